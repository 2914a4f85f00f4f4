"""Rows of the response-length experiment: one answer, and what it is against the full cache's."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.length_dataset import Request
from kvjax import decode, registry
from kvjax.evaluation import length_shift
from kvjax.evaluation.stepwise import Answer
from kvjax.types import PromptShape
from models import hub

# Gives states f32[n, D] of each answer: one a token (or a single one, of a sentence encoder).
Encoder = Callable[[Sequence[Sequence[int]]], list[np.ndarray]]


def decoder_encoder(loaded: hub.Loaded, batch: int) -> Encoder:
    """The model's own final hidden states, with its full cache, after the start of a turn.

    A causal model's state does not depend on what follows: the states of the first n tokens of an
    answer are those of the answer cut to n tokens.

    Args:
        loaded: the model.
        batch: answers that are run together.
    """
    first = loaded.tokenizer.bos_id if loaded.tokenizer.bos_id is not None else 0
    known: dict[tuple[int, ...], np.ndarray] = {}

    def states(answers: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        filled = [*answers, *[answers[-1]] * (batch - len(answers))]
        width = -(-max(len(ids) for ids in filled) // 64) * 64
        tokens = np.zeros((batch, width), np.int32)
        at = np.full((batch, width), -1, np.int32)
        for i, ids in enumerate(filled):
            tokens[i, : len(ids)] = ids
            at[i, : len(ids)] = np.arange(1, len(ids) + 1)
        begin, starts = decode.left_pad([[first]] * batch)
        prefill = decode.prefill(loaded.model, loaded.params, begin, starts)
        full = registry.make("full")
        caches = decode.compress(full, prefill.prompts, loaded.model, reserve=width)
        hidden, _ = decode.extend(
            loaded.model, loaded.params, caches, jnp.asarray(tokens), jnp.asarray(at)
        )
        found = np.asarray(hidden, np.float32)
        return [found[i, : len(ids)] for i, ids in enumerate(answers)]

    def encode(answers: Sequence[Sequence[int]]) -> list[np.ndarray]:
        wanted = [tuple(map(int, ids)) for ids in answers]
        new = sorted({ids for ids in wanted if ids not in known}, key=len)
        for i in range(0, len(new), batch):
            known.update(zip(new[i : i + batch], states(new[i : i + batch]), strict=True))
        return [known[ids] for ids in wanted]

    return encode


def pooled(states: np.ndarray, tokens: int) -> np.ndarray:
    """The mean state f32[D] of the first `tokens` tokens."""
    return states[: max(tokens, 1)].mean(0)


def text_of(answer: Answer, loaded: hub.Loaded, tokens: int | None = None) -> str:
    """The text of an answer's first `tokens` tokens."""
    return loaded.tokenizer.decode(answer.tokens[:tokens])


def answer_row(
    request: Request, answer: Answer, loaded: hub.Loaded, stored: int, budget: int
) -> dict[str, Any]:
    """What an answer says alone.

    Args:
        request: its prompt.
        answer: the answer.
        loaded: the model.
        stored: live bytes of body and metadata right after the prompt, all layers.
        budget: tokens of the full cache's answer: correctness is also asked of so many.
    """
    model, references = loaded.model, request.prompt.references
    layers = len(model.windows)

    def full_bytes(tokens):
        return PromptShape(tokens, model.num_kv_heads, model.head_dim).full_bytes * layers

    held = len(request.ids) + len(answer.tokens) - 1  # the last token is not stored
    text = text_of(answer, loaded)
    row = {
        "task": request.prompt.task,
        "source": request.prompt.source,
        "prompt_tokens": len(request.ids),
        "kv_bytes": stored,
        "ratio": full_bytes(len(request.ids)) / stored,
        "end_bytes": answer.kv_bytes,
        "ratio_at_end": full_bytes(held) / answer.kv_bytes,
        "generated_tokens": len(answer.tokens),
        "truncated": not answer.stopped,
        "empty": not text.strip(),
        "repeated": length_shift.repeated_share(list(answer.tokens)),
        "stop_probability": float(answer.stop_probability.mean()),
        "correct": None,
        "correct_within": None,
        "prediction": text,
    }
    if references:
        row["correct"] = length_shift.correct(text, references)
        within = text_of(answer, loaded, budget)
        row["correct_within"] = length_shift.correct(within, references)
    return row


def pair_row(
    full: Answer, other: Answer, states: tuple[np.ndarray, np.ndarray], center: np.ndarray,
    stop_ids: frozenset[int],
) -> dict[str, Any]:  # fmt: skip
    """What an answer says against the full cache's to the same prompt with the same draws.

    Up to where the two part, both caches were asked the same: there the probabilities compare.

    Args:
        full: the full cache's answer.
        other: the other's.
        states: of `Encoder`, of both.
        center: f32[D], taken from every embedding.
        stop_ids: tokens that end an answer.
    """
    parted = length_shift.divergence(list(full.tokens), list(other.tokens), stop_ids)
    shortest = min(len(full.tokens), len(other.tokens))
    common = shortest if parted.position is None else min(parted.position + 1, shortest)
    stops = other.stop_probability[:common] - full.stop_probability[:common]

    def alike(n, m):
        vectors = pooled(states[0], n)[None], pooled(states[1], m)[None]
        return float(length_shift.similarity(*vectors, center)[0])

    lengths = (
        {"generated_tokens": len(a.tokens), "truncated": not a.stopped} for a in (full, other)
    )
    at = None if parted.position is None or parted.position >= shortest else parted.position
    return length_shift.shift_of_pair(*lengths) | {
        "full_tokens": len(full.tokens),
        "full_truncated": not full.stopped,
        "divergence": parted.kind,
        "divergence_position": parted.position,
        "gap_full": None if at is None else float(full.gap[at]),
        "gap_compressed": None if at is None else float(other.gap[at]),
        "common_tokens": common,
        "stop_shift_common": float(stops.mean()),
        "similarity": alike(len(full.tokens), len(other.tokens)),
        "similarity_common": alike(shortest, shortest),
    }


def forced_row(full: Answer, forced: Answer) -> dict[str, Any]:
    """The full cache's own answer, run through another cache.

    Where it stopped (`stop_at_end`) and before (`stop_before`): P(EOS) under both; and the mean
    negative log-likelihood of its tokens.
    """
    ended = full.stopped
    before = slice(0, len(full.tokens) - int(ended))
    found = {}
    for name, answer in (("full", full), ("compressed", forced)):
        stops = answer.stop_probability
        found[f"stop_at_end_{name}"] = float(stops[-1]) if ended else None
        found[f"stop_before_{name}"] = float(stops[before].mean()) if len(stops[before]) else None
        nll = -np.log(np.maximum(answer.probability, 1e-30))
        found[f"answer_nll_{name}"] = float(nll.mean())
    return found


def keys_for(seed: int, indices: Sequence[int]) -> jax.Array:
    """A key a request, the same in every arm and whatever else is in the batch."""
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    return fold(jax.random.key(seed), jnp.asarray(indices, jnp.int32))
