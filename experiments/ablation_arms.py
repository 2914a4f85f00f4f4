"""Studies 1, 2 and 4 of AnchorKV, and the answers of study 10: settings at equal measured bytes.

Ranking of residuals, components taken away one by one, the split of residuals between keys and
values with every other knob's sensitivity: each is a list of settings over the same questions, so
that a row is measured once for all studies that show it.
"""

from collections.abc import Sequence
from typing import Any

from experiments import plots
from experiments.ablation_plots import as_y, lines
from experiments.ablation_settings import (
    BASE,
    COMPONENTS,
    NAIVE,
    NO_RESIDUALS,
    ONE_SIDE,
    RANKING,
    SENSITIVITY,
)
from experiments.ablation_verdict import (
    Verdict,
    above,
    below,
    paired,
    shown,
    together,
    within,
)
from experiments.report import Column, interval, markdown
from experiments.runner import Run

GROUP = "answers"
FIELDS = ("token_match", "exact", "answer_nll", "kl", "error", "ratio")


def rows_of(rows: Sequence[dict], names: dict[Any, str], **group: Any) -> list[dict]:
    """Means of the rows of some labels, under the names that a study gives them."""
    shown_as: dict[str, list] = {}
    for name, label in names.items():
        shown_as.setdefault(label, []).append(name)
    own = [r for r in rows if all(r.get(k) == v for k, v in group.items())]
    named = [r | {"name": n} for r in own for n in shown_as.get(r["method"], ())]
    means = plots.group_means(named, ["name", "target_ratio"], FIELDS)
    order = {name: i for i, name in enumerate(names)}
    limits = {(r["method"], r["target_ratio"]): r["limit"] for r in rows}
    for mean in means:
        mean["limit"] = limits[names[mean["name"]], mean["target_ratio"]]
    return sorted(means, key=lambda m: (m["target_ratio"], order[m["name"]]))


def needle_rows(rows: Sequence[dict]) -> list[dict]:
    """The rows of questions with an answer, not those of running text."""
    return [r for r in rows if r["group"] == GROUP and r["task"] != "text"]


def text_rows(rows: Sequence[dict]) -> list[dict]:
    """The rows of running text."""
    return [r for r in rows if r["group"] == GROUP and r["task"] == "text"]


def compared(
    run: Run, names: dict[str, str], title: str, reference: str, ratios: Sequence[float]
) -> str:
    """A study's table: needles and text side by side, and the difference to a reference."""
    own = [r for r in run.rows if r.get("target_ratio") in ratios]
    asked, text = needle_rows(own), text_rows(own)
    rows = []
    for mean in rows_of(asked, names):
        prose = rows_of(
            text, {mean["name"]: names[mean["name"]]}, target_ratio=mean["target_ratio"]
        )
        pair = [{"method": m, "target_ratio": mean["target_ratio"]}
                for m in (names[mean["name"]], names[reference])]  # fmt: skip
        difference = paired(asked, "token_match", *pair, combine=lambda a, b: 100 * (a - b))
        rows.append(mean | {"prose": prose[0] if prose else {}, "difference": difference})
    columns = [
        Column("residuals" if "anking" in title else "setting", "name"),
        Column("asked", lambda r: f"{r['target_ratio']:.0f}x"),
        Column("stored", lambda r: f"{r['ratio']:.2f}x"),
        Column("tokens right %", interval("token_match", ".0f", 100)),
        Column(f"points minus {reference}", lambda r: shown_or_none(r["difference"])),
        Column("answer NLL", interval("answer_nll", ".2f")),
        Column("error, needles", interval("error", ".3f")),
        Column("KL, text", lambda r: interval("kl", ".3f")(r["prose"])),
        Column("error, text", lambda r: interval("error", ".3f")(r["prose"])),
        Column("note", "limit"),
    ]
    count = f"n = {rows[0]['n']} needles, {len({r['prompt'] for r in text})} texts" if rows else ""
    return markdown(rows, columns, f"{title}, {count}")


