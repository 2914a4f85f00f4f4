"""AnchorKV: each step of the paper in numpy, the byte ledger to the byte, and its limits."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from kvjax import (
    accounting,
    anchor_bytes,
    anchor_choice,
    anchor_residuals,
    anchors,
    quant,
    registry,
    scores,
)  # fmt: skip
from kvjax.methods.anchorkv import AnchorKV
from kvjax.methods.full import Full
from kvjax.pallas.anchor_assign.api import anchor_assign
from kvjax.pallas.anchor_decode import xla
from kvjax.rope import rotate
from kvjax.types import PromptShape
from tests import prompts
from tests.prompts import Shape, compress, fast_jit, step

SHAPE = Shape(16, 4, 2, (90, 57), columns=96)
WINDOW, EXTRA = 8, 8
PLAIN = registry.make(
    "paper_short:anchorkv",
    window=WINDOW,
    extra_anchors=EXTRA,
    scale="rms",
    bits=(2,),
    theta=1.0,
    kernel=5,
)
LEAN = AnchorKV(window=WINDOW, extra_anchors=EXTRA, bits=(2,), theta=0.7, kernel=5)


def row_of(prompt, i, length):
    """Rotated q, k and unrotated k, v of a row's real tokens, float64 [heads, n, H]."""
    arrays = (prompt.q, prompt.k, prompt.k_unrotated, prompt.v)
    return [np.asarray(x, np.float64)[i, :, x.shape[2] - length :] for x in arrays]


def window_attention(q, k, v, kv_heads):
    """Probabilities [K, G W, n] and outputs [K, G W, H] of the last W queries of each group."""
    heads, n, dim = q.shape
    late = np.arange(n - WINDOW, n)
    p = np.einsum("nwh,nsh->nws", q[:, n - WINDOW :], np.repeat(k, heads // kv_heads, 0))
    p = np.where(np.arange(n)[None] <= late[:, None], p / np.sqrt(dim), -np.inf)
    p = np.exp(p - p.max(-1, keepdims=True))
    p = (p / p.sum(-1, keepdims=True)).reshape(kv_heads, -1, n)
    return p, p @ v


@pytest.fixture(scope="module")
def plain():
    prompt = prompts.prompt(SHAPE)
    return prompt, compress(PLAIN, prompt, prompts.info(SHAPE)).body


def test_step_1_anchors_are_attended_or_random_and_the_window(plain):
    prompt, body = plain
    noise = np.asarray(scores.hash_scores(PLAIN.random_seed, prompt.starts, 2, 96))
    attended = round(0.7 * EXTRA)
    for i, n in enumerate(SHAPE.lengths):
        q, k, _, v = row_of(prompt, i, n)
        p, _ = window_attention(q, k, v, 2)
        for h in range(2):
            total = np.pad(p[h].sum(0), 2)
            pooled = np.stack([total[j : j + n] for j in range(5)]).mean(0)[: n - WINDOW]
            first = np.argsort(-pooled, kind="stable")[:attended].tolist()
            rest = [j for j in range(n - WINDOW) if j not in first]
            random = sorted(rest, key=lambda j: -noise[i, h, 96 - n + j])[: EXTRA - attended]
            want = sorted(first + random) + list(range(n - WINDOW, n))
            assert np.asarray(body.positions)[i, h].tolist() == want
            # shared by K and V, stored exactly, keys before RoPE
            for side, x in enumerate((prompt.k_unrotated, prompt.v)):
                held = np.asarray(x)[i, h, 96 - n :][want]
                np.testing.assert_array_equal(np.asarray(body.anchors)[i, side, h], held)


def test_the_share_moves_anchors_from_attention_to_chance():
    prompt, layer = prompts.prompt(SHAPE), prompts.info(SHAPE)
    sets = []
    for share, seed in ((1.0, 1), (1.0, 2), (0.0, 1), (0.0, 2)):
        method = dataclasses.replace(PLAIN, attention_share=share, random_seed=seed)
        sets.append(np.asarray(compress(method, prompt, layer).body.positions)[..., :EXTRA])
    assert (sets[0] == sets[1]).all() and (sets[2] != sets[3]).any()
    assert (sets[0] != sets[2]).any()


def test_step_2_and_3_assignment_and_projection(plain):
    prompt, body = plain
    negative = 0
    for i, n in enumerate(SHAPE.lengths):
        _, _, k, v = row_of(prompt, i, n)
        for side, x in enumerate((k, v)):
            for h in range(2):
                a = np.asarray(body.anchors, np.float64)[i, side, h]
                t = x[h, : n - WINDOW]
                cosine = t @ a.T / np.linalg.norm(a, axis=1) / np.linalg.norm(t, axis=1)[:, None]
                want = np.abs(cosine).argmax(1)
                got = np.asarray(body.index)[i, side, h, 0, : n - WINDOW].astype(int)
                assert (got == want).all()
                best = a[want]
                gamma = (t * best).sum(1) / (best**2).sum(1)
                stored = np.asarray(body.gamma, np.float64)[i, side, h, 0]
                np.testing.assert_allclose(stored[: n - WINDOW], gamma, rtol=1e-3, atol=1e-6)
                assert (stored[n - WINDOW :] == 0).all()
                negative += int((gamma < 0).sum())
                residual = t - gamma[:, None] * best
                dots = (residual * best).sum(1) / np.linalg.norm(best, axis=1)
                np.testing.assert_allclose(dots, 0, atol=1e-10)
                cos = np.take_along_axis(cosine, want[:, None], 1)[:, 0]
                norm = np.linalg.norm(t, axis=1) * np.sqrt(np.maximum(1 - cos**2, 0))
                np.testing.assert_allclose(np.linalg.norm(residual, axis=1), norm, atol=1e-6)
                own = np.asarray(body.positions)[i, h, :EXTRA]  # anchors are their own
                assert (got[own] == np.arange(EXTRA)).all() and (stored[own] == 1).all()
    assert negative > 20  # the absolute cosine is deliberate


def test_assignment_ignores_invalid_and_zero_anchors():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 30, 16)).astype(np.float32)
    a = rng.normal(size=(2, 6, 16)).astype(np.float32)
    a[0, 2] = 0
    valid = np.ones((2, 6), bool)
    valid[1, :3] = False
    index, gamma = (np.asarray(y) for y in anchor_assign(*map(jnp.asarray, (x, a, valid))))
    assert not (index[0] == 2).any() and (index[1] >= 3).all()
    best = np.take_along_axis(a, index[..., None], 1)
    np.testing.assert_allclose(gamma, (x * best).sum(-1) / (best**2).sum(-1), rtol=1e-4, atol=1e-6)
    zero = anchor_assign(jnp.asarray(x), jnp.zeros((2, 6, 16)), jnp.asarray(valid))
    assert np.isfinite(zero[1]).all() and (np.asarray(zero[1]) == 0).all()


