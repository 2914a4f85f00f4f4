"""LongBench's metrics against values worked out by hand from their definitions."""

import pytest

from kvjax.evaluation.longbench_metrics import METRICS, code_sim, qa_f1, rouge_l
from kvjax.evaluation.rows import Row


def row(metric, *answers, dataset="qasper", classes=None):
    extra = {"dataset": dataset, "all_classes": classes}
    return Row("0", "c", "q", "", answers, 8, dataset, metric=metric, extra=extra)


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("The cat sat.", "a cat sat down", 0.8),  # cat sat: precision 1, recall 2/3
        ("cat cat", "cat", 2 / 3),  # a word counts as often as the other text has it
        ("Theatre, an-other", "theatre another", 1.0),  # only whole articles go
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("the", "a", 0.0),
    ],
)
def test_qa_f1(prediction, reference, expected):
    assert qa_f1(prediction, reference) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("the cat sat", "the cat sat", 1.0),
        ("the cat sat", "the dog sat down", 4 / 7),  # LCS the sat: precision 2/3, recall 2/4
        # the references' sentences take the union of what either sentence shares with them, of
        # distinct words: {x, y, z} of 4 in the reference, of 3 in the prediction
        ("x y. z", "x z y w", 2 * (3 / 3) * (3 / 4) / (3 / 3 + 3 / 4)),
        ("Cat", "cat", 0.0),  # case counts, and there is no stemming
        ("cats", "cat", 0.0),
        ("", "cat", 0.0),
        ("...", "cat", 0.0),
        ("cat", "", 0.0),
    ],
)
def test_rouge_l(prediction, reference, expected):
    assert rouge_l(prediction, reference) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("City", 1.0),
        ("Other city", 0.0),
        ("City or Date", 0.5),
        ("I do not know", 0.0),
    ],
)
def test_classification(prediction, expected):
    classes = ["City", "Date", "Other city"]
    metric = METRICS["classification"]
    assert metric(prediction, row("classification", "City", classes=classes)) == expected


def test_a_class_within_the_right_ones_name_does_not_count_as_named():
    classes = ["city", "Other city"]
    score = METRICS["classification"]("Other city", row("x", "Other city", classes=classes))
    assert score == 1.0


def test_retrieval_and_count_share_out_over_the_numbers_that_were_said():
    retrieval, count = METRICS["retrieval"], METRICS["count"]
    assert retrieval("Paragraph 12", row("x", "Paragraph 12")) == 1.0
    assert retrieval("Paragraph 1 or Paragraph 12", row("x", "Paragraph 12")) == 0.5
    assert retrieval("Paragraph 120", row("x", "Paragraph 12")) == 0.0
    assert retrieval("none", row("x", "Paragraph 12")) == 0.0
    assert count("There are 7.", row("x", "7")) == 1.0
    assert count("7 of 30", row("x", "7")) == 0.5
    with pytest.raises(ValueError, match="Paragraph 3"):
        retrieval("1", row("x", "twelve"))


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("return self.values", "return self.value", 0.97),  # 2 * 17 / 35
        ("\n```python\n# adds\nreturn a\n", "return a", 1.0),  # the first line of code
        ("// note", "x", 0.0),
        # difflib's longest blocks: "abc" alone, 2 * 3 / 12 (an edit distance would say 0.67)
        ("defabc", "abcdef", 0.5),
    ],
)
def test_code_similarity(prediction, reference, expected):
    assert code_sim(prediction, reference) == pytest.approx(expected)


def test_code_similarity_keeps_leading_spaces_and_rounds_to_whole_percent():
    assert code_sim("    x = 1", "x = 1") == round(100 * 10 / 14) / 100


def test_the_best_reference_counts_on_the_first_line_of_some_datasets_only():
    said = "\nblue\nred"
    assert METRICS["qa_f1"](said, row("qa_f1", "red", "green", dataset="triviaqa")) == 0.0
    assert METRICS["qa_f1"](said, row("qa_f1", "green", "blue", dataset="triviaqa")) == 1.0
    both = METRICS["qa_f1"](said, row("qa_f1", "red", "green", dataset="qasper"))
    assert both == pytest.approx(2 / 3)