def shown_or_none(difference: Any, form: str = "+.0f") -> str | None:
    """An interval without its n."""
    return None if difference is None else shown(difference, form).split(", n =")[0]


def figure(run: Run, names: dict[str, str], name: str, title: str, ratios: Sequence[float]) -> None:
    """Score and error against the ratio, a line a setting."""
    own = [r for r in needle_rows(run.rows) if r["target_ratio"] in ratios]
    means = rows_of(own, names)
    scores = [m | {f: 100 * m[f] for f in m if f.startswith("token_match")} for m in means]
    panels = {"answer tokens right": [m | as_y("token_match", m) for m in scores],
              "attention-output error": [m | as_y("error", m) for m in means]}  # fmt: skip
    run.save_figure(name, lines(
        panels, "target_ratio", "y", "name", title=f"{title}, n = {means[0]['n']}", log_x=True,
        x_label="compression ratio asked for",
        y_label={"answer tokens right": "%", "attention-output error": "relative"},
    ))  # fmt: skip


def ranking_report(run: Run, ratios: Sequence[float]) -> tuple[str, list[Verdict]]:
    """Study 1."""
    figure(run, RANKING, "ranking", "Who gets a residual, at equal bytes", ratios)
    table = compared(run, RANKING, "1 Ranking of residuals", "utility (floor 1)", ratios)
    low, high = min(ratios), max(ratios)
    found = []
    others = [name for name in RANKING if name != "utility (floor 1)"]
    gaps = [_points(run, RANKING[name], BASE, low) for name in others]
    worst = max(gaps, key=lambda g: abs(g.mean))
    found.append(Verdict(
        "1 ranking", f"{low:.0f}x: no ranking is over 10 points from utility (paper: almost none)",
        f"largest gap {shown(worst, '+.0f', ' points')}",
        together(within(g, -10, 10) for g in gaps),
    ))  # fmt: skip
    gap = _points(run, RANKING["random"], BASE, high)
    found.append(Verdict(
        "1 ranking", f"{high:.0f}x: random is over 10 points behind utility (paper: far behind)",
        shown(gap, "+.0f", " points"), below(gap, -10),
    ))  # fmt: skip
    paper = RANKING["utility (floor 0, paper)"]
    gap = _points(run, RANKING["random"], paper, high)
    found.append(Verdict(
        "1 ranking", f"{high:.0f}x: random is behind the paper's utility without a floor",
        shown(gap, "+.0f", " points"), below(gap, 0),
    ))  # fmt: skip
    error = error_ratio(run, paper, RANKING["random"], high)
    found.append(Verdict(
        "1 ranking", f"{high:.0f}x: the paper's utility has a smaller attention error than random",
        f"ratio of errors {shown(error, '.2f')}", below(error, 1),
    ))  # fmt: skip
    return table, found


