"""The laws of a compression method, over every registered one; a new method needs no line here."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import accounting, decode, registry, select, sharding
from kvjax.attention import attend_dense
from kvjax.methods.full import Full
from kvjax.pytree import walk
from kvjax.rope import rotate
from kvjax.types import PromptKV
from models import decoder
from models.config import Config
from tests import prompts
from tests.prompts import Shape, compress, fast_jit, step

CASES = prompts.cases()
# Pairwise: head dim 16 to 256, MHA, GQA 2/3/4/8, MQA, one to three ragged rows, two dtypes.
SHAPES = [
    Shape(16, 2, 2, (40,)),
    Shape(64, 4, 2, (70, 96)),
    Shape(80, 3, 1, (97, 33, 64)),
    Shape(96, 8, 2, (128,), "bfloat16", 136),
    Shape(128, 8, 1, (100, 41), "bfloat16"),
    Shape(64, 6, 2, (60, 5, 1)),
    Shape(256, 8, 1, (64, 130, 40), "bfloat16"),
    Shape(128, 3, 3, (96, 77)),
]
# The forms of a method share its code: they share out the shapes, and the first runs every law.
FORMS_OF = {name: [c for c in CASES if c.partition("-")[0] == name] for name in registry.names()}
FIRST = [cases[0] for cases in FORMS_OF.values()]
# Every other shape by default, the ones between under `slow`.
CASES_BY_SHAPE = [
    pytest.param(case, shape, marks=[pytest.mark.slow] if (at + place) % 2 else [])
    for at, cases in enumerate(FORMS_OF.values())
    for i, case in enumerate(cases)
    for place, shape in enumerate(SHAPES[i :: len(cases)])
]
RAGGED = Shape(64, 4, 2, (70, 96))


def structure(case: str):
    """What decoding knows of a case: the kind of its cache, whatever was put in it."""
    method, layer = prompts.setting(case, RAGGED.row), prompts.info(RAGGED)
    return jax.tree.structure(
        jax.eval_shape(lambda p: method.compress(p, layer), prompts.prompt(RAGGED))
    )


# Methods whose caches are of one kind (all that keep tokens of their own choice, for one) decode
# by one program: the first of each kind runs the laws of decoding.
KINDS = list({structure(case): case for case in reversed(CASES)}.values())[::-1]
KEEP_ALL = ("full", "paged")  # methods that compress nothing
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


@functools.partial(fast_jit, static_argnums=0)
def dense(rope, cache, q, positions):
    """Dense attention over the materialised cache, and the positions it holds."""
    k, v, where = cache.materialize()
    q, k, v = (x.astype(jnp.float32) for x in (rotate(rope, q, positions), k, v))
    return attend_dense(q, k, v, positions, where), where


@functools.cache
def built(case: str, shape: Shape, seed: int = 0):
    method, layer = prompts.setting(case, shape.row), prompts.info(shape)
    q, k, v, positions = prompts.step_inputs(shape, 3)
    # a pad at the end of the last row: never attended, its output zero
    inputs = q, k, v, positions.at[-1, -1].set(-1)
    cache = compress(method, prompts.prompt(shape, seed), layer)
    out, after = step(cache, *inputs)
    return method, inputs, cache, out, after, *dense(layer.rope, after, q, inputs[3])


def check_step(case, shape, seed=0):
    _, inputs, cache, out, _, want, where = built(case, shape, seed)
    positions, out, want = inputs[3], np.asarray(out, np.float32), np.asarray(want)
    assert np.isfinite(out).all()
    if cache.evicts:  # a step of three tokens is three steps: the returned cache is the last one's
        steps = [2] * (len(shape.lengths) - 1) + [1]  # the last row ends in a pad
        out, want = (
            np.stack([x[i, :, s : s + 1] for i, s in enumerate(steps)]) for x in (out, want)
        )
    size = np.abs(want).max()
    assert size > 0.05  # the comparison means something
    np.testing.assert_allclose(out, want, atol=TOLERANCE[shape.dtype] * max(size, 1.0), rtol=0)
    assert cache.evicts or (out[-1, :, -1] == 0).all()
    where, positions = np.asarray(where), np.asarray(positions)
    for row in range(len(shape.lengths)):  # the new tokens are there, once each
        new = positions[row][positions[row] >= 0]
        for head in where[row]:
            assert [int((head == p).sum()) for p in new] == [1] * len(new)
            kept = head[head >= 0]
            assert len(set(kept.tolist())) == len(kept) and kept.max() == new.max()


@pytest.mark.parametrize("case,shape", CASES_BY_SHAPE, ids=str)
def test_law_1_and_4_step_is_dense_attention_and_bytes_are_those_of_the_arrays(case, shape):
    check_step(case, shape)
    check_bytes(case, shape)


@pytest.mark.slow
def test_law_1_and_4_over_a_sample_of_the_full_product():
    seed = int(np.random.default_rng().integers(2**31))
    print(f"sampled with seed {seed}")
    rng = np.random.default_rng(seed)
    heads = [(4, 4), (4, 2), (3, 1), (8, 2), (8, 1), (6, 3)]
    dims, dtypes = (16, 64, 80, 96, 128, 256), ("float32", "bfloat16")
    product = list(itertools.product(CASES, dims, heads, (1, 2, 3), dtypes))
    for at in rng.choice(len(product), 60, replace=False):
        case, dim, (n, k), batch, dtype = product[at]
        lengths = tuple(int(x) for x in rng.integers(40, 200, batch))
        shape = Shape(dim, n, k, lengths, dtype, max(lengths) + int(rng.integers(0, 40)))
        check_step(case, shape, seed)
        check_bytes(case, shape, seed)


def check_bytes(case, shape, seed=0):
    method, _, cache, *_ = built(case, shape, seed)
    leaves = jax.tree.leaves(cache)
    for leaf in walk(cache):  # a pool of pages belongs to no row
        assert leaf.axes[0] == "page" or leaf.value.shape[0] == len(shape.lengths)
    allocated = accounting.cache_bytes(cache)
    assert allocated.total == sum(leaf.nbytes for leaf in leaves)
    specs = jax.eval_shape(
        lambda p: method.compress(p, prompts.info(shape)), prompts.prompt(shape, seed)
    )
    assert accounting.cache_bytes(specs) == allocated
    live = accounting.live_bytes(cache)
    assert (live.stored <= sum(leaf.nbytes for leaf in leaves)).all()
    longest = int(np.argmax(shape.lengths))
    assert live.stored[longest] == method.layer_bytes(shape.row)
    assert np.all(live.tail == 0)
    parts = accounting.components(cache)
    assert sum(p["allocated"] for p in parts.values()) == allocated.total
    assert sum(p["live"] for p in parts.values()) == sum(int(x.sum()) for x in live)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES[1:5], ids=str)
def test_law_4_a_solved_knob_lands_within_its_target(case, shape):
    method, row = prompts.base(case), shape.row
    full = row.full_bytes * row.itemsize // 2
    reached = 0
    for ratio in (1.0, 1.3, 2.0, 2.7, 4.0, 5.5, 8.0, 16.0, 1000.0):
        target = full / ratio
        try:
            found = accounting.solve(method, target, row)
        except accounting.UnreachableBytes as error:
            nearest = error.nearest.layer_bytes(row)
            assert nearest > target or nearest < target * 0.98
            assert str(nearest) in str(error)
            if nearest > target:  # it is the smallest setting
                for lower in (target, target / 2, 1.0):
                    with pytest.raises(accounting.UnreachableBytes) as below:
                        accounting.solve(method, lower, row)
                    assert below.value.nearest.layer_bytes(row) == nearest
            continue
        spent = found.layer_bytes(row)
        assert spent <= target
        if not hasattr(method, "points"):
            one_token = 2 * row.kv_heads * row.head_dim * row.itemsize
            assert spent >= target - max(0.02 * target, one_token)
        reached += 1
    with pytest.raises(accounting.UnreachableBytes):
        accounting.solve(method, full / 1000, row)
    assert reached or case in KEEP_ALL


@functools.cache
def full_outputs(shape: Shape):
    inputs = prompts.step_inputs(shape, 3)
    cache = compress(Full(), prompts.prompt(shape), prompts.info(shape))
    return inputs, np.asarray(step(cache, *inputs)[0])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [SHAPES[1]], ids=str)
def test_law_5_exact_is_the_full_cache(case, shape):
    method = prompts.base(case)
    inputs, want = full_outputs(shape)
    prompt, layer = prompts.prompt(shape), prompts.info(shape)
    if not hasattr(method, "exact"):
        best = max(method.points(), key=lambda m: m.layer_bytes(shape.row))
        got = np.asarray(step(compress(best, prompt, layer), *inputs)[0])
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert error < 0.02, error
        assert error > 1e-6 or max(shape.lengths) < 64  # it did quantize
        return
    exact = method.exact()
    exact = exact.resolve(shape.row) if hasattr(exact, "resolve") else exact
    cache = compress(exact, prompt, layer)
    np.testing.assert_allclose(np.asarray(step(cache, *inputs)[0]), want, atol=1e-5, rtol=0)
    stored = accounting.live_bytes(cache).stored[int(np.argmax(shape.lengths))]
    assert stored == exact.layer_bytes(shape.row)
    if case not in KEEP_ALL:  # and the ordinary setting is not
        ordinary = step(compress(prompts.setting(case, shape.row), prompt, layer), *inputs)[0]
        assert np.abs(np.asarray(ordinary) - want).max() > 1e-3


def tree_rows(tree, rows):
    return decode.select_rows((tree,), jnp.asarray(rows))[0]


@pytest.mark.parametrize("case", FIRST)
def test_law_6_a_row_is_itself_whatever_stands_beside_or_before_it(case):
    shape = RAGGED
    method, layer = prompts.setting(case, shape.row), prompts.info(shape)
    rows = [prompts.tokens_of(i, n, shape) for i, n in enumerate(shape.lengths)]
    other = prompts.tokens_of(7, 83, shape)
    inputs = prompts.step_inputs(shape, 2)
    want = np.asarray(step(compress(method, prompts.build(rows, shape), layer), *inputs)[0])
    wider = shape._replace(columns=131)
    got = step(compress(method, prompts.build(rows, wider), layer), *inputs)[0]
    np.testing.assert_allclose(np.asarray(got), want, atol=2e-5, rtol=0)
    for i, row in enumerate(rows):  # beside another, and alone
        mine = [x[i : i + 1] for x in inputs]
        pair = prompts.build([other, row], shape._replace(columns=96))
        twice = [jnp.concatenate([x, x]) for x in mine]
        got = step(compress(method, pair, layer), *twice)[0]
        np.testing.assert_allclose(np.asarray(got)[1:], want[i : i + 1], atol=2e-5, rtol=0)
        alone = prompts.build([row], shape._replace(columns=96))
        got = step(compress(method, alone, layer), *mine)[0]
        np.testing.assert_allclose(np.asarray(got), want[i : i + 1], atol=2e-5, rtol=0)


def feed(cache, inputs, sizes, flush_every):
    """Append in chunks; outputs [B, N, T, H] and the cache."""
    outs, at = [], 0
    for size in sizes:
        out, cache = step(cache, *(x[:, :, at : at + size] for x in inputs[:3]),
                          inputs[3][:, at : at + size])  # fmt: skip
        cache = decode.flush((cache,))[0] if flush_every else cache
        outs.append(out)
        at += size
    return jnp.concatenate(outs, 2), cache


@pytest.mark.parametrize("case", KINDS)
def test_law_6_tokens_appended_in_any_chunks_end_in_the_same_cache(case):
    shape = RAGGED
    method = prompts.setting(case, shape.row)
    every = method.flush_every
    start = compress(method, prompts.prompt(shape), prompts.info(shape))
    inputs = prompts.step_inputs(shape, 37)
    want, results = None, []
    for sizes in ([1] * 37, [3] * 12 + [1], [17, 17, 1, 1, 1]):
        out, cache = feed(start, inputs, sizes, every)
        k, v, where = (np.asarray(x) for x in cache.materialize())
        real = (where >= 0)[..., None]
        results.append((np.where(real, k, 0), np.where(real, v, 0), where))
        if want is None:
            want = np.asarray(out)
        elif start.step_limit is None:
            np.testing.assert_allclose(np.asarray(out), want, atol=2e-5, rtol=0)
        else:  # inside a chunk, tokens are read exactly a little longer
            assert np.abs(np.asarray(out)[:, :, -1] - want[:, :, -1]).max() < 2e-5
    for one in results[1:]:
        for a, b in zip(one, results[0], strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6, rtol=0)


@pytest.mark.parametrize("case", KINDS)
def test_law_7_rows_reorder_repeat_and_select(case):
    _, inputs, cache, out, *_ = built(case, SHAPES[2])
    for rows in ([2, 0, 1], [1, 1, 1], [0, 2, 0]):
        got, _ = step(tree_rows(cache, rows), *(x[jnp.asarray(rows)] for x in inputs))
        np.testing.assert_allclose(np.asarray(got), np.asarray(out)[rows], atol=1e-6, rtol=0)


@pytest.mark.parametrize("case", FIRST)
def test_law_7_sharded_is_unsharded(case):
    mesh = sharding.make_mesh(data=2, model=4)
    shape = Shape(16, 8, 4, (70, 64))
    method, layer = prompts.setting(case, shape.row), prompts.info(shape)
    prompt, inputs = prompts.prompt(shape), prompts.step_inputs(shape, 1)
    cache = compress(method, prompt, layer)
    want, after = step(cache, *inputs)
    placed = sharding.shard(cache, mesh)
    split = [leaf for leaf in jax.tree.leaves(placed) if not leaf.sharding.is_fully_replicated]
    assert split and all(len(leaf.sharding.device_set) == 8 for leaf in split)
    heads_split = [
        leaf for leaf in walk(placed) if "kv_head" in leaf.axes
        and leaf.value.sharding.shard_shape(leaf.value.shape)[leaf.axes.index("kv_head")] == 1
    ]  # fmt: skip
    assert heads_split
    got, new = step(placed, *inputs)
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=1e-5, rtol=0)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), atol=1e-5, rtol=0
        )
    whole = sharding.shard(prompt, mesh)
    got = step(compress(method, whole, layer), *inputs)[0]
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", FIRST)
def test_law_8_a_second_prompt_meets_a_fresh_method(case):
    long, short = SHAPES[1], SHAPES[1]._replace(lengths=(80,))
    method = prompts.setting(case, short.row)
    compress(method, prompts.prompt(long), prompts.info(long))
    second = compress(method, prompts.prompt(short, 5), prompts.info(short))
    again = prompts.setting.__wrapped__(case, short.row)
    fresh = compress(again, prompts.prompt(short, 5), prompts.info(short))
    for a, b in zip(jax.tree.leaves(second), jax.tree.leaves(fresh), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    stored = int(accounting.live_bytes(second).stored[0])
    assert stored == method.layer_bytes(short.row)
    if case not in KEEP_ALL:  # the compression asked for happened
        assert stored < 0.75 * 2 * short.row.full_bytes


def degenerate(kind: str, shape: Shape) -> PromptKV:
    rows = [prompts.tokens_of(i, n, shape) for i, n in enumerate(shape.lengths)]
    for row in rows:
        for name, x in row.items():
            if kind == "zero":
                x[:] = 0
            elif kind == "constant":
                x[:] = 0.7
            elif kind == "ties":
                x[:] = x[:, :1]
            elif kind == "huge":
                x *= 1e4 / np.abs(x).max()
            elif kind == "largest" and name != "q":  # squares still fit float32
                x[:] = np.sign(x) * 1e18
    return prompts.build(rows, shape)


@pytest.mark.parametrize(
    "case,dtype",  # each in one dtype by default, in the other under `slow`
    [
        pytest.param(case, dtype, marks=[pytest.mark.slow] if (i + j) % 2 else [])
        for i, case in enumerate(CASES)
        for j, dtype in enumerate(("float32", "bfloat16"))
    ],
)
def test_law_10_degenerate_prompts_stay_finite_and_keep_the_recent(case, dtype):
    shape = {"float32": SHAPES[1], "bfloat16": SHAPES[4]}[dtype]
    method, layer = prompts.setting(case, shape.row), prompts.info(shape)
    inputs, longest = prompts.step_inputs(shape, 3), int(np.argmax(shape.lengths))
    for kind in ("zero", "constant", "ties", "huge", "largest"):
        cache = compress(method, degenerate(kind, shape), layer)
        out, after = step(cache, *inputs)
        k, v, where = after.materialize()
        for leaf in jax.tree.leaves((cache, k, v)):
            assert not np.isnan(np.asarray(leaf, np.float32)).any(), kind
        assert np.isfinite(np.asarray(out, np.float32)).all(), kind
        where = np.asarray(where)
        turned = hasattr(method, "rotation")  # a turned constant is as coarse as any other vector
        if kind == "zero" or (kind == "constant" and not turned):
            value = 0.0 if kind == "zero" else 0.7
            old = (where[longest] >= 0) & (where[longest] < shape.row.num_tokens)
            old = np.asarray(v, np.float32)[longest][old]
            np.testing.assert_allclose(old, value, atol=0.01)
        names = {f.name for f in dataclasses.fields(method)}
        recent = getattr(method, "window", None) or (8 if method.name == "streaming_llm" else 0)
        for row, length in enumerate(shape.lengths):
            for head in where[row]:
                first = length + 2 if cache.evicts and not recent else length - recent
                assert (np.isin(np.arange(first, length + 3), head)).all(), kind
                if "sinks" in names:
                    assert np.isin(np.arange(method.sinks), head).all(), kind


@pytest.mark.parametrize("case", CASES)
def test_law_10_one_token(case):
    shape = Shape(16, 4, 2, (1, 1))
    method = prompts.base(case)
    exact = hasattr(method, "exact")
    if exact:
        method = method.exact()
    else:
        method = max(method.points(), key=lambda m: m.layer_bytes(shape.row))
    method = method.resolve(shape.row) if hasattr(method, "resolve") else method
    cache = compress(method, prompts.prompt(shape), prompts.info(shape))
    inputs, want = full_outputs(shape)
    tolerance = 1e-5 if exact else 0.02 * np.abs(want).max()
    np.testing.assert_allclose(np.asarray(step(cache, *inputs)[0]), want, atol=tolerance, rtol=0)


# Laws over whole models.

CONFIG = Config(
    architecture="llama", num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16,
    intermediate_size=48, vocab_size=61, norm_epsilon=1e-5, rope_theta=10000.0,
    max_position_embeddings=512, windows=(None, None),
)  # fmt: skip
LENGTHS, NEW = (128, 90), 40


@functools.cache
def tiny():
    return decoder.model(CONFIG), decoder.init(CONFIG, jax.random.key(3))


def prompt_tokens(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, CONFIG.vocab_size, n).tolist() for n in lengths]


@functools.cache
def prefilled(multiple: int = 1):
    model, params = tiny()
    tokens, starts = decode.left_pad(prompt_tokens(LENGTHS), multiple)
    return decode.prefill(model, params, tokens, starts, dtype=jnp.float32)


def model_row():
    return Shape(16, 4, 2, LENGTHS).row


def model_caches(case, multiple=1, method=None):
    method = method or prompts.setting(case, model_row())
    model, _ = tiny()
    caches = decode.compress(method, prefilled(multiple).prompts, model, reserve=NEW)
    return method, caches


@functools.cache
def generated(case):
    """`generate`'s compiled program: tokens and logits for rows of two lengths, and its text."""
    model, params = tiny()
    method, caches = model_caches(case)
    lowered = decode._generate.lower(
        model, params, caches, prefilled().logits, jnp.asarray(LENGTHS, jnp.int32),
        jnp.zeros(0, jnp.int32), jax.random.split(jax.random.key(0), 2), jnp.float32(0),
        jnp.float32(1), limit=NEW, flush_every=method.flush_every, greedy=True, keep_logits=True,
    )  # fmt: skip
    compiled = lowered.compile({"xla_backend_optimization_level": 0})
    result, _ = compiled(
        params, caches, prefilled().logits, jnp.asarray(LENGTHS, jnp.int32),
        jnp.zeros(0, jnp.int32), jax.random.split(jax.random.key(0), 2), jnp.float32(0),
        jnp.float32(1),
    )  # fmt: skip
    return np.asarray(result.tokens), np.asarray(result.logits), compiled.as_text()


