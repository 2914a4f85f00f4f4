"""Response lengths: what is compared with what, and what the tables make of it."""

import dataclasses
import gzip
import json

import numpy as np
import pytest

from experiments import length_dataset, length_report, length_shift, length_timing, plots
from experiments.length_dataset import Request, choose, in_chunks
from experiments.length_rows import decoder_encoder, forced_row, keys_for, pair_row, pooled
from experiments.runner import Run
from kvjax import accounting, decode
from kvjax.evaluation.prompts import Prompt
from kvjax.evaluation.stepwise import Answer
from models import hub

STOP = frozenset({0})


@pytest.fixture(scope="module")
def loaded():
    return hub.load("tiny")


def request(number, tokens, source="s"):
    return Request(Prompt(f"{source}{number}", source, "t", (("user", "x"),)), (1,) * tokens)


def answer(tokens, stopped=True, stop=0.0, probability=0.5, gap=0.25):
    n = len(tokens)
    return Answer(
        np.array(tokens), stopped, *(np.full(n, x, np.float32) for x in (probability, gap, stop)), 9
    )


def test_every_source_gives_the_same_number_while_it_has_some():
    requests = [request(i, 10, "a") for i in range(3)] + [request(i, 10, "b") for i in range(9)]
    requests += [request(9, 900, "b")]
    config = length_dataset.Config(count=8, max_prompt=20)
    chosen, left_out = choose(config, requests)
    assert left_out == 1
    sources = [r.prompt.source for r in chosen]
    assert (sources.count("a"), sources.count("b")) == (3, 5)
    assert len({r.prompt.id for r in chosen}) == 8
    assert choose(config, requests)[0] == chosen
    assert choose(dataclasses.replace(config, seed=1), requests)[0] != chosen
    with pytest.raises(ValueError, match="count=13 must be at most 12"):
        choose(dataclasses.replace(config, count=13), requests)


def test_built_in_prompts_that_are_too_short_name_a_length_that_is_not(loaded):
    config = dataclasses.replace(length_dataset.TINY, max_prompt=300)
    with pytest.raises(ValueError, match="max_prompt=300, .* prompts of 225 tokens") as caught:
        length_dataset.built_in(config, loaded.tokenizer)
    least = int(str(caught.value).split()[-1].rstrip("."))  # "about": each prompt draws its own
    config = dataclasses.replace(config, max_prompt=int(1.2 * least * 4 / 3))
    assert length_dataset.built_in(config, loaded.tokenizer)


def test_a_chunk_holds_all_lengths_in_order():
    requests = [request(i, 1 + (7 * i) % 50) for i in range(48)]
    chunks = in_chunks(requests, 2)
    assert sorted(r.prompt.id for c in chunks for r in c) == sorted(r.prompt.id for r in requests)
    assert [len(chunk) for chunk in chunks] == [16, 16, 16]
    for lengths in ([len(r.ids) for r in chunk] for chunk in chunks):
        assert lengths == sorted(lengths) and lengths[-1] - lengths[0] > 30  # of 50


def test_grid_has_greedy_once_and_every_sample():
    config = length_shift.Config(temperatures=(0.0, 0.5, 1.0), top_ps=(0.9, 1.0), seeds=(1, 2, 3))
    found = length_shift.grid(config)
    assert found[0] == (0.0, 1.0, None) and len(found) == 1 + 2 * 2 * 3
    assert length_shift.next_seed((0.5, 0.9, 3), config) == (0.5, 0.9, 1)
    for wrong in ({"temperatures": ()}, {"temperatures": (-1.0,)}, {"top_ps": (1.5,)},
                  {"seeds": (1, 1)}, {"temperatures": (0.5, 0.5)}):  # fmt: skip
        with pytest.raises(ValueError, match="must be"):
            length_shift.grid(dataclasses.replace(config, **wrong))


def test_every_method_gets_the_bytes_of_the_discrete_one(loaded):
    config = length_shift.Config(methods=("h2o", "kivi(residual_length=32)", "snapkv"), ratio=3.0)
    requests = [request(0, 400)]
    arms = {arm.label: arm for arm in length_shift.plan(config, loaded, requests)}
    assert list(arms) == ["full", length_shift.FLOAT32, *config.methods]
    shape = length_shift.shape_of(requests, loaded)
    stored = {label: accounting.layer_bytes(arm.method, shape, 2) for label, arm in arms.items()}
    kivi = stored["kivi(residual_length=32)"]
    assert shape.full_bytes / kivi != pytest.approx(3.0, rel=1e-3)
    for label in ("h2o", "snapkv"):
        assert 0.97 * kivi < stored[label] <= kivi
    apart = length_shift.plan(dataclasses.replace(config, match=False), loaded, requests)
    assert next(a for a in apart if a.label == "h2o").target_ratio == 3.0


