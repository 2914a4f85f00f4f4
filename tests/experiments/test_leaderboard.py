"""What may stand in one board, who is compared at which bytes, and the page."""

import csv
import dataclasses
import json
import math
from html.parser import HTMLParser

import pytest

from experiments import leaderboard, leaderboard_page, leaderboard_rows, scored_rows
from experiments.leaderboard import Config
from experiments.leaderboard_rows import MEAN, Source
from experiments.runner import Run
from experiments.scored_rows import Scored
from models import hub


def rows(method, target, scores, *, task="vt", stored=None, check=1.0, aware=False, limit=None):
    stored = stored or target
    return tuple(
        Scored(method, target, task, 1024, str(i), float(score), stored, round(1e6 / stored), limit,
               aware, "measured", check + i)
        for i, score in enumerate(scores)
    )  # fmt: skip


def source(name, *parts, model="m", seed=1):
    return Source(name, model, seed, tuple(row for part in parts for row in part), 0)


FULL = rows("full", 1.0, (100, 100))


def test_runs_that_agree_stand_in_one_board_and_shared_rows_count_once():
    one = source("one", FULL, rows("snapkv", 4.0, (0, 100)))
    two = source("two", FULL, rows("kivi", 4.0, (50, 100)))
    (board,) = leaderboard_rows.boards([one, two])
    cells = leaderboard_rows.cells(board, 0, 0.02)
    assert {(c["method"], c["n"]) for c in cells} == {("full", 2), ("snapkv", 2), ("kivi", 2)}
    assert board.apart is None and board.title == "m, 1,024 tokens, question-agnostic"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (source("b", rows("full", 1.0, (100, 100), check=1.2)), "a likelihood of 1.2 and 1;"),
        (source("b", rows("full", 1.0, (100, 40))), "40 and 100 points"),
        (source("b", FULL, model="n"), "are of n and m"),
        (source("b", rows("h2o", 4.0, (1, 1))), "no full-cache row on a prompt in common"),
        (source("b", rows("full", 1.0, (9,), task="cwe"), seed=2), "seeds 2 and 1"),
        (source("b", rows("full", 1.0, (9,), task="cwe"), model=None), "does not say its model"),
    ],
)
def test_runs_that_differ_are_apart_or_refused(other, why):
    one = source("a", FULL)
    boards = leaderboard_rows.boards([one, other])
    assert len(boards) == 2 and why in boards[1].apart and "b alone" in boards[1].title
    with pytest.raises(ValueError, match=why):
        leaderboard_rows.boards([one, other], refuse=True)


def test_other_tasks_of_the_same_model_join_and_aware_never_does():
    other = source("b", rows("full", 1.0, (10, 30), task="cwe"))
    (board,) = leaderboard_rows.boards([source("a", FULL), other])
    mean = [c for c in leaderboard_rows.cells(board, 0, 0.02) if c["task"] == MEAN]
    assert [c["score"] for c in mean] == [60.0] and mean[0]["n"] == 4
    aware = source("c", rows("full", 1.0, (100, 100), aware=True))
    boards = leaderboard_rows.boards([source("a", FULL), aware], refuse=True)
    assert [b.aware for b in boards] == [False, True] and "question-aware" in boards[1].title


def groups(*parts):
    (board,) = leaderboard_rows.boards([source("a", FULL, *parts)])
    cells = leaderboard_rows.cells(board, 0, 0.02)
    return {(c["method"], c["target_ratio"]): c["group"] for c in cells}


