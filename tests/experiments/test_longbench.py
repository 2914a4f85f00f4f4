"""The LongBench experiment on random weights: rows, files, tables, errors."""

import csv
import dataclasses
import json
from types import SimpleNamespace

import pytest

from experiments import longbench, longbench_report
from experiments.longbench import TINY, run
from experiments.ratio_arms import at_ratios
from experiments.runner import Run, main
from kvjax.evaluation.longbench import DATASETS
from kvjax.types import PromptShape
from tests.evaluation.test_needle import Bytes


def test_scores_and_predictions_have_the_fields_that_others_read(tmp_path):
    with Run.create(TINY, tmp_path) as made:
        run(TINY, made)
        rows = made.rows
    with open(made.path / "scores.csv", newline="") as file:
        scores = list(csv.DictReader(file))
    assert list(scores[0]) == ["method", "config", "dataset", "id", "score"]
    assert len(scores) == len(rows) == 3 * TINY.rows
    assert {(s["method"], s["config"]) for s in scores} == {
        ("full", ""), ("snapkv", "2x"), ("kivi(residual_length=64)", "2x"),
    }  # fmt: skip
    assert all(0 <= float(s["score"]) <= 1 for s in scores)
    lines = [json.loads(x) for x in (made.path / "predictions.jsonl").read_text().splitlines()]
    assert len(lines) == len(rows)
    wanted = {"input", "answers", "pred", "all_classes", "length", "dataset", "language", "_id"}
    assert wanted <= set(lines[0]) and lines[0]["dataset"] == "trec"
    for line, row, score in zip(lines, rows, scores, strict=True):
        assert line["pred"] == row["prediction"] and line["score"] == row["score"] / 100
        assert float(score["score"]) == pytest.approx(line["score"], abs=1e-6)
        assert row["new_tokens"] <= TINY.max_new_tokens
        assert row["context_tokens"] <= TINY.max_tokens + 1
    summary = (made.path / "summary.md").read_text()
    assert "our own wording" in summary and "2 of 2 rows lost tokens" in summary


def rows_of(scores, task="trec"):
    shared = {
        "task": task, "ratio": 1.0, "kv_bytes": 10, "token_match": 0.5, "answer_nll": 1.0,
        "new_tokens": 3, "context_tokens": 9, "empty": False, "finish_reason": "limit",
        "limit": None,
    }  # fmt: skip
    return [
        shared | {"method": m, "target_ratio": r, "id": str(i), "score": s}
        for (m, r), values in scores.items()
        for i, s in enumerate(values)
    ]


def test_differences_are_paired_with_the_same_sample_of_the_full_cache():
    rows = rows_of({("full", 1.0): [10, 90, 50], ("snapkv", 4.0): [0, 80, 40]})
    means = longbench_report.means_of(longbench_report.with_differences(rows))
    full, snapkv = means
    assert full["score"] == 50 and snapkv["score"] == 40 and snapkv["difference"] == -10
    # every sample loses the same: no doubt about the difference, much about the scores
    assert snapkv["difference_low"] == snapkv["difference_high"] == -10
    assert snapkv["score_high"] - snapkv["score_low"] > 20
    assert snapkv["cut_short"] == 100 and snapkv["empty"] == 0


def test_the_mean_of_datasets_counts_each_once():
    every, rows = [], []
    for task, scores in (("trec", [0, 0, 0, 40]), ("lcc", [90, 90])):
        both = {("full", 1.0): scores, ("snapkv", 4.0): [s - 5 for s in scores]}
        own = longbench_report.with_differences(rows_of(both, task))
        every += [m | {"task": task} for m in longbench_report.means_of(own)]
        rows += own
    full, snapkv = longbench_report.mean_of_datasets(every, rows)
    assert full["score"] == 50 and full["trec"] == 10 and full["lcc"] == 90
    assert full["score_low"] < 50 < full["score_high"] < 66  # samples within a dataset vary
    assert "difference" not in full
    assert snapkv["difference"] == snapkv["difference_low"] == snapkv["difference_high"] == -5


