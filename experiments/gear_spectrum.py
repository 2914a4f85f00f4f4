"""How fast do the singular values of GEAR's quantization error fall, by layer and head?

    python -m experiments.gear_spectrum                # default model, 2 bits
    python -m experiments.gear_spectrum --bits 4 --outliers 0

A prompt of running text is prefilled exactly; its keys and values are quantized as GEAR does,
outliers set aside. What is left of each KV head, tokens x head dim, is decomposed. A low-rank
term recovers the share of the error's energy that the first singular values hold, at most; white
noise of the same size has the share that comes from having few channels. Nothing is calibrated:
GEAR computes these factors from the prompt itself, in `compress`.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.figure import Figure

from experiments import plots
from experiments.report import Column, markdown, table
from experiments.runner import Run, main
from kvjax import decode, gear_body
from kvjax.evaluation import needle
from kvjax.methods.gear import GEAR
from kvjax.types import LayerInfo
from models import hub

SIDES = ("keys", "values")


@dataclass(frozen=True)
class Config:
    """Singular values of the error of GEAR's backbone, and what power iteration recovers."""

    model: str | None = None
    """GGUF file, Hugging Face directory, hub id or "tiny"; default SmolLM2-135M-Instruct"""
    tokens: int = 1024
    """of the prompt; a multiple of the group"""
    bits: int = 2
    """of a code"""
    group: int = 64
    """tokens (keys) or channels (values) that share a scale"""
    outliers: float = 0.02
    """share of the values that are set aside, exact"""
    ranks: tuple[int, ...] = (1, 2, 4, 8)
    """of the low-rank term"""
    iterations: int = 3
    """passes of the power iteration"""
    seed: int = 42
    """of the prompt's text and of the white noise"""


TINY = Config(model="tiny", tokens=64, group=16, ranks=(1, 2))


def run(config: Config, run: Run) -> None:
    """Decompose the layers that are missing, then report."""
    if config.tokens < config.group or config.tokens % config.group:
        raise ValueError(f"tokens={config.tokens} must be a multiple of group={config.group}.")
    loaded = hub.load(config.model)
    model, run_scalars = loaded.model, functools.partial(scalars, config)
    run.watch(run_scalars)
    layers = range(len(model.windows))
    todo = [i for i in layers if missing(run, i, model.num_kv_heads)]
    with run.progress(len(layers), "layers") as progress:
        for _ in range(len(layers) - len(todo)):
            progress.advance(skipped=True)
        if todo:
            text = needle.running_text(loaded.tokenizer, config.tokens, config.seed)
            tokens = jnp.asarray([text[: config.tokens]], jnp.int32)
            starts = jnp.zeros(1, jnp.int32)
            prompts = decode.prefill(
                model, loaded.params, tokens, starts, dtype=jnp.float32
            ).prompts
        for layer in todo:
            info = LayerInfo(len(layers), None, 1, model.rope)
            for row in decompose(config, prompts[layer], info):
                key = {"layer": layer, "side": row["side"], "head": row["head"]}
                if run.finished(key) is None:
                    run.append(key | row)
            progress.advance(f"layer {layer}")
    report(config, run, loaded.name)


def missing(run: Run, layer: int, heads: int) -> bool:
    """Whether some head of a layer has no row."""
    keys = ({"layer": layer, "side": s, "head": h} for s in SIDES for h in range(heads))
    return any(run.finished(key) is None for key in keys)


@functools.partial(jax.jit, static_argnums=(2, 3))
def residuals(method: GEAR, prompt: Any, info: LayerInfo, ranks: tuple[int, ...]) -> Any:
    """For keys and values: x and its error f32[K, T, H], and low-rank terms, one a rank."""
    rebuilt = method.compress(prompt, info).body.prompt.dense()
    out = []
    for x, y in zip((prompt.k, prompt.v), rebuilt, strict=True):
        error = x - y
        terms = []
        for rank in ranks:
            left, right = gear_body.low_rank(error, rank, method.iterations, method.seed)
            terms.append(jnp.einsum("bktr,bkcrh->kth", left, right.astype(jnp.float32)))
        out.append((x[0], error[0], tuple(terms)))
    return out


def decompose(config: Config, prompt: Any, info: LayerInfo) -> Iterator[dict[str, Any]]:
    """A row a side and head of one layer."""
    method = GEAR(
        k_bits=config.bits, v_bits=config.bits, group=config.group, residual_length=config.group,
        prefill_rank=0, decode_rank=0, iterations=config.iterations, outliers=config.outliers,
    )  # fmt: skip
    white = np.random.default_rng(config.seed).normal(size=prompt.k.shape[2:])
    noise = shares(np.linalg.svd(white, compute_uv=False), config.ranks)
    for side, arrays in zip(SIDES, residuals(method, prompt, info, config.ranks), strict=True):
        x, error, terms = jax.tree.map(np.asarray, arrays)
        for head in range(x.shape[0]):
            singular = np.linalg.svd(error[head], compute_uv=False)
            energy = max(float((error[head] ** 2).sum()), 1e-30)
            found = [1 - float(((error[head] - term[head]) ** 2).sum()) / energy for term in terms]
            yield {
                "side": side,
                "head": head,
                "error": float(np.linalg.norm(error[head]) / np.linalg.norm(x[head])),
                "best": shares(singular, config.ranks),
                "found": found,
                "white": noise,
                "spectrum": singular / max(float(singular[0]), 1e-30),
            }


