"""The specification of flash_prefill: online softmax in blocks that skips the upper triangle."""

import jax.numpy as jnp
from jax import Array, lax

from kvjax.pallas.partial import MASKED

_QUERIES, _KEYS = 256, 256  # columns of a block


def flash_prefill(
    q: Array, k: Array, v: Array, starts: Array, *, window: int | None
) -> tuple[Array, Array]:
    """See `api.flash_prefill`."""
    batch, heads, columns, dim = q.shape
    kv_heads, group = k.shape[1], heads // k.shape[1]
    size = min(_QUERIES, -(-columns // 8) * 8)
    keys = min(_KEYS, size)
    pad = -columns % size
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (pad, 0), (0, 0))) for x in (q, k, v))
    total, starts, lead = columns + pad, starts + pad, batch * kv_heads
    k, v = (x.reshape(lead, total, dim) for x in (k, v))
    q = q.reshape(lead, group, total // size, size, dim).transpose(2, 0, 1, 3, 4)
    first = jnp.repeat(starts, kv_heads)[:, None, None]  # [B*K, 1, 1]

    def queries(args):
        block, at = args  # [B*K, G, size, H], first column
        block = block.reshape(lead, group * size, dim)
        row = at + jnp.tile(jnp.arange(size), group)[None, :, None]  # column of each query

        def step(j, carry):
            o, m, l = carry  # noqa: E741
            kb, vb = (lax.dynamic_slice_in_dim(x, j * keys, keys, 1) for x in (k, v))
            s = jnp.einsum("brh,bsh->brs", block, kb, preferred_element_type=jnp.float32)
            column = j * keys + jnp.arange(keys)[None, None, :]
            mask = (column <= row) & (column >= first)
            if window is not None:
                mask &= column > row - window
            s = jnp.where(mask, s * dim**-0.5, MASKED)
            new = jnp.maximum(m, s.max(-1))
            p = jnp.where(mask, jnp.exp(s - new[..., None]), 0.0)
            shrink = jnp.exp(m - new)
            add = jnp.einsum(
                "brs,bsh->brh", p.astype(vb.dtype), vb, preferred_element_type=jnp.float32
            )
            return o * shrink[..., None] + add, new, l * shrink + p.sum(-1)

        low = starts.min() if window is None else jnp.maximum(starts.min(), at - window + 1)
        zero = jnp.zeros((lead, group * size), jnp.float32)
        o, m, l = lax.fori_loop(  # noqa: E741
            jnp.maximum(low, 0) // keys,
            (at + size + keys - 1) // keys,
            step,
            (jnp.zeros((lead, group * size, dim), jnp.float32), zero + MASKED, zero),
        )
        safe = jnp.where(l > 0, l, 1.0)
        o = (o / safe[..., None]).reshape(lead, group, size, dim)
        return o, (m + jnp.log(safe)).reshape(lead, group, size)

    out, lse = lax.map(queries, (q, jnp.arange(total // size, dtype=jnp.int32) * size))
    out = out.transpose(1, 2, 0, 3, 4).reshape(batch, heads, total, dim)
    lse = lse.transpose(1, 2, 0, 3).reshape(batch, heads, total)
    return out[:, :, pad:].astype(v.dtype), lse[:, :, pad:]
