"""Anchors, coefficients and residuals: the storage of AnchorKV, and attention over it.

Tokens before the window are *coded*: token t of a row has position t and, on each side (0 = keys,
1 = values), an anchor, a coefficient and perhaps a residual. The last W tokens are anchors
themselves and are attended exactly.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax import quant
from kvjax.attention import Partial, dense_partial, merge, visible
from kvjax.pallas.anchor_decode import xla
from kvjax.pallas.anchor_decode.api import Coded, Residuals, Widths, anchor_decode
from kvjax.pytree import METADATA, array, pytree, static
from kvjax.rope import Rope, rotate

KEYS, VALUES = 0, 1
_TOKENS = {"valid": "num_coded", "spans": "capacity"}


@pytree
class AnchorBody:
    """The compressed prompt of one layer.

    Invariants: C is a multiple of 32, at least the longest row less the window. Anchors come first,
    the W window tokens last (inside `anchors` when `window` is None). A token has J anchors, one a
    turn. `words`, `prefix`, `codes` and `scales` hold one array a residual width; slots are in the
    order (side, KV head, token), those past the row's count are zero. In stages, `words` and
    `prefix` hold one array a stage, and all stages share one array of codes, the first stage's
    slots before the second's.
    """

    anchors: Array = array("batch", "side", "kv_head", "slot", "head_dim", valid="num_anchors")
    anchor_scales: Array | None = array("batch", "side", "kv_head", "slot", valid="num_anchors")
    window: Array | None = array("batch", "side", "kv_head", "slot", "head_dim", valid="num_window")
    mean: Array | None = array("batch", "side", "kv_head", "head_dim")  # of all tokens
    positions: Array | None = array("batch", "kv_head", "slot", valid="num_anchors")  # i32
    index: Array = array("batch", "side", "kv_head", "turn", "slot", **_TOKENS)
    gamma: Array = array("batch", "side", "kv_head", "turn", "slot", **_TOKENS)
    gamma_range: Array | None = array("batch", "side", "kv_head", "turn", "range")
    words: tuple[Array, ...] = array("batch", "side", "kv_head", "slot", **_TOKENS)
    prefix: tuple[Array, ...] = array("batch", "side", "kv_head", "slot", **_TOKENS)
    codes: tuple[Array, ...] = array("batch", "slot", "byte", valid="num_residuals")
    scales: tuple[Array, ...] = array("batch", "slot", valid="num_residuals")
    lengths: Array = array("batch", role=METADATA)  # i32[B], prompt tokens
    capacity: int = static()  # C, coded tokens
    window_size: int = static()  # W
    widths: Widths = static()
    rope: Rope = static()
    impl: str = static("auto")

    @property
    def num_coded(self) -> Array:
        """i32[B], tokens before the window."""
        return jnp.maximum(self.lengths - self.window_size, 0)

    @property
    def num_window(self) -> Array:
        """i32[B], tokens in the window."""
        return jnp.minimum(self.lengths, self.window_size)

    @property
    def num_anchors(self) -> Array:
        """i32[B], valid slots of `anchors`."""
        held = self.anchors.shape[3] - (self.window_size if self.window is None else 0)
        extra = jnp.minimum(self.num_coded, held)
        return extra + (self.num_window if self.window is None else 0)

    @property
    def num_residuals(self) -> tuple[Array, ...]:
        """i32[B] a width (of all stages together): residuals stored."""
        last = zip(self.words, self.prefix, strict=True)
        if self.widths.staged:
            last = [(self.words[-1], self.prefix[-1])]
        return tuple(
            prefix[:, -1, -1, -1].astype(jnp.int32)
            + lax.population_count(words[:, -1, -1, -1]).astype(jnp.int32)
            for words, prefix in last
        )

    def coded(self) -> Coded:
        """The arrays that `anchor_decode` reads."""
        stages = len(self.words) if self.widths.staged else 1
        codes, scales = self.codes * stages, self.scales * stages
        residuals = zip(self.words, self.prefix, codes, scales, strict=True)
        return Coded(
            self.anchors,
            self.anchor_scales,
            self.window,
            self.mean,
            self.index,
            self.gamma,
            self.gamma_range,
            tuple(Residuals(*parts) for parts in residuals),
            self.num_coded,
        )

    def _window(self) -> tuple[Array, Array, Array]:
        """Rotated k, v [B, K, W, H] and positions i32[B, W] of the window."""
        held = self.window
        if held is None:
            held = self.anchors[..., -self.window_size :, :]
            if self.anchor_scales is not None:
                scale = self.anchor_scales[..., -self.window_size :, None].astype(jnp.float32)
                held = held.astype(jnp.float32) * scale
        if self.mean is not None and self.window is None:
            held = held.astype(jnp.float32) + self.mean.astype(jnp.float32)[:, :, :, None]
        slot = jnp.arange(self.window_size, dtype=jnp.int32)[None]
        positions = self.lengths[:, None] - self.window_size + slot
        positions = jnp.where(positions >= 0, positions, -1)
        return rotate(self.rope, held[:, KEYS], positions), held[:, VALUES], positions

    def attend(self, q: Array, positions: Array) -> Partial:
        """Attention of rotated queries [B, N, T, H] over coded tokens and window."""
        k, v, where = self._window()
        near = dense_partial(q, k, v, visible(positions, where))
        far = anchor_decode(q, self.coded(), widths=self.widths, rope=self.rope, impl=self.impl)
        return merge(Partial(*far), near)

    def materialize(self) -> tuple[Array, Array, Array]:
        """Every token rebuilt: k, v f32[B, K, C + W, H] and positions i32[B, K, C + W]."""
        x = rebuild(self.coded(), self.widths)  # [B, 2, K, C, H], keys before RoPE
        batch, _, heads, tokens, dim = x.shape
        token = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (batch, tokens))
        add = residual_values(self.coded(), self.widths, dim)
        k, v = rotate(self.rope, x[:, KEYS], token) + add[:, KEYS], x[:, VALUES] + add[:, VALUES]
        near_k, near_v, near = self._window()
        far = jnp.where(token < self.num_coded[:, None], token, -1)
        positions = jnp.concatenate([far, near], 1)
        return (
            jnp.concatenate([k, near_k.astype(jnp.float32)], 2),
            jnp.concatenate([v, near_v.astype(jnp.float32)], 2),
            jnp.broadcast_to(positions[:, None], (batch, heads, positions.shape[1])),
        )


def rebuild(coded: Coded, widths: Widths) -> Array:
    """mean + gamma_t a_t of every coded token and side: f32[B, 2, K, C, H], keys before RoPE."""
    index, gamma = xla.indices(coded, widths), xla.gammas(coded, widths)
    dense = xla.dense_anchors(coded)
    near = sum(
        jnp.take_along_axis(dense, index[:, :, :, turn, :, None], 3) * gamma[:, :, :, turn, :, None]
        for turn in range(index.shape[3])
    )
    return near if coded.mean is None else near + coded.mean.astype(jnp.float32)[:, :, :, None]


def residual_values(coded: Coded, widths: Widths, dim: int) -> Array:
    """Residual of every coded token and side, zero without one: f32[B, 2, K, C, H].

    Key residuals are those of rotated keys.
    """
    shape = (*coded.anchors.shape[:3], xla.indices(coded, widths).shape[-1], dim)
    spin, total = quant.rotation(dim, widths.seed), jnp.zeros(shape, jnp.float32)
    for residuals, bits in zip(coded.residuals, widths.residuals, strict=True):
        values = xla.residual_levels(residuals, bits, dim) @ spin.T  # [B, N, H]
        slot, present = xla.slots(residuals)
        rows = jax.vmap(lambda x, at: x[at])(values, slot)
        total = total + jnp.where(present[..., None], rows, 0.0)
    return total
