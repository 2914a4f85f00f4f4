"""The specification of paged_decode: gather each row's pages, then dense attention."""

import jax.numpy as jnp
from jax import Array

from kvjax.pallas import partial


def gather_pages(pages: Array, table: Array) -> Array:
    """The tokens of each row in order: pages [P, K, S, ...] by table i32[B, M] to [B, K, M*S, ...].

    Entries of -1 give the tokens of some page: mask them.
    """
    heads, slots = pages.shape[1:3]
    head = jnp.arange(heads, dtype=jnp.int32)[None, :, None]
    at = jnp.maximum(table, 0)[:, None] * heads + head  # [B, K, M], runs of S rows in a row
    rows = pages.reshape(-1, *pages.shape[2:])[at]
    return rows.reshape(*at.shape[:2], at.shape[2] * slots, *pages.shape[3:])


def paged_decode(
    q: Array, k_pages: Array, v_pages: Array, table: Array, lengths: Array
) -> tuple[Array, Array, Array]:
    """See `api.paged_decode`."""
    k, v = (gather_pages(pages, table) for pages in (k_pages, v_pages))
    valid = jnp.arange(k.shape[2])[None] < lengths[:, None]
    shape = (q.shape[0], 1, q.shape[2], k.shape[2])
    return partial.dense(q, k, v, jnp.broadcast_to(valid[:, None, None], shape))
