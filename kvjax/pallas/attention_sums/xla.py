"""The specification of attention_sums: blocks of keys, each over the queries from its diagonal."""

import jax.numpy as jnp
from jax import Array, lax

_KEYS = 256  # columns of a block, of keys and of queries


def attention_sums(
    q: Array, k: Array, lse: Array, starts: Array, *, last: int | None = None
) -> Array:
    """See `api.attention_sums`."""
    batch, heads, columns, dim = q.shape
    kv_heads, group = k.shape[1], heads // k.shape[1]
    size = min(_KEYS, -(-columns // 8) * 8)
    pad = -columns % size
    q, k = (jnp.pad(x, ((0, 0), (0, 0), (pad, 0), (0, 0))) for x in (q, k))
    lse = jnp.pad(lse, ((0, 0), (0, 0), (pad, 0)))
    total, starts, lead = columns + pad, starts + pad, batch * kv_heads
    first = jnp.repeat(starts, kv_heads)[:, None, None]  # [B*K, 1, 1]
    seen = 0 if last is None else max(total - last, 0)  # first column whose query counts
    k = k.reshape(lead, total // size, size, dim).swapaxes(0, 1)
    q = q.reshape(lead, group, total, dim)
    lse = lse.reshape(lead, group, total)

    def keys(args):
        block, at = args  # [B*K, size, H], first column
        column = at + jnp.arange(size)[None, None]

        def step(j, sums):
            qb = lax.dynamic_slice_in_dim(q, j * size, size, 2).reshape(lead, group * size, dim)
            norm = lax.dynamic_slice_in_dim(lse, j * size, size, 2).reshape(lead, group * size, 1)
            s = jnp.einsum("brh,bsh->brs", qb, block, preferred_element_type=jnp.float32)
            row = j * size + jnp.tile(jnp.arange(size), group)[None, :, None]
            mask = (column <= row) & (column >= first)
            if last is not None:
                mask &= row >= seen
            return sums + jnp.where(mask, jnp.exp(s * dim**-0.5 - norm), 0.0).sum(1)

        zero = jnp.zeros((lead, size), jnp.float32)
        return lax.fori_loop(jnp.maximum(at, seen) // size, total // size, step, zero)

    sums = lax.map(keys, (k, jnp.arange(total // size, dtype=jnp.int32) * size))
    return sums.swapaxes(0, 1).reshape(batch, kv_heads, total)[:, :, pad:]
