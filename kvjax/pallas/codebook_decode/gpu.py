"""codebook_decode as a GPU kernel."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from kvjax import quant
from kvjax.pallas import split_k

_BLOCK = 32


def codebook_decode(
    q: Array,
    k_codes: Array,
    k_scales: Array,
    v_codes: Array,
    v_scales: Array,
    lengths: Array,
    *,
    keys: tuple[Any, ...],
    values: tuple[Any, ...],
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """See `api.codebook_decode`."""
    batch, kv_heads = k_codes.shape[:2]
    kind, dim = split_k.exact(q.dtype), sum(part.dim for part in keys)
    # Up to 4 bits levels are a polynomial of the code; wider ones come from a table.
    wide = sorted({(p.level_bits, p.dim) for p in keys + values if p.level_bits > 4})
    tables = [jnp.asarray(quant.coordinate_levels(*width), jnp.float32) for width in wide]

    def features(refs, parts, at):  # yields values [width, power(dim)] and scale f32[width]
        codes_ref, scales_ref, *tables = refs
        row = jnp.minimum(at, scales_ref.shape[0] - 1)
        byte, column = 0, 0
        for part in parts:
            code = split_k.codes(
                codes_ref, at, part.bits, part.dim, split_k.columns(part.dim), byte
            )
            norm = split_k.gather(scales_ref, row, column).astype(jnp.float32)
            if part.level_bits:
                index = code & (2**part.level_bits - 1)
                if part.level_bits > 4:
                    ref = tables[wide.index((part.level_bits, part.dim))]
                    yield split_k.gather(ref, index), norm
                else:
                    yield quant.coordinate_decode(index, part.level_bits, part.dim), norm
            if part.signs:
                gamma = split_k.gather(scales_ref, row, column + 1).astype(jnp.float32)
                sign = (code >> part.level_bits).astype(jnp.float32) * 2 - 1
                yield sign, norm * gamma * part.sign_scale
            byte += part.code_bytes
            column += part.scales

    def tile(queries, refs, head):
        def scores(start, at):
            side = (refs[0], refs[1], *refs[4:])
            return sum(
                split_k.dot_rows(own, x, kind) * scale[None]
                for own, (x, scale) in zip(queries, features(side, keys, at), strict=True)
            ) * (dim**-0.5)

        def weigh(p, start, at, live):
            return tuple(
                split_k.dot(p * jnp.where(live, scale, 0.0)[None], x, kind)
                for x, scale in features(refs[2:], values, at)
            )

        return split_k.Tile(scores, weigh)

    def widths(parts):
        return [p.dim for p in parts for _ in range((p.level_bits > 0) + p.signs)]

    queries, at = [], 0
    for width in widths(keys):
        queries.append(q[..., at : at + width])
        at += width
    arrays = [split_k.of_head(x) for x in (k_codes, k_scales, v_codes, v_scales)]
    o, m, l = split_k.decode(  # noqa: E741
        "codebook_decode", tile, queries, [*arrays, *map(split_k.whole, tables)],
        jnp.broadcast_to(lengths[:, None], (batch, kv_heads, lengths.shape[1])),
        steps=q.shape[2], tokens=_BLOCK, block=_BLOCK, capacity=k_codes.shape[2],
        widths=widths(values), interpret=interpret, num_stages=1, num_warps=4 if dim <= 64 else 8,
    )  # fmt: skip
    return jnp.concatenate(o, -1), m, l
