"""What the RULER experiment makes of its command line and of its rows."""

import dataclasses
import json

import numpy as np
import pytest

from experiments import ruler, ruler_plots, ruler_report
from experiments.ruler import PRESETS, Config, settle
from experiments.runner import Run
from kvjax.evaluation import ruler as tasks
from kvjax.evaluation.rows import Encoded, Row


def row(task, number, method, ratio, score, match, nll):
    return {
        "length": 1024, "task": task, "id": f"42-{number}", "method": method,
        "target_ratio": ratio, "basis": "measured", "score": score, "token_match": match,
        "answer_nll": nll, "ratio": ratio, "kv_bytes": int(1e6 / ratio), "limit": None,
        "empty": score == 0, "finish_reason": "limit" if number else "end_of_sequence",
        "setting": "", "prediction": "", "new_tokens": 3, "context_tokens": 1024,
    }  # fmt: skip


def rows():
    """Two tasks; one that the full cache cannot do; "poor" loses vt from 4 times on."""
    made = []
    for i in range(5):
        wobble = 0.01 * i
        made.append(row("niah_single_1", i, "full", 1.0, 100.0, 1.0, 0.1 + wobble))
        made.append(row("vt", i, "full", 1.0, 60.0, 0.6, 1.0))
        made.append(row("cwe", i, "full", 1.0, 0.0, 0.2, 3.0))
        for ratio, lost in ((2.0, 0.0), (4.0, 40.0)):
            made.append(row("niah_single_1", i, "poor", ratio, 100.0, 1.0, 0.1 + wobble))
            made.append(row("vt", i, "poor", ratio, 60.0 - lost + i, 0.6 - lost / 200, 1 + lost))
            made.append(row("cwe", i, "poor", ratio, 0.0, 0.2, 3.0 + (lost > 0) * (1 + wobble)))
    return made


def test_presets_fill_what_no_flag_sets():
    small = settle(Config())
    assert small.lengths == (1024,) and small.model is None and len(small.tasks) == 13
    large = settle(Config(preset="llama-3.1-8b", prompts=3))
    assert large.lengths == (32_768, 65_536) and large.prompts == 3 and large.new_tokens is None
    assert large.model == "meta-llama/Llama-3.1-8B-Instruct" and large.batch == 1
    assert {"llama-3.1-70b", "mistral-small-3.1-24b"} < set(PRESETS)
    quick = settle(Config(quick=True))
    assert quick.ratios == (4.0,) and quick.methods == ("anchorkv", "snapkv")
    assert settle(Config(quick=True, methods=("kivi", "random"))).methods == ("kivi",)
    assert settle(Config(quick=True, methods=("random",))).methods == ("random",)


def test_wrong_settings_are_errors():
    with pytest.raises(ValueError, match="tasks: 'niah' must be one of niah_single_1"):
        settle(Config(tasks=("niah",)))
    with pytest.raises(ValueError, match="prompts=0 must be at least 1"):
        settle(Config(prompts=0))
    with pytest.raises(ValueError, match="lengths and ratios"):
        settle(Config(ratios=()))


def test_tasks_that_the_full_cache_cannot_do_are_left_out_of_the_mean():
    made = ruler_report.compared(rows())
    assert ruler_report.solved_tasks(made) == ["niah_single_1", "vt"]
    found = ruler_report.scores(made, ["niah_single_1", "vt", "cwe"], ["niah_single_1", "vt"])
    full = found["arms"]["full@1.00x"]
    assert full["mean_of_all"] == pytest.approx(53.33) and full["mean_of_solved"] == 80.0
    assert full["tasks"]["cwe"] == {"score": 0.0, "n": 5}
    assert "fwe" in found["tasks_left_out"] and len(found["tasks_left_out"]) == 10
    text = ruler_report.full_cache(made, ["niah_single_1", "vt"], "title")
    assert text.count("left out of the mean") == 1


def test_a_task_is_lost_where_the_interval_of_the_paired_change_excludes_none():
    made = ruler_report.compared(rows())
    assert ruler_report.lost_at(made, ["vt"], "poor", "score_change", -1) == 4.0
    assert ruler_report.lost_at(made, ["niah_single_1"], "poor", "score_change", -1) is None
    assert ruler_report.lost_at(made, ["cwe"], "poor", "score_change", -1) is None
    # what the score cannot show, teacher forcing does
    assert ruler_report.lost_at(made, ["cwe"], "poor", "answer_nll_change", 1) == 4.0
    assert ruler_report.lost_at(made, ["cwe"], "poor", "answer_nll_change", 1, 1.1) is None
    text = ruler_report.lost(made, ["niah_single_1", "vt"], "Task lost")
    assert "| poor | 4.0x | not shown | 4.0x |" in text
    both = ["niah_single_1", "vt"]  # their prompts count together
    assert ruler_report.lost_at(made, both, "poor", "score_change", -1) == 4.0
    # one prompt gives no interval, and so nothing is said to be lost
    single = [r for r in made if r["id"] == "42-0"]
    assert ruler_report.lost_at(single, ["vt"], "poor", "score_change", -1) is None


