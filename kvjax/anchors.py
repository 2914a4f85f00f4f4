"""Anchors, coefficients and residuals: the storage of AnchorKV and the steps that build it.

Tokens before the window are *coded*: token t of a row has position t and, on each side (0 = keys,
1 = values), an anchor, a coefficient and perhaps a residual. The last W tokens are anchors
themselves and are attended exactly.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax import quant
from kvjax.anchor_bytes import DISTORTION
from kvjax.attention import Partial, dense_partial, merge, visible
from kvjax.pallas.anchor_decode import xla
from kvjax.pallas.anchor_decode.api import Coded, Residuals, Widths, anchor_decode
from kvjax.pytree import METADATA, array, pytree, static
from kvjax.rope import Rope, rotate
from kvjax.scores import Observation, in_blocks

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
        if self.mean is not None:
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


def utility(
    x: Array,
    rebuilt: Array,
    rotated: Array,
    seen: Observation,
    lengths: Array,
    rope: Rope,
    floor: Array | float,
) -> Array:
    """Squared change of the attention output that each side's error causes, to first order.

    u^K_t = mean_w (alpha_t^2 + floor / n^2) (q_w . R_t r^K_t)^2 / H |V_t - y_w|^2 and
    u^V_t = mean_w (alpha_t^2 + floor / n^2) |r^V_t|^2, over the observation queries w.

    Args:
        x: [B, 2, K, C, H], the tokens, keys before RoPE.
        rebuilt: f32[B, 2, K, C, H], their approximation.
        rotated: [B, K, C, H], the keys at their positions.
        seen: the observation window.
        lengths: i32[B], prompt tokens.
        rope: of the layer.
        floor: attention that a token may yet get, in units of 1 / n (phi).

    Returns:
        f32[B, 2, K, C].

    Source: AnchorKV (arXiv 2608.02901), equations 5 and 6.
    Differs from the reference: floor (0 there).
    """
    batch, _, heads, tokens, dim = x.shape
    queries = seen.q * dim**-0.5
    count = jnp.maximum(seen.seen.sum(-1), 1)[:, None, None]  # [B, 1, 1]
    rest = floor / jnp.square(lengths.astype(jnp.float32))[:, None, None, None]
    y_square = jnp.square(seen.y).sum(-1)[..., None]

    def product(a, b):  # [B, K, m, H] . [B, K, S, H]
        out = jnp.einsum("brh,bsh->brs", a.reshape(-1, *a.shape[2:]), b.reshape(-1, *b.shape[2:]))
        return out.reshape(*a.shape[:3], b.shape[2])

    def block(first, size):
        token = first + jnp.arange(size, dtype=jnp.int32)
        here = lax.dynamic_slice_in_dim(x, first, size, 3).astype(jnp.float32)
        error = here - lax.dynamic_slice_in_dim(rebuilt, first, size, 3)
        keys = lax.dynamic_slice_in_dim(rotated, first, size, 2).astype(jnp.float32)
        alpha = jnp.exp(jnp.minimum(product(queries, keys) - seen.lse[..., None], 0.0))
        weight = jnp.where(seen.seen[:, None, :, None], jnp.square(alpha) + rest, 0.0)
        moved = product(queries, rotate(rope, error[:, KEYS], token))
        values = here[:, VALUES]
        distance = jnp.square(values).sum(-1)[:, :, None] + y_square - 2 * product(seen.y, values)
        u_keys = (weight * jnp.square(moved) * jnp.maximum(distance, 0.0)).sum(2)
        u_values = weight.sum(2) * jnp.square(error[:, VALUES]).sum(-1)
        return jnp.stack([u_keys / count, u_values / count], 1)

    return jnp.concatenate(in_blocks(block, tokens), -1)


def choose(utilities: Array, counts: list[Array], capacities: list[tuple[int, int]]) -> list[Array]:
    """The tokens that get a residual of each width, widest first by utility.

    Args:
        utilities: f32[B, 2, ...], sides first, negative where a token does not compete.
        counts: i32[B, P] a width, widest first: residuals of each pool, over all KV heads. P = 2
            is a pool a side, P = 1 one for both.
        capacities: the largest of each count, static.

    Returns:
        A mask bool [B, 2, ...] a width.
    """
    batch, pools = utilities.shape[0], counts[0].shape[1] if counts else 1
    flat = utilities.reshape(batch, pools, -1)
    masks = [[] for _ in range(pools)]
    for side in range(pools):
        most = min(sum(c[side] for c in capacities), flat.shape[-1])
        _, order = lax.top_k(flat[:, side], most)
        rank, start = jnp.arange(most, dtype=jnp.int32)[None], jnp.zeros((batch, 1), jnp.int32)
        for count in counts:
            end = start + count[:, side, None]
            chosen = (rank >= start) & (rank < end)
            empty = jnp.zeros((batch, flat.shape[-1]), bool)
            masks[side].append(
                jax.vmap(lambda row, at, on: row.at[at].set(on))(empty, order, chosen)
            )
            start = end
    return [jnp.stack(pair, 1).reshape(utilities.shape) for pair in zip(*masks, strict=True)]


def choose_stages(utilities: Array, count: Array, capacity: tuple[int, ...], bits: int) -> Array:
    """The tokens that get a first code of their residual, and those that get a second.

    A code of `bits` leaves a known share of the squared error, so that a first one is worth
    u (1 - share) and a second u share (1 - share), at the same bytes: the most worthy win.

    Args:
        utilities: f32[B, 2, K, C], negative where a token does not compete.
        count: i32[B, P], codes of each pool (see `choose`).
        capacity: the largest of each, static.
        bits: of one code.

    Returns:
        Masks bool [B, 2 stages, 2, K, C]; who has a second code has a first.
    """
    share = DISTORTION[bits - 1]
    worth = jnp.stack([utilities * (1 - share), utilities * share * (1 - share)], 2)
    return choose(worth, [count], [capacity])[0].swapaxes(1, 2)


def cover(
    x: Array, chosen: Array, starts: Array, window: int, size: int, first: Array | int
) -> Array:
    """Add the tokens that are farthest from every anchor so far, one after the other.

    The distance of a token is 1 - cos^2 to its nearest anchor, added over keys and values.

    Args:
        x: f32[B, 2, K, T, H], right-aligned keys before RoPE and values; the last `window` columns
            are anchors already.
        chosen: bool [B, K, T - window], the anchors before them so far, at most `size`.
        starts: i32[B], first real column.
        window: W, tokens.
        size: anchors a KV head beside the window when done.
        first: number of them that `chosen` holds.

    Returns:
        `chosen` with `size` anchors, fewer where there are no more tokens.
    """
    before = x.shape[3] - window
    real = jnp.arange(before, dtype=jnp.int32)[None] >= jnp.minimum(starts, before)[:, None]
    held = jnp.arange(before, x.shape[3])[None] >= starts[:, None]
    norm = jnp.sqrt(jnp.square(x).sum(-1, keepdims=True))
    unit = jnp.where(norm > 0, x / jnp.where(norm > 0, norm, 1.0), 0.0)
    far, near = unit[:, :, :, :before], unit[:, :, :, before:]
    batch, _, heads, _, dim = far.shape
    flat = far.reshape(-1, before, dim)

    def nearest(rows):  # f32[B, 2, K, A, H] -> [B, 2, K, T - W], largest cos^2
        dots = jnp.einsum("bth,bah->bta", flat, rows.reshape(-1, *rows.shape[3:]))
        return jnp.square(dots).max(-1).reshape(batch, 2, heads, before)

    _, columns = lax.top_k(chosen.astype(jnp.float32), size)
    on = jnp.take_along_axis(chosen, columns, 2)[:, None, :, :, None]
    rows = jnp.take_along_axis(far, columns[:, None, :, :, None], 3) * on
    rows = jnp.concatenate([rows, near * held[:, None, None, :, None]], 3)

    def add(_, carry):
        chosen, most = carry
        distance = (1 - most).sum(1)
        distance = jnp.where(chosen | ~real[:, None], -jnp.inf, distance)
        column = jnp.argmax(distance, -1).astype(jnp.int32)  # [B, K]
        new = jnp.take_along_axis(far, column[:, None, :, None, None], 3)
        hit = jnp.arange(before, dtype=jnp.int32)[None, None] == column[..., None]
        return chosen | (hit & real[:, None]), jnp.maximum(most, nearest(new))

    return lax.fori_loop(first, size, add, (chosen, nearest(rows)))[0]


def slot_order(mask: Array, size: int) -> Array:
    """Flat indices of the set entries of bool [B, ...], in order: i32[B, size], padded with 0."""
    flat = mask.reshape(mask.shape[0], -1)
    at = jnp.where(flat, jnp.cumsum(flat, -1, dtype=jnp.int32) - 1, size)
    entry = jnp.broadcast_to(jnp.arange(flat.shape[1], dtype=jnp.int32), flat.shape)
    empty = jnp.zeros((flat.shape[0], size), jnp.int32)
    return jax.vmap(lambda row, at, x: row.at[at].set(x, mode="drop"))(empty, at, entry)


def encode(residuals: Array, bits: int, how: str, seed: int, small: bool) -> tuple[Array, Array]:
    """Code residual vectors: rotate, scale, nearest Lloyd-Max level, pack.

    Args:
        residuals: f32[..., H].
        bits: 1 to 8.
        how: the scale: "absmax" (the paper's: largest coordinate, codebook of a unit Gaussian),
            "rms", or "least_squares" (rms codes, then <r, c> / <c, c>).
        seed: of the rotation.
        small: store the scale in 8 bits instead of float16.

    Returns:
        codes uint8 [..., packed_size(H, bits)] and scales f16 or uint8 [...].

    Raises:
        ValueError: for an unknown scale.

    Source: AnchorKV (arXiv 2608.02901), residual code.
    """
    dim = residuals.shape[-1]
    spun = residuals @ quant.rotation(dim, seed)
    if how == "absmax":
        scale = jnp.abs(spun).max(-1)
    elif how in ("rms", "least_squares"):
        scale = jnp.sqrt(jnp.square(spun).mean(-1))
    else:
        raise ValueError(f"scale={how!r} must be 'absmax', 'rms' or 'least_squares'.")
    unit = spun / jnp.where(scale > 0, scale, 1.0)[..., None]
    codes = quant.codebook_encode(unit, bits)
    if how == "least_squares":
        levels = quant.codebook_decode(codes, bits)
        scale = (spun * levels).sum(-1) / jnp.square(levels).sum(-1)
        scale = jnp.maximum(scale, 0.0)
    if small:
        return quant.pack(codes, bits), quant.scale_encode(scale)
    return quant.pack(codes, bits), jnp.minimum(scale, 65504.0).astype(jnp.float16)


def decode(codes: Array, scale: Array, bits: int, dim: int, seed: int) -> Array:
    """Undo `encode`: f32[..., H]."""
    scale = xla.scale_values(scale)[..., None]
    levels = quant.codebook_decode(quant.unpack(codes, bits, dim), bits)
    return (levels * scale) @ quant.rotation(dim, seed).T


def quantize_gamma(gamma: Array, coded: Array, bits: int) -> tuple[Array, Array, Array]:
    """Coefficients between their smallest and largest, a row, side and KV head at a time.

    Args:
        gamma: f32[B, 2, K, C].
        coded: bool [B, 1, 1, C], tokens that count.
        bits: 1 to 8.

    Returns:
        codes i32[B, 2, K, C], range f16[B, 2, K, 2] (smallest, step), and the values they stand
        for, f32[B, 2, K, C].
    """
    low = jnp.where(coded, gamma, jnp.inf).min(-1)
    high = jnp.where(coded, gamma, -jnp.inf).max(-1)
    low, high = (jnp.where(jnp.isfinite(x), x, 0.0) for x in (low, high))
    limit = 65504.0
    low = jnp.clip(low, -limit, limit).astype(jnp.float16)
    step = (jnp.clip(high, -limit, limit) - low.astype(jnp.float32)) / (2**bits - 1)
    step = jnp.minimum(step, limit).astype(jnp.float16)
    a, b = (x.astype(jnp.float32)[..., None] for x in (low, step))
    codes = jnp.clip(jnp.round((gamma - a) / jnp.where(b > 0, b, 1.0)), 0, 2**bits - 1)
    codes = jnp.where(b > 0, codes, 0.0).astype(jnp.int32)
    return codes, jnp.stack([low, step], -1), a + b * codes.astype(jnp.float32)
