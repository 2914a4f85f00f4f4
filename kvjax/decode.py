"""The only loops: prefill, compress, extend, step, generate; no method is named here.

Everything here is jitted a layer or a step at a time. Layers are an unrolled Python loop: prefill
and compress run one compiled program L times, a decode step is one program over all layers.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.methods.full import Full
from kvjax.pallas.attention_sums.api import attention_sums
from kvjax.pallas.dispatch import beside
from kvjax.pallas.flash_prefill.api import flash_prefill
from kvjax.rope import rotate
from kvjax.types import LayerInfo, Method, Model, PromptKV, PromptShape


class Prefill(NamedTuple):
    """A finished prompt, before any compression; what every method of a sweep starts from."""

    logits: Array  # f32[B, V] of each row's last token
    prompts: tuple[PromptKV, ...]  # one a layer
    lengths: np.ndarray  # int[B], real tokens: the next position of each row


class Generation(NamedTuple):
    """Tokens of a finished `generate`."""

    tokens: Array  # i32[B, M], -1 after a row's end
    lengths: Array  # i32[B], tokens of each row, a stop token included
    stopped: Array  # bool[B], ended by a stop token (else by the limit)
    logits: Array | None  # f32[B, M, V] that each token was chosen from, if asked for


def left_pad(rows: Sequence[Sequence[int]], multiple: int = 1, pad: int = 0) -> tuple[Array, Array]:
    """Right-align prompts of different lengths.

    Args:
        rows: token ids of each prompt.
        multiple: the width is rounded up to a multiple of it (128 bounds recompilation).
        pad: token id that fills.

    Returns:
        tokens i32[B, T] and starts i32[B], the first real column of each row.

    Raises:
        ValueError: for no prompts or an empty one.
    """
    lengths = [len(row) for row in rows]
    if not lengths or min(lengths) == 0:
        raise ValueError(f"prompts of {lengths} tokens: each must hold at least 1 token.")
    width = -(-max(lengths) // multiple) * multiple
    tokens = np.full((len(rows), width), pad, np.int32)
    for i, row in enumerate(rows):
        tokens[i, width - len(row) :] = row
    return jnp.asarray(tokens), jnp.asarray(width - np.array(lengths), jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def _embed(model: Model, params: Any, tokens: Array) -> Array:
    return model.embed(model.config, params, tokens)


@functools.partial(jax.jit, static_argnums=0)
def _head(model: Model, params: Any, x: Array) -> Array:
    return model.head(model.config, params, x)


@functools.partial(jax.jit, static_argnums=(0, 4, 5, 6, 7), donate_argnums=2)
def _prefill_block(model, layer, x, starts, window, dtype, impl, column_sums):
    positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None] - starts[:, None]

    def attend(q, k, v, _):
        q, rotated = rotate(model.rope, q, positions), rotate(model.rope, k, positions)
        out, lse = flash_prefill(q, rotated, v, starts, window=window, impl=impl)
        how = beside(impl)
        sums = attention_sums(q, rotated, lse, starts, impl=how) if column_sums else None
        kept = (array.astype(dtype) for array in (q, rotated, k, v))
        return out, PromptKV(*kept, starts, column_sums=sums)

    return model.block(model.config, layer, x, attend, None)


def prefill(
    model: Model,
    params: Any,
    tokens: Array,
    starts: Array,
    *,
    dtype: Any = jnp.bfloat16,
    impl: str = "auto",
    method: Method | None = None,
    reserve: int = 0,
    column_sums: bool = False,
) -> Prefill:
    """Run the prompts exactly and keep each layer's queries, keys and values.

    Args:
        model: the decoder.
        params: its weights.
        tokens: i32[B, T], left-padded (`left_pad`).
        starts: i32[B], first real column of each row.
        dtype: of the cache that will be built; attention itself runs in the model's dtype.
        impl: of the prefill kernel, see `pallas.dispatch.choose`; column sums: `dispatch.beside`.
        method: if given, each layer is compressed as soon as it is done and `prompts` holds the
            layers' caches instead: one layer's prompt is live at a time.
        reserve: tokens that will be appended, with `method`.
        column_sums: also sum up the attention that each column gets from all queries, which H2O
            ranks by: about a third more attention time here, or twice the attention in `compress`.

    Returns:
        The last token's logits and what the layers hold.

    Raises:
        ValueError: for an empty prompt or shapes that do not fit.
    """
    if tokens.ndim != 2 or starts.shape != tokens.shape[:1]:
        raise ValueError(f"tokens {tokens.shape} and starts {starts.shape} must be [B, T] and [B].")
    lengths = tokens.shape[1] - np.asarray(starts)
    if tokens.shape[1] == 0 or lengths.min() < 1:
        raise ValueError(f"prompts of {lengths} tokens: each must hold at least 1 token.")
    resolved = method
    if getattr(method, "spreads", False):
        raise ValueError(
            f"{type(method).__name__} spreads its budget over layers, which takes all of them:"
            " compress after prefill."
        )
    if method is not None:
        resolved = _resolve(method, lengths, model.num_kv_heads, model.head_dim, dtype)
    x = _embed(model, {k: v for k, v in params.items() if k != "layers"}, tokens)
    kept = []
    for index, layer in enumerate(params["layers"]):
        window = model.windows[index]
        wanted = column_sums or getattr(resolved, "column_sums", False)
        summed = wanted and window is None  # a layer with a window stays full
        x, prompt = _prefill_block(model, layer, x, starts, window, jnp.dtype(dtype), impl, summed)
        if resolved is not None:
            prompt = _compress_layer(resolved, prompt, model, index, reserve)
        kept.append(prompt)
    return Prefill(head(model, params, x[:, -1]), tuple(kept), lengths)


def head(model: Model, params: Any, x: Array) -> Array:
    """Logits f32[..., V] of hidden states [..., D] (`extend` returns them)."""
    return _head(model, {k: v for k, v in params.items() if k != "layers"}, x)


@functools.partial(jax.jit, static_argnums=2)
def _compress(method: Method, prompt: PromptKV, info: LayerInfo) -> Any:
    return method.compress(prompt, info)


def _resolve(method: Method, lengths: np.ndarray, heads: int, dim: int, dtype: Any) -> Method:
    """Static sizes from the longest row; the shortest must be within its own bytes too."""
    if not hasattr(method, "resolve"):
        return method
    longest, shortest = (
        PromptShape(int(n), heads, dim, jnp.dtype(dtype).itemsize)
        for n in (lengths.max(), lengths.min())
    )
    method = method.resolve(longest)
    method.resolve(shortest)
    return method


_statistics = jax.jit(lambda m, prompt, info: m.layer_statistics(prompt, info), static_argnums=2)


def _spread(method: Method, prompts: Sequence[PromptKV], model: Model, lengths: np.ndarray) -> list:
    """A method for every layer, from the statistics of those that are compressed."""
    _, heads, _, dim = prompts[0].k.shape
    shape = PromptShape(int(lengths.max()), heads, dim, prompts[0].k.dtype.itemsize)
    resolved = _resolve(method, lengths, heads, dim, prompts[0].k.dtype)
    layers = [i for i, window in enumerate(model.windows) if window is None]
    info = LayerInfo(len(prompts), None, 1, model.rope)
    found = [_statistics(resolved.for_layer(i, len(prompts)), prompts[i], info) for i in layers]
    methods = [resolved] * len(prompts)
    for i, own in zip(layers, method.allocate(found, shape), strict=True):
        methods[i] = own
    return methods


def _compress_layer(method, prompt, model, index, reserve):
    window = model.windows[index]
    if window is not None:
        method = Full(impl=getattr(method, "impl", "auto"))
    method = method.for_layer(index, len(model.windows))
    info = LayerInfo(len(model.windows), window, reserve, model.rope)
    return _compress(method, prompt, info)


def compress(
    method: Method, prompts: Sequence[PromptKV], model: Model, *, reserve: int
) -> tuple[Any, ...]:
    """Build every layer's cache from one prefill; layers with a sliding window stay full.

    Args:
        method: its per-layer integers come from `for_layer`; a method with `resolve` gets the
            longest real prompt of the batch.
        prompts: `Prefill.prompts`; not consumed, so that many methods can share them.
        model: the decoder.
        reserve: tokens that will be appended, the capacity of the tails.

    Returns:
        A cache a layer.

    Raises:
        ValueError: for a setting that these shapes cannot be stored with.
    """
    heads, total, dim = prompts[0].k.shape[1:]
    lengths = total - np.asarray(prompts[0].starts)
    if getattr(method, "spreads", False):
        methods = _spread(method, prompts, model, lengths)
    else:
        methods = [_resolve(method, lengths, heads, dim, prompts[0].k.dtype)] * len(prompts)
    return tuple(
        _compress_layer(own, prompt, model, index, reserve)
        for index, (own, prompt) in enumerate(zip(methods, prompts, strict=True))
    )


def _run(model: Model, params: Any, caches: Any, tokens: Array, positions: Array):
    """Hidden states [B, T, D] of new tokens and the caches that hold them (traced)."""
    x = model.embed(model.config, params, tokens)

    def attend(q, k, v, cache):
        return cache.step(q, k, v, positions)

    new = []
    for layer, cache in zip(params["layers"], caches, strict=True):
        x, cache = model.block(model.config, layer, x, attend, cache)
        new.append(cache)
    return x, tuple(new)


_extend = jax.jit(_run, static_argnums=0, donate_argnums=2)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def decode_step(
    model: Model, params: Any, caches: Any, token: Array, positions: Array
) -> tuple[Array, Any]:
    """One token a row.

    Args:
        model: the decoder.
        params: its weights.
        caches: a cache a layer; donated, the returned ones take their place.
        token: i32[B].
        positions: i32[B]; -1 leaves the row's cache as it is (its logits mean nothing).

    Returns:
        logits f32[B, V] and the caches.
    """
    x, caches = _run(model, params, caches, token[:, None], positions[:, None])
    return model.head(model.config, params, x[:, 0]), caches


@functools.partial(jax.jit, donate_argnums=0)
def flush(caches: Any) -> Any:
    """Fold full blocks of every layer's tail; rows without one are left alone."""
    return tuple(cache.flush() for cache in caches)


