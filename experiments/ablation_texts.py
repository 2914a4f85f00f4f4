"""Texts of four kinds, prefilled once: some layers' prompts, and the queries of later tokens.

The studies that look at one layer at a time share this. The later tokens are the same text's own,
so that their queries are the full cache's and no compressed cache has seen them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.ablation_prompts import CONTENTS, texts
from kvjax import decode, metrics
from kvjax.attention import dense_partial, finish
from kvjax.storage import Dense
from kvjax.types import LayerInfo, PromptKV, PromptShape
from models import hub

DEPTHS = ("early", "middle", "late")  # thirds of a model


class Layer(NamedTuple):
    """One layer of all texts."""

    number: int
    depth: str  # of DEPTHS
    prompt: PromptKV  # of the first tokens
    queries: Array  # [B, N, m, H], rotated, of the later tokens


class Texts(NamedTuple):
    """Prefilled texts."""

    contents: tuple[str, ...]  # of each row
    layers: tuple[Layer, ...]
    info: LayerInfo


def prefill(
    loaded: hub.Loaded, length: int, later: int, each: int, layers: int, seed: int
) -> Texts:
    """Prefill `each` texts of every kind.

    Args:
        loaded: the model.
        length: tokens that a cache is made of.
        later: tokens whose queries are kept.
        each: texts a kind.
        layers: how many layers are kept, spread over the model.
        seed: draws the texts.
    """
    rows, contents = [], []
    for content in CONTENTS:
        rows += texts(loaded.tokenizer, content, length + later, each, seed)
        contents += [content] * each
    tokens, starts = decode.left_pad(rows)
    prompts = decode.prefill(loaded.model, loaded.params, tokens, starts).prompts
    total = len(prompts)
    chosen = np.unique(np.linspace(0, total - 1, min(layers, total)).round().astype(int))
    kept = []
    for number in chosen:
        depth = DEPTHS[min(3 * int(number) // total, 2)]
        whole = prompts[number]
        first = PromptKV(
            *(x[:, :, :length] for x in (whole.q, whole.k, whole.k_unrotated, whole.v)), starts
        )
        kept.append(Layer(int(number), depth, first, whole.q[:, :, length:]))
    info = LayerInfo(total, None, 1, loaded.model.rope)
    return Texts(tuple(contents), tuple(kept), info)


def shape_of(prompt: PromptKV, length: int) -> PromptShape:
    """The shape of one of a layer's prompts, `length` tokens of it."""
    return PromptShape(length, prompt.k.shape[1], prompt.k.shape[3])


@jax.jit
def output_error(view: Dense, prompt: PromptKV, queries: Array) -> Array:
    """Relative root-mean-square error of the attention output over the prompt alone: f32[B]."""
    batch, _, rows, _ = queries.shape

    def attend(k, v, real):  # bool [B, 1 or K, S]
        mask = jnp.broadcast_to(real[:, :, None], (batch, real.shape[1], rows, real.shape[2]))
        return finish(dense_partial(queries, k, v, mask))

    column = jnp.arange(prompt.k.shape[2], dtype=jnp.int32)[None, None]
    exact = attend(prompt.k, prompt.v, column >= prompt.starts[:, None, None])
    found = attend(view.k, view.v, view.positions >= 0)
    return metrics.relative_error(found, exact)


def slots_for(length: int) -> int:
    """Slots that hold any cache of `length` tokens and its padding."""
    return -(-(length + 64) // 64) * 64


def missing(run: Any, keys: Sequence[dict]) -> bool:
    """Whether any of the rows is still to be measured."""
    return any(run.finished(key) is None for key in keys)
