"""Negative sets: the counts of the study's own scores, margins, duplicates, files."""

import gzip
import json

import numpy as np
import pytest

from experiments.negative_study import BASELINE as FULL
from experiments.negative_study import COUNTS, COUNTS_MEDIAN, H2O, KIVI, MARGINS, STREAM
from kvjax.evaluation import negatives
from kvjax.evaluation.negatives import Arm

BY_DATASET = {
    "gov_report": 53, "qmsum": 21, "qasper": 15, "multifieldqa_en": 10, "multi_news": 9,
    "hotpotqa": 7, "repobench-p": 7, "trec": 5, "samsum": 4, "lcc": 3, "2wikimqa": 2,
}  # fmt: skip
BENIGN = {
    "2wikimqa": 75, "gov_report": 98, "hotpotqa": 97, "lcc": 235, "multi_news": 93,
    "multifieldqa_en": 65, "qmsum": 93, "passage_count": 8, "passage_retrieval_en": 141,
    "qasper": 69, "repobench-p": 230, "samsum": 88, "trec": 148, "triviaqa": 112,
}  # fmt: skip
MEANS = {
    FULL: 41.22, KIVI: 41.29, Arm("kivi", "2bits_group32_residual128"): 40.09, H2O: 39.13,
    Arm("h2o", "c512_w32_k7_maxpool"): 36.29, STREAM: 38.90,
    Arm("streamingllm", "c512_w32_k7_maxpool"): 35.54,
    Arm("streamingllm", "c256_w32_k7_maxpool"): 33.74,
}  # fmt: skip


@pytest.fixture(scope="module")
def study(data_folder):
    return negatives.read_scores(data_folder / "longbench_scores" / "llama3_8b_instruct.csv.gz")


def datasets(samples):
    return {d: sum(s[0] == d for s in samples) for d in {s[0] for s in samples}}


@pytest.mark.parametrize("arms", COUNTS, ids=lambda arms: "+".join(a.method for a in arms))
def test_counts_of_the_study_by_margin(study, arms):
    methods = [study[arm] for arm in arms]
    found = [len(negatives.negatives(study[FULL], methods, m / 100)) for m in MARGINS]
    assert tuple(found) == COUNTS[arms]
    median = negatives.negatives(study[FULL], methods, 0.1, "median_zeros")
    assert len(median) == COUNTS_MEDIAN[arms]


def test_datasets_denominators_and_means_of_the_study(study):
    both = negatives.negatives(study[FULL], [study[H2O], study[STREAM]], 0.1)
    assert datasets(both) == BY_DATASET and sum(BY_DATASET.values()) == 136
    assert datasets(negatives.benign(study[FULL])) == BENIGN
    assert len(study[FULL]) == 3350
    for arm, mean in MEANS.items():
        each = [
            np.mean([s for (d, _), s in study[arm].items() if d == name])
            for name in datasets(study[arm])
        ]
        assert round(100 * float(np.mean(each)), 2) == mean, arm


def test_zero_baselines_are_what_the_median_rule_of_the_study_adds(study):
    """Where the median is 0 a baseline of 0 'loses' nothing and yet is counted by the study."""
    with_zeros = set(negatives.negatives(study[FULL], [study[H2O]], 0.1, "median_zeros"))
    without = set(negatives.negatives(study[FULL], [study[H2O]], 0.1, "median"))
    assert without < with_zeros
    added = with_zeros - without
    assert {dataset for dataset, _ in added} == {"passage_count"}
    assert all(study[FULL][sample] == 0 for sample in added)


def scored(*values, dataset="d"):
    return {(dataset, str(i)): float(v) for i, v in enumerate(values)}


def test_margin_is_a_loss_for_negative_scores_too():
    """s·(1 − m) would call −0.49 a loss against −0.50; s − |s|·m does not."""
    assert negatives.cut(-0.50, 0.05) == pytest.approx(-0.525)
    assert negatives.cut(0.50, 0.05) == pytest.approx(0.475)
    base = scored(-0.5, -0.9)  # mean −0.7: the first is benign
    assert negatives.negatives(base, [scored(-0.49, -0.9)], 0.05) == []
    assert negatives.negatives(base, [scored(-0.52, -0.9)], 0.05) == []
    assert negatives.negatives(base, [scored(-0.53, -0.9)], 0.05) == [("d", "0")]


def test_every_method_must_lose_and_a_loss_of_exactly_the_margin_counts():
    base = scored(100, 100, 100, 0)
    one, two = scored(90, 90, 91, 0), scored(0, 95, 0, 0)
    assert negatives.negatives(base, [one], 0.1) == [("d", "0"), ("d", "1")]
    assert negatives.negatives(base, [one, two], 0.1) == [("d", "0")]
    assert negatives.benign(scored(0, 0, 0)) == []
    assert len(negatives.benign(scored(0, 0, 0), "median_zeros")) == 3


def test_means_are_of_each_dataset():
    base = scored(10, 20) | scored(80, 90, dataset="e")
    assert negatives.benign(base) == [("d", "1"), ("e", "1")]


def test_samples_that_share_a_text_are_left_out_and_the_counts_add_up():
    base = scored(100, 100, 100, 100, 100, 0)
    method = scored(0, 100, 0, 0, 0, 0)
    texts = dict(zip(base, ["same", "SAME ", "x  y", "X y", "other", "none"], strict=True))
    mined = negatives.mine(base, [method], 0.1, texts=texts)
    assert mined.positives == (("d", "1"),)
    assert mined.like_a_positive == (("d", "0"),)
    assert mined.negatives == (("d", "2"), ("d", "4"))
    assert mined.duplicates == (("d", "3"),)
    assert sum(map(len, mined)) == len(negatives.benign(base)) == 5
    assert len(negatives.mine(base, [method], 0.1).negatives) == 4


