"""Studies 6 and 7 of AnchorKV: where the observation window was, and tokens that pile up exact.

A deep needle is asked for with the window on the end of the context, on the question, or on the
first turn of a conversation. And after compression a long answer or an agent's turns are appended:
the effective ratio falls, unless what piled up is compressed again, which costs quality.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import ablation_batch, ablation_settings, plots
from experiments.ablation_batch import Question
from experiments.ablation_plots import as_y, bars, lines
from experiments.ablation_verdict import Verdict, above, below, paired, shown
from experiments.arms import solve
from experiments.report import Column, interval, markdown
from experiments.runner import Run
from kvjax import accounting, decode, registry, turns
from kvjax.accounting import Budget
from models import hub

TURNS, PILE = "turns", "pile"
WINDOWS = ("question", "turn 1", "end of context")
METHODS = ablation_settings.WINDOW
ARMS = ("full", "kept exact", "compressed again")


def settings(ratio: float, shape: Any) -> list[ablation_batch.Setting]:
    """What study 6 compares."""
    return [ablation_settings.setting(label, ratio, shape) for label in METHODS.values()]


def turns_report(run: Run, ratio: float) -> tuple[str, list[Verdict]]:
    """Study 6."""
    names = {label: name for name, label in METHODS.items()} | {"full": "full cache"}
    rows = [
        r | {"name": names[r["method"]]}
        for r in run.rows if r["group"] == TURNS and r["method"] in names
    ]  # fmt: skip
    means = plots.group_means(
        rows, ["task", "name"], ("token_match", "exact", "answer_nll", "ratio")
    )
    columns = [
        Column("window on", "task"), Column("cache", "name"),
        Column("stored", lambda r: f"{r['ratio']:.2f}x"),
        Column("tokens right %", interval("token_match", ".0f", 100)),
        Column("exact %", interval("exact", ".0f", 100)),
        Column("answer NLL", interval("answer_nll", ".2f")), Column("n", "n"),
    ]  # fmt: skip
    table = markdown(means, columns, f"6 A deep needle and the observation window, {ratio:.0f}x")
    shares = [m | {f: 100 * m[f] for f in m if f.startswith("token_match")} for m in means]
    run.save_figure("turns", bars(
        {f"{ratio:.0f}x": shares}, "task", "token_match", "name",
        y_label="answer tokens right, %",
        title=f"A deep needle, by where the observation window was, n = {means[0]['n']}",
    ))  # fmt: skip
    found = []
    for name, label in METHODS.items():
        for task in WINDOWS[1:]:
            gap = _against_question(rows, label, task)
            found.append(Verdict(
                "6 turns", f"{name}: window on {task} loses over 10 points against on the question"
                " (the paper does not say)", shown(gap, "+.0f", " points"), below(gap, -10),
            ))  # fmt: skip
    return table, found


def _against_question(rows: Sequence[dict], label: str, task: str) -> Any:
    pair = [{"method": label, "task": t} for t in (task, WINDOWS[0])]
    return paired(rows, "token_match", *pair, ("prompt",), lambda a, b: 100 * (a - b))


def pile(
    run: Run,
    loaded: hub.Loaded,
    questions: Sequence[Question],
    chunk: int,
    steps: int,
    ratio: float,
) -> Iterator[str]:
    """Rows of study 7: {group, task, prompt, method, step, kl, nll, ratio}, the answer at the end.

    Args:
        run: gets the rows.
        loaded: the model.
        questions: of `ablation_prompts.piling`, contexts of one length.
        chunk: tokens a step.
        steps: before the question.
        ratio: of the first compression and of every later one.
    """
    cells = [
        {"group": PILE, "task": q.task, "prompt": q.number, "method": arm, "step": step}
        for arm in ARMS for step in range(steps + 1) for q in questions
    ]  # fmt: skip
    if all(run.finished(cell) is not None for cell in cells):
        yield ""
        return
    contexts = decode.left_pad([q.context for q in questions])
    prefill = decode.prefill(loaded.model, loaded.params, *contexts)
    log_p: list[jax.Array] = []
    for arm in ARMS:
        for step, found in enumerate(_steps(loaded, prefill, questions, chunk, steps, ratio, arm)):
            logits, targets, scored, stored = found
            if arm == "full":
                log_p.append(jax.nn.log_softmax(logits, -1))
            values = ablation_batch.quality(log_p[step], logits, targets, scored)
            values["nll"] = values.pop("answer_nll")
            values = {name: np.asarray(x, np.float64) for name, x in values.items()}
            for i, q in enumerate(questions):
                key = {"group": PILE, "task": q.task, "prompt": q.number, "method": arm,
                       "step": step}  # fmt: skip
                if run.finished(key) is None:
                    tokens = prefill.lengths[i] + min((step + 1) * chunk, len(q.follows))
                    run.append(key | {n: float(x[i]) for n, x in values.items()}
                               | {"ratio": float(stored[i]), "tokens": int(tokens),
                                  "last": step == steps})  # fmt: skip
        yield arm


def _steps(loaded, prefill, questions, chunk, steps, ratio, arm) -> Iterator[tuple]:
    """Logits, their targets, which of them count, and measured ratios, after every step."""
    model, params = loaded.model, loaded.params
    longest = max(len(q.follows) for q in questions)
    total = int(prefill.lengths.max())

    def method(tokens):
        if arm == "full":
            return registry.make("full")
        shape = ablation_batch.shape_of(loaded, tokens)
        label = ablation_settings.BASE
        return solve(label, registry.make(label), Budget(ratio=ratio), shape).method

    caches = decode.compress(method(total), prefill.prompts, model, reserve=longest)
    bounds = [(i * chunk, (i + 1) * chunk) for i in range(steps)] + [(steps * chunk, longest)]
    for step, (first, last) in enumerate(bounds):
        ids = [q.follows[first:last] for q in questions]
        tokens = np.zeros((len(ids), last - first), np.int32)
        positions = np.full(tokens.shape, -1, np.int32)
        for row, place, own, n in zip(tokens, positions, ids, prefill.lengths, strict=True):
            row[: len(own)] = own
            place[: len(own)] = n + first + np.arange(len(own))
        hidden, caches = decode.extend(
            model, params, caches, jnp.asarray(tokens), jnp.asarray(positions)
        )
        if step < steps:
            columns = np.linspace(0, chunk - 2, min(32, chunk - 1)).astype(int)
            columns = np.broadcast_to(columns, (len(ids), len(columns)))
            scored = np.ones(columns.shape, bool)
        else:
            columns = np.stack([len(own) - 1 - np.arange(8, 0, -1) for own in ids])
            starts = np.array([q.answer_start for q in questions])[:, None]
            scored = first + columns + 1 >= starts
        rows = np.arange(len(ids))[:, None]
        logits = decode.head(model, params, hidden[rows, columns])
        targets = jnp.asarray(np.take_along_axis(tokens, columns + 1, 1))
        if arm == "compressed again" and step < steps:
            recent = np.array([(*q.context, *q.follows[:last])[-32:] for q in questions], np.int32)
            caches = turns.recompress(
                model, params, caches, method(total + last), jnp.asarray(recent), reserve=longest
            )
        yield logits, targets, jnp.asarray(scored), _ratio(caches, prefill.lengths, ids, first)


def _ratio(caches, lengths, ids, first) -> np.ndarray:
    """Full bfloat16 bytes of all tokens so far over live bytes, the tail's included."""
    live = accounting.live_bytes(caches)
    keys = caches[0].tail.k
    a_token = 4 * keys.shape[1] * keys.shape[3] * len(caches)
    tokens = np.array([n + first + len(own) for n, own in zip(lengths, ids, strict=True)])
    return a_token * tokens / (live.stored + live.tail)


