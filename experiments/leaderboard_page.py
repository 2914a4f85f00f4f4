"""The leaderboard as Markdown, CSV and one HTML page that needs no other file."""

import csv
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.leaderboard_rows import MEAN
from experiments.plots import bytes_text
from experiments.report import Column, markdown, table

Cells = Sequence[Mapping[str, Any]]

CSV_FIELDS = (
    "title", "group", "method", "target_ratio", "ratio", "kv_bytes", "task", "score", "low", "high",
    "n", "limit", "no_op",
)  # fmt: skip


def lines_of(rows: Cells, board: int) -> list[dict[str, Any]]:
    """One line an arm with its cells by task; full first, then by target, best mean first."""
    lines: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        if row["board"] == board:
            key = row["method"], row["target_ratio"]
            line = lines.setdefault(key, {k: row[k] for k in row if k not in _OF_A_CELL})
            line.setdefault("cells", {})[row["task"]] = row

    def order(line: Mapping[str, Any]) -> tuple:
        cells = line["cells"].values()
        mean = line["cells"].get(MEAN) or {"score": sum(c["score"] for c in cells) / len(cells)}
        return line["method"] != "full", line["group"] or 0, -mean["score"], line["method"]

    return sorted(lines.values(), key=order)


_OF_A_CELL = ("task", "score", "low", "high", "n")


def tasks_of(rows: Cells, board: int) -> list[str]:
    """Tasks of a board, the mean first."""
    tasks = list(dict.fromkeys(row["task"] for row in rows if row["board"] == board))
    return ([MEAN] if MEAN in tasks else []) + [task for task in tasks if task != MEAN]


def cell_text(cell: Mapping[str, Any] | None) -> str | None:
    """Score with its interval; the number of prompts where it is few."""
    if cell is None:
        return None
    if cell["low"] is None:
        return f"{cell['score']:.1f} (n = {cell['n']})"
    return f"{cell['score']:.1f} [{cell['low']:.0f}, {cell['high']:.0f}]"


def mark(line: Mapping[str, Any]) -> str | None:
    """What is to be said of an arm: no compression at all, or why the target was not met."""
    notes = [line["limit"]] if line["limit"] else []
    return ", ".join((["no-op"] if line["no_op"] else []) + notes) or None


def group_text(line: Mapping[str, Any]) -> str:
    """The bytes at which an arm is compared."""
    if line["method"] == "full":
        return "full"
    return f"{line['group']:.3g}x" if line["group"] else "more than any"


def columns(rows: Cells, board: int) -> list[Column]:
    """Columns of a board's table."""
    lines = lines_of(rows, board)
    found = [
        Column("at most", group_text),
        Column("method", "method"),
        Column("asked", lambda line: f"{line['target_ratio']:.2f}x"),
        Column("stored", lambda line: f"{line['ratio']:.2f}x" if line["ratio"] else None),
    ]
    for task in tasks_of(rows, board):
        counts = sorted({line["cells"][task]["n"] for line in lines if task in line["cells"]})
        n = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        found.append(
            Column(f"{task}, n = {n}", lambda line, task=task: cell_text(line["cells"].get(task)))
        )
    return [*found, Column("note", mark)]


def markdown_page(rows: Cells, notes: Sequence[str], explained: str) -> str:
    """All boards as Markdown."""
    parts = []
    for board, note in enumerate(notes):
        lines = lines_of(rows, board)
        parts.append(markdown(lines, columns(rows, board), lines[0]["title"]) + f"\n{note}\n")
    return "\n".join([*parts, explained])


def explanation(unscored: int, tolerance: float) -> str:
    """How to read a board.

    Args:
        unscored: rows that were left out.
        tolerance: share by which an arm's bytes may exceed its target's.
    """
    return (
        "Scores from 0 to 100 with 95 % intervals over prompts (Wilson for right or wrong, t"
        " otherwise, which has no width where all prompts score alike); the mean of tasks is"
        " unweighted. *At most*: the bytes at which arms are compared, full bfloat16 bytes over"
        " stored bytes; an arm stands at the largest target whose bytes it exceeds by no more than"
        f" {tolerance:.1%}, by measure, so a method with discrete settings may have fewer bytes"
        " than its neighbours and never more. *Asked* and *stored*: what was asked for and what"
        " the arrays hold. *no-op*: nothing was compressed. Within a target, the best mean comes"
        f" first. Rows left out: {unscored:,} (timings, text without a score, sizes not"
        " measured).\n"
    )


def print_tables(rows: Cells) -> None:
    """Print each board."""
    for board in sorted({row["board"] for row in rows}):
        lines = lines_of(rows, board)
        table(lines, columns(rows, board), lines[0]["title"])