def loop(method, caches, logits, positions, steps):
    """The same decoding, a Python loop of `decode_step`."""
    model, params = tiny()
    positions, tokens, kept = np.array(positions), [], []
    for _ in range(steps):
        token = logits.argmax(-1).astype(jnp.int32)
        tokens.append(np.asarray(token))
        kept.append(np.asarray(logits))
        if decode.needs_flush(method.flush_every, positions):
            caches = decode.flush(caches)
        logits, caches = decode.decode_step(
            model, params, caches, token, jnp.asarray(positions, jnp.int32)
        )
        positions += 1
    return np.stack(tokens, 1), np.stack(kept, 1), caches


@pytest.mark.parametrize("case", KINDS)
def test_law_2_and_3_generate_is_a_loop_of_steps_in_place(case):
    method, caches = model_caches(case)
    before = decode.decode_step._cache_size()
    old = jax.tree.leaves(caches)
    big = [leaf for leaf in old if leaf.size >= 2048]
    pointers = {leaf.unsafe_buffer_pointer() for leaf in big}
    tokens, logits, after = loop(method, caches, prefilled().logits, LENGTHS, NEW)
    # one trace for all steps; methods whose caches have one shape share it
    assert decode.decode_step._cache_size() - before <= 1
    assert all(leaf.is_deleted() for leaf in old)  # donated
    new = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after)}
    if method.flush_every is None:
        assert big and pointers <= new  # and reused: nothing was copied
    want_tokens, want_logits, _ = generated(case)
    np.testing.assert_array_equal(tokens, want_tokens)
    np.testing.assert_allclose(logits, want_logits, atol=1e-5, rtol=0)
    assert len(set(want_tokens[0].tolist())) > 3


