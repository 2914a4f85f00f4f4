"""The specification of paged_decode: gather each row's pages, then dense attention."""

import jax.numpy as jnp
from jax import Array

from kvjax.pallas import partial


def gather_pages(pages: Array, table: Array) -> Array:
    """The tokens of each row in order: pages [P, K, S, ...] by table i32[B, M] to [B, K, M*S, ...].

    Entries of -1 give the tokens of some page: mask them.
    """
    rows = pages[jnp.maximum(table, 0)].swapaxes(1, 2)  # [B, K, M, S, ...]
    return rows.reshape(*rows.shape[:2], rows.shape[2] * rows.shape[3], *rows.shape[4:])


def paged_decode(
    q: Array, k_pages: Array, v_pages: Array, table: Array, lengths: Array
) -> tuple[Array, Array, Array]:
    """See `api.paged_decode`."""
    k, v = (gather_pages(pages, table) for pages in (k_pages, v_pages))
    valid = jnp.arange(k.shape[2])[None] < lengths[:, None]
    shape = (q.shape[0], 1, q.shape[2], k.shape[2])
    return partial.dense(q, k, v, jnp.broadcast_to(valid[:, None, None], shape))
