"""Study 8 of AnchorKV: query heads that share a KV head, and requests that share a batch.

A real model has one group size. Others are made from its layers: with G = 1 every query head gets
a copy of its KV head; with more than the model's G a KV head's queries are joined by query heads
of other groups, which attend to its keys too; with fewer only the first of them are observed. What
is measured is the error of the real query heads alone.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments import ablation_settings, plots
from experiments.ablation_batch import cache_and_view
from experiments.ablation_plots import lines
from experiments.ablation_texts import (
    Layer,
    Texts,
    missing,
    output_error,
    shape_of,
    slots_for,
)
from experiments.ablation_verdict import Verdict, above, by_text, paired, shown, within
from experiments.report import Column, interval, markdown
from experiments.runner import Run
from kvjax import accounting
from kvjax.storage import left_align
from kvjax.types import PromptKV

FLOORS = {"floor 1": 1.0, "floor 0 (paper)": 0.0}


def regroup(q: Array, group: int, size: int) -> Array:
    """Query heads for KV heads that `size` query heads share.

    Args:
        q: [B, K * group, T, H].
        group: G of the model.
        size: G wanted; all query heads at most.

    Returns:
        [B, K * size, T, H]: each KV head's own query heads, then the next ones, wrapping
        round; where `size` is under `group` the first of its own.
    """
    heads = q.shape[1]
    order = [
        (first + i) % heads for first in range(0, heads, group) for i in range(min(size, heads))
    ]
    return q[:, jnp.array(order)]


def with_group(layer: Layer, size: int) -> tuple[PromptKV, Array]:
    """A layer as if `size` query heads shared a KV head, and the queries that are measured."""
    prompt = layer.prompt
    group = prompt.q.shape[1] // prompt.k.shape[1]
    if size == group:
        return prompt, layer.queries
    if size == 1:
        many = {
            name: jnp.repeat(getattr(prompt, name), group, 1) for name in ("k", "k_unrotated", "v")
        }
        return dataclasses.replace(prompt, **many), layer.queries
    return dataclasses.replace(prompt, q=regroup(prompt.q, group, size)), layer.queries


def shortened(prompt: PromptKV, lengths: Sequence[int]) -> PromptKV:
    """The first `lengths` tokens of each row, right-aligned as in a batch of unequal prompts."""
    total = prompt.k.shape[2]
    starts = jnp.asarray([total - n for n in lengths], jnp.int32)
    moved = {
        name: left_align(getattr(prompt, name), -starts) for name in ("q", "k", "k_unrotated", "v")
    }
    return dataclasses.replace(prompt, **moved, starts=starts)


def groups(
    run: Run, texts: Texts, length: int, sizes: Sequence[int], ratio: float
) -> Iterator[str]:
    """Rows of study 8: {group: gqa, layer, prompt, size, floor, error}, and those of batches."""
    for size in sizes:
        for name, floor in FLOORS.items():
            for layer in texts.layers:
                cells = [
                    {"group": "gqa", "layer": layer.number, "prompt": i, "size": size,
                     "floor": name}
                    for i in range(len(texts.contents))
                ]  # fmt: skip
                if not missing(run, cells):
                    continue
                prompt, queries = with_group(layer, size)
                shape = shape_of(prompt, length)
                method = ablation_settings.setting(ablation_settings.BASE, ratio, shape).method
                method = dataclasses.replace(method.resolve(shape), attention_floor=floor)
                own = method.for_layer(layer.number, texts.info.num_layers)
                _, view = cache_and_view(own, prompt, texts.info, slots_for(length))
                errors = np.asarray(output_error(view, prompt, queries))
                stored = shape.full_bytes / method.layer_bytes(shape)
                for i, key in enumerate(cells):
                    if run.finished(key) is None:
                        run.append(key | {"error": float(errors[i]), "ratio": stored})
        yield f"G = {size}"
    yield from _batches(run, texts, length, ratio)


def _batches(run: Run, texts: Texts, length: int, ratio: float) -> Iterator[str]:
    """Rows {group: batch, layer, prompt, together, length, error, ratio}: in a batch and alone."""
    lengths = [length if i % 2 == 0 else length // 2 for i in range(len(texts.contents))]
    rows = [0, 1, len(lengths) - 2, len(lengths) - 1]
    for layer in texts.layers[:: max(len(texts.layers) // 3, 1)]:
        cells = [
            {"group": "batch", "layer": layer.number, "prompt": i, "together": together}
            for together in (True, False) for i in rows
        ]  # fmt: skip
        if not missing(run, cells):
            continue
        mixed = shortened(layer.prompt, lengths)
        measured = _measured(mixed, layer, texts, length, ratio, lengths)
        for i in rows:
            start, n = length - lengths[i], lengths[i]
            one = {
                name: getattr(mixed, name)[i : i + 1, :, start:]
                for name in ("q", "k", "k_unrotated", "v")
            }
            alone = PromptKV(**one, starts=jnp.zeros(1, jnp.int32))
            own = layer._replace(queries=layer.queries[i : i + 1])
            single = _measured(alone, own, texts, n, ratio, [n])
            found = {True: [x[i] for x in measured], False: [x[0] for x in single]}
            for together, (error, stored) in found.items():
                key = {**cells[0], "prompt": i, "together": together}
                if run.finished(key) is None:
                    run.append(key | {"length": n, "error": float(error), "ratio": float(stored)})
    yield "batches"


def _measured(prompt, layer, texts, total, ratio, lengths) -> tuple[np.ndarray, np.ndarray]:
    """Errors and measured ratios of the rows of a prompt."""
    shape = shape_of(prompt, total)
    method = ablation_settings.setting(ablation_settings.BASE, ratio, shape).method.resolve(shape)
    own = method.for_layer(layer.number, texts.info.num_layers)
    cache, view = cache_and_view(own, prompt, texts.info, slots_for(total))
    errors = np.asarray(output_error(view, prompt, layer.queries))
    return errors, accounting.compression_ratio([cache], shape, np.array(lengths))


def report(run: Run, ratio: float, group: int) -> tuple[str, list[Verdict]]:
    """Tables, figure and verdicts of study 8.

    Args:
        run: holds the rows.
        ratio: of compression.
        group: G of the model.
    """
    rows = [r for r in run.rows if r["group"] == "gqa"]
    texts = by_text(rows, ["size", "floor", "ratio"], ("error",))
    means = plots.group_means(texts, ["size", "floor", "ratio"], ("error",))
    columns = [
        Column("G", "size"), Column("ranking", "floor"),
        Column("stored", lambda r: f"{r['ratio']:.2f}x"),
        Column("error of the real query heads", interval("error", ".3f")), Column("n texts", "n"),
        Column("group", lambda r: "real" if r["size"] == group else "synthetic"),
    ]  # fmt: skip
    table = markdown(means, columns, f"8 Query heads a KV head, {ratio:.0f}x")
    batch = [r for r in run.rows if r["group"] == "batch"]
    grouped = plots.group_means(batch, ["length", "together"], ("error", "ratio"))
    table += "\n" + markdown(
        sorted(grouped, key=lambda r: (-r["length"], r["together"])),
        [Column("tokens", "length"), 
         Column("in a batch", lambda r: "yes" if r["together"] else "no"),
         Column("stored", interval("ratio", ".2f")), Column("error", interval("error", ".3f")),
         Column("n texts and layers", "n")],
        "8 Unequal prompts in one batch, and alone",
    )  # fmt: skip
    run.save_figure("groups", lines(
        {f"{ratio:.0f}x": means}, "size", "error", "floor", x_label="query heads a KV head, G",
        y_label="attention-output error, relative",
        title=f"Observation by m = W G queries, n = {means[0]['n']} texts",
    ))  # fmt: skip
    found = []
    sizes = sorted({r["size"] for r in texts})
    for floor in FLOORS:
        for size in sizes:
            if size == group:
                continue
            pair = [{"size": s, "floor": floor} for s in (size, group)]
            gap = paired(texts, "error", *pair, ("prompt",), lambda a, b: a / b)
            found.append(Verdict(
                "8 groups", f"{floor}: G = {size} has the error of G = {group} to 5 %"
                " (the paper does not say)", f"ratio {shown(gap, '.3f')}",
                within(gap, 0.95, 1.05),
            ))  # fmt: skip
    longest = max(r["length"] for r in batch)
    for name, own in (
        ("the longest prompt", [r for r in batch if r["length"] == longest]),
        ("a prompt of half the length", [r for r in batch if r["length"] < longest]),
    ):
        gap = paired(own, "error", {"together": True}, {"together": False}, ("prompt", "layer"),
                     lambda a, b: a / b)  # fmt: skip
        if gap is not None:
            found.append(Verdict(
                "8 batch", f"{name} has the error in a batch that it has alone, to 2 %",
                f"ratio {shown(gap, '.4f')}", within(gap, 0.98, 1.02),
            ))  # fmt: skip
            stored = paired(own, "ratio", {"together": True}, {"together": False},
                            ("prompt", "layer"), lambda a, b: a / b)  # fmt: skip
            found.append(Verdict(
                "8 batch", f"{name} is stored in a batch as small as alone, to 2 %",
                f"ratio {shown(stored, '.4f')}", above(stored, 0.98),
            ))  # fmt: skip
    return table, found