def select_rows(caches: Any, rows: Array) -> Any:
    """Reorder, repeat or drop the rows of a batch: beams, finished requests.

    Args:
        caches: a cache a layer.
        rows: i32[R], the row of the old batch that each new one is.
    """

    def select(cache):
        if hasattr(cache, "select_rows"):
            return cache.select_rows(rows)
        return jax.tree.map(lambda x: x[rows], cache)

    return tuple(select(cache) for cache in caches)


def flush_interval(caches: Any) -> int | None:
    """Positions at which some layer folds a block are multiples of this; None: never."""
    intervals = {cache.flush_every for cache in caches if cache.flush_every is not None}
    return math.gcd(*intervals) if intervals else None


def needs_flush(flush_every: int | None, positions: Any) -> bool:
    """Whether some row's next position closes a block. `positions`: int[B] on the host."""
    return flush_every is not None and bool((np.asarray(positions) % flush_every == 0).any())


def extend(
    model: Model,
    params: Any,
    caches: Any,
    tokens: Array,
    positions: Array,
) -> tuple[Array, Any]:
    """Append T tokens a row, in chunks that the caches can take: a question, a turn, a chunk.

    Args:
        model: the decoder.
        params: its weights.
        caches: a cache a layer; donated.
        tokens: i32[B, T], right-padded.
        positions: i32[B, T], -1 for pads.

    Returns:
        Hidden states [B, T, D] for `head`, and the caches.

    Raises:
        ValueError: if the caches have no room for the tokens.
    """
    positions_host = np.asarray(positions)
    need = (positions_host >= 0).sum(1)
    for index, cache in enumerate(caches):
        room = np.asarray(cache.room())
        if (need > room).any():
            raise ValueError(
                f"layer {index} has room for {room} more tokens and {need} were given:"
                f" compress with reserve >= {int((need - room).max())} more."
            )
    total = tokens.shape[1]
    chunk = min([total] + [c.step_limit for c in caches if c.step_limit is not None])
    folds, hidden = flush_interval(caches) is not None, []
    for at in range(0, total, chunk):
        if folds:  # single steps before may have left a whole block
            caches = flush(caches)
        x, caches = _extend(
            model, params, caches, tokens[:, at : at + chunk], positions[:, at : at + chunk]
        )
        hidden.append(x)
    if folds:
        caches = flush(caches)
    return (hidden[0] if len(hidden) == 1 else jnp.concatenate(hidden, 1)), caches


