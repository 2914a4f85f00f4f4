"""What the comparison makes of its rows and of its command line."""

import dataclasses

import pytest

from experiments import methods_report
from experiments.arms import idealised, plan
from experiments.methods_at_equal_bytes import GROUPS, Config, budgets_of, timing_arms
from kvjax import accounting, registry
from kvjax.accounting import Budget
from kvjax.types import PromptShape

SHAPE = PromptShape(1024, 3, 64)


def row(method, ratio, prompt, match, basis="measured", stored=None):
    return {
        "task": "noise_7", "method": method, "target_ratio": ratio, "basis": basis,
        "prompt": prompt, "token_match": match, "answer_nll": 1 - match, "kl": 0.1,
        "ratio": stored or ratio,
    }  # fmt: skip


def test_budgets_are_in_one_unit():
    assert [b.ratio for b in budgets_of(Config())] == [2, 4, 6, 10, 16]
    assert budgets_of(Config(tokens=(64,))) == [Budget(tokens=64)]
    assert budgets_of(Config(bits_per_value=(2.0,))) == [Budget(bits_per_value=2.0)]
    with pytest.raises(ValueError, match="tokens, bytes: they must be in one unit"):
        budgets_of(Config(tokens=(64,), kv_bytes=(1e6,)))


def test_every_label_of_every_group_can_be_stored_at_some_budget():
    for labels in GROUPS.values():
        arms = plan(labels, (4.0,), (), SHAPE, 4)
        assert {arm.label for arm in arms} == set(labels)
        for arm in arms:
            stored = accounting.layer_bytes(arm.method, SHAPE, 4)
            if arm.limit is None:
                assert 0.95 * SHAPE.full_bytes / 4 < stored <= SHAPE.full_bytes / 4
        timed = timing_arms(labels, 4.0, SHAPE, 4)
        assert [arm.label for arm in timed] == ["full", *labels]
        near = next((a for a in timed if a.label == "kivi"), None)
        if near:  # the point nearest to the ratio
            assert (near.method.k_bits, near.method.v_bits) == (2, 2)


def test_tokens_are_an_evictors_and_bytes_everybody_elses():
    arms = {arm.label: arm for arm in plan(("snapkv", "anchorkv"), [Budget(tokens=128)], (), SHAPE)}
    assert arms["snapkv"].method.budget == 128 and arms["snapkv"].basis == "idealised"
    assert arms["anchorkv"].basis == "measured" and arms["anchorkv"].target_ratio == 8
    same = idealised(GROUPS["all"], 4.0, SHAPE)
    assert {arm.method.budget for arm in same} == {256}
    assert not {"kivi", "anchorkv", "snapkv+kivi"} & {arm.label for arm in same}


def test_ranks_at_equal_tokens_and_at_equal_bytes():
    config = dataclasses.replace(Config(), idealised_ratio=4.0)
    scores = {"snapkv": (0.5, 0.5), "h2o": (0.6, 0.4)}  # at equal tokens, at equal bytes
    tokens = [row(m, 4.0, 0, s[0], "idealised", 3.9) for m, s in scores.items()]
    at_bytes = [row(m, 4.0, 0, s[1]) for m, s in scores.items()]
    text = methods_report.idealised(config, at_bytes, tokens, "token_match")
    assert "| snapkv | 4.00 | 3.90 | 2.6% | 50.0 | 2 | 50.0 | 1 |" in text
    assert "changes the rank of snapkv, h2o" in text
    level = [row(m, 4.0, 0, s[0]) for m, s in scores.items()]
    assert "changes no rank" in methods_report.idealised(config, level, tokens, "token_match")


def test_differences_are_paired_by_prompt():
    base = [row("anchorkv", 4.0, i, m) for i, m in enumerate((0.2, 0.6, 1.0))]
    worse = [row("anchorkv(bits=(2,))", 4.0, i, m) for i, m in enumerate((0.1, 0.5, 0.9))]
    text = methods_report.differences([*base, *worse[::-1]], "anchorkv", "token_match")
    assert "| anchorkv(bits=(2,)) | 4.0x | 3 | -10 [-10, -10] | +0.100" in text


def test_compressing_above_its_share_of_prefill_is_marked():
    def timed(method, seconds):
        return row(method, 4.0, 0, 0.0) | {
            "task": "timing", "length": 2048, "prefill_seconds": 1.0, "column_sums_seconds": 0.0,
            "compress_seconds": seconds, "step_seconds": 0.01,
        }  # fmt: skip

    text = methods_report.timing([timed("full", 0.0), timed("gear", 0.26)], "tiny")
    assert text.count("over 25 %") == 1 and "gear's: 26.0%" in text


def test_settings_say_what_a_label_stands_for():
    text = methods_report.settings(["rethink:kivi", "rethink:kivi", "snapkv"])
    assert text.count("rethink:kivi") == 1 and "k_bits=4" in text
    assert repr(registry.make("snapkv")) in text