def test_an_arm_never_has_more_bytes_than_its_group():
    found = groups(
        rows("snapkv", 2.0, (1, 1)), rows("h2o", 2.0, (1, 1)),
        rows("snapkv", 4.0, (1, 1), stored=4.02), rows("h2o", 4.0, (1, 1), stored=3.95),
        rows("kivi", 3.3, (1, 1), limit="discrete setting"),
        rows("kivi", 4.2, (1, 1), limit="discrete setting"),
        rows("kivi", 1.5, (1, 1), limit="discrete setting"),
        rows("gear", 8.0, (1, 1), stored=4.1, limit="limit 4.1x"),
        rows("adakv", 8.0, (1, 1), stored=7.0),
    )  # fmt: skip
    assert found == {
        ("full", 1.0): None, ("snapkv", 2.0): 2, ("h2o", 2.0): 2, ("snapkv", 4.0): 4,
        ("h2o", 4.0): 4, ("kivi", 3.3): 2, ("kivi", 4.2): 4, ("kivi", 1.5): None,
        ("gear", 8.0): 4, ("adakv", 8.0): 4,
    }  # fmt: skip
    # Discrete settings are targets only where nothing else is.
    kivi = rows("kivi", 3.0, (1, 1), limit="discrete setting")
    assert groups(kivi)[("kivi", 3.0)] == 3
    assert groups(kivi, rows("snapkv", 2.0, (1, 1)))[("kivi", 3.0)] == 2


def test_a_discrete_setting_of_two_runs_is_one_arm():
    one, two = (
        source(name, FULL, rows("kivi", target, (50, 100), limit="discrete setting"))
        for name, target in (("a", 4.196), ("b", 4.197))
    )
    (board,) = leaderboard_rows.boards([one, two])
    cells = leaderboard_rows.cells(board, 0, 0.02)
    assert [(c["method"], c["target_ratio"], c["n"]) for c in cells] == [
        ("full", 1.0, 2), ("kivi", 4.2, 2)
    ]  # fmt: skip


def test_full_comes_first_and_the_best_mean_next():
    (board,) = leaderboard_rows.boards(
        [source("a", rows("snapkv", 4.0, (0, 50)), rows("h2o", 4.0, (60, 50)), FULL)]
    )
    cells = leaderboard_rows.cells(board, 0, 0.02)
    assert [r["method"] for r in leaderboard_page.lines_of(cells, 0)] == ["full", "h2o", "snapkv"]


def test_interval_of_the_mean_of_tasks():
    parts = [
        {"task": "a", "score": 50.0, "low": 44.0, "high": 53.0, "n": 5},
        {"task": "b", "score": 100.0, "low": 92.0, "high": 100.0, "n": 7},
    ]
    mean = leaderboard_rows.mean_of(parts)
    assert mean["score"] == 75 and mean["n"] == 12
    assert mean["low"] == pytest.approx(75 - math.hypot(6, 8) / 2)
    assert mean["high"] == pytest.approx(75 + 3 / 2)
    assert leaderboard_rows.mean_of([parts[0], parts[1] | {"low": None}])["low"] is None


def test_an_arm_that_compresses_nothing_is_marked():
    (board,) = leaderboard_rows.boards(
        [source("a", FULL, rows("snapkv", 4.0, (1, 1), stored=1.0, limit="limit 1.0x"))]
    )
    lines = leaderboard_page.lines_of(leaderboard_rows.cells(board, 0, 0.02), 0)
    assert [leaderboard_page.mark(line) for line in lines] == [None, "no-op, limit 1.0x"]


