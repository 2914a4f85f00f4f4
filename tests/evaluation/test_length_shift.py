"""Statistics of answers' lengths against cases worked out by hand."""

import math

import numpy as np
import pytest

from kvjax.evaluation import length_shift as shift

STOP = frozenset({0})


def test_shift_is_positive_where_the_compressed_answer_is_shorter():
    assert shift.relative_shift(100, 60) == 0.4
    assert shift.relative_shift(100, 250) == -1.5
    with pytest.raises(ValueError, match="must be at least 1"):
        shift.relative_shift(0, 5)


def test_log_ratio_is_symmetric_and_the_shift_is_not():
    assert shift.log_ratio(50, 100) == -shift.log_ratio(100, 50) == pytest.approx(math.log(2))
    assert shift.relative_shift(50, 100) != -shift.relative_shift(100, 50)


def test_rethinks_rule_drops_empty_references_and_triple_lengths():
    full, compressed = [0, 100, 100, 100, 3], [5, 300, 301, 50, 2]
    assert shift.rethink_percent(full, compressed) == [-200, 50, 33]


@pytest.mark.parametrize(
    ("full", "other", "expected"),
    [
        ([5, 6, 0], [5, 6, 0], (None, "same")),
        ([5, 6, 0], [5, 7, 0], (1, "early")),
        ([5, 6, 0], [5, 6, 8, 0], (2, "end")),
        ([5, 6, 8, 9], [5, 0], (1, "end")),
        ([5, 6, 8], [5, 6, 8, 9], (3, "end")),  # one was cut off by a shorter limit
        ([5, 6], [5, 6], (None, "same")),  # both at the limit
        ([0], [4, 0], (0, "end")),
    ],
)
def test_divergence(full, other, expected):
    assert shift.divergence(full, other, STOP) == expected
    assert shift.divergence(other, full, STOP) == expected


def test_repeated_ngrams():
    assert shift.repeated_share([1, 2, 3, 4, 5], 2) == 0
    assert shift.repeated_share([1, 2, 1, 2, 1], 2) == 0.5  # 12 21 12 21
    assert shift.repeated_share([7] * 13, 4) == pytest.approx(0.9)
    assert shift.repeated_share([1, 2], 4) == 0


@pytest.mark.parametrize(
    ("text", "references", "expected"),
    [
        ("She has 3 + 4 = 7. So the answer is 1,007 dollars.", ["so #### 1007"], 1),
        ("It costs $12.50.", ["12.5"], 1),
        ("7, no, 8", ["7"], 0),  # the last number counts
        ("none", ["7"], 0),
        ("The capital is  PARIS, of course", ["Paris"], 1),
        ("London", ["Paris", "london"], 1),
        ("", ["Paris"], 0),
        ("minus -3", ["-3"], 1),
    ],
)
def test_correct(text, references, expected):
    assert shift.correct(text, references) == expected


def test_similarity_is_blind_to_what_all_answers_share():
    common = np.full(4, 100.0)
    a, b = common + [1, 0, 0, 0], common + [0, 1, 0, 0]
    plain = shift.similarity(a[None], b[None], np.zeros(4))[0]
    assert plain > 0.999
    assert shift.similarity(a[None], b[None], common)[0] == pytest.approx(0)
    assert shift.similarity(a[None], (2 * (a - common) + common)[None], common)[0] == 1
    assert shift.similarity(common[None], a[None], common)[0] == 0


def row(tokens, truncated=False):
    return {"generated_tokens": tokens, "truncated": truncated}


def test_a_truncated_answer_has_no_length():
    ended = shift.shift_of_pair(row(100), row(150))
    assert (ended["shift"], ended["length_ratio"], ended["much_longer"]) == (-0.5, 1.5, 1)
    cut = shift.shift_of_pair(row(100), row(120, True))
    assert cut["shift"] is cut["length_ratio"] is cut["log_ratio"] is cut["much_longer"] is None
    assert cut["log_ratio_censored"] == pytest.approx(math.log(1.2))
    assert shift.shift_of_pair(row(100), row(200, True))["much_longer"] == 1
    assert shift.shift_of_pair(row(200, True), row(200, True))["much_longer"] is None
