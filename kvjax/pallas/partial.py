"""The value-level math that ops share: softmax partials over dense keys, fields of packed codes.

Batch and KV heads are one leading axis in every product: a product with two batch axes and a batch
of one is several times slower on a CPU.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax import quant

MASKED = -1e30


def logits(q: Array, k: Array) -> Array:
    """q [B,N,T,H] . k [B,K,S,H] / sqrt(H), as f32[B, K, G*T, S] (query heads by KV head)."""
    batch, heads, steps, dim = q.shape
    kv_heads, slots = k.shape[1:3]
    rows = heads // kv_heads * steps
    product = jnp.einsum(
        "brh,bsh->brs",
        q.astype(k.dtype).reshape(batch * kv_heads, rows, dim),
        k.reshape(batch * kv_heads, slots, dim),
        preferred_element_type=jnp.float32,
    )
    return product.reshape(batch, kv_heads, rows, slots) * dim**-0.5


def soften(scores: Array, mask: Array) -> tuple[Array, Array, Array]:
    """Masked exponentials of f32[B, K, G*T, S] with their running maximum and sum.

    Returns:
        p of the scores' shape, m and l [B, K, G*T]; a row with nothing visible has p = l = 0.
    """
    scores = jnp.where(mask, scores, MASKED)
    m = scores.max(-1)
    p = jnp.where(mask, jnp.exp(scores - m[..., None]), 0.0)
    return p, m, p.sum(-1)


def weigh(p: Array, v: Array) -> Array:
    """p [B,K,R,S] . v [B,K,S,H] as f32[B, K, R, H]."""
    batch, kv_heads, rows, slots = p.shape
    product = jnp.einsum(
        "brs,bsh->brh",
        p.astype(v.dtype).reshape(batch * kv_heads, rows, slots),
        v.reshape(batch * kv_heads, slots, -1),
        preferred_element_type=jnp.float32,
    )
    return product.reshape(batch, kv_heads, rows, -1)


def by_head(o: Array, m: Array, l: Array, steps: int) -> tuple[Array, Array, Array]:  # noqa: E741
    """[B, K, G*T, ...] to [B, N, T, ...] for each of o, m, l."""
    batch, dim = o.shape[0], o.shape[-1]
    shape = (batch, o.shape[1] * o.shape[2] // steps, steps)
    return o.reshape(*shape, dim), m.reshape(shape), l.reshape(shape)


def dense(q: Array, k: Array, v: Array, mask: Array) -> tuple[Array, Array, Array]:
    """The partial (o, m, l) of attention over dense keys and values.

    Args:
        q: [B, N, T, H], rotated.
        k: [B, K, S, H], rotated; its dtype is the products' (accumulation is float32).
        v: [B, K, S, H].
        mask: bool [B, 1 or K, T, S], what each query sees.

    Returns:
        o f32[B, N, T, H] = sum p v, m f32[B, N, T] the maximum, l f32[B, N, T] = sum p.
    """
    batch, _, steps, _ = q.shape
    p, m, l = soften(logits(q, k), expand(mask, q.shape[1], k.shape[1]))  # noqa: E741
    return by_head(weigh(p, v), m, l, steps)


def products(q: Array, k: Array) -> Array:
    """q f32[P, R, ...] . k f32[P, S, ...] over all their other axes, as f32[P, R, S].

    With the queries first, XLA's CPU backend transposes float32 keys before it multiplies; the
    barrier keeps it from turning the product round again.
    """
    q, k = (x.reshape(*x.shape[:2], -1) for x in (q, k))
    return lax.optimization_barrier(jnp.einsum("bsh,brh->bsr", k, q)).swapaxes(1, 2)


def combine(
    parts: tuple[Array, ...],
    m: Array,
    l: Array,  # noqa: E741
    axis: int,
) -> tuple[tuple[Array, ...], Array, Array]:
    """Merge the partials along an axis of sums f32[..., H] each, m and l f32[...]."""
    top = m.max(axis, keepdims=True)
    fade = jnp.exp(m - top)
    merged = tuple((o * fade[..., None]).sum(axis) for o in parts)
    return merged, top.squeeze(axis), (l * fade).sum(axis)


def slot_sums(scores: Array, m: Array, l: Array, seen: Array) -> Array:  # noqa: E741
    """Attention that each slot gets, summed over the queries of a KV head: f32[B, K, S].

    Args:
        scores: f32[B, K, G*T, S], anything where a slot is not seen.
        m: f32[B, N, T], the maximum of each query's scores.
        l: f32[B, N, T], the sum of exp(scores - m); 0 where a query saw nothing.
        seen: bool[B, K, S].
    """
    m, l = (x.reshape(scores.shape[:3])[..., None] for x in (m, l))  # noqa: E741
    p = jnp.where(seen[:, :, None], jnp.exp(scores - m), 0.0)
    return (p / jnp.where(l > 0, l, 1.0)).sum(2)


def expand(mask: Array, heads: int, kv_heads: int) -> Array:
    """A mask [B, 1 or K, T, S] repeated for the G query heads of a group: [B, 1 or K, G*T, S]."""
    group = heads // kv_heads
    return mask if group == 1 else jnp.tile(mask, (1, 1, group, 1))


def fields(packed: Array, bits: int, size: int) -> Array:
    """Unpack codes in the cheapest order: a word at a time, a shift a field.

    `quant.unpack` restores the order of the codes, which a CPU cannot do in whole words. A product
    sums in any order: give its other operand `field_order`. A smaller plane's fields fall into the
    first plane's order, byte by byte, as the planes' widths divide each other.

    Args:
        packed: uint8 [..., quant.packed_size(size, bits)].
        bits: 1 to 8.
        size: number of codes n.

    Returns:
        i32[..., X, Y] with X * Y = n; flat entry i is code `field_order(bits, size)[i]`.
    """
    word, planes = _word(bits, size), quant.parts(bits)
    if not word:
        return quant.unpack(packed, bits, size)[..., None, :]
    first, at, total = planes[0][0], 0, 0
    byte, part = np.ix_(range(word), range(8 // first))
    for width, low in planes:
        count, repeat = size * width // 8, first // width
        words = packed[..., at : at + count]
        if word > 1:
            words = words.reshape(*packed.shape[:-1], count // word, word)
            words = lax.bitcast_convert_type(words, {2: jnp.uint16, 4: jnp.uint32}[word])
        at += count
        shift = 8 * byte[..., None] + width * (repeat * part[..., None] + np.arange(repeat))
        shift = shift.reshape((1,) * (packed.ndim - 1) + (-1, repeat, 1))
        field = (words[..., None, None, :] >> jnp.asarray(shift, words.dtype)) & (2**width - 1)
        field = field.reshape(*packed.shape[:-1], shift.shape[-3], -1)
        total |= field.astype(jnp.int32) << low
    return total


def field_order(bits: int, size: int) -> np.ndarray:
    """The code that each entry of `fields` holds: int[size]."""
    word = _word(bits, size)
    if not word:
        return np.arange(size)
    first = quant.parts(bits)[0][0]
    count = size * first // 8
    byte, part, index = np.ix_(range(word), range(8 // first), range(count // word))
    return (part * count + word * index + byte).reshape(-1)


def _word(bits: int, size: int) -> int:
    """Bytes of the widest word that divides every plane, 0 where a plane is not whole bytes."""
    if any(size * width % 8 for width, _ in quant.parts(bits)):
        return 0
    counts = [size * width // 8 for width, _ in quant.parts(bits)]
    return next(word for word in (4, 2, 1) if not any(count % word for count in counts))


def decoded(decode: Callable[..., Any], lengths: Array, q: Array, body: Any) -> Any:
    """`decode(q, body)`, stored before anything reads it; zeros where no row has a length.

    A branch is a computation of its own. Without it XLA fuses the decoding into its consumers,
    where a CPU repeats it for every channel and query; and, as it needs nothing but the body, it
    decodes all layers before the first one is attended to.

    Args:
        decode: a function of q and body that returns arrays; what it returns must depend on q.
        lengths: i32[...], entries that the body holds.
        q: the queries.
        body: arrays.
    """
    shapes = jax.eval_shape(decode, q, body)

    def nothing(*_):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    return lax.cond(lengths.max() > 0, decode, nothing, q, body)