def test_rows_of_every_experiment_are_read(tmp_path):
    lines = [
        {"method": "full", "target_ratio": 1.0, "task": "vt", "id": "a", "score": 50, "length": 9},
        {"method": "anchorkv:paper_short", "target_ratio": 4.0, "task": "noise_7", "prompt": 3,
         "token_match": 0.25, "basis": "measured", "answer_nll": 0.5, "aware": True},
        {"method": "h2o", "target_ratio": 4.0, "task": "timing", "prompt": 0},
        {"method": "h2o", "target_ratio": 4.0, "task": "vt", "id": "a", "score": 1,
         "basis": "idealised"},
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = {"config": {"seed": 7, "model": "some/model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = leaderboard_rows.read(tmp_path)
    assert (found.model, found.seed, found.unscored) == ("some/model", 7, 2)
    assert [(r.method, r.id, r.score, r.aware) for r in found.rows] == [
        ("full", "a", 50.0, False), ("paper_short:anchorkv", "3", 25.0, True),
    ]  # fmt: skip
    assert found.rows[1].check == 0.5
    (tmp_path / "config.json").write_text(json.dumps({"config": {"model": None}}))
    assert leaderboard_rows.read(tmp_path).model == hub.DEFAULT_NAME
    (tmp_path / "summary.md").write_text("## Llama-3.1-8B, 4,096 tokens, n = 3\n\nSeed 5.\n")
    assert leaderboard_rows.described(tmp_path) == ("Llama-3.1-8B", 5)
    (tmp_path / "summary.md").write_text("## The full cache: Llama-3.1-8B, 4,096 tokens, n = 3\n")
    assert leaderboard_rows.described(tmp_path)[0] == "Llama-3.1-8B"
    (tmp_path / "metrics.jsonl").write_text('{"kind": "kernel", "op": "x"}\n')
    with pytest.raises(ValueError, match="no row with method, target_ratio, task, id"):
        scored_rows.read(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no metrics.jsonl"):
        scored_rows.read(tmp_path / "none")


class Page(HTMLParser):
    """Counts what a page is made of."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.links, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        names = dict(attrs)
        self.links += [names[a] for a in ("src", "href") if a in names]
        if tag == "tr":
            self.rows.append({"cells": 0, **names})
        if tag in ("td", "th"):
            self.rows[-1]["cells"] += 1
        if tag in ("table", "section", "script", "style", "tr", "select"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in ("table", "section", "script", "style", "tr", "select"):
            assert self.open.pop() == tag


def made(tmp_path, *sources):
    boards = leaderboard_rows.boards(list(sources))
    cells = [c for i, board in enumerate(boards) for c in leaderboard_rows.cells(board, i, 0.02)]
    notes = [leaderboard_rows.note(board) for board in boards]
    return cells, leaderboard_page.html_page(cells, notes, leaderboard_page.explanation(3, 0.02))


def test_the_page_is_one_file_with_whole_tables(tmp_path):
    odd = rows("kivi(<b>='&')", 4.2, (50, 100), limit="discrete setting")
    cells, text = made(
        tmp_path,
        source("a", FULL, rows("snapkv", 4.0, (0, 100)), odd),
        source("z", rows("full", 1.0, (100, 100), aware=True)),
    )
    page = Page(text)
    assert page.links == [] and page.open == [] and "http" not in text and "@import" not in text
    assert "<b>=" not in text and "kivi(&lt;b&gt;=" in text
    assert text.count("<table>") == 2 and text.count("<script>") == 1
    widths = {row["cells"] for row in page.rows}
    assert widths == {7}  # at most, method, asked, stored, bytes, vt, note
    assert [row.get("data-group") for row in page.rows] == [None, "full", "4x", "4x", None, "full"]
    assert "by no more than 2.0%" in text and "n 2" in text and "Rows left out: 3" in text


def test_a_run_writes_markdown_csv_and_page(tmp_path):
    with Run.create(leaderboard.TINY, tmp_path) as run:
        leaderboard.run(leaderboard.TINY, run)
    with open(run.path / "leaderboard.csv", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(run.rows) == 9  # three arms, two tasks and their mean
    assert {line["task"] for line in lines} == {"niah_single_1", "vt", MEAN}
    assert "| full | full | 1.00x |" in (run.path / "leaderboard.md").read_text()
    assert Page((run.path / "leaderboard.html").read_text()).open == []
    for config, message in (
        (Config(), "no runs: name folders"),
        (dataclasses.replace(leaderboard.TINY, tolerance=-5), "tolerance=-5 must be 0 or more"),
    ):
        with pytest.raises(ValueError, match=message), Run.create(config, tmp_path) as run:
            leaderboard.run(config, run)