def shares(singular: np.ndarray, ranks: Sequence[int]) -> list[float]:
    """Share of the energy in the first r singular values, for each rank."""
    energy = np.cumsum(singular**2)
    return [float(energy[min(r, len(energy)) - 1] / max(energy[-1], 1e-30)) for r in ranks]


def scalars(config: Config, row: dict[str, Any]) -> Iterator[tuple[str, float, int]]:
    """TensorBoard scalars of a row; the step is the layer."""
    arm = f"{row['side']}/head_{row['head']}"
    yield f"spectrum/error_share/{arm}", row["error"], row["layer"]
    for rank, best, found in zip(config.ranks, row["best"], row["found"], strict=True):
        yield f"spectrum/best_share_rank_{rank}/{arm}", best, row["layer"]
        yield f"spectrum/found_share_rank_{rank}/{arm}", found, row["layer"]


def columns(config: Config) -> list[Column]:
    """Columns of the table: best, found and white share of each rank."""

    def entry(field, i):
        return lambda row: 100 * row[field][i]

    listed = [
        Column("layer", "layer", "d"),
        Column("side", "side"),
        Column("head", "head", "d"),
        Column("error %", lambda row: 100 * row["error"], ".1f"),
    ]
    for i, rank in enumerate(config.ranks):
        listed += [
            Column(f"{field} r={rank} %", entry(field, i), ".1f")
            for field in ("best", "found", "white")
        ]
    return listed


def report(config: Config, run: Run, name: str) -> None:
    """Table, plots and summary, from the rows alone."""
    title = f"{name}, {config.tokens:,} tokens, {config.bits} bits, group {config.group}"
    rows = sorted(run.rows, key=lambda row: (row["layer"], row["side"], row["head"]))
    table(rows, columns(config), title)
    for side in SIDES:
        here = [row for row in rows if row["side"] == side]
        run.save_figure(f"spectrum_{side}", draw(here, f"{title}, {side}"))
        lines = [
            {"layer": layer, "method": f"rank {rank}", "share": float(np.mean(values))}
            for i, rank in enumerate(config.ranks)
            for layer in sorted({row["layer"] for row in here})
            for values in [[row["found"][i] for row in here if row["layer"] == layer]]
        ]
        figure = plots.by_layer(
            lines, "share", title=f"{title}, {side}", y_label="share of the error recovered",
            in_order=True,
        )  # fmt: skip
        run.save_figure(f"recovered_{side}", figure)
    run.write_summary(markdown(rows, columns(config), title) + "\n" + notes(config, rows))


def draw(rows: Sequence[dict], title: str) -> Figure:
    """Singular values over the first, a line a head, coloured by layer."""
    with matplotlib.rc_context({"figure.constrained_layout.use": True, "figure.dpi": 130}):
        figure = Figure(figsize=(7.6, 4.3))
        axes = figure.add_subplot()
        last = max(row["layer"] for row in rows)
        for row in rows:
            colour = matplotlib.colormaps["viridis"](0.9 * row["layer"] / max(last, 1))
            label = f"layer {row['layer']}" if row["layer"] in (0, last) and not row["head"] else ""
            axes.plot(
                range(1, len(row["spectrum"]) + 1), row["spectrum"], color=colour, linewidth=0.8,
                label=label or None,
            )  # fmt: skip
        axes.set_title(title, loc="left")
        axes.set_xlabel("singular value of the quantization error, by size")
        axes.set_ylabel("over the largest")
        axes.set_ylim(bottom=0)
        figure.legend(loc="outside right upper")
        return figure


def notes(config: Config, rows: Sequence[dict]) -> str:
    """What the table says, in numbers."""
    lines = [
        "Error: of the backbone with outliers set aside, relative to the head's keys or values."
        " Best: share of that error's energy in the first r singular values. Found: share that"
        f" {config.iterations} passes of power iteration recover, in float16 factors. White: best"
        " of white noise of the same size.\n"
    ]
    for side in SIDES:
        here = [row for row in rows if row["side"] == side]
        for i, rank in enumerate(config.ranks):
            best, found, white = (
                100 * np.mean([row[f][i] for row in here]) for f in ("best", "found", "white")
            )
            lines.append(
                f"- {side}, rank {rank}: best {best:.1f} %, found {found:.1f} %,"
                f" white noise {white:.1f} %"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(Config, run)
