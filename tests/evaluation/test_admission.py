"""Gates at their bounds, onset and crossover by hand, and the published run judged as it was."""

import math

import pytest

from kvjax.evaluation import admission
from kvjax.evaluation.admission import ACCEPTED, FAILED, PLANNED, REFERENCE, REFUSED, Gates


def test_a_value_on_the_bound_passes_and_one_beyond_names_its_gate():
    assert admission.judge(Gates(), 0.50, 0.60, 2.00) == (ACCEPTED, (), ())
    cases = {"nll_difference": (0.51, 1, 1), "top5_overlap": (0, 0.59, 1),
             "latency_ratio": (0, 1, 2.01)}  # fmt: skip
    for name, values in cases.items():
        assert admission.judge(Gates(), *values)[:2] == (REFUSED, (name,))
    assert admission.judge(Gates(), 0.51, 0.5, 3.0).broken == tuple(cases)


def test_better_than_the_full_cache_is_accepted():
    assert admission.judge(Gates(), -0.4, 1.0, 0.7).decision == ACCEPTED


def test_a_gate_inside_the_interval_is_uncertain_whatever_the_verdict():
    intervals = {"nll_difference": (0.1, 0.8), "top5_overlap": (0.7, 0.9), "latency_ratio": None}
    for difference in (0.3, 0.6):
        verdict = admission.judge(Gates(), difference, 0.8, 1.0, intervals)
        assert verdict.uncertain == ("nll_difference",)
        assert (verdict.decision == ACCEPTED) == (difference <= 0.5)


def test_a_nan_is_not_judged():
    with pytest.raises(ValueError, match="top5_overlap=nan"):
        admission.judge(Gates(), 0.0, math.nan, 1.0)


def test_onset_needs_every_longer_context_to_gain():
    assert admission.onset([(512, -1), (2048, 3), (4096, 5)]) == 2048
    assert admission.onset([(4096, 5), (512, 2), (2048, -3)]) == 4096
    assert admission.onset([(512, 1), (2048, 2)]) == 512
    assert admission.onset([(512, 1), (2048, 0)]) is None and admission.onset([]) is None


def test_crossover_is_linear_between_two_measurements_and_never_outside():
    assert admission.crossover([(100, -1.0), (200, 3.0)]) == 125
    assert admission.crossover([(200, 3.0), (100, 1.0)]) is None
    assert admission.crossover([(100, 0.2), (200, 0.4), (300, 0.8)], level=0.5) == pytest.approx(
        225
    )
    falling = [(100, 2.0), (200, 1.0)]
    assert admission.crossover(falling, level=1.5) == 150
    assert admission.crossover([(512, 1.0)]) is None


def test_the_last_of_several_crossings_counts():
    assert admission.crossover([(0, -1.0), (10, 1.0), (20, -1.0), (30, 1.0)]) == 25


def cell(decision, saved=0, ratio=1.0, stage=None):
    return {"decision": decision, "saved_bytes": saved, "latency_ratio": ratio,
            "failure_stage": stage}  # fmt: skip


def test_the_candidate_saves_most_of_what_was_accepted():
    cells = [cell(ACCEPTED, 5), cell(REFUSED, 9), cell(ACCEPTED, 7, 1.9), cell(ACCEPTED, 7, 1.1)]
    assert admission.candidate(cells) is cells[3]
    assert admission.candidate([cell(ACCEPTED, 0), cell(ACCEPTED, -4), cell(REFERENCE)]) is None


def test_conclusions():
    failed = {"decision": FAILED, "failure_stage": "compress"}
    assert admission.conclude([cell(REFERENCE), failed, cell(ACCEPTED, 3)]) == (
        ACCEPTED,
        "compress",
    )
    assert admission.conclude([cell(REFERENCE), cell(REFUSED, 3)]) == (REFUSED, None)
    assert admission.conclude([cell(ACCEPTED, -3)]) == (REFUSED, None)
    assert admission.conclude([failed, cell(REFERENCE)]) == (FAILED, "compress")
    assert admission.conclude([]) == (PLANNED, None)


def test_the_published_figures_are_judged_as_their_author_did():
    assert admission.judge(Gates(), 0.375, 0.70, 1.285).decision == ACCEPTED
    # no latency was published at 4,096 tokens: quality alone refuses it
    assert admission.judge(Gates(), 0.973, 0.55, 1.0).broken == ("nll_difference", "top5_overlap")