@pytest.mark.parametrize("case", KINDS)
def test_law_5_exact_generates_the_full_caches_tokens(case):
    method = prompts.base(case)
    if not hasattr(method, "exact"):
        pytest.skip("no exact setting: an error bound at 8 bits stands in its place")
    model, params = tiny()
    _, caches = model_caches(case, method=method.exact())
    result, _ = decode.generate(
        model, params, caches, prefilled().logits, LENGTHS, max_new_tokens=NEW
    )
    np.testing.assert_array_equal(np.asarray(result.tokens), generated("full")[0])


@pytest.mark.parametrize("case", KINDS)
def test_law_6_a_wider_bucket_gives_the_same_logits(case):
    model, params = tiny()
    method, caches = model_caches(case, 96)
    assert prefilled(96).prompts[0].k.shape[2] == 192
    tokens, logits, _ = loop(method, caches, prefilled(96).logits, LENGTHS, 3)
    np.testing.assert_array_equal(tokens, generated(case)[0][:, :3])
    np.testing.assert_allclose(logits, generated(case)[1][:, :3], atol=2e-4, rtol=0)


@pytest.mark.parametrize("case", KINDS)
def test_law_6_compressing_inside_prefill_is_compressing_after(case):
    model, params = tiny()
    method, want = model_caches(case)
    tokens, starts = decode.left_pad(prompt_tokens(LENGTHS))
    got = decode.prefill(
        model, params, tokens, starts, dtype=jnp.float32, method=method, reserve=NEW
    ).prompts
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


