"""quant_decode as a GPU kernel."""

import jax.numpy as jnp
from jax import Array

from kvjax.pallas import groups, split_k


def quant_decode(
    q: Array,
    k_codes: Array,
    k_scale: Array,
    k_zero: Array,
    v_codes: Array,
    v_scale: Array,
    v_zero: Array,
    lengths: Array,
    *,
    k_bits: int,
    v_bits: int,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """See `api.quant_decode`."""
    batch, _, steps, dim = q.shape
    kv_heads, kind = k_codes.shape[1], split_k.exact(q.dtype)
    group, v_groups = k_codes.shape[2] // k_scale.shape[2], v_scale.shape[3]
    small = kind == jnp.float32  # for want of registers
    tokens = groups.tile_tokens(group, most=16 if small else 128)

    def tile(queries, refs, head):
        def scores(start, at):
            s = groups.key_scores(
                *queries, refs[:3], start, at, group=group, bits=k_bits, dim=dim, dtype=kind
            )
            return s * dim**-0.5

        def weigh(p, start, at, live):
            return tuple(
                groups.weighed_values(
                    p, refs[3:], at, live, groups=v_groups, bits=v_bits, dim=dim, dtype=kind
                )
            )

        return split_k.Tile(scores, weigh)

    arrays = (k_codes, k_scale, k_zero, v_codes, v_scale, v_zero)
    o, m, l = split_k.decode(  # noqa: E741
        "quant_decode", tile, [q], [split_k.of_head(x) for x in arrays],
        jnp.broadcast_to(lengths[:, None, None], (batch, kv_heads, steps)),
        steps=steps, tokens=tokens, block=split_k.power(tokens), capacity=k_codes.shape[2],
        widths=[dim // v_groups] * v_groups, interpret=interpret,
        num_warps=4 if not small else 8 if dim <= 128 else 16, num_stages=1 if small else 2,
    )  # fmt: skip
    return jnp.concatenate(o, -1), m, l
