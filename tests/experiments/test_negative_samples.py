"""Negative samples as an experiment: the study's counts, own runs as input, sets, verdicts."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from experiments import negative_input, negative_samples, negative_study
from experiments.negative_samples import TINY, Config, judge
from experiments.runner import Run
from kvjax.evaluation import negatives
from kvjax.evaluation.negatives import Arm


def execute(config, folder):
    with Run.create(config, folder) as run:
        negative_samples.run(config, run)
    return run


@pytest.fixture(scope="module")
def study(data_folder, tmp_path_factory):
    config = Config(scores=(data_folder / negative_input.SHARED,), margins=(10.0,), rules=("mean",))
    return execute(config, tmp_path_factory.mktemp("study"))


def test_counts_of_the_study_are_printed(study):
    counts = [row for row in study.rows if row["kind"] == "count"]
    assert len(counts) == 36 and all(row["negatives"] == row["study"] for row in counts)
    failures = {
        (row["methods"], row["task"]): row["negatives"]
        for row in study.rows
        if row["kind"] == "failures"
    }
    both = "h2o and streamingllm"
    assert failures[both, "all"] == 136 and failures[both, "Summarisation"] == 53 + 21 + 9
    assert failures["kivi", "all"] == 87
    text = (study.path / "summary.md").read_text()
    assert "| h2o and streamingllm | 218 | 211 | 190 | 162 | 136 | 97 | 51 | 35 | 342 |" in text
    assert "All 36 counts are those of the study's own extractors" in text


def test_the_nearest_definitions_stand_beside_the_published_figures(study):
    found = {
        (row["kind"], row["pick"]): row for row in study.rows if row["kind"].startswith("study_")
    }
    nearest = found["study_composition", "nearest of all"]
    stated = found["study_composition", "as the study's code reads"]
    assert stated["figures"] == pytest.approx([62.07, 49.59, 39.53, 32.27], abs=0.01)
    assert nearest["distance"] <= stated["distance"] < 4
    scores = found["study_scores", "as the study's code reads"]
    assert scores["counts"] == [21, 2, 1] and scores["rule"] == "mean"
    text = (study.path / "summary.md").read_text()
    for figure in ("66.7", "54.6", "43.0", "32.6", "97.0 / 30.0 / 57.2 / 61.3", "GEAR's 73.0 %"):
        assert figure in text, figure


def test_sets_can_be_read_back_and_are_the_counts(study):
    files = {f.name: negatives.read_negative_set(f) for f in (study.path / "negatives").iterdir()}
    assert len(files["h2o+streamingllm.jsonl"]) == 136
    assert files["h2o+streamingllm.jsonl"] == files["h2o.jsonl"] & files["streamingllm.jsonl"]
    verdicts = json.loads((study.path / "recommendation.json").read_text())
    assert set(verdicts) == {"kivi", "h2o", "streamingllm"}
    assert verdicts["kivi"]["Summarisation"]["verdict"] == "deny"
    assert verdicts["kivi"]["Code"]["verdict"] == "allow"
    assert verdicts["h2o"]["Few-shot"]["loss"] == pytest.approx(5.5, abs=0.05)


def bounds(loss, failures):
    return {"loss_low": loss[0], "loss_high": loss[1],
            "failure_ratio_low": failures[0], "failure_ratio_high": failures[1]}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "verdict", "because"),
    [
        (bounds((-1, 1), (0, 0.1)), "allow", "both upper bounds hold"),
        (bounds((-1, 3), (0, 0.1)), "deny", "loss not ruled out"),
        (bounds((-1, 1), (0, 0.2)), "deny", "failures not ruled out"),
        (bounds((3, 4), (0, 0.2)), "deny", "loss shown"),
        (bounds((3, 4), (0.2, 0.3)), "deny", "loss and failures shown"),
        (bounds((None, None), (0, 0.1)), "deny", "loss not ruled out"),
        ({"loss_low": 0, "loss_high": 1}, "deny", "failures not ruled out"),
    ],
)
def test_verdicts(row, verdict, because):
    assert judge(row, 2.0, 0.1) == {"verdict": verdict, "because": because}


def own_run(folder, scores):
    lines = [
        {"method": m, "target_ratio": r, "basis": "measured", "task": "vt", "length": length,
         "id": str(i), "score": s}
        for (m, r, length), values in scores.items()
        for i, s in enumerate(values)
    ]  # fmt: skip
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_own_runs_are_input_and_give_a_set_for_other_experiments(tmp_path):
    folder = own_run(tmp_path / "ruler", {
        ("full", 1.0, 512): (100, 100, 0, 100), ("snapkv", 4.0, 512): (100, 0, 0, 90),
        ("full", 1.0, 1024): (100, 100, 0, 0), ("snapkv", 4.0, 1024): (100, 100, 0, 0),
    })  # fmt: skip
    run = execute(Config(scores=(folder,), rules=("mean",), margins=(10, 32)), tmp_path)
    lines = (run.path / "negatives" / "snapkv.jsonl").read_text().splitlines()
    assert [json.loads(line)["dataset"] for line in lines] == ["vt@512", "vt@512"]
    found = negatives.read_negative_set(run.path / "negatives" / "snapkv.jsonl")
    assert found == {("vt", "1"), ("vt", "3")}
    tracing = [r for r in run.rows if r["kind"] == "failures" and r["task"] == "Tracing"]
    assert [(r["margin_percent"], r["negatives"], r["benign"]) for r in tracing] == [
        (10, 2, 5), (32, 1, 5)
    ]  # fmt: skip


def test_longbench_predictions_are_a_table_out_of_1(tmp_path):
    file = tmp_path / "predictions.jsonl"
    lines = [
        {"method": m, "config": c, "id": str(i), "pred": "x", "score": s, "dataset": "trec"}
        for m, c, scores in (("full", "", (1, 0.5, 1)), ("snapkv", "4x", (0, 0.5, 1)))
        for i, s in enumerate(scores)
    ]  # fmt: skip
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = execute(Config(scores=(file,), rules=("mean",), margins=(10,)), tmp_path)
    assert negatives.read_negative_set(run.path / "negatives" / "snapkv.jsonl") == {("trec", "0")}
    (row,) = [r for r in run.rows if r["kind"] == "verdict" and r["task"] == "all"]
    assert row["baseline"] == pytest.approx(250 / 3)


def test_samples_with_the_text_of_a_positive_are_left_out(tmp_path):
    table = "method,config,dataset,id,score\n" + "".join(
        f"{m},,lcc,{i},{s}\n"
        for m, scores in (("full", (1, 1, 1, 0)), ("h2o", (0, 1, 0, 0)))
        for i, s in enumerate(scores)
    )
    (tmp_path / "scores.csv").write_text(table)
    texts = ("same", "Same", "other", "none")
    prompts = [{"dataset": "lcc", "id": i, "context": t} for i, t in enumerate(texts)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    config = Config(
        scores=(tmp_path / "scores.csv",), rows=tmp_path / "rows.jsonl", rules=("mean",),
        margins=(10,),
    )  # fmt: skip
    run = execute(config, tmp_path)
    (row,) = [r for r in run.rows if r["kind"] == "set"]
    assert (row["samples"], row["like_a_positive"], row["benign"]) == (1, 1, 3)
    (line,) = (run.path / "negatives" / "h2o.jsonl").read_text().splitlines()
    assert json.loads(line)["row"]["context"] == "other"
    (tmp_path / "rows.jsonl").write_text(json.dumps({"task": "vt", "context": "x"}))
    with pytest.raises(ValueError, match="holds none of the samples: it has vt/0"):
        execute(config, tmp_path)


def test_wrong_input_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.delenv("KVJAX_DATA", raising=False)
    with pytest.raises(ValueError, match="no scores: name tables or runs with --scores"):
        negative_input.read(Config())
    for wrong in ({"margin": 200}, {"margins": (10, 0)}):
        with pytest.raises(ValueError, match="must be above 0 and at most 100, in %"):
            execute(dataclasses.replace(TINY, **wrong), tmp_path)
    lacking = dataclasses.replace(TINY, rows=tmp_path / "none.jsonl", methods=("snapkv",))
    with pytest.raises(FileNotFoundError, match="none.jsonl is not there"):  # before anything else
        execute(lacking, tmp_path)
    with pytest.raises(ValueError, match="'snapkv' names no arm; it must be one of full, evictor"):
        execute(dataclasses.replace(TINY, methods=("snapkv",)), tmp_path)
    with pytest.raises(ValueError, match="there is no arm beside evictor:4x"):
        execute(dataclasses.replace(TINY, baseline="evictor", methods=("evictor",)), tmp_path)
    folder = own_run(tmp_path / "r", {
        ("full", 1.0, 9): (100, 100), ("h2o", 4.0, 9): (10,), ("h2o", 2.0, 9): (0, 0),
    })  # fmt: skip
    with pytest.raises(ValueError, match="h2o:4x has no score of 1 of 2 samples .* --common"):
        execute(Config(scores=(folder,)), tmp_path)
    common = execute(Config(scores=(folder,), common=True, margins=(10,)), tmp_path)
    assert next(r for r in common.rows if r["kind"] == "failures")["benign"] == 1
    zeros = own_run(tmp_path / "zeros", {("full", 1.0, 9): (0, 0), ("h2o", 4.0, 9): (0, 1)})
    with pytest.raises(ValueError, match="every score of full is 0"):
        execute(Config(scores=(zeros,)), tmp_path)
    with pytest.raises(ValueError, match="'h2o' names several arms; it must be one of h2o:4x"):
        execute(Config(scores=(folder,), methods=("h2o",)), tmp_path)
    with pytest.raises(ValueError, match="full_score=1 cannot hold"):
        negative_input.read(Config(scores=(folder,), full_score=1))
    with pytest.raises(ValueError, match="say with --full-score 100"):
        negative_input.read(Config(scores=(folder, Path("t.csv"))))


def test_labels_and_sets():
    two = [Arm("h2o", "2x"), Arm("h2o", "4x"), Arm("kivi", "4bit")]
    assert [str(negative_input.label(a, two)) for a in two] == ["h2o:2x", "h2o:4x", "kivi"]
    assert len(negative_samples.sets_of(two)) == 3 + 3 + 1
    assert len(negative_samples.sets_of(two[:1])) == 1
    six = [Arm(str(i), "") for i in range(6)]
    assert len(negative_samples.sets_of(six)) == 7
    assert negative_samples.set_name(two) == "h2o:2x and h2o:4x and kivi:4bit"
    assert negative_samples.file_name(two) == "h2o_2x+h2o_4x+kivi_4bit.jsonl"
    assert negative_samples.set_name(six) == "all 6 methods"
    assert negative_samples.file_name(six) == "all_6.jsonl"


def test_unions_and_intersections_of_the_search():
    k, h, s = (np.array(x, bool) for x in ([1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 0]))
    found = {name: value.tolist() for name, value in negative_study.sets_of((k, h, s)).items()}
    assert found["all three"] == [True, False, False, False] == found["two of three"]
    assert found["any"] == [True, True, True, False]
    assert found["KIVI and H2O"] == [True, False, False, False]
