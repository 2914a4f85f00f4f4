"""Expected attention: keep what the model's future queries are likely to attend to."""

import jax
import jax.numpy as jnp
from jax import Array

from kvjax import select
from kvjax.eviction import check_budget, evictor
from kvjax.pytree import pytree, static
from kvjax.registry import register
from kvjax.rope import tables, unrotate
from kvjax.types import LayerInfo, PromptKV


@register("expected_attention", presets={"kvpress": {}})
@evictor
@pytree
class ExpectedAttention:
    """Score of a column: attention of a Gaussian of queries over the next `future` positions.

    With mean mu and covariance S of the prompt's unrotated queries (the first `sinks` left out) and
    R the rotation averaged over the next `future` positions, a query head expects
    softmax_j(k_j . R mu / sqrt(H) + k_j^T R S R^T k_j / 2H); averaged over the group, times the
    norm of the value. The first `sinks` columns are always kept.

    Source: Devoto, Jeblick and Jegou, "Expected Attention" (arXiv 2510.00636), section 3;
    NVIDIA/kvpress expected_attention_press.py.
    Differs from the reference: the covariance and the quadratic form are taken through the factors
    of the queries' Gram matrix in float32; pads are left out.
    """

    epsilon: float = 0.0  # added to the expected attention before the value's norm
    budget: int = static(1024)  # tokens kept per KV head
    sinks: int = static(4)  # tokens
    future: int = static(512)  # positions that queries are expected at, tokens
    covariance: bool = static(True)
    value_norm: bool = static(True)
    impl: str = static("auto")
    queries = "all"  # needs every query of the prompt, not only the last ones

    @property
    def smallest(self) -> int:
        """Tokens: the sinks and one more."""
        return self.sinks + 1

    def score(self, prompt: PromptKV, info: LayerInfo) -> Array:
        """Expected attention times the value's norm: f32[B, K, T]."""
        batch, heads, total, dim = prompt.q.shape
        kv_heads = prompt.k.shape[1]
        column = jnp.arange(total, dtype=jnp.int32)[None]
        positions = column - prompt.starts[:, None]
        counted = (positions >= self.sinks)[:, None, :, None]
        plain = unrotate(info.rope, prompt.q.astype(jnp.float32), positions)
        plain = jnp.where(counted, plain, 0.0)
        count = jnp.maximum(counted.sum(2, keepdims=True), 1)
        mean = plain.sum(2, keepdims=True) / count
        turn = self._mean_rotation(info, total - prompt.starts, dim)  # [B, H, H]

        keys = prompt.k.astype(jnp.float32)
        # R is applied to the keys, once for all heads: k . R mu = (R^T k) . mu.
        back = jnp.einsum("bkth,bhi->bkti", keys, turn)
        back = back.reshape(batch * kv_heads, total, dim)
        group = heads // kv_heads
        mu = mean.reshape(batch * kv_heads, group, dim)
        logits = jnp.einsum("bgh,bth->bgt", mu, back) * dim**-0.5
        if self.covariance:
            centred = jnp.where(counted, plain - mean, 0.0)
            centred = centred.reshape(batch * heads, total, dim)
            spread = jnp.einsum("bth,bti->bhi", centred, centred)
            spread = spread.reshape(batch, heads, dim, dim) / count
            spread = spread.reshape(batch * kv_heads, group, dim, dim)
            turned = jnp.einsum("bth,bghi->bgti", back, spread)
            logits = logits + (turned * back[:, None]).sum(-1) / (2 * dim)
        seen = jnp.repeat(counted[:, 0, :, 0], kv_heads, 0)[:, None]
        expected = jax.nn.softmax(jnp.where(seen, logits, -1e30), -1)
        expected = expected.mean(1).reshape(batch, kv_heads, total)
        if not self.value_norm:
            return expected
        norms = jnp.linalg.norm(prompt.v.astype(jnp.float32), axis=-1)
        return (expected + self.epsilon) * norms

    def _mean_rotation(self, info: LayerInfo, lengths: Array, dim: int) -> Array:
        """The rotation matrix averaged over the next `future` positions: [B, H, H]."""
        ahead = jnp.arange(self.future, dtype=jnp.int32)[None] + lengths[:, None]
        cos, sin = (x.mean(1) for x in tables(info.rope, ahead))  # [B, R/2]
        half = cos.shape[-1]
        rest = jnp.ones((cos.shape[0], dim - 2 * half), jnp.float32)
        diagonal = jax.vmap(jnp.diag)(jnp.concatenate([cos, cos, rest], -1))
        at = jnp.arange(half)
        return diagonal.at[:, at, at + half].add(-sin).at[:, at + half, at].add(sin)

    def select(self, prompt: PromptKV, info: LayerInfo) -> tuple[Array, Array]:
        """Columns i32[B, K, C] and lengths i32[B, K] that are kept.

        Raises:
            ValueError: if the budget does not exceed the sinks.
        """
        check_budget(self)
        sinks = select.sink_columns(prompt.starts, prompt.k.shape[2], self.sinks)[:, None]
        return select.top_columns(self.score(prompt, info), self.budget, prompt.starts, sinks)
