"""Which method keeps most in the same bytes, over all runs? One page, sortable.

    python -m experiments.leaderboard runs/ruler/<run> runs/longbench/<run>
    python -m experiments.leaderboard results/methods_at_equal_bytes results/anchorkv_sweep

Reads the rows of runs (metrics.jsonl with method, target_ratio, task, prompt and score) and writes
leaderboard.md, leaderboard.csv and leaderboard.html, one file that needs no other. Runs of one
model whose full caches agree on every prompt that they share stand in one board; others in
boards of their own.
"""

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from experiments import leaderboard_page, leaderboard_rows
from experiments.leaderboard_rows import Source
from experiments.runner import Run, main
from experiments.scored_rows import Scored


@dataclass(frozen=True)
class Config:
    """Methods × tasks at matched bytes, from the rows of runs."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """folders of runs or of results, or .jsonl files"""
    mismatch: Literal["separate", "refuse"] = "separate"
    """what to do with runs that differ in model, prompts or seed"""
    tolerance: float = 0.02
    """share by which measured bytes may exceed a target to count as matched"""


TINY = Config(runs=(Path("tiny"),))


def run(config: Config, run: Run) -> None:
    """Read, group, average, write the three files."""
    if not config.runs:
        raise ValueError("no runs: name folders, as in experiments.leaderboard runs/ruler/<run>.")
    if config.tolerance < 0:
        raise ValueError(f"tolerance={config.tolerance} must be 0 or more, a share.")
    sources = [made_up() if p == Path("tiny") and not p.exists() else leaderboard_rows.read(p)
               for p in config.runs]  # fmt: skip
    boards = leaderboard_rows.boards(sources, config.mismatch == "refuse")
    run.watch(scalars)
    with run.progress(len(boards), "boards") as progress:
        for number, board in enumerate(boards):
            for row in leaderboard_rows.cells(board, number, config.tolerance):
                key = ("board", "group", "method", "target_ratio", "task")
                if run.finished({name: row[name] for name in key}) is None:
                    run.append(row)
            progress.advance(board.title)
    notes = [leaderboard_rows.note(board) for board in boards]
    left = sum(source.unscored for source in sources)
    explained = leaderboard_page.explanation(left, config.tolerance)
    text = leaderboard_page.markdown_page(run.rows, notes, explained)
    (run.path / "leaderboard.md").write_text(text, encoding="utf-8")
    leaderboard_page.write_csv(run.path / "leaderboard.csv", run.rows)
    page = leaderboard_page.html_page(run.rows, notes, explained)
    (run.path / "leaderboard.html").write_text(page, encoding="utf-8")
    leaderboard_page.print_tables(run.rows)
    run.write_summary(text)


def made_up() -> Source:
    """A source from a fixed seed, for tests and a first look."""
    draw = np.random.default_rng(0)
    rows = []
    for method, ratio, share in (("full", 1.0, 0.9), ("snapkv", 4.0, 0.5), ("kivi", 4.2, 0.8)):
        for task, i in itertools.product(("niah_single_1", "vt"), range(8)):
            score = 100.0 * (draw.random() < share)
            stored = int(1e6 / ratio)
            where = ratio, task, 1024, str(i), score, ratio, stored
            rows.append(Scored(method, *where, None, False, "measured", float(i)))
    return Source("tiny", "made up", 0, tuple(rows), 0)


def scalars(row: dict[str, Any]) -> Any:
    """TensorBoard scalars of a row."""
    name, task = (re.sub(r"[^\w.-]", "_", row[field]) for field in ("method", "task"))
    step = round(100 * row["target_ratio"])
    yield f"leaderboard_{row['board']}/{task}_percent/{name}", row["score"], step


if __name__ == "__main__":
    main(Config, run)