def write_csv(path: Path, rows: Cells) -> None:
    """Write one line a cell."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, CSV_FIELDS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def html_page(rows: Cells, notes: Sequence[str], explained: str) -> str:
    """All boards as one page: tables that sort on a click, and a choice of target."""
    boards = []
    for board, note in enumerate(notes):
        lines = lines_of(rows, board)
        boards.append(_board(lines, tasks_of(rows, board), lines[0]["title"], note))
    return (
        "<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n"
        "<meta name=viewport content='width=device-width, initial-scale=1'>\n"
        f"<title>KV cache compression at matched bytes</title>\n<style>{_STYLE}</style>\n"
        "<h1>KV cache compression at matched bytes</h1>\n"
        f"<p class=note>{_emphasis(explained)}</p>\n"
        + "\n".join(boards)
        + f"\n<script>{_SCRIPT}</script>\n</html>\n"
    )


def _board(lines: Cells, tasks: Sequence[str], title: str, note: str) -> str:
    groups = list(dict.fromkeys(group_text(line) for line in lines if line["method"] != "full"))
    options = "".join(f"<option>{html.escape(g)}</option>" for g in groups)
    heads = ["at most", "method", "asked", "stored", "bytes", *tasks, "note"]
    head = "".join(
        f"<th scope=col aria-sort=none><button type=button>{html.escape(h)}</button></th>"
        for h in heads
    )
    body = "\n".join(_line(line, tasks) for line in lines)
    return (
        f"<section>\n<h2>{html.escape(title)}</h2>\n<p class=note>{html.escape(note)}</p>\n"
        f"<label>Stored at most <select><option value=''>every target</option>{options}</select>"
        "</label>\n<div class=scroll><table>\n"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>\n</section>"
    )


def _line(line: Mapping[str, Any], tasks: Sequence[str]) -> str:
    full = line["method"] == "full"
    group = group_text(line)
    ratio = f"{line['ratio']:.2f}x" if line["ratio"] else "–"
    stored = bytes_text(line["kv_bytes"]) if line["kv_bytes"] else "–"
    parts = [
        _cell(group, 0 if full else line["group"] or 0.5),
        f"<th scope=row data-v='{html.escape(line['method'], quote=True)}'>"
        f"{html.escape(line['method'])}</th>",
        _cell(f"{line['target_ratio']:.2f}x", line["target_ratio"]),
        _cell(ratio, line["ratio"] or 0),
        _cell(stored, line["kv_bytes"] or 0),
    ]
    for task in tasks:
        cell = line["cells"].get(task)
        if cell is None:
            parts.append(_cell("–", -1))
            continue
        span = "" if cell["low"] is None else f" <i>{cell['low']:.0f}–{cell['high']:.0f}</i>"
        share = min(max(cell["score"], 0.0), 100.0)
        tip = f"{task}: {cell['score']:.2f}, n = {cell['n']}"
        parts.append(
            f"<td class=score data-v='{cell['score']:.4f}' style='--s:{share:.1f}%'"
            f" title='{html.escape(tip, quote=True)}'><b>{cell['score']:.1f}</b>{span}"
            f" <small>n {cell['n']}</small></td>"
        )
    parts.append(f"<td class=note>{html.escape(mark(line) or '')}</td>")
    kind = " class=full" if full else ""
    return f"<tr{kind} data-group='{html.escape(group, quote=True)}'>{''.join(parts)}</tr>"


def _cell(text: str, value: float) -> str:
    return f"<td data-v='{value:.6g}'>{html.escape(text)}</td>"


def _emphasis(text: str) -> str:
    parts = html.escape(text).split("*")
    return "".join(f"<em>{part}</em>" if i % 2 else part for i, part in enumerate(parts))


_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5a6472; --line: #d9dee5;
  --paper: #ffffff; --bar: #cfe3f6; --star: #fff4d6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #a2acba; --line: #343b46;
  --paper: #15181d; --bar: #1f3d5a; --star: #3a3115; } }
body { margin: 2rem auto; max-width: 110rem; padding: 0 1rem; color: var(--ink);
  background: var(--paper); font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .3rem; }
.note { color: var(--soft); font-size: .85rem; max-width: 70rem; }
.scroll { overflow-x: auto; margin-top: .6rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; }
th, td { padding: .28rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
tbody th, td.note, thead th:nth-child(2), thead th:last-child { text-align: left; }
tbody th { font-weight: 600; }
thead th { position: sticky; top: 0; background: var(--paper);
  border-bottom: 2px solid var(--soft); }
thead button { all: unset; cursor: pointer; font-weight: 600; }
thead button:focus-visible { outline: 2px solid currentColor; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
td.score { background: linear-gradient(to right, var(--bar) var(--s), transparent var(--s)); }
td.score i { color: var(--soft); font-style: normal; } small { color: var(--soft); }
tr.full td:not(.score), tr.full th { background: var(--star); }
""".strip()

_SCRIPT = """
for (const section of document.querySelectorAll('section')) {
  const body = section.querySelector('tbody'), heads = [...section.querySelectorAll('thead th')];
  const value = (row, i) => row.cells[i].dataset.v ?? row.cells[i].textContent;
  heads.forEach((head, i) => head.querySelector('button').addEventListener('click', () => {
    const down = head.getAttribute('aria-sort') !== 'descending';
    heads.forEach(h => h.setAttribute('aria-sort', 'none'));
    head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    const rows = [...body.rows], numbers = rows.every(r => !isNaN(value(r, i)));
    rows.sort((a, b) => (down ? -1 : 1) * (numbers
      ? value(a, i) - value(b, i) : value(a, i).localeCompare(value(b, i))));
    rows.forEach(r => body.append(r));
  }));
  section.querySelector('select').addEventListener('change', event => {
    for (const row of body.rows) row.hidden = event.target.value !== ''
      && row.dataset.group !== event.target.value && row.dataset.group !== 'full';
  });
}
""".strip()
