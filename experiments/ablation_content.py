"""Study 9 of AnchorKV: which layers, heads and texts demand residuals, and what error is left."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments import ablation_settings, plots
from experiments.ablation_batch import cache_and_view
from experiments.ablation_plots import as_y, bars, lines
from experiments.ablation_texts import Texts, missing, output_error, shape_of, slots_for
from experiments.ablation_verdict import Verdict, above, mean_of, shown
from experiments.report import Column, interval, markdown
from experiments.runner import Run
from kvjax import accounting
from kvjax.pallas.anchor_decode import xla

SIDES = ("keys", "values")


def demand(run: Run, texts: Texts, length: int, ratio: float) -> Iterator[str]:
    """Rows of study 9: who gets residuals, {group, layer, prompt, share, error, ...}."""
    shape = shape_of(texts.layers[0].prompt, length)
    method = ablation_settings.setting(ablation_settings.BASE, ratio, shape).method.resolve(shape)
    for layer in texts.layers:
        keys = [
            {"group": "demand", "layer": layer.number, "prompt": i}
            for i in range(len(texts.contents))
        ]
        if not missing(run, keys):
            yield ""
            continue
        own = method.for_layer(layer.number, texts.info.num_layers)
        cache, view = cache_and_view(own, layer.prompt, texts.info, slots_for(length))
        errors = np.asarray(output_error(view, layer.prompt, layer.queries))
        _, present = xla.slots(cache.body.coded().residuals[0])
        share = np.asarray(present.sum(-1)) / np.asarray(cache.body.num_coded)[:, None, None]
        stored = accounting.compression_ratio([cache], shape, np.full(len(share), length))
        for i, key in enumerate(keys):
            if run.finished(key) is None:
                run.append(key | {
                    "content": texts.contents[i], "depth": layer.depth, "ratio": stored[i],
                    "share": share[i].tolist(), "error": float(errors[i]),
                })  # fmt: skip
        yield f"layer {layer.number}"


def content_report(run: Run, ratio: float) -> tuple[str, list[Verdict]]:
    """Study 9."""
    rows = [r for r in run.rows if r["group"] == "demand"]
    near = [r for r in run.rows if r["group"] == "geometry" and r["side"] in SIDES]
    prompts = {}
    for row in rows:
        share = np.array(row["share"])  # [2, K]
        uneven = share.max(1) / np.maximum(share.min(1), 1e-3)
        prompts.setdefault(row["prompt"], []).append((row, float(np.mean(uneven))))
    lines_of = []
    for prompt, own in prompts.items():
        cosine = {
            side: float(np.mean([
                r["absolute"] for r in near if r["prompt"] == prompt and r["side"] == side]))
            for side in SIDES
        }  # fmt: skip
        lines_of.append({
            "prompt": prompt, "content": own[0][0]["content"], "ratio": own[0][0]["ratio"],
            "uneven": float(np.mean([u for _, u in own])),
            "error": float(np.mean([r["error"] for r, _ in own])),
            **{f"cosine_{side}": value for side, value in cosine.items()},
        })  # fmt: skip
    fields = ("uneven", "error", "cosine_keys", "cosine_values")
    means = plots.group_means(lines_of, ["content"], fields)
    columns = [
        Column("text", "content"), Column("n", "n"),
        Column("error", interval("error", ".3f")),
        Column("absolute cosine, keys", interval("cosine_keys", ".3f")),
        Column("absolute cosine, values", interval("cosine_values", ".3f")),
        Column("most / least residuals of a layer's heads", interval("uneven", ".2f")),
    ]  # fmt: skip
    table = markdown(
        means, columns, f"9 By kind of text, {lines_of[0]['ratio']:.1f}x, layers averaged"
    )
    same, other = _changes(rows)
    run.save_figure("content", bars(
        {"attention-output error": [m | as_y("error", m) | {"line": "error"} for m in means],
         "most / least residuals": [m | as_y("uneven", m) | {"line": "error"} for m in means]},
        "content", "y", "line", title=f"By kind of text, {ratio:.0f}x",
        y_label={"attention-output error": "relative", "most / least residuals": "times"},
    ))  # fmt: skip
    run.save_figure("demand", _demand_figure(rows, ratio))
    uneven = mean_of(lines_of, "uneven")
    found = [
        Verdict("9 demand", "a layer's heads get unequal residuals: most over 1.5 times the least"
                " (paper: uneven)", shown(uneven, ".2f", " times"), above(uneven, 1.5)),
    ]  # fmt: skip
    for name, gap in (("two texts of one kind", same), ("two texts of different kinds", other)):
        if gap is not None:
            found.append(Verdict(
                "9 demand", f"{name}: a head's share of residuals moves by over a tenth of the mean"
                " (paper: depends on the input)", shown(gap, ".3f"), above(gap, 0.1),
            ))  # fmt: skip
    worst, best = max(means, key=lambda m: m["error"]), min(means, key=lambda m: m["error"])
    found.append(Verdict(
        "9 demand", "the error is the same for every kind of text (the paper does not say)",
        f"{best['content']} {interval('error', '.3f')(best)}, {worst['content']}"
        f" {interval('error', '.3f')(worst)}", _overlap(best, worst),
    ))  # fmt: skip
    return table, found


def _overlap(best: dict, worst: dict) -> str:
    if best.get("error_high") is None or worst.get("error_low") is None:
        return "undecided"
    return "refuted" if best["error_high"] < worst["error_low"] else "undecided"


def _changes(rows: list[dict]) -> tuple[Any, Any]:
    """Mean change of a head's share between two texts over the mean share, by pair of texts."""
    maps, contents = {}, {}
    for row in rows:
        maps.setdefault(row["prompt"], {})[row["layer"]] = np.array(row["share"])
        contents[row["prompt"]] = row["content"]
    same, other = [], []
    for one, two in itertools.combinations(sorted(maps), 2):
        a, b = (np.stack([maps[p][layer] for layer in sorted(maps[p])]) for p in (one, two))
        change = float(np.abs(a - b).mean() / np.mean([a.mean(), b.mean()]))
        (same if contents[one] == contents[two] else other).append({"change": change})
    return mean_of(same, "change"), mean_of(other, "change")


def _demand_figure(rows: list[dict], ratio: float) -> Any:
    """Share of residuals by layer, a line a KV head, averaged over texts."""
    panels = {}
    for side, name in enumerate(SIDES):
        flat = [
            {"layer": r["layer"], "head": f"KV head {h}", "y": 100 * r["share"][side][h]}
            for r in rows for h in range(len(r["share"][side]))
        ]  # fmt: skip
        panels[name] = plots.group_means(flat, ["layer", "head"], ("y",))
    return lines(
        panels, "layer", "y", "head", title=f"Tokens with a residual, {ratio:.0f}x, mean of texts",
        x_label="layer", y_label="tokens with a residual, %",
    )  # fmt: skip