def test_longbench_e_is_reported_by_length():
    rows = rows_of({("full", 1.0): [10, 30, 90]})
    questions = [
        SimpleNamespace(row=SimpleNamespace(task="trec", id=str(i), extra={"length": n}))
        for i, n in enumerate((100, 3999, 9000))
    ]
    text = longbench_report.by_length(rows, questions)
    assert "| trec | full | 1.0 | 20.0 (2) | – | 90.0 (1) |" in text


def test_rows_that_are_too_short_are_left_out_and_counted():
    records = [
        {"input": "q", "context": "x" * n, "answers": ["a"], "length": n}
        for n in (10, 900, 20, 950)
    ]
    config = dataclasses.replace(TINY, max_tokens=600, min_tokens=600, rows=0, max_new_tokens=5)
    questions, left_out = longbench.select(config, {"trec": records}, Bytes())
    assert [q.row.id for q in questions] == ["1", "3"] and left_out == {"trec": 2}
    assert all(q.removed > 0 and q.row.max_new_tokens == 5 for q in questions)
    unlimited = dataclasses.replace(config, min_tokens=0, max_new_tokens=0)
    questions, left_out = longbench.select(unlimited, {"trec": records}, Bytes())
    assert len(questions) == 4 and left_out == {"trec": 0}
    assert questions[0].row.max_new_tokens == DATASETS["trec"].max_new_tokens
    with pytest.raises(ValueError, match="min_tokens=5000"):
        longbench.select(dataclasses.replace(config, min_tokens=5000), {"trec": records}, Bytes())


def test_a_set_of_samples_picks_its_rows_alone(tmp_path):
    records = [{"input": "q", "context": f"text {i}", "answers": ["a"], "length": 2} for i in "abc"]
    path = tmp_path / "set.jsonl"
    path.write_text('{"dataset": "trec", "id": "2"}\n{"dataset": "lcc", "id": "0"}\n')
    config = dataclasses.replace(TINY, only=str(path), rows=1)
    questions, _ = longbench.select(config, {"trec": records}, Bytes())
    assert [q.row.id for q in questions] == ["2"]
    with pytest.raises(ValueError, match="names no row of qasper"):
        longbench.select(config, {"qasper": records}, Bytes())


def test_a_discrete_method_stands_for_the_ratio_it_comes_nearest_to():
    shape = PromptShape(1024, 3, 64)
    planned = at_ratios(("snapkv", "kivi"), (4.0, 10.0), shape, 2)
    named = [(arm.label, arm.target_ratio) for arm in planned.arms]
    assert named == [("snapkv", 4.0), ("snapkv", 10.0), ("kivi", 4.0)]
    kivi = planned.arms[-1]
    stored = shape.full_bytes / kivi.method.layer_bytes(shape)
    assert kivi.limit == f"discrete setting, {stored:.1f}x" and 2.5 < stored < 6.4
    assert planned.absent == [f"kivi has no setting of its own near 10x at 1,024 tokens"
                              f" (nearest: {stored:.1f}x)."]  # fmt: skip
    for methods, ratios, message in (
        (("snapkv",), (-1.0,), "positive"), ((), (4.0,), "at least one"),
        (("snapkv",), (), "at least one"), (("snapkv", "full"), (4.0,), "must not name 'full'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            at_ratios(methods, ratios, shape, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no LongBench rows: name them with --folder"),
        (["--folder", "sample", "--methods", "snapvk"], "unknown method 'snapvk'"),
        (["--folder", "sample", "--datasets", "qasper"], "the sample has no qasper"),
        (["--folder", "sample", "--rows", "-1"], "rows=-1"),
        (["--folder", "sample", "--batch", "0"], "batch=0 must be at least 1"),
        (["--folder", "sample", "--methods"], "must each hold at least one"),
        (["--folder", "sample", "--max-tokens", "3"], "max_tokens=3"),
        (["--folder", "sample", "--model", "tiny", "--prompts", "/nowhere.json"], "is no file"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.delenv("KVJAX_DATA", raising=False)
    with pytest.raises(SystemExit) as stopped:
        main(longbench.Config, run, [*arguments, "--runs-dir", str(tmp_path)])
    assert stopped.value.code == 1
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error