def pile_report(run: Run, ratio: float) -> tuple[str, list[Verdict]]:
    """Study 7."""
    rows = [r for r in run.rows if r["group"] == PILE]
    steps = [r for r in rows if not r["last"]]
    means = plots.group_means(steps, ["task", "method", "step", "tokens"], ("kl", "nll", "ratio"))
    columns = [
        Column("what piles up", "task"), Column("cache", "method"), Column("tokens", "tokens"),
        Column("effective ratio", lambda r: f"{r['ratio']:.2f}x"),
        Column("KL of the step's tokens", interval("kl", ".3f")),
        Column("NLL", interval("nll", ".2f")), Column("n", "n"),
    ]  # fmt: skip
    table = markdown(means, columns, f"7 Tokens piling up after {ratio:.0f}x")
    final = plots.group_means(
        [r for r in rows if r["last"]], ["task", "method"], ("token_match", "nll", "ratio")
    )
    table += "\n" + markdown(final, [
        Column("what piled up", "task"), Column("cache", "method"),
        Column("effective ratio", lambda r: f"{r['ratio']:.2f}x"),
        Column("needle: tokens right %", interval("token_match", ".0f", 100)),
        Column("answer NLL", interval("nll", ".2f")), Column("n", "n"),
    ], "7 The needle of the context, asked for afterwards")  # fmt: skip
    panels: dict[str, list] = {}
    for task in dict.fromkeys(r["task"] for r in means):
        for name, field in (("effective ratio", "ratio"), ("KL", "kl")):
            panels[f"{task}: {name}"] = [
                m | as_y(field, m) for m in means if m["task"] == task and m["method"] != "full"
            ]
    labels = {p: "times" if p.endswith("ratio") else "nats a token" for p in panels}
    run.save_figure("pile", lines(
        panels, "tokens", "y", "method", x_label="tokens so far", y_label=labels,
        title=f"Exact tokens piling up after {ratio:.0f}x, n = {means[0]['n']}",
    ))  # fmt: skip
    found = []
    end = max(r["step"] for r in steps)
    for task in dict.fromkeys(r["task"] for r in rows):
        own = [r for r in steps if r["task"] == task and r["step"] == end]
        kept, again = ({"method": m} for m in ARMS[1:])
        loss = paired(own, "ratio", kept, again, ("prompt",), lambda a, b: a / b)
        found.append(Verdict(
            "7 piling up", f"{task}: tokens kept exact halve the effective ratio",
            f"kept over compressed again {shown(loss, '.2f')}", below(loss, 0.5),
        ))  # fmt: skip
        gap = paired(own, "kl", again, kept, ("prompt",))
        found.append(Verdict(
            "7 piling up", f"{task}: compressing again costs KL on the tokens that follow",
            shown(gap, "+.3f", " nats"), above(gap, 0),
        ))  # fmt: skip
        last = [r for r in rows if r["task"] == task and r["last"]]
        gap = paired(last, "nll", again, kept, ("prompt",))
        found.append(Verdict(
            "7 piling up", f"{task}: compressing again costs the needle of the context",
            f"answer NLL {shown(gap, '+.2f', ' nats')}", above(gap, 0),
        ))  # fmt: skip
    return table, found