def sample(logits: Array, key: Array, temperature: Array | float, top_p: Array | float) -> Array:
    """Draw from softmax(logits / temperature), cut to the smallest set of mass top_p.

    Args:
        logits: f32[B, V].
        key: a key a row.
        temperature: > 0.
        top_p: in (0, 1].

    Returns:
        i32[B].
    """
    scaled = logits / temperature
    p = jax.nn.softmax(scaled, -1)
    bits = lax.bitcast_convert_type(p, jnp.int32)  # ordered as p is, which is not negative

    def halve(_, bounds):  # the greatest threshold that leaves a mass of top_p; a sort takes longer
        low, high = bounds
        middle = low + (high - low + 1) // 2
        enough = jnp.where(bits >= middle[:, None], p, 0.0).sum(-1) >= top_p
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    threshold, _ = lax.fori_loop(0, 31, halve, (jnp.zeros_like(bits[:, 0]), bits.max(-1)))
    cut = jnp.where(bits >= threshold[:, None], scaled, -jnp.inf)
    return jax.vmap(jax.random.categorical)(key, cut).astype(jnp.int32)


@functools.partial(
    jax.jit,
    static_argnames=("model", "limit", "flush_every", "greedy", "keep_logits"),
    donate_argnames=("caches",),
)
def _generate(
    model, params, caches, logits, positions, stop, key, temperature, top_p,
    *, limit, flush_every, greedy, keep_logits,
):  # fmt: skip
    batch, vocabulary = logits.shape
    kept = jnp.zeros((batch, limit, vocabulary if keep_logits else 0), jnp.float32)
    tokens = jnp.full((batch, limit), -1, jnp.int32)

    def choose(logits, i):
        if greedy:
            return logits.argmax(-1).astype(jnp.int32)
        keys = jax.vmap(jax.random.fold_in, (0, None))(key, i)
        return sample(logits, keys, temperature, top_p)

    def going(carry):
        i, _, _, _, alive, _, _ = carry
        return (i < limit) & alive.any()

    def body(carry):
        i, logits, caches, positions, alive, tokens, kept = carry
        token = choose(logits, i)
        tokens = tokens.at[:, i].set(jnp.where(alive, token, -1))
        if keep_logits:
            kept = kept.at[:, i].set(logits)
        alive = alive & ~(token[:, None] == stop[None]).any(-1)
        at = jnp.where(alive, positions, -1)
        if flush_every is not None:
            caches = lax.cond(
                (positions % flush_every == 0).any(),
                lambda c: tuple(cache.flush() for cache in c),
                lambda c: c,
                caches,
            )
        x, caches = _run(model, params, caches, token[:, None], at[:, None])
        logits = model.head(model.config, params, x[:, 0])
        return i + 1, logits, caches, positions + alive, alive, tokens, kept

    carry = (jnp.int32(0), logits, caches, positions, jnp.ones(batch, bool), tokens, kept)
    _, _, caches, positions, alive, tokens, kept = lax.while_loop(going, body, carry)
    return Generation(tokens, (tokens >= 0).sum(-1), ~alive, kept if keep_logits else None), caches


