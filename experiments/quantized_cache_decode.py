"""Arms of the paired quantized-cache study: what they are, and how one decodes and is scored."""

import functools
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import decode, metrics
from kvjax.evaluation import needle
from models import hub


class Cell(NamedTuple):
    """One arm at one place of a matrix."""

    matrix: str  # "context" or "window"
    context: int  # prompt, tokens
    new_tokens: int  # decoded, whatever they are
    method: str  # "full", "kivi" or "hqq"
    bits: int  # of keys and values; 16 for the full cache
    residual_length: int | None  # exact recent tokens
    group: int | None  # values that share a scale
    label: str  # the method, as `registry.make` takes it

    @property
    def key(self) -> dict[str, Any]:
        """What identifies the row."""
        names = ("matrix", "context", "new_tokens", "method", "bits", "residual_length")
        return {name: getattr(self, name) for name in names}

    @property
    def name(self) -> str:
        """Short, for people."""
        if self.method == "full":
            return f"full, {self.context:,} tokens"
        return f"{self.method} {self.bits}-bit, {self.context:,} tokens, R {self.residual_length}"


class Prompt(NamedTuple):
    """A context of an exact length and the text that follows it."""

    context: tuple[int, ...]
    follows: tuple[int, ...]

    @property
    def sha256(self) -> str:
        """Hash of the context's token ids as little-endian int32."""
        return hashlib.sha256(np.asarray(self.context, "<i4").tobytes()).hexdigest()


class Generated(NamedTuple):
    """A greedy generation of a fixed number of tokens."""

    tokens: np.ndarray  # i32[N], each chosen from the cache's own logits
    seconds: float  # of all steps and flushes
    step_seconds: list[float]
    flush_seconds: list[float]
    caches: Any


class Forced(NamedTuple):
    """Logits along a fixed trajectory of n tokens."""

    logits: jax.Array  # f32[n, V], after each token
    targets: jax.Array  # i32[n], the next tokens


def prompt_of(tokenizer: Any, context: int, follows: int, seed: int, folder: str | None) -> Prompt:
    """Running text of exactly `context` tokens, BOS included where the model takes one."""
    ids = needle.running_text(tokenizer, context + follows, seed, folder)
    return Prompt(tuple(ids[:context]), tuple(ids[context:]))


def expected_flushes(context: int, new_tokens: int, residual: int, whole_prompt: bool) -> int:
    """Blocks of `residual` tokens that decoding codes, from the positions alone.

    Args:
        context: prompt, tokens.
        new_tokens: appended tokens; a block that the last one fills is coded too.
        residual: tokens a block.
        whole_prompt: the prompt is coded to its last token (else to its last whole block); later
            blocks still end where a position is a multiple of `residual`.
    """
    first = -(-context // residual) if whole_prompt else context // residual
    return max((context + new_tokens) // residual - first, 0)


def folded(caches: Sequence[Any]) -> tuple[int, ...]:
    """Tokens whose keys each layer reads from codes, 0 where it keeps every token exactly."""
    counts = []
    for cache in caches:
        count = getattr(cache, "k_folded", None)
        if count is None:
            count = getattr(getattr(cache, "body", None), "folded", None)
        counts.append(0 if count is None else int(np.asarray(count)[0]))
    return tuple(counts)


def generate(
    loaded: hub.Loaded,
    caches: Any,
    first: jax.Array,
    cell: Cell,
    watch: Callable[[Any, Any], None] | None = None,
) -> Generated:
    """Decode greedily for exactly `new_tokens` tokens; a stop token stops nothing.

    Args:
        loaded: the model.
        caches: donated.
        first: i32[1], the token that the prompt's own logits chose.
        cell: context and number of tokens.
        watch: called after each step with None and the caches, after each flush with what `folded`
            was before it and the caches; not for a generation that is timed.
    """
    every, end = decode.flush_interval(caches), cell.context + cell.new_tokens
    token, tokens, steps, flushes = first, [], [], []
    begin = time.perf_counter()
    for position in range(cell.context, end + 1):
        # compress has coded the whole blocks of the prompt: none is due before the first token
        if position > cell.context and decode.needs_flush(every, [position]):
            start = time.perf_counter()
            old = folded(caches) if watch else None
            caches = jax.block_until_ready(flush(caches))
            flushes.append(time.perf_counter() - start)
            if watch:
                watch(old, caches)
        if position == end:
            break
        start = time.perf_counter()
        logits, caches = decode.decode_step(
            loaded.model, loaded.params, caches, token, jnp.asarray([position], jnp.int32)
        )
        token = jax.block_until_ready(likeliest(logits))
        steps.append(time.perf_counter() - start)
        tokens.append(token)
        if watch:
            watch(None, caches)
    took = time.perf_counter() - begin
    return Generated(np.asarray(jnp.concatenate(tokens)), took, steps, flushes, caches)


def flush(caches: Sequence[Any]) -> tuple[Any, ...]:
    """`decode.flush`, a layer at a time: layers alike share one small program."""
    return tuple(_flush_layer(cache) for cache in caches)


@functools.partial(jax.jit, donate_argnums=0)
def _flush_layer(cache: Any) -> Any:
    return cache.flush()


@jax.jit
def likeliest(logits: jax.Array) -> jax.Array:
    """The likeliest token of each row: i32[B] from f32[B, V]."""
    return logits.argmax(-1).astype(jnp.int32)


def forced(loaded: hub.Loaded, caches: Any, trajectory: Sequence[int], cell: Cell) -> Forced:
    """Feed a trajectory of n + 1 tokens through the packed cache, one step a token.

    Returns:
        The n logits that the cache gave, each with the next token of the trajectory as its target.
        The prompt's own logits are not among them: no compressed cache had a part in those.
    """
    every, rows = decode.flush_interval(caches), []
    for i, token in enumerate(trajectory[:-1]):
        position = cell.context + i
        if i and decode.needs_flush(every, [position]):
            caches = flush(caches)
        logits, caches = decode.decode_step(
            loaded.model, loaded.params, caches,
            jnp.asarray([token], jnp.int32), jnp.asarray([position], jnp.int32),
        )  # fmt: skip
        rows.append(logits[0])
    return Forced(jnp.stack(rows), jnp.asarray(trajectory[1:], jnp.int32))


def compared(full: Forced, own: Forced) -> dict[str, Any]:
    """NLL difference, its ratio and top-5 overlap of an arm along the full cache's trajectory.

    Raises:
        FloatingPointError: for logits that are not finite.
    """
    nll, reference = (np.asarray(metrics.nll(f.logits, f.targets), np.float64) for f in (own, full))
    overlap = np.asarray(metrics.top_k_overlap(full.logits, own.logits), np.float64)
    if not (np.isfinite(nll).all() and np.isfinite(reference).all()):
        raise FloatingPointError("the logits are not finite.")
    difference = metrics.mean_interval(nll - reference, "bootstrap")
    shared = metrics.mean_interval(overlap, "bootstrap")
    return {
        "nll": float(nll.mean()),
        "nll_full": float(reference.mean()),
        "nll_difference": difference.mean,
        "nll_difference_low": difference.low,
        "nll_difference_high": difference.high,
        "nll_ratio": float(nll.mean() / reference.mean()) if reference.mean() > 0 else None,
        "top5_overlap": shared.mean,
        "top5_overlap_low": shared.low,
        "top5_overlap_high": shared.high,
    }
