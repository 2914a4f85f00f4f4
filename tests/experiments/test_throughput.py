"""Planning, ratios and the peer's protocol; the whole experiment runs in test_experiments.py."""

import dataclasses
import json
import sys

import numpy as np
import pytest

from experiments import peer_transformers, throughput
from experiments.peer_transformers import Peer
from experiments.throughput import TINY, Shape

ANSWER = {
    "prefill_seconds": 2.0, "step_seconds": [0.5, 0.25, 0.25], "next_tokens": [7],
    "peak_rss_bytes": 1000,
}  # fmt: skip


def test_shapes_are_ordered_and_stand_once():
    config = dataclasses.replace(TINY, contexts=(64, 32, 64), batches=(2, 1))
    assert throughput.shapes(config) == [(32, 1), (32, 2), (64, 1), (64, 2)]


@pytest.mark.parametrize(
    "change, said",
    [({"new_tokens": 2}, "new_tokens=2"), ({"repeats": 0}, "repeats=0"),
     ({"peer": "transformers"}, "weights on disk")],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        throughput.check(dataclasses.replace(TINY, **change))


def test_speeds_are_medians_and_flush_steps_stand_apart():
    row = throughput.speeds(Shape(100, 2), [1.0, 4.0, 2.0], [0.5], [0.1, 0.2, 0.3], [0.9])
    assert row["prefill_tokens_per_second"] == 100 and row["ttft_seconds"] == 2.5
    assert row["tpot_seconds"] == 0.2 and row["decode_tokens_per_second"] == 10
    assert row["flush_step_seconds"] == 0.9
    assert 0.29 < row["tpot_p99_seconds"] <= 0.3
    assert throughput.speeds(Shape(1, 1), [1.0], [1.0], [1.0])["flush_step_seconds"] is None


def rows_of(batch, speed):
    speeds = {"full": speed, "snapkv": 2 * speed, "transformers": speed / 4}
    return [
        {"context": 64, "batch": batch, "method": method, "target_ratio": None,
         "prefill_tokens_per_second": 10.0, "decode_tokens_per_second": value}
        for method, value in speeds.items()
    ]  # fmt: skip


def test_ratios_are_to_the_full_cache_and_to_the_peer_of_the_same_shape():
    rows = rows_of(1, 8.0)
    throughput.with_ratios(rows, "transformers")
    assert [row["decode_over_full"] for row in rows] == [1, 2, 0.25]
    assert [row["decode_over_peer"] for row in rows] == [4, 8, 1]
    assert {row["prefill_over_peer"] for row in rows} == {1}
    rows = rows_of(1, 8.0)[:2]
    throughput.with_ratios(rows, "none")
    assert "decode_over_peer" not in rows[0]


def test_growth_is_over_the_smallest_batch_of_the_same_method():
    grown = throughput.with_growth(rows_of(2, 8.0) + rows_of(8, 24.0))
    assert [row["growth"] for row in grown] == [None] * 3 + [3] * 3


def test_the_peer_s_row_leaves_warm_steps_out_and_compares_tokens():
    answers = [ANSWER | {"step_seconds": [9.0, 9.0, 0.5]}, ANSWER]
    row = throughput.peer_row(Shape(64, 1), answers, np.array([7]), 0.5)
    assert row["tpot_seconds"] == 0.375 and row["num_steps"] == 2
    assert row["same_next_token"] == 1.0 and row["prefill_tokens_per_second"] == 32


@pytest.mark.parametrize(
    "line, said",
    [("nonsense", "must be JSON"), ("[1]", "must be JSON"), ('{"prefill_seconds": 1}', "JSON"),
     ('{"error": "no torch"}', "no torch"), (json.dumps(ANSWER), "must be 5")],
)  # fmt: skip
def test_an_answer_that_is_none_is_refused(line, said):
    with pytest.raises(ValueError, match=said):
        peer_transformers.parse(line, 5)


def interpreter(folder, body):
    """A script that is started in place of a Python with the extra `peers`."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\nimport json, sys\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_the_peer_answers_a_line_for_a_line(tmp_path):
    body = (
        "assert sys.argv[-3:] == ['weights.gguf', '--threads', '3'], sys.argv\n"
        "for line in sys.stdin:\n"
        "    asked = json.loads(line)\n"
        f"    answer = {ANSWER!r}\n"
        "    answer['step_seconds'] = [0.1] * asked['new_tokens']\n"
        "    answer['next_tokens'] = [row[-1] for row in asked['tokens']]\n"
        "    print(json.dumps(answer), flush=True)"
    )
    peer = Peer("weights.gguf", interpreter(tmp_path, body), 3)
    assert peer.ask(np.array([[1, 2], [3, 4]]), 2)["next_tokens"] == [2, 4]
    assert len(peer.ask(np.array([[5]]), 4)["step_seconds"]) == 4
    peer.close()


def test_a_peer_that_stops_says_why(tmp_path):
    peer = Peer("x", interpreter(tmp_path, "sys.exit('No module named torch')"), 1)
    with pytest.raises(ValueError, match="No module named torch"):
        peer.ask(np.array([[1]]), 1)
    peer.close()
    with pytest.raises(ValueError, match="cannot be started"):
        Peer("x", str(tmp_path / "nowhere"), 1)
