"""Signature, checks and shapes of codebook_decode."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float16, Int32, UInt8

from kvjax import quant
from kvjax.pallas import dispatch
from kvjax.pallas.codebook_decode import gpu, xla
from kvjax.typed import typed


class Part(NamedTuple):
    """Some channels of a vector, coded on their own.

    A code of `bits` bits is the index of a level of `quant.coordinate_levels`; with `signs` its
    highest bit is the sign of a sketched residual instead. Its features, in which it is linear,
    are the levels (H of them, none where the sign is the only bit), then the signs (H of them).
    """

    dim: int  # channels H
    bits: int
    signs: bool = False

    @property
    def level_bits(self) -> int:
        """Bits of the index of a level, 0 where there is none."""
        return self.bits - self.signs

    @property
    def features(self) -> int:
        """Number of features."""
        return self.dim * ((self.level_bits > 0) + self.signs)

    @property
    def scales(self) -> int:
        """Float16 numbers a vector: its norm, with signs its residual's too."""
        return 1 + self.signs

    @property
    def code_bytes(self) -> int:
        """Bytes of a vector's packed codes."""
        return quant.packed_size(self.dim, self.bits)

    @property
    def sign_scale(self) -> float:
        """What makes the sketched residual unbiased (QJL, arXiv 2406.03482)."""
        return math.sqrt(math.pi / 2) / self.dim


_HALF = (Part(48, 3), Part(16, 4))
# batch, query heads, KV heads, tokens, parts of keys, parts of values
SHAPES = {
    "smollm2_135m_4bit": (1, 9, 3, 2048, (Part(64, 4),), (Part(64, 4),)),
    "smollm2_135m_3.5bit": (1, 9, 3, 2048, _HALF, _HALF),
    "llama3_8b_3bit": (1, 32, 8, 32768, (Part(128, 3),), (Part(128, 3),)),
    "llama3_8b_4bit_prod": (1, 32, 8, 32768, (Part(128, 4, True),), (Part(128, 4),)),
    "qwen2_5_7b_2bit": (1, 28, 4, 32768, (Part(128, 2),), (Part(128, 2),)),
}
_HEAD, _KV = ("batch", "head"), ("batch", "kv_head")
# names of the leading axes of arguments and outputs, for `sharding.shard_over_heads`
AXES = ((_HEAD, *[_KV] * 4, ("batch",)), (_HEAD,) * 3)


def example(shape: tuple, seed: int = 0) -> tuple[tuple, dict]:
    """Arguments of an entry of `SHAPES`: one new bfloat16 query, every token coded."""
    batch, heads, kv_heads, tokens, keys, values = shape
    draw = iter(jax.random.split(jax.random.key(seed), 5))

    def coded(parts):
        size = (batch, kv_heads, tokens, sum(p.code_bytes for p in parts))
        scales = (*size[:3], sum(p.scales for p in parts))
        norm = 1 + jax.random.uniform(next(draw), scales)
        return jax.random.bits(next(draw), size, jnp.uint8), norm.astype(jnp.float16)

    q = (batch, heads, 1, sum(p.features for p in keys))
    q = jax.random.normal(next(draw), q, jnp.bfloat16)
    lengths = jnp.full((batch, 1), tokens, jnp.int32)
    return (q, *coded(keys), *coded(values), lengths), {"keys": keys, "values": values}


@typed
def codebook_decode(
    q: Float[Array, "B N T FK"],
    k_codes: UInt8[Array, "B K S PK"],
    k_scales: Float16[Array, "B K S CK"],
    v_codes: UInt8[Array, "B K S PV"],
    v_scales: Float16[Array, "B K S CV"],
    lengths: Int32[Array, "B T"],
    *,
    keys: tuple[Part, ...],
    values: tuple[Part, ...],
    impl: str = "auto",
) -> tuple[Float[Array, "B N T FV"], Float[Array, "B N T"], Float[Array, "B N T"]]:
    """Attention of new queries over codes, in the codes' own spaces.

    A vector is the sum over its parts of norm * (levels[code] + sign_scale * gamma * sign), in the
    space that the part was rotated (and sketched) to. Scores and sums are linear in these features:
    queries come in rotated once, the output leaves to be rotated back once.

    Args:
        q: [B, N, T, FK], one number for every feature of a key, parts side by side.
        k_codes: uint8 [B, K, S, PK], `quant.pack` of each part's codes, side by side.
        k_scales: f16[B, K, S, CK], each part's norm and (with signs) gamma, side by side.
        v_codes: as k_codes.
        v_scales: as k_scales.
        lengths: i32[B, T], tokens that each query attends to, the first ones.
        keys: parts of a key.
        values: parts of a value.
        impl: see `dispatch.choose`.

    Returns:
        o f32[B, N, T, FV] in the features of the values, m f32[B, N, T], l f32[B, N, T]: an
        unnormalised online softmax.

    Raises:
        ValueError: if codes, scales or queries are not what the parts say.
    """
    for name, parts, codes, scales in (
        ("keys", keys, k_codes, k_scales), ("values", values, v_codes, v_scales),
    ):  # fmt: skip
        want = sum(p.code_bytes for p in parts), sum(p.scales for p in parts)
        if (codes.shape[-1], scales.shape[-1]) != want:
            raise ValueError(
                f"{name} of {codes.shape[-1]} bytes and {scales.shape[-1]} scales must be {want}"
                f" for {parts}."
            )
    if q.shape[-1] != sum(p.features for p in keys):
        raise ValueError(f"q of {q.shape[-1]} features must be {sum(p.features for p in keys)}.")
    backends = {
        "xla": xla.codebook_decode,
        "gpu": gpu.codebook_decode,
        "interpret": functools.partial(gpu.codebook_decode, interpret=True),
    }
    return dispatch.choose("codebook_decode", impl, backends, AXES)(
        q, k_codes, k_scales, v_codes, v_scales, lengths, keys=keys, values=values
    )
