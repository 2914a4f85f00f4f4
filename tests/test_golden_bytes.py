"""Bytes a token and KV head at head_dim 128, as the methods' papers and codes count them."""

import pytest

from kvjax import registry
from kvjax.types import PromptShape

LONG = PromptShape(2**20, 1, 128)  # so long that windows and headers do not count
FULL = 512  # bytes a token: K and V, 128 channels, two bytes


@pytest.mark.parametrize(
    "label,token_bytes,ratio",
    [
        ("kivi(k_bits=2, v_bits=2, group=32)", 96, 5.33),
        ("kivi(k_bits=2, v_bits=2, group=64)", 80, 6.4),
        ("kivi(k_bits=2, v_bits=2, group=128)", 72, 7.11),
        ("kivi(k_bits=4, v_bits=4, group=32)", 160, 3.2),
        ("turboquant(k_bits=2, v_bits=2)", 68, 7.53),
        ("turboquant(k_bits=3, v_bits=3)", 100, 5.12),
        ("turboquant(k_bits=4, v_bits=4)", 132, 3.88),
        ("turboquant(k_bits=2.5, v_bits=2.5)", 80, 6.4),
        ("turboquant(k_bits=3.5, v_bits=3.5)", 112, 4.57),
        ("turboquant(k_bits=3, v_bits=3, key_objective='prod', value_objective='prod')", 104, 4.92),
        ("quantized_cache(k_bits=4, v_bits=4, group=64, requantize_all=True)", 144, 3.56),
        # a backbone as KIVI's at group 64, then 4 bytes a rank and token of the low-rank term
        ("gear(k_bits=2, v_bits=2, outliers=0.0)", 80 + 16, 5.33),
        ("full", 512, 1.0),
        ("paged(page_size=16)", 512 + 4 / 16, 1.0),
    ],
)
def test_bytes_of_a_token(label, token_bytes, ratio):
    stored = registry.make(label).layer_bytes(LONG) / LONG.num_tokens
    assert stored == pytest.approx(token_bytes, abs=0.1)
    assert FULL / stored == pytest.approx(ratio, abs=0.01)


@pytest.mark.parametrize("label", ["snapkv", "adakv", "knorm", "streaming_llm", "pyramidkv"])
def test_a_kept_token_costs_its_keys_values_and_position(label):
    few, more = (registry.make(label, budget=n).layer_bytes(LONG) for n in (1000, 2000))
    assert more - few == 1000 * (512 + 4)  # positions are int32 beyond 65,536 tokens
    short = PromptShape(4000, 1, 128)
    few, more = (registry.make(label, budget=n).layer_bytes(short) for n in (1000, 2000))
    assert more - few == 1000 * (512 + 2)


def test_a_token_that_may_be_evicted_also_has_a_score():
    few, more = (registry.make("h2o", budget=n).layer_bytes(LONG) for n in (1000, 2000))
    assert more - few == 1000 * (512 + 4 + 4)
    few, more = (
        registry.make("paper:streaming_llm", budget=n).layer_bytes(LONG) for n in (1000, 2000)
    )
    assert more - few == 1000 * (512 + 4)