WHILE = re.compile(r"= \((.*?)\) while\(")
FLOAT = re.compile(r"\b(?:f32|bf16|f16)\[([\d,]+)\]")


def floats_carried(hlo: str) -> list[int]:
    """Elements of every float array in the carry of any loop of a compiled program."""
    sizes = []
    for carry in WHILE.findall(hlo):
        sizes += [int(np.prod([int(d) for d in s.split(",")])) for s in FLOAT.findall(carry)]
    return sizes


def dense_limit():
    """Elements of one side of the tokens that are no longer recent, dense."""
    return len(LENGTHS) * CONFIG.num_kv_heads * (max(LENGTHS) - 32) * CONFIG.head_dim


@pytest.mark.parametrize("case", KINDS)
def test_law_9_no_dense_float_body_in_the_carry_of_generate(case):
    _, caches = model_caches(case)
    limit = dense_limit()
    own = [leaf for leaf in jax.tree.leaves(caches) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    stores_dense = any(leaf.size >= limit for leaf in own)
    sizes = floats_carried(generated(case)[2])
    assert sizes  # the scan found the loop
    assert (max(sizes) >= limit) == stores_dense, (max(sizes), limit)
    assert stores_dense == (case in KEEP_ALL)


def test_law_9_the_scan_sees_a_body_that_was_decoded_outside_the_loop():
    assert max(floats_carried(generated("full")[2])) >= dense_limit()


def test_every_evictor_never_selects_a_pad_or_a_token_twice():
    shape = Shape(16, 4, 2, (70, 30, 1), columns=77)
    prompt = prompts.prompt(shape)
    for case in CASES:
        method = prompts.setting(case, shape.row)
        if not hasattr(method, "select"):
            continue
        select_columns = fast_jit(type(method).select, static_argnums=2)
        columns, lengths = (
            np.asarray(x) for x in select_columns(method, prompt, prompts.info(shape))
        )
        for row, n in enumerate(shape.lengths):
            for head in range(shape.kv_heads):
                kept = columns[row, head, : lengths[row, head]]
                assert (kept >= 77 - n).all() and (kept < 77).all()
                assert (np.diff(kept) > 0).all() and len(kept) == min(columns.shape[2], n)


def test_protected_columns_win_over_any_score():
    scores = jnp.full((1, 1, 9), jnp.inf).at[0, 0, 3].set(jnp.nan)
    protected = select.recent_columns(9, 2)[None, None]
    columns, _ = select.top_columns(scores, 3, jnp.zeros(1, jnp.int32), protected)
    assert columns[0, 0].tolist() == [0, 7, 8]