def test_tables_in_all_formats_and_scales(tmp_path):
    rows = [("full", "", "vt", 0, 1.0), ("h2o", "4x", "vt", 0, 0.25)]
    text = "method,config,dataset,id,score\n" + "".join(
        ",".join(map(str, row)) + "\n" for row in rows
    )
    (tmp_path / "a.csv").write_text(text)
    with gzip.open(tmp_path / "a.csv.gz", "wt") as file:
        file.write(text)
    lines = [json.dumps(dict(zip(negatives.COLUMNS, row, strict=True))) for row in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    tables = [negatives.read_scores(tmp_path / f"a.{e}") for e in ("csv", "csv.gz", "jsonl")]
    expected = {Arm("full", ""): {("vt", "0"): 1.0}, Arm("h2o", "4x"): {("vt", "0"): 0.25}}
    assert tables == [expected] * 3
    (tmp_path / "a.csv").write_text(text.replace("0.25", "25"))
    assert negatives.read_scores(tmp_path / "a.csv", 100)[Arm("h2o", "4x")] == {("vt", "0"): 25.0}
    assert str(Arm("h2o", "4x")) == "h2o:4x" and str(Arm("full", "")) == "full"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("method,dataset,id\nfull,vt,0\n", "row 1 has no score: a table of scores has"),
        ("method,dataset,id,score\nfull,vt,0,good\n", "score='good' is no number"),
        ("method,dataset,id,score\nfull,vt,0,nan\n", "score=nan must be at most 1"),
        ("method,dataset,id,score\nfull,vt,0,37\n", "score=37 must be at most 1"),
        ("method,dataset,id,score\nfull,vt,0,1\nfull,vt,0,0\n", "full has vt/0 twice"),
        ("method,dataset,id,score\n", "holds no scores"),
    ],
)
def test_bad_tables_are_refused(tmp_path, text, message):
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        negatives.read_scores(tmp_path / "bad.csv")


def test_bad_questions_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not there"):
        negatives.read_scores(tmp_path / "none.csv")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError, match="must be a .csv or .jsonl file"):
        negatives.read_scores(tmp_path / "a.json")
    base = scored(1, 1)
    with pytest.raises(ValueError, match="no score of 1 of 2 samples of the baseline, such as d/1"):
        negatives.negatives(base, [scored(0)], 0.1)
    for margin in (0, -0.1, 10):
        with pytest.raises(ValueError, match=r"must be in \(0, 1\]"):
            negatives.negatives(base, [base], margin)
    with pytest.raises(ValueError, match="methods is empty"):
        negatives.negatives(base, [], 0.1)
    with pytest.raises(ValueError, match="rule='mode' must be"):
        negatives.benign(base, "mode")


def test_negative_set_round_trip(tmp_path):
    base, method = scored(100, 50, dataset="vt@4096"), scored(0, 50, dataset="vt@4096")
    found = negatives.negatives(base, [method], 0.1)
    rows = {found[0]: {"context": "c", "question": "q"}}
    file = tmp_path / "negatives.jsonl"
    assert negatives.write_negative_set(file, found, {"full": base, "h2o": method}, rows) == 1
    line = json.loads(file.read_text())
    assert line["scores"] == {"full": 100, "h2o": 0} and line["row"]["question"] == "q"
    assert line["dataset"] == "vt@4096" and line["task"] == "vt"
    assert negatives.read_negative_set(file) == {("vt", "0")}
    file.write_text('{"id": 3}\n')
    with pytest.raises(ValueError, match="row 1 needs dataset and id"):
        negatives.read_negative_set(file)
    file.write_text("[]\n")
    with pytest.raises(ValueError, match="line 1: must be a JSON object"):
        negatives.read_negative_set(file)
    file.write_text("")
    with pytest.raises(ValueError, match="is empty"):
        negatives.read_negative_set(file)
    (tmp_path / "none.csv").write_text("dataset,id\n")
    with pytest.raises(ValueError, match="holds no samples"):
        negatives.read_negative_set(tmp_path / "none.csv")


def test_prompt_rows_are_counted_within_their_dataset(tmp_path):
    lines = [{"dataset": "a", "context": "1", "input": "?"}, {"task": "b", "context": "2", "id": 7},
             {"dataset": "a", "context": "3"}]  # fmt: skip
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    rows = negatives.prompt_rows(file)
    assert list(rows) == [("a", "0"), ("b", "7"), ("a", "1")]
    assert negatives.prompt_text(rows["a", "0"]) == "1\n?"
    lines.append({"dataset": "b", "context": "4", "id": "7"})
    file.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ValueError, match="row 4: b/7 is there twice"):
        negatives.prompt_rows(file)
    file.write_text('{"dataset": "a"}')
    with pytest.raises(ValueError, match="row 1 needs dataset"):
        negatives.prompt_rows(file)


def test_longbench_rows_are_prompts(data_folder):
    shared = negatives.prompt_rows(data_folder / "longbench" / "multi_news.jsonl.gz")
    assert len(shared) == 60 and next(iter(shared)) == ("multi_news", "0")


def test_tasks_of_datasets():
    assert negatives.task_of("gov_report") == negatives.task_of("gov_report_e") == "Summarisation"
    assert negatives.task_of("niah_multikey_2@4096") == "Retrieval"
    assert negatives.task_of("my_own") == "my_own"
    assert negatives.by_task([("lcc", "1"), ("my_own", "1"), ("qasper", "0"), ("lcc", "2")]) == {
        "QA": 1, "Code": 2, "my_own": 1,
    }  # fmt: skip