def test_pair_compares_probabilities_only_where_both_saw_the_same():
    full = answer([5, 6, 7, 8, 0], stop=0.1, gap=0.3)
    states = np.array([[1.0, 0.0]] * 5), np.array([[0.0, 1.0]] * 4)
    other = answer([5, 6, 9, 0], stop=0.4, gap=0.2)
    other.stop_probability[3] = 0.9  # after they parted: not compared
    row = pair_row(full, other, states, np.zeros(2), STOP)
    assert (row["divergence"], row["divergence_position"], row["common_tokens"]) == ("early", 2, 3)
    assert row["stop_shift_common"] == pytest.approx(0.3)
    assert (row["gap_full"], row["gap_compressed"]) == pytest.approx((0.3, 0.2))
    assert row["shift"] == pytest.approx(0.2)
    assert row["similarity"] == 0 and pair_row(full, full, (states[0],) * 2, np.zeros(2), STOP)[
        "similarity"
    ] == pytest.approx(1)
    cut = pair_row(full, answer([5, 6, 7], stopped=False), states, np.zeros(2), STOP)
    assert (cut["divergence"], cut["shift"], cut["gap_full"]) == ("end", None, None)


def test_forced_row_splits_the_end_from_what_is_before():
    full, forced = answer([5, 6, 0], stop=0.1), answer([5, 6, 0], stop=0.2, probability=0.25)
    full.stop_probability[-1], forced.stop_probability[-1] = 0.8, 0.3
    row = forced_row(full, forced)
    assert (row["stop_at_end_full"], row["stop_at_end_compressed"]) == pytest.approx((0.8, 0.3))
    assert (row["stop_before_full"], row["stop_before_compressed"]) == pytest.approx((0.1, 0.2))
    assert row["answer_nll_compressed"] == pytest.approx(np.log(4))
    cut = forced_row(full._replace(stopped=False), forced)
    assert cut["stop_at_end_full"] is None and cut["stop_before_full"] == pytest.approx(1 / 3)


def test_states_of_a_cut_answer_are_those_of_the_answer(loaded):
    encode = decoder_encoder(loaded, batch=2)
    long, short, other = encode([[7, 8, 9, 10], [7, 8], [9, 8]])
    assert long.shape == (4, loaded.config.hidden_size)
    np.testing.assert_allclose(pooled(long, 2), pooled(short, 2), atol=1e-5)
    assert np.abs(pooled(short, 2) - pooled(other, 2)).max() > 1e-3


def test_a_request_has_one_key_whatever_is_beside_it():
    together, alone = keys_for(3, [4, 5, 6]), keys_for(3, [5])
    assert together[1] == alone[0] and together[0] != alone[0]
    assert keys_for(4, [5])[0] != alone[0]


def shown(method, prompt, tokens, **more):
    return {
        "kind": "answer", "method": method, "prompt": prompt, "temperature": 0.8, "top_p": 0.9,
        "ratio": 4.0, "ratio_at_end": 4.0, "generated_tokens": tokens, "truncated": False,
        "empty": False, "repeated": 0.0,
    } | more  # fmt: skip


def test_seeds_are_averaged_before_prompts():
    pair = {"full_tokens": 100, "divergence": "early", "divergence_position": 3}
    rows = [
        shown("h2o", "a", 100, seed=1, shift=0.0, **pair),
        shown("h2o", "a", 200, seed=2, shift=-1.0, **pair),
        shown("h2o", "b", 400, seed=1, shift=-3.0, **pair | {"divergence": "end"}),
        shown("h2o", "b", 400, seed=2, truncated=True, shift=None, **pair),
    ]
    (mean,) = length_report.summarised(rows)
    assert (mean["n"], mean["answers"], mean["pairs"]) == (2, 4, 3)
    assert mean["shift"] == pytest.approx((-0.5 - 3.0) / 2)
    assert mean["truncated"] == pytest.approx(0.25)
    assert mean["early"] == pytest.approx(0.75)
    assert mean["length"] == pytest.approx((150 + 400) / 2)
    assert mean["dropped"] == pytest.approx(1 / 3) and mean["kept_shift"] == pytest.approx(-0.5)


def test_bounds_of_a_share_are_shares_and_those_of_a_mean_are_not():
    rows = [{"m": "a", "x": x, "y": x} for x in (0.0, 0.5, 1.0, 1.0, None)]
    (mean,) = plots.group_means(rows, ["m"], ["x", "y"], shares=("x",))
    assert mean["n"] == 5 and mean["x"] == mean["y"] == 0.625
    assert mean["x_high"] == 1.0 < mean["y_high"]
    same = [{"m": "a", "x": 1.0, "y": 1.0}] * 3  # a mean of exactly 1 is not a proportion
    (mean,) = plots.group_means(same, ["m"], ["x", "y"], shares=("x",))
    assert mean["x_low"] < 1.0 == mean["y_low"]
    few = [{"m": "a", "tokens": x} for x in (10.0, 190.0)]
    (mean,) = plots.group_means(few, ["m"], ["tokens"], bounds={"tokens": (0.0, 500.0)})
    assert (mean["tokens_low"], mean["tokens"], mean["tokens_high"]) == (0.0, 100.0, 500.0)