def generate(
    model: Model,
    params: Any,
    caches: Any,
    logits: Array,
    positions: Array,
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    temperature: float = 0.0,
    top_p: float = 1.0,
    key: Array | None = None,
    keep_logits: bool = False,
) -> tuple[Generation, Any]:
    """Decode each row to a stop token or a limit, in one compiled loop.

    Args:
        model: the decoder.
        params: its weights.
        caches: a cache a layer; donated. They need room for max_new_tokens.
        logits: f32[B, V], of the last token so far.
        positions: i32[B], the next position of each row.
        max_new_tokens: limit, tokens a row.
        stop_ids: a row ends with any of these (and keeps it).
        temperature: 0 = greedy.
        top_p: nucleus mass in (0, 1].
        key: for sampling: one key, or one a row.
        keep_logits: also return the logits of every step.

    Returns:
        The generation and the caches after it.

    Raises:
        ValueError: for settings out of range, a missing key, or too little room.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1.")
    if temperature < 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature={temperature} must be >= 0 and top_p={top_p} in (0, 1].")
    if temperature > 0 and key is None:
        raise ValueError("sampling (temperature > 0) must be given a key.")
    room = min(int(np.asarray(cache.room()).min()) for cache in caches)
    if room < max_new_tokens:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} exceeds the room of the cache, {room} tokens:"
            " compress with a larger reserve."
        )
    key = jax.random.key(0) if key is None else key
    if key.ndim == 0:
        key = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(logits.shape[0]))
    return _generate(
        model, params, caches, logits, jnp.asarray(positions, jnp.int32),
        jnp.asarray(list(stop_ids), jnp.int32), key, jnp.float32(temperature), jnp.float32(top_p),
        limit=max_new_tokens, flush_every=flush_interval(caches), greedy=temperature == 0,
        keep_logits=keep_logits,
    )  # fmt: skip
