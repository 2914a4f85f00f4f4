"""gear_decode as a GPU kernel: backbone, low rank and outliers in one pass."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from kvjax.pallas import groups, split_k


def gear_decode(
    q: Array,
    keys: Any,
    values: Any,
    lengths: Array,
    *,
    chunk: int,
    k_bits: int,
    v_bits: int,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """See `api.gear_decode`."""
    batch, _, steps, dim = q.shape
    kv_heads, slots = keys.codes.shape[1:3]
    kind, chunks = split_k.exact(q.dtype), slots // chunk
    group, v_groups = slots // keys.scale.shape[2], values.scale.shape[3]
    tokens = groups.tile_tokens(group, chunk, most=32)
    present = [[name for name, x in zip(x._fields, x, strict=True) if x is not None]
               for x in (keys, values)]  # fmt: skip

    def tile(queries, refs, head):
        (q,) = queries
        count = len(present[0])
        k = dict(zip(present[0], refs[:count], strict=True))
        v = dict(zip(present[1], refs[count:], strict=True))

        def scores(start, at):
            s = groups.key_scores(
                q, (k["codes"], k["scale"], k["zero"]), start, at,
                group=group, bits=k_bits, dim=dim, dtype=kind,
            )  # fmt: skip
            if "left" in k:
                small = split_k.dot_rows(q, _right(k["right"], start // chunk), kind)
                s += split_k.dot_rows(small, _left(k["left"], at), kind)
            if "delta" in k:
                s += split_k.dot_rows(q, _sparse_keys(k, start, at), kind)
            return s * dim**-0.5

        def weigh(p, start, at, live):
            refs = v["codes"], v["scale"], v["zero"]
            out = groups.weighed_values(
                p, refs, at, live, groups=v_groups, bits=v_bits, dim=dim, dtype=kind
            )
            size = dim // v_groups
            if "left" in v:
                left = jnp.where(live[:, None], _left(v["left"], at), 0)
                small = split_k.dot(p, left, kind)
            for i in range(v_groups):
                if "left" in v:
                    right = _right(v["right"], start // chunk, size, i * size)
                    out[i] += split_k.dot(small, right, kind)
                if "delta" in v:
                    sparse = _sparse_values(v, at, live, split_k.columns(size, i * size))
                    out[i] += split_k.dot(p, sparse, kind)
            return tuple(out)

        return split_k.Tile(scores, weigh)

    def _left(ref, at):  # f32[width, power(r)], zero beyond the rank
        rank = ref.shape[1]
        own = jnp.arange(split_k.power(rank)) < rank
        return jnp.where(own[None], split_k.rows(ref, at, rank).astype(jnp.float32), 0.0)

    def _right(ref, at, size=dim, first=0):  # f32[power(r), power(size)] of ref [C, r, H]
        rank = jnp.minimum(jnp.arange(split_k.power(ref.shape[1])), ref.shape[1] - 1)
        at = jnp.minimum(at, ref.shape[0] - 1)
        column = split_k.columns(size, first)
        return split_k.gather(ref, at, rank[:, None], column[None]).astype(jnp.float32)

    def _sparse_keys(k, start, at):
        each, chunk_of = k["delta"].shape[0] // chunks, jnp.minimum(start // chunk, chunks - 1)
        column, place = split_k.columns(dim), at - chunk_of * chunk

        def add(i, dense):
            token, delta = (
                split_k.gather(k[name], chunk_of * each + i, column) for name in ("index", "delta")
            )
            hit = token.astype(jnp.int32)[None] == place[:, None]
            return dense + jnp.where(hit, delta.astype(jnp.float32)[None], 0.0)

        zero = jnp.zeros((place.shape[0], column.shape[0]), jnp.float32)
        return lax.fori_loop(0, each, add, zero)

    def _sparse_values(v, at, live, channel):
        row = jnp.minimum(at, slots - 1)

        def add(i, dense):
            index, delta = (split_k.gather(v[name], row, i) for name in ("index", "delta"))
            hit = live[:, None] & (index.astype(jnp.int32)[:, None] == channel[None])
            return dense + jnp.where(hit, delta.astype(jnp.float32)[:, None], 0.0)

        zero = jnp.zeros((at.shape[0], channel.shape[0]), jnp.float32)
        return lax.fori_loop(0, v["delta"].shape[1], add, zero)

    arrays = [x for side in (keys, values) for x in side if x is not None]
    o, m, l = split_k.decode(  # noqa: E741
        "gear_decode", tile, [q], [split_k.of_head(x) for x in arrays],
        jnp.broadcast_to(lengths[:, None, None], (batch, kv_heads, steps)),
        steps=steps, tokens=tokens, block=split_k.power(tokens), capacity=slots,
        widths=[dim // v_groups] * v_groups, interpret=interpret, num_stages=1,
    )  # fmt: skip
    return jnp.concatenate(o, -1), m, l