def test_dataset_flag_writes_the_training_set_of_a_named_file(tmp_path):
    lines = [{"id": f"p{i}", "prompt": "Why? " * (i + 1), "source": "mine"} for i in range(3)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    config = length_shift.Config(
        dataset=True, model="tiny", prompts=str(file), methods=("h2o(budget=24)",), count=3,
        batch=2, limit=6, max_prompt=300,
    )  # fmt: skip
    with Run.create(config, tmp_path / "runs") as run:
        length_shift.run(config, run)
    assert len(run.rows) == 3 * 2
    text = gzip.decompress((run.path / "lengths.csv.gz").read_bytes()).decode()
    assert text.splitlines()[0].startswith("prompt,source,task,prompt_tokens,method,setting")
    assert len(text.splitlines()) == 7 and "Why?" not in text
    assert {row["truncated"] for row in run.rows} <= {True, False}
    assert all(row["generated_tokens"] <= 6 for row in run.rows)
    kept = {row["method"]: row["ratio"] for row in run.rows if row["prompt"] == "p2"}
    assert kept["full"] == pytest.approx(1, abs=0.02) and kept["h2o(budget=24)"] > 1.3


def test_dataset_flag_keeps_its_own_defaults_and_refuses_what_it_has_not():
    plain, own = length_shift.Config(dataset=True), length_dataset.Config()
    assert length_shift.dataset_config(plain) == own
    changed = dataclasses.replace(plain, seed=1, count=700)
    made = length_shift.dataset_config(changed)
    assert made == dataclasses.replace(own, seed=1, count=700)
    with pytest.raises(ValueError, match="ratio, seeds must not be given"):
        length_shift.dataset_config(dataclasses.replace(plain, ratio=2.0, seeds=(3,)))


def test_unknown_methods_and_missing_files_are_refused_before_a_model_is_loaded(tmp_path):
    for wrong, message in (
        ({"methods": ("nope",)}, "unknown method 'nope'"),
        ({"prompts": str(tmp_path / "none.csv")}, "is no file"),
        ({"ratio": -1.0}, "ratio=-1.0 must be positive"),
        ({"timed_prompts": -1}, "timed_prompts=-1 must be 0 or more"),
    ):
        config = dataclasses.replace(length_shift.TINY, model="no/such/model", **wrong)
        with Run.create(config, tmp_path / "runs") as run:
            with pytest.raises((ValueError, FileNotFoundError), match=message):
                length_shift.run(config, run)


def test_a_ratio_that_a_method_cannot_reach_is_noted_in_its_row(loaded):
    config = length_shift.Config(methods=("h2o",), ratio=900.0)
    arm = length_shift.plan(config, loaded, [request(0, 400)])[-1]
    assert arm.limit.startswith("limit ")
    (mean,) = length_report.summarised([shown("h2o", "a", 5, limit=arm.limit)])
    assert mean["limit"] == arm.limit


def test_an_answer_that_is_timed_compiles_nothing(loaded, tmp_path, monkeypatch):
    label, limit = "kivi(residual_length=32)", 40
    arms = [length_shift.Arm(name, 1.0, length_shift.registry.make(name), None)
            for name in ("full", label)]  # fmt: skip
    methods = {arm.label: arm.method for arm in arms}
    order, compiled, alone = [], [], length_timing.answer_alone

    def sizes():
        return [f._cache_size() for f in (decode.decode_step, decode.flush)]

    def watched(loaded, method, request, columns, limit):
        before = sizes()
        found = alone(loaded, method, request, columns, limit)
        order.append((request.prompt.id, type(method).__name__))
        compiled.append(sizes() != before)
        return found

    monkeypatch.setattr(length_timing, "answer_alone", watched)
    endless = dataclasses.replace(loaded, tokenizer=Endless(loaded.tokenizer))
    with Run.create(length_shift.TINY, tmp_path) as run:
        requests = [request(0, 50), request(1, 60)]
        length_timing.time_requests(run, endless, arms, methods, requests, limit)
    assert not any(compiled)
    assert [name for _, name in order] == ["Full", "KIVI"] * 2 and order[1][0] == order[0][0]
    for row in run.rows:
        assert row["generated_tokens"] == limit and row["truncated"]
        assert row["e2e_seconds"] == pytest.approx(
            row["ttft_seconds"] + (limit - 1) * row["tpot_seconds"]
        )


class Endless:
    """A tokenizer that no answer ends with."""

    stop_ids = frozenset()

    def __init__(self, tokenizer):
        self.bos_id = tokenizer.bos_id


def test_a_no_op_that_differs_stops_the_run(loaded):
    config = dataclasses.replace(length_shift.TINY, count=1, batch=1, limit=4)
    ids = length_dataset.encode(length_dataset.built_in(config, loaded.tokenizer), loaded.tokenizer)
    batch = length_shift.Batch(config, loaded, ids, 0, False)
    setting = (0.0, 1.0, None)
    full, _ = batch.answers("full", length_shift.registry.make("full"), setting)
    length_shift.check_no_op(batch, full, setting)
    wrong = [full[0]._replace(gap=full[0].gap + 1e-3)]
    with pytest.raises(ValueError, match="the no-op arm differs"):
        length_shift.check_no_op(batch, wrong, setting)
