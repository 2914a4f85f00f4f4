"""Budgets in every unit, shares as tokens, labels and presets."""

import itertools

import numpy as np
import pytest

from kvjax import accounting, registry
from kvjax.accounting import Budget, UnreachableBytes, within
from kvjax.eviction import tokens_of
from kvjax.types import PromptShape

ROW = PromptShape(1000, 3, 64)
LONG = PromptShape(8192, 3, 64)  # presets of anchorkv need thousands of tokens
EVICTORS = [n for n in registry.names() if hasattr(registry.get(n), "with_budget")]
QUANTIZERS = [n for n in registry.names() if hasattr(registry.get(n), "full_layers")]
CONTINUOUS = [n for n in registry.names() if hasattr(registry.get(n), "fit")]


def test_a_share_is_rounded_in_one_way():
    """U01: products that miss a whole number, and prompts of a token."""
    assert int(10 * (1 - 0.9)) == 0  # the trap
    assert tokens_of(1 - 0.9, 10) == 1
    assert tokens_of(0.1 * 3, 10) == 3 and tokens_of(0.29, 100) == 29  # 28.999999999999996
    for n, share in itertools.product((1, 2, 3), (1e-9, 0.1, 0.5, 0.99, 1.0)):
        assert 1 <= tokens_of(share, n) <= n
    for tokens, n in itertools.product(range(1, 60), (60, 77, 1000)):
        assert tokens_of(tokens / n, n) == tokens
    assert tokens_of(1.0, 131072) == 131072
    for share in (0.0, -0.5, 1.0001, float("nan")):
        with pytest.raises(ValueError, match="must be in"):
            tokens_of(share, 10)


def test_a_budget_has_one_unit():
    row = PromptShape(100, 2, 8)
    assert Budget(ratio=4.0).target_bytes(row) == row.full_bytes / 4
    assert Budget(bytes=123).target_bytes(row) == 123
    assert Budget(bits_per_value=2).target_bytes(row) == 2 * 2 * 100 * 2 * 8 / 8
    units = {"tokens": 10, "ratio": 4.0, "bytes": 1000, "bits_per_value": 2.0}
    wrong = [{}] + [dict(pair) for pair in itertools.combinations(units.items(), 2)]
    wrong += [{name: value} for name in units for value in (0, -1, float("nan"))]
    for given in wrong:
        for method in (registry.make("snapkv"), registry.make("kivi")):
            with pytest.raises(ValueError, match="must be exactly one positive value of"):
                within(method, Budget(**given), row)


@pytest.mark.parametrize("name", EVICTORS)
def test_a_budget_in_tokens_is_the_evictors_own(name):
    found = within(registry.make(name), Budget(tokens=300), ROW)
    assert found.budget == 300
    one = accounting.layer_bytes(found.with_budget(301), ROW)
    assert one - accounting.layer_bytes(found, ROW) >= 3 * 4 * 64  # bfloat16 K and V of 3 heads


@pytest.mark.parametrize("name", [*QUANTIZERS, "anchorkv", "full"])
def test_a_method_that_keeps_every_token_has_no_budget_in_tokens(name):
    with pytest.raises(ValueError, match=f"{name} keeps every token"):
        within(registry.make(name), Budget(tokens=300), ROW)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_bytes_are_met_from_below(name):
    row = LONG if name == "anchorkv" else ROW
    slack_token = 4 * row.kv_heads * row.head_dim
    reached = 0
    for preset in (*registry.get(name).presets, ""):
        method = registry.make(f"{preset}:{name}" if preset else name)
        for ratio, layers in itertools.product((1.5, 2.0, 3.7, 6.0, 11.0), (1, 5)):
            target = row.full_bytes / ratio
            units = (
                Budget(ratio=ratio), Budget(bytes=target), Budget(bits_per_value=16 / ratio),
            )  # fmt: skip
            try:
                found = [within(method, unit, row, layers) for unit in units]
            except UnreachableBytes as error:
                least = accounting.layer_bytes(error.nearest, row, layers)
                assert not target - slack_token <= least <= target
                continue
            spent = [accounting.layer_bytes(x, row, layers) for x in found]
            for cost in spent:
                assert target - max(0.02 * target, slack_token) <= cost <= target
            assert found[0] == found[1]  # the same in every unit
            reached += 1
    assert reached >= 4


def test_a_budget_of_two_methods():
    method = registry.make("snapkv+kivi")
    found = within(method, Budget(tokens=400), ROW)
    assert found.budget == 400 and found.evictor == registry.make("snapkv", budget=400)
    for label in ("snapkv+kivi", "paper:h2o+kivi", "pyramidkv+kivi", "tova+kivi"):
        for ratio, layers in itertools.product((6.0, 9.0, 15.0), (1, 5)):
            target = ROW.full_bytes / ratio
            try:
                found = within(registry.make(label), Budget(ratio=ratio), ROW, layers)
            except UnreachableBytes as error:  # whole blocks of layers that are not alike: steps
                assert (label, layers) == ("pyramidkv+kivi", 5)
                found = error.nearest
            cost = accounting.layer_bytes(found, ROW, layers)
            assert target * 0.85 < cost <= target, (label, ratio, layers)


def test_labels_and_presets():
    assert registry.make("kvpress:snapkv") == registry.make("snapkv:kvpress")
    assert registry.make("kvpress:snapkv").window == 64
    assert registry.make("kvpress:snapkv", window=16).window == 16  # an override wins
    assert registry.make("snapkv") == registry.get("snapkv")()
    with pytest.raises(ValueError, match=r"snapkv has no preset 'papr': it has \['kvpress', 'pap"):
        registry.make("papr:snapkv")
    with pytest.raises(ValueError, match=r"no hyperparameter \['widow'\]: it has"):
        registry.make("snapkv", widow=3)
    with pytest.raises(ValueError, match="unknown method"):
        registry.make("snapvk")
    for label in ("snapkv+kivi+gear", "snapkv+", "+kivi"):
        with pytest.raises(ValueError):
            registry.make(label)
    with pytest.raises(ValueError, match="no overrides"):
        registry.make("snapkv+kivi", budget=3)


def test_every_preset_makes_a_method_that_says_its_bytes():
    """U14: what a preset sets is in the method itself, which is what a run's config stores."""
    count = 0
    for name in registry.names():
        for preset, values in registry.get(name).presets.items():
            method = registry.make(f"{preset}:{name}")
            for key, value in values.items():
                assert getattr(method, key) == value
                assert f"{key}={value!r}" in repr(method)
            assert 0 < accounting.layer_bytes(method, LONG, 2) < np.inf
            count += 1
    assert count >= 12