def components_report(run: Run, ratios: Sequence[float]) -> tuple[str, list[Verdict]]:
    """Study 2."""
    figure(run, COMPONENTS, "components", "One component taken away, at equal bytes", ratios)
    table = compared(run, COMPONENTS, "2 Components", "all components", ratios)
    low, high = min(ratios), max(ratios)
    found = []
    naive_losses = [error_ratio(run, NAIVE, BASE, ratio) for ratio in ratios]
    found.append(Verdict(
        "2 components", "naive 2-bit residuals have a larger error at every ratio (paper: constant"
        " loss)", "; ".join(f"{r:.0f}x: {shown(e, '.2f', ' times')}"
                           for r, e in zip(ratios, naive_losses, strict=True)),
        together(above(e, 1.0) for e in naive_losses),
    ))  # fmt: skip
    others = [n for n in COMPONENTS if n not in ("all components", "naive 2-bit")]
    for field, what in (("error", "attention error"), ("answer_nll", "answer NLL")):
        gaps = [
            _gap(run, field, NAIVE, COMPONENTS[n], ratio) for ratio in ratios for n in others
        ]  # fmt: skip
        words = [above(gap, 0.0) for gap in gaps]
        smallest = min(gaps, key=lambda g: g.mean)
        found.append(Verdict(
            "2 components", f"naive 2-bit is the largest loss in {what}, at every ratio (paper)",
            f"larger than another in {words.count('confirmed')}, smaller in"
            f" {words.count('refuted')} of {len(words)} pairs; least {shown(smallest, '+.2f')}",
            together(words),
        ))  # fmt: skip
    losses = [error_ratio(run, NO_RESIDUALS, BASE, ratio) for ratio in ratios]
    found.append(Verdict(
        "2 components", "no residuals: a larger error at every ratio (paper: loses everywhere)",
        "; ".join(f"{r:.0f}x: {shown(e, '.2f', ' times')}"
                  for r, e in zip(ratios, losses, strict=True)),
        together(above(e, 1.0) for e in losses),
    ))  # fmt: skip
    for name in ("no random anchors", "quota per head"):
        label = COMPONENTS[name]
        near, far = error_ratio(run, label, BASE, low), error_ratio(run, label, BASE, high)
        found.append(Verdict(
            "2 components", f"{name}: under 5 % more error at {low:.0f}x (paper: cheap)",
            shown(near, ".3f", " times"), below(near, 1.05),
        ))  # fmt: skip
        found.append(Verdict(
            "2 components", f"{name}: over 5 % more error at {high:.0f}x (paper: growing)",
            shown(far, ".3f", " times"), above(far, 1.05),
        ))  # fmt: skip
        score = _points(run, label, BASE, high)
        found.append(Verdict(
            "2 components", f"{name}: fewer answer tokens right at {high:.0f}x (paper: growing)",
            shown(score, "+.0f", " points"), below(score, 0),
        ))  # fmt: skip
    return table, found


def split_report(run: Run, middle: float) -> tuple[str, list[Verdict]]:
    """Study 4."""
    asked, text, tables = needle_rows(run.rows), text_rows(run.rows), []
    rows = []
    for knob, values in SENSITIVITY.items():
        for mean in rows_of(asked, values, target_ratio=middle):
            prose = rows_of(text, {mean["name"]: values[mean["name"]]}, target_ratio=middle)[0]
            pair = [{"method": m, "target_ratio": middle} for m in (values[mean["name"]], BASE)]
            gaps = {
                "nll_gap": paired(asked, "answer_nll", *pair),
                "kl_gap": paired(text, "kl", *pair),
            }
            rows.append(mean | gaps | {"knob": knob, "prose": prose})
    columns = [
        Column("knob", "knob"), Column("value", "name"),
        Column("stored", lambda r: f"{r['ratio']:.2f}x"),
        Column("tokens right %", interval("token_match", ".0f", 100)),
        Column("answer NLL", interval("answer_nll", ".2f")),
        Column("NLL minus default", lambda r: shown_or_none(r["nll_gap"], "+.2f")),
        Column("KL, text", lambda r: interval("kl", ".3f")(r["prose"])),
        Column("KL minus default", lambda r: shown_or_none(r["kl_gap"], "+.3f")),
        Column("error, text", lambda r: interval("error", ".3f")(r["prose"])),
        Column("note", "limit"),
    ]  # fmt: skip
    tables.append(markdown(rows, columns, f"4 Sensitivities at {middle:.0f}x, n = {rows[0]['n']}"
                           f" needles, {rows[0]['prose']['n']} texts"))  # fmt: skip
    whole = {"keys and values compressed": BASE}
    whole |= {f"{name} in place of compressed": f"{BASE}, {name}" for name in ONE_SIDE}
    sides = []
    for mean in rows_of(asked, whole, target_ratio=middle):
        prose = rows_of(text, {mean["name"]: whole[mean["name"]]}, target_ratio=middle)[0]
        sides.append(mean | {"prose": prose})
    tables.append(markdown(sides, [
        Column("view", "name"), Column("tokens right %", interval("token_match", ".0f", 100)),
        Column("answer NLL", interval("answer_nll", ".2f")),
        Column("error, needles", interval("error", ".3f")),
        Column("KL, text", lambda r: interval("kl", ".3f")(r["prose"])),
        Column("error, text", lambda r: interval("error", ".3f")(r["prose"])),
    ], f"4 Which side's errors cost, at {middle:.0f}x"))  # fmt: skip
    for name, knobs in (("split", list(SENSITIVITY)[:3]), ("sensitivity", list(SENSITIVITY)[3:])):
        panels = {knob: _two_lines([r for r in rows if r["knob"] == knob]) for knob in knobs}
        run.save_figure(name, lines(
            panels, "name", "y", "line", x_label="value",
            y_label="nats a token, minus default", level=0.0,
            title=f"Sensitivities at {middle:.0f}x, n = {rows[0]['n']} needles",
        ))  # fmt: skip
    return "\n".join(tables), _split_verdicts(run, middle)