@pytest.mark.parametrize("floor", [0.0, 0.3])
def test_step_4_utility_is_the_formula(floor):
    prompt, rope = prompts.prompt(SHAPE), prompts.rope(16)
    rng = np.random.default_rng(3)
    size, lengths = 96 - WINDOW, np.array(SHAPE.lengths)
    shift = np.asarray(prompt.starts)

    def aligned(x):
        return np.stack([np.roll(np.asarray(x)[i], -s, 1)[:, :size] for i, s in enumerate(shift)])

    x = np.stack([aligned(prompt.k_unrotated), aligned(prompt.v)], 1)
    rebuilt = x + 0.3 * rng.normal(size=x.shape).astype(np.float32)
    seen = scores.observe(prompt, WINDOW)
    got = np.asarray(
        anchor_residuals.utility(
            jnp.asarray(x), jnp.asarray(rebuilt), jnp.asarray(aligned(prompt.k)), seen,
            jnp.asarray(lengths, jnp.int32), rope, floor,
        )
    )  # fmt: skip
    error = jnp.asarray(x - rebuilt)
    token = jnp.arange(size, dtype=jnp.int32)
    r_keys = np.asarray(rotate(rope, error[:, 0], token), np.float64)
    for i, n in enumerate(SHAPE.lengths):
        q, k, _, v = row_of(prompt, i, n)
        p, y = window_attention(q, k, v, 2)
        queries = q[:, n - WINDOW :].reshape(2, -1, 16)
        for h in range(2):
            near = n - WINDOW
            weight = p[h][:, :near] ** 2 + floor / n**2
            moved = (queries[h] @ r_keys[i, h, :near].T) ** 2 / 16
            distance = ((v[h, None, :near] - y[h][:, None]) ** 2).sum(-1)
            u_keys = (weight * moved * distance).mean(0)
            norms = (np.asarray(error, np.float64)[i, 1, h, :near] ** 2).sum(-1)
            u_values = weight.mean(0) * norms
            np.testing.assert_allclose(got[i, 0, h, :near], u_keys, rtol=2e-3, atol=1e-9)
            np.testing.assert_allclose(got[i, 1, h, :near], u_values, rtol=2e-3, atol=1e-9)