def test_intervals_of_several_tasks_resample_prompts_within_tasks():
    made = ruler_report.compared(rows())
    both = ruler_report.balanced(made, "score", ["niah_single_1", "vt"], ("poor", 4.0))
    assert both["score"] == pytest.approx((100 + 22) / 2)
    assert both["score_low"] < both["score"] < both["score_high"]
    assert both["score_high"] - both["score_low"] < 2  # the tasks' difference is no noise
    assert ruler_report.balanced(made, "score", ["fwe"], ("poor", 4.0)) is None
    nothing = [r | {"score": 0.0} for r in made]  # no spread is not certainty
    none = ruler_report.balanced(nothing, "score", ["niah_single_1", "vt"], ("poor", 4.0))
    assert none["score"] == none["score_low"] == 0 and 5 < none["score_high"] < 60
    one = [r for r in made if r["id"] == "42-0"]  # one prompt a task gives no interval
    assert ruler_report.balanced(one, "score", ["vt"], ("poor", 4.0))["score_low"] is None


def test_a_negative_set_is_a_task(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text('{"dataset": "vt@700", "id": "42-1"}\n')
    config = dataclasses.replace(ruler.TINY, only=str(path))
    with Run.create(config, tmp_path, "ruler") as run:
        ruler.run(config, run)
        found = [(r["task"], r["id"], r["method"]) for r in run.rows]
    assert found == [("vt", "42-1", "full"), ("vt", "42-1", "snapkv")]


def test_report_is_made_of_rows_alone(tmp_path):
    config = settle(Config())
    with Run.create(config, tmp_path, "ruler") as run:
        run.watch(ruler_report.scalars)
        for made in rows():
            run.append(made)
        ruler_report.report(config, run, "tiny")
        text = (run.path / "summary.md").read_text()
        record = json.loads((run.path / "scores.json").read_text())
        pictures = {file.name for file in run.path.glob("*.png")}
    assert pictures == {"score_1024.png", "gold_1024.png", "tasks_1024.png"}
    assert record["harness"].startswith("RULER-style") and "RULER-style" in text
    assert "| full | 1.0x | 1.00x | 0.0% | 15 | 80.0" in text and "(cwe)" in text
    assert "Families of tasks" in text and "aggregation" in text


def test_heat_map_has_a_cell_for_every_task_and_arm():
    figure = ruler_plots.heat_map(rows(), ["vt"], "title")
    upper, lower = figure.axes[:2]
    assert [label.get_text() for label in upper.get_yticklabels()] == [
        "(niah_single_1)", "vt", "(cwe)",
    ]  # fmt: skip
    shown = np.array([float(text.get_text()) for text in upper.texts]).reshape(3, 3)
    assert (shown[0] == 100).all() and (shown[1] == [60, 62, 22]).all()
    assert [label.get_text() for label in lower.get_xticklabels()] == [
        "full", "poor 2.0x", "poor 4.0x",
    ]  # fmt: skip


def test_every_task_belongs_to_one_family():
    named = [task for family in ruler_report.FAMILIES.values() for task in family]
    assert len(named) == len(set(named)) and set(tasks.TASKS) < set(named)


def test_official_files_run_whole_unless_a_flag_says_how_many(tmp_path):
    for task in ("vt", "cwe"):
        lines = [
            {"index": i, "input": f"Text {i}.\nQuestion: which?", "outputs": ["a"]}
            for i in range(5)
        ]
        (tmp_path / f"{task}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    config = Config(official=str(tmp_path), tasks=("vt", "fwe"))
    assert [row.id for row in ruler.official(config)] == list("01234")
    two = dataclasses.replace(config, tasks=("cwe", "vt"), prompts=2)
    assert [(r.task, r.id) for r in ruler.official(two)] == [
        ("cwe", "0"), ("cwe", "1"), ("vt", "0"), ("vt", "1"),
    ]  # fmt: skip


def test_questions_and_answers_of_like_lengths_go_together():
    def question(length, limit):
        row = Row(str(length), "c", "q", "", ("a",), limit, "vt")
        return Encoded(row, (1,), (0,) * length)

    made = [question(*size) for size in ((93, 64), (20, 64), (60, 30), (30, 30), (91, 64))]
    parts = [[len(q.question_ids) for q in part] for part in ruler.by_size(made)]
    assert parts == [[30, 60], [20], [91, 93]]