def _two_lines(rows: Sequence[dict]) -> list[dict]:
    """Needles' NLL and running text's KL against the default, as lines of one panel."""
    return [
        row | {"line": name} | {"y": gap.mean, "y_low": gap.low, "y_high": gap.high}
        for name, field in (("needles: NLL", "nll_gap"), ("text: KL", "kl_gap"))
        for row in rows
        if (gap := row[field]) is not None
    ]


def _split_verdicts(run: Run, middle: float) -> list[Verdict]:
    asked, text = needle_rows(run.rows), text_rows(run.rows)
    found = []
    for what, rows, field in (
        ("needles: answer NLL", asked, "answer_nll"),
        ("text: KL", text, "kl"),
    ):
        keys, values = ({"method": f"{BASE}, {name}", "target_ratio": middle} for name in ONE_SIDE)
        gap = paired(rows, field, values, keys)
        found.append(Verdict(
            "4 split", f"{what}: key errors cost more than value errors (the paper does not say)",
            f"exact values minus exact keys {shown(gap, '+.3f', ' nats')}", above(gap, 0),
        ))  # fmt: skip
        shares = SENSITIVITY["share of keys"]
        half = {"method": BASE, "target_ratio": middle}
        gaps = {
            name: paired(rows, field, {"method": label, "target_ratio": middle}, half)
            for name, label in shares.items() if label != BASE
        }  # fmt: skip
        rival = min(gaps, key=lambda name: gaps[name].mean)
        found.append(Verdict(
            "4 split", f"{what}: half of the residuals for keys is better than any other share (the"
            " paper fixes it)", f"nearest rival {rival}: minus half"
            f" {shown(gaps[rival], '+.3f', ' nats')}",
            together(above(gap, 0) for gap in gaps.values()),
        ))  # fmt: skip
    gap = _points(run, RANKING["utility (floor 0, paper)"], BASE, middle)
    found.append(Verdict(
        "4 split", "without an attention floor fewer answer tokens are right",
        shown(gap, "+.0f", " points"), below(gap, 0),
    ))  # fmt: skip
    return found


def _gap(run: Run, field: str, one: str, other: str, ratio: float) -> Any:
    """Difference in `field` over needles."""
    pair = [{"method": m, "target_ratio": ratio} for m in (one, other)]
    return paired(needle_rows(run.rows), field, *pair)


def _points(run: Run, one: str, other: str, ratio: float) -> Any:
    pair = [{"method": m, "target_ratio": ratio} for m in (one, other)]
    return paired(needle_rows(run.rows), "token_match", *pair, combine=lambda a, b: 100 * (a - b))


def error_ratio(run: Run, one: str, other: str, ratio: float) -> Any:
    """Ratio of attention errors, over needles and texts."""
    rows = [r for r in run.rows if r["group"] == GROUP]
    pair = [{"method": m, "target_ratio": ratio} for m in (one, other)]
    return paired(rows, "error", *pair, combine=lambda a, b: a / max(b, 1e-9))