def budget(theta, n, kv_heads, dim, anchors_held, window):
    """Equation 9 with the ledger of the specification, plain storage, one 2-bit width."""
    coded, words = n - window, math.ceil((n - window) / 32)
    base = 4 * kv_heads * (anchors_held + window) * dim  # bf16 anchors, both sides
    base += 4 * kv_heads * (anchors_held + window)  # positions
    base += 2 * kv_heads * coded * ((1 if anchors_held + window <= 256 else 2) + 2)
    base += 2 * kv_heads * words * (4 + 4)
    base += 8  # the row's two counters
    full = 4 * n * kv_heads * dim
    count = max(0, math.floor((theta * full - base) / (dim // 4 + 2)))
    return base, min(count, 2 * kv_heads * (coded - anchors_held))


@pytest.mark.parametrize("theta", [0.5, 0.62, 0.8, 1.0])
def test_step_5_budget_pooled_over_heads(theta):
    shape = SHAPE._replace(dtype="bfloat16")
    prompt, row = prompts.prompt(shape), shape.row
    method = dataclasses.replace(PLAIN, theta=theta)
    body = compress(method, prompt, prompts.info(shape)).body
    for i, n in enumerate(shape.lengths):
        base, count = budget(theta, n, 2, 16, EXTRA, WINDOW)
        assert int(body.num_residuals[0][i]) == count
        _, present = xla.slots(body.coded().residuals[0])
        sides = np.asarray(present)[i].sum((1, 2))
        most = 2 * (n - WINDOW - EXTRA)
        assert sides[0] == min(count // 2, most) and sides.sum() == count
        live = accounting.live_bytes(compress(method, prompt, prompts.info(shape))).stored[i]
        assert live == base + count * (16 // 4 + 2)
        assert live <= theta * 4 * n * 2 * 16 or count == 0
    assert method.layer_bytes(row) == sum(x * y for x, y in zip((1, 6), budget(
        theta, 90, 2, 16, EXTRA, WINDOW), strict=True))  # fmt: skip


def test_step_5_the_largest_utilities_of_the_layer_win():
    rng = np.random.default_rng(1)
    u = rng.random((2, 2, 3, 40)).astype(np.float32)
    u[:, :, 1] *= 3  # one head demands more
    u[:, :, :, -5:] = -1
    counts = [jnp.asarray(c, jnp.int32) for c in ([[7, 4], [3, 9]], [[20, 30], [10, 11]])]
    wide, narrow = anchor_residuals.choose(jnp.asarray(u), counts, [(7, 9), (20, 30)])
    for i in range(2):
        for side in range(2):
            order = np.argsort(-u[i, side].ravel())
            a, b = int(counts[0][i, side]), int(counts[1][i, side])
            assert set(np.flatnonzero(np.asarray(wide)[i, side])) == set(order[:a])
            assert set(np.flatnonzero(np.asarray(narrow)[i, side])) == set(order[a : a + b])
    per_head = np.asarray(narrow | wide)[0, 0].sum(1)
    assert per_head[1] > 1.3 * per_head[0]  # pooled: no quota a head


@pytest.mark.parametrize("how", ["rms", "least_squares", "absmax"])
def test_step_6_residual_code(how):
    rng = np.random.default_rng(2)
    r = (rng.normal(size=(2000, 128)) * rng.random((2000, 1)) * 5).astype(np.float32)
    codes, scale = anchor_residuals.encode(jnp.asarray(r), 2, how, 0, False)
    assert codes.shape == (2000, 32) and scale.dtype == jnp.float16
    spin = np.asarray(quant.rotation(128, 0), np.float64)
    levels = np.array(quant.lloyd_max(2))
    spun = r @ spin
    by = np.abs(spun).max(1) if how == "absmax" else np.sqrt((spun**2).mean(1))
    want = np.abs(spun[..., None] / by[:, None, None] - levels).argmin(-1)
    got = np.asarray(quant.unpack(codes, 2, 128))
    assert (got == want).mean() > 0.999
    c = levels[want]
    if how == "least_squares":
        by = (spun * c).sum(1) / (c * c).sum(1)
    np.testing.assert_allclose(np.asarray(scale, np.float64), by, rtol=2e-3)
    back = levels[got] * np.asarray(scale, np.float64)[:, None] @ spin.T
    relative = ((back - r) ** 2).sum() / (r**2).sum()
    # the paper's absmax with the codebook of a unit Gaussian wastes its outer levels
    want, slack = (0.62, 0.06) if how == "absmax" else (0.1175, 0.01)
    assert abs(relative - want) < slack


@pytest.mark.parametrize("magnitude", [1e-7, 1e-4, 1.0, 1e4])
@pytest.mark.parametrize("small", [False, True])
def test_a_coded_residual_is_never_worse_than_none(magnitude, small):
    rng = np.random.default_rng(0)
    r = (rng.normal(size=(50, 16)) * magnitude).astype(np.float32)
    codes, scale = anchor_residuals.encode(jnp.asarray(r), 2, "least_squares", 0, small)
    scale = quant.scale_decode(scale) if small else scale.astype(jnp.float32)
    levels = quant.codebook_decode(quant.unpack(codes, 2, 16), 2) * scale[:, None]
    back = np.asarray(levels @ quant.rotation(16, 0).T)
    error = np.linalg.norm(back - r, axis=1)
    assert (error <= np.linalg.norm(r, axis=1) * 1.001).all()


@pytest.mark.parametrize("method", [PLAIN, LEAN], ids=["plain", "lean"])
def test_step_6_slots_are_a_permutation_in_token_order(method):
    prompt = prompts.prompt(SHAPE)
    body = compress(dataclasses.replace(method, theta=0.8), prompt, prompts.info(SHAPE)).body
    for residuals, count in zip(body.coded().residuals, body.num_residuals, strict=True):
        slot, present = (np.asarray(x) for x in xla.slots(residuals))
        for i in range(2):
            used = slot[i][present[i]]  # in the order (side, head, token)
            assert used.tolist() == list(range(int(count[i]))) and len(used) > 20


@pytest.mark.parametrize("method", [PLAIN, LEAN], ids=["plain", "lean"])
def test_step_7_reconstruction_and_its_error(method):
    """Every token is gamma a + r-hat, keys rotated at their position; numpy decodes the arrays."""
    prompt = prompts.prompt(SHAPE)
    body = compress(method, prompt, prompts.info(SHAPE)).body
    k, v, where = (np.asarray(x) for x in fast_jit(type(body).materialize)(body))
    spin, levels = np.asarray(quant.rotation(16, 0)), np.array(quant.lloyd_max(2))
    near = np.asarray(anchors.rebuild(body.coded(), body.widths))
    if method is PLAIN:
        index, gamma = (np.asarray(x)[:, :, :, 0, :, None] for x in (body.index, body.gamma))
        at = np.broadcast_to(index.astype(int), (*index.shape[:-1], 16))
        held = np.take_along_axis(np.asarray(body.anchors), at, 3)
        want = held * gamma.astype(np.float32)
        np.testing.assert_allclose(near, want, rtol=1e-6)
    codes = np.asarray(quant.unpack(body.codes[0], 2, 16))
    scale = body.scales[0]
    scale = np.asarray(quant.scale_decode(scale) if scale.dtype == jnp.uint8 else scale, np.float64)
    words = np.asarray(body.words[0])
    better = []
    for i, n in enumerate(SHAPE.lengths):
        _, rotated, _, values = row_of(prompt, i, n)
        at = 0
        for side in range(2):
            for h in range(2):
                x = near[i, side, h, : n - WINDOW]
                if side == 0:
                    x = rotate(prompts.rope(16), jnp.asarray(x)[None], jnp.arange(n - WINDOW))[0]
                x = np.array(x, np.float64)
                truth = (rotated if side == 0 else values)[h]
                for t in range(n - WINDOW):
                    if words[i, side, h, t // 32] >> (t % 32) & 1:
                        add = levels[codes[i, at]] * scale[i, at] @ spin.T
                        better.append(
                            np.linalg.norm(truth[t] - x[t] - add) / np.linalg.norm(truth[t] - x[t])
                        )
                        x[t] += add
                        at += 1
                got = (k if side == 0 else v)[i, h]
                order = [int(np.flatnonzero(where[i, h] == t)[0]) for t in range(n)]
                np.testing.assert_allclose(got[order][: n - WINDOW], x, atol=2e-5)
                far = 2e-5 if method is PLAIN else np.abs(truth).max() / 100  # int8 there
                np.testing.assert_allclose(got[order][n - WINDOW :], truth[n - WINDOW :], atol=far)
        assert at == int(body.num_residuals[0][i])
    # the bits went to the token they belong to: 2-bit coding leaves about a third of the norm
    assert np.mean(better) < 0.45 and np.max(better) < 0.9


def test_lean_widths():
    shape = SHAPE._replace(dtype="bfloat16")
    prompt, layer = prompts.prompt(shape), prompts.info(shape)
    method = dataclasses.replace(LEAN, extra_anchors=12, gamma_bits=3)
    body = compress(method, prompt, layer).body
    assert body.widths.index == math.ceil(math.log2(12 + WINDOW)) == 5
    assert body.index.dtype == jnp.uint8 and body.index.shape[-1] == 96 * 5 // 8
    assert body.gamma.dtype == jnp.uint8 and body.gamma.shape[-1] == 96 * 3 // 8
    assert body.anchors.dtype == jnp.int8 and body.anchor_scales.dtype == jnp.float16
    assert body.positions is None and body.scales[0].dtype == jnp.uint8
    assert int(body.lengths[0]) == 90 and int(np.asarray(xla.indices(
        body.coded(), body.widths)).max()) < 12 + WINDOW  # fmt: skip


def test_the_papers_ledger_at_32k():
    shape = PromptShape(32768, 8, 128)
    assert shape.full_bytes == 134_217_728
    method = registry.make("paper:anchorkv", theta=0.05).resolve(shape)
    assert (method.window, method.extra_anchors + method.window) == (32, 256)
    base, count = budget(0.05, 32768, 8, 128, 224, 32)
    assert base - 8 == 2_759_040  # the specification's table: 2.76 MB; the paper states 3.39 MB
    sides = 2 * 8 * (32768 - 32)
    assert sides == 523_776
    papers = 91_056  # residual slots by the paper, 17.4 % of the token-sides
    assert abs(papers / sides - 0.174) < 0.001
    assert count / sides > 0.22 and count > papers
    layout = method.layout(shape)
    assert int(anchor_bytes.counts(layout, np.array([32768]))[0].sum()) == count
    assert method.layer_bytes(shape) == base + count * 34 <= 0.05 * shape.full_bytes


def test_the_paper_preset_refuses_a_short_context_naming_the_limit():
    with pytest.raises(ValueError, match="4224 tokens"):
        registry.make("paper:anchorkv", theta=0.3).resolve(PromptShape(4000, 8, 128))
    registry.make("paper:anchorkv", theta=0.3).resolve(PromptShape(4224, 8, 128))
    with pytest.raises(ValueError, match="no preset 'papr'"):
        registry.make("papr:anchorkv")


@pytest.mark.parametrize("preset", ["default", "paper_short"])
@pytest.mark.parametrize("heads,dim", [(1, 16), (3, 64), (8, 128), (3, 80)])
def test_theta_bounds_the_bytes_and_the_smallest_is_named(preset, heads, dim):
    for n in (40, 200, 1000, 4096, 32768):
        shape = PromptShape(n, heads, dim)
        with pytest.raises(ValueError, match="the smallest that can is") as refused:
            registry.make(f"{preset}:anchorkv", theta=1e-4).resolve(shape)
        smallest = float(str(refused.value).rstrip(".").split()[-1])
        spent = 0
        for theta in (smallest, *np.linspace(smallest * 1.01, max(1.0, smallest * 1.3), 23)):
            method = registry.make(f"{preset}:anchorkv", theta=float(theta))
            now = method.layer_bytes(shape)
            assert now <= theta * shape.full_bytes
            assert now >= spent
            spent = now
        with pytest.raises(ValueError, match="cannot pay"):
            registry.make(f"{preset}:anchorkv", theta=smallest * 0.98).resolve(shape)


def test_measured_bytes_stay_within_theta():
    shape = Shape(16, 4, 2, (200,), "bfloat16")
    prompt, layer = prompts.prompt(shape), prompts.info(shape)
    for preset, theta in (("default", 0.4), ("default", 0.9), ("paper_short", 0.7)):
        method = registry.make(f"{preset}:anchorkv", theta=theta).resolve(shape.row)
        stored = accounting.live_bytes(compress(method, prompt, layer)).stored[0]
        assert theta * 0.97 * shape.row.full_bytes < stored <= theta * shape.row.full_bytes


def test_theta_one_approaches_the_full_cache():
    shape = Shape(64, 4, 2, (160,), "bfloat16")
    prompt, layer = prompts.prompt(shape), prompts.info(shape)
    inputs = prompts.step_inputs(shape, 1)
    want = np.asarray(step(compress(Full(), prompt, layer), *inputs)[0], np.float32)
    errors = []
    for theta in (0.25, 0.5, 1.0):
        cache = compress(AnchorKV(theta=theta).resolve(shape.row), prompt, layer)
        got = np.asarray(step(cache, *inputs)[0], np.float32)
        errors.append(np.linalg.norm(got - want) / np.linalg.norm(want))
    assert errors[0] > errors[1] > errors[2] and errors[2] < 0.02, errors


def sizes_of(jaxpr):
    """Elements of every value of a jaxpr, inner ones included."""
    for equation in jaxpr.eqns:
        for out in equation.outvars:
            yield math.prod(out.aval.shape), equation.primitive.name
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(inner, core.ClosedJaxpr):
                    yield from sizes_of(inner.jaxpr)
                elif isinstance(inner, core.Jaxpr):
                    yield from sizes_of(inner)


@pytest.mark.parametrize("preset", ["default", "paper_short"])
def test_no_intermediate_is_quadratic_in_the_prompt(preset):
    shape = Shape(64, 8, 1, (1024,), "bfloat16")
    method = registry.make(f"{preset}:anchorkv", theta=0.2).resolve(shape.row)
    specs = jax.eval_shape(lambda: prompts.prompt(shape))
    jaxpr = jax.make_jaxpr(lambda p: method.compress(p, prompts.info(shape)))(specs)
    found = list(sizes_of(jaxpr.jaxpr))
    queries = 8 * method.window  # m = W G
    assert len(found) > 200 and queries * 1024 * 64 > 1024 * 1024
    largest = max(found)
    assert largest[0] < 1024 * 1024, largest  # neither [S, S] nor [m, S, D]


OPTIONS = {
    "one pool": {"key_share": None},
    "stages": {"wide_share": None, "bits": (2, 4)},
    "stages, one pool": {"wide_share": None, "bits": (2, 4), "key_share": None},
    "coverage": {"anchor_choice": "coverage", "attention_share": 0.25},
    "two anchors": {"anchors_per_token": 2},
    "two anchors, plain": {"anchors_per_token": 2, "storage": "plain", "centered": False},
}
WIDE = SHAPE._replace(lengths=(160, 131), columns=160)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_changes_what_is_stored_within_theta(name):
    """Law 1 of the new storage, exact bytes, and at least half of the tokens differ somewhere."""
    prompt, row = prompts.prompt(WIDE), WIDE.row
    options = {"bits": (2, 4)} | OPTIONS[name]
    theta = 0.52 if options.get("storage") == "plain" else 0.3
    method = dataclasses.replace(LEAN, theta=theta, **options).resolve(row)
    ours = {field: getattr(LEAN, field) for field in OPTIONS[name] if field not in ("storage",)}
    before = dataclasses.replace(method, **ours | {"centered": method.centered, "bits": (2, 4)})
    cache, other = (compress(m, prompt, prompts.info(WIDE)) for m in (method, before))
    views = [np.asarray(fast_jit(type(c).materialize)(c)[1], np.float32) for c in (cache, other)]
    moved = np.abs(views[0] - views[1]).max(-1) > 1e-6
    assert moved.any(), name
    live = accounting.live_bytes(cache).stored
    for i, n in enumerate(WIDE.lengths):
        assert live[i] <= theta * row._replace(num_tokens=n).full_bytes
    assert live[0] == method.layer_bytes(row) > 0.97 * theta * row.full_bytes
    inputs = prompts.step_inputs(WIDE, 1)
    out, after = step(cache, *inputs)
    k, v, where = fast_jit(type(after).materialize)(after)
    q = rotate(prompts.rope(16), inputs[0].astype(jnp.float32), inputs[3])
    scores_ = jnp.einsum("bnth,bnsh->bnts", q, jnp.repeat(k, 2, 1).astype(jnp.float32)) / 4
    seen = jnp.repeat(where, 2, 1)[:, :, None] >= 0
    p = jax.nn.softmax(jnp.where(seen, scores_, -jnp.inf), -1)
    want = jnp.einsum("bnts,bnsh->bnth", p, jnp.repeat(v, 2, 1).astype(jnp.float32))
    np.testing.assert_allclose(np.asarray(out), np.asarray(want), atol=3e-5)


def test_one_pool_keeps_the_top_of_the_union():
    rng = np.random.default_rng(4)
    u = rng.random((2, 2, 3, 40)).astype(np.float32)
    u[:, 1] *= 4  # values matter more
    count = jnp.asarray([[50], [31]], jnp.int32)
    (mask,) = (np.asarray(m) for m in anchor_residuals.choose(jnp.asarray(u), [count], [(50,)]))
    for i in range(2):
        order = np.argsort(-u[i].ravel())
        assert set(np.flatnonzero(mask[i])) == set(order[: int(count[i, 0])])
        assert mask[i, 1].sum() > 2 * mask[i, 0].sum()


def test_stages_go_where_they_remove_the_most_error():
    """The chosen codes are the best of all (token, stage) pairs, by the error that each removes."""
    rng = np.random.default_rng(5)
    u = np.exp(2 * rng.normal(size=(1, 2, 2, 50))).astype(np.float32)
    u[..., -3:] = -1
    first, second = np.asarray(
        anchor_residuals.choose_stages(jnp.asarray(u), jnp.asarray([[120]], jnp.int32), (120,), 2)
    )[0]
    assert first.sum() + second.sum() == 120 and 5 < second.sum() < 60
    assert (first | ~second).all() and not first[..., -3:].any()
    worth = lambda on, more: u[0][on] * more  # noqa: E731
    kept = min(worth(first, 0.8825).min(), worth(second, 0.1175 * 0.8825).min())
    lost = max(worth(~first, 0.8825).max(), worth(~second, 0.1175 * 0.8825).max())
    assert kept >= lost


def test_a_second_stage_refines_the_first():
    prompt = prompts.prompt(WIDE)
    method = dataclasses.replace(LEAN, theta=0.33, wide_share=None, bits=(2, 4), key_share=None)
    body = compress(method, prompt, prompts.info(WIDE)).body
    assert body.codes[0].shape[-1] == 4 and len(body.codes) == 1 and len(body.words) == 2
    stages = [tuple(np.asarray(x) for x in xla.slots(r)) for r in body.coded().residuals]
    used = np.concatenate([slot[0][present[0]] for slot, present in stages])
    assert used.tolist() == list(range(int(body.num_residuals[0][0])))  # every slot once, in order
    near = np.asarray(anchors.rebuild(body.coded(), body.widths))[0, 1]
    full = near + np.asarray(anchors.residual_values(body.coded(), body.widths, 16))[0, 1]
    n = WIDE.lengths[0]
    truth = np.asarray(prompt.v, np.float32)[0, :, : n - WINDOW]
    error = np.square(full[:, : n - WINDOW] - truth).sum(-1)
    error /= np.square(near[:, : n - WINDOW] - truth).sum(-1)
    once, twice = (present[0, 1][:, : n - WINDOW] for _, present in stages)
    assert twice.sum() > 20 and (once & ~twice).sum() > 20
    assert error[twice].mean() < 0.04 < 0.08 < error[once & ~twice].mean() < 0.2


def test_coverage_takes_the_farthest_token_each_time():
    rng = np.random.default_rng(6)
    x = rng.normal(size=(2, 2, 2, 40, 16)).astype(np.float32)
    starts, window, size = np.array([0, 9]), 4, 7
    chosen = np.zeros((2, 2, 36), bool)
    chosen[:, :, [12, 20, 30]] = True
    got = np.asarray(
        anchor_choice.cover(
            jnp.asarray(x), jnp.asarray(chosen), jnp.asarray(starts), window, size, 3
        )
    )
    unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
    for b in range(2):
        for h in range(2):
            held = [12, 20, 30, 36, 37, 38, 39]
            for _ in range(size - 3):
                cosine = np.einsum(
                    "sth,sah->sta", unit[b, :, h], unit[b, :, h, held].swapaxes(0, 1)
                )
                distance = (1 - (cosine**2).max(-1)).sum(0)
                distance[: starts[b]], distance[held], distance[36:] = -1, -1, -1
                held.append(int(distance.argmax()))
            assert sorted(np.flatnonzero(got[b, h])) == sorted(t for t in held if t < 36)


def test_a_second_anchor_projects_what_the_first_left():
    prompt = prompts.prompt(SHAPE)
    method = dataclasses.replace(
        PLAIN, anchors_per_token=2, bits=(), extra_anchors=12, theta=2.0, attention_share=1.0
    )
    body = compress(method, prompt, prompts.info(SHAPE)).body
    a = np.asarray(body.anchors, np.float64)
    index, gamma = np.asarray(body.index, int), np.asarray(body.gamma, np.float64)
    n = SHAPE.lengths[0]
    near = np.asarray(anchors.rebuild(body.coded(), body.widths))
    for side, x in enumerate((prompt.k_unrotated, prompt.v)):
        left = np.asarray(x, np.float64)[0, :, 96 - n : 96 - WINDOW]
        total, after_one = np.zeros_like(left), []
        for turn in range(2):
            for h in range(2):
                held = a[0, side, h]
                at = index[0, side, h, turn, : n - WINDOW]
                cosine = np.abs(left[h] @ held.T) / np.linalg.norm(held, axis=1)
                own = np.asarray(body.positions)[0, h, :12]
                rest = np.setdiff1d(np.arange(n - WINDOW), own)  # anchors: themselves, then nothing
                assert (at[rest] == cosine.argmax(1)[rest]).mean() > 0.98
                step_ = held[at] * gamma[0, side, h, turn, : n - WINDOW, None]
                total[h] += step_
                left[h] -= step_
                if turn == 0:
                    after_one.append(np.linalg.norm(left[h], axis=-1).mean())
        np.testing.assert_allclose(near[0, side, :, : n - WINDOW], total, atol=1e-4)
        norm = np.linalg.norm(left, axis=-1)
        one = (
            near[0, side, :, : n - WINDOW] * 0
            + np.asarray(x, np.float64)[0, :, 96 - n : 96 - WINDOW]
        )
        first = a[0, side][np.arange(2)[:, None], index[0, side, :, 0, : n - WINDOW]]
        first = first * gamma[0, side, :, 0, : n - WINDOW, None]
        assert norm.mean() < 0.98 * np.linalg.norm(one - first, axis=-1).mean()


def test_a_pooled_layer_budget_follows_the_utilities_and_stays_within_the_total():
    row = WIDE.row
    method = dataclasses.replace(
        AnchorKV(theta=0.4), layer_budget="pooled", window=WINDOW, extra_anchors=None
    )
    layers = [prompts.prompt(WIDE, seed) for seed in (0, 20, 40)]
    # in the second layer attention is flat and the values share a large part: errors matter less
    layers[1] = dataclasses.replace(layers[1], q=layers[1].q * 0, v=layers[1].v + 20)
    gather = fast_jit(lambda p: method.layer_statistics(p, prompts.info(WIDE)))
    found = [gather(p) for p in layers]
    sides = 2 * 2 * (np.array(WIDE.lengths) - WINDOW)
    for one in found:
        assert np.asarray(one).sum(1).tolist() == sides.tolist()
    given = method.allocate(found, row)
    stored = [accounting.live_bytes(compress(m, p, prompts.info(WIDE))).stored[0]
              for m, p in zip(given, layers, strict=True)]  # fmt: skip
    assert stored == [m.layer_bytes(row) for m in given]
    assert 0.97 * 3 * 0.4 * row.full_bytes < sum(stored) <= 3 * 0.4 * row.full_bytes
    assert len({m.theta for m in given}) > 1
    order = np.argsort([np.asarray(one).mean(0) @ np.exp2(np.arange(128) / 2) for one in found])
    assert given[order[-1]].theta == max(m.theta for m in given)
    for theta in (0.2, 0.5, 0.9, 1.2):  # whatever the pair of widths, down to layers with nothing
        skewed = [found[0] * 0 + jnp.eye(128)[j][None] * 608 for j in (20, 100, 100)]
        bought = dataclasses.replace(method, theta=theta).allocate(skewed, row)
        assert sum(m.layer_bytes(row) for m in bought) <= 3 * theta * row.full_bytes
    equal = dataclasses.replace(method, layer_budget="equal")
    assert [m.theta for m in equal.allocate(found, row)] == [0.4] * 3


def test_layers_buy_from_the_best_price_down():
    """Against a greedy purchase, one token-side at a time."""
    layout = AnchorKV(window=8, extra_anchors=8, prefix_bits=16).layout(PromptShape(512, 2, 16))
    layout = layout._replace(theta=0.35)
    rng = np.random.default_rng(7)
    demand = np.zeros((4, 128))
    for i in range(4):
        at = np.clip(rng.normal(60 + 6 * i, 8, 2016), 0, 127).astype(int)
        np.add.at(demand[i], at, 1)
    thetas = anchor_bytes.spread(layout, 512, (2, 4, 8), demand, steps=1000)
    base, full = int(anchor_bytes.base_bytes(layout, 512)), 4 * 512 * 2 * 16
    total = 4 * (0.35 * full - base)
    offers = []
    left, cost = [1, 0.1175, 0.009497, 0.0001], [0, 5, 9, 17]
    for i in range(4):
        for j in np.flatnonzero(demand[i]):
            for s in range(3):
                gain = (left[s] - left[s + 1]) * 2 ** (j / 2) / (cost[s + 1] - cost[s])
                offers += [(-gain, i, cost[s + 1] - cost[s])] * int(demand[i, j])
    spent = np.zeros(4)
    for _, i, price in sorted(offers):
        if spent.sum() + price > total:
            break
        spent[i] += price
    got = np.array(thetas) * full - base
    assert got.sum() <= total + 4
    np.testing.assert_allclose(got, spent, atol=0.03 * total)
    assert got[3] > got[2] > got[1] > got[0]


@pytest.mark.parametrize(
    "wrong,message",
    [
        ({"anchor_choice": "random"}, "anchor_choice='random' must be one of"),
        ({"anchors_per_token": 3}, "anchors_per_token=3 must be one of"),
        ({"layer_budget": "x"}, "layer_budget='x' must be one of"),
        ({"wide_share": None, "bits": (2, 3)}, "must double"),
        ({"key_share": 1.5}, "must be in"),
    ],
)
def test_wrong_options_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        AnchorKV(**wrong).resolve(PromptShape(1000, 2, 64))


def test_a_prompt_that_lost_tokens_is_refused():
    prompt = prompts.prompt(SHAPE)
    gone = dataclasses.replace(prompt, next_positions=jnp.asarray([100, 90], jnp.int32))
    with pytest.raises(ValueError, match="lost tokens"):
        LEAN.resolve(SHAPE.row).compress(gone, prompts.info(SHAPE))


def test_all_options_at_once_give_each_row_of_a_ragged_batch_what_it_gets_alone():
    both = WIDE
    chosen = {k: v for options in list(OPTIONS.values())[:-1] for k, v in options.items()}
    method = dataclasses.replace(LEAN, theta=0.35, **chosen, extra_anchors=16).resolve(both.row)
    inputs = prompts.step_inputs(both, 2)
    want = np.asarray(step(compress(method, prompts.prompt(both), prompts.info(both)), *inputs)[0])
    for i, n in enumerate(both.lengths):
        alone = Shape(16, 4, 2, (n,))
        cache = compress(method, prompts.prompt(alone, i), prompts.info(alone))
        got = step(cache, *(x[i : i + 1] for x in inputs))[0]
        np.testing.assert_allclose(np.asarray(got)[0], want[i], atol=2e-4)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_bytes_of_an_option_stay_within_theta(name):
    for n in (200, 2048, 32768):
        shape, spent = PromptShape(n, 3, 64), 0
        for theta in np.linspace(0.2, 1.2, 11):
            options = {key: value for key, value in OPTIONS[name].items() if key != "bits"}
            method = AnchorKV(theta=float(theta), **options)
            now = method.layer_bytes(shape)
            assert spent <= now <= theta * shape.full_bytes
            spent = now
        assert spent > 0.8 * shape.full_bytes
