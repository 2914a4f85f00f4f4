"""The paired study on a tiny model: exact counts, bytes by hand, failures, resume, one JSON."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import quantized_cache_matrix as matrix
from experiments import quantized_cache_measure as measure
from experiments import quantized_cache_memory as memory
from experiments import quantized_cache_plots as plots
from experiments import quantized_cache_report as report
from experiments import quantized_cache_study as study
from experiments.quantized_cache_decode import (
    Cell,
    Forced,
    compared,
    expected_flushes,
    prompt_of,
)
from experiments.quantized_cache_matrix import TINY, Config
from experiments.runner import Run
from kvjax import decode, registry
from kvjax.evaluation.admission import ACCEPTED, FAILED, REFERENCE, REFUSED, Gates
from models import hub, tiny

# 72 is no multiple of 16: the two policies differ in what the prompt leaves exact
ODD = dataclasses.replace(
    TINY, contexts=(72,), context_new_tokens=12, context_residual=16, windows=(), repeats=2,
)  # fmt: skip
# groups of 48 channels do not fit 32: hqq fails, kivi (groups of 8 tokens) goes on
BROKEN = dataclasses.replace(TINY, contexts=(), window_new_tokens=8, group=48)


def finished(config, folder):
    with Run.create(config, folder) as run:
        matrix.run(config, run)
    return run


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    return finished(ODD, tmp_path_factory.mktemp("odd"))


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    return finished(BROKEN, tmp_path_factory.mktemp("broken"))


def study_of(run):
    return json.loads((run.path / "study.json").read_text())


def test_the_default_matrices_are_what_the_study_asks_for():
    groups = matrix.plan(Config())
    assert [(g[0].matrix, g[0].context, g[0].new_tokens) for g in groups] == [
        ("context", 512, 64), ("context", 2048, 64), ("context", 4096, 64), ("window", 512, 128),
    ]  # fmt: skip
    assert all(g[0].method == "full" for g in groups)
    rivals = [(m, b) for m in ("kivi", "hqq") for b in (4, 2)]
    for group in groups[:3]:
        assert [(c.method, c.bits) for c in group[1:]] == rivals
        assert {(c.residual_length, c.group) for c in group[1:]} == {(128, 64)}
    window = groups[3][1:]
    assert [(c.residual_length, c.method, c.bits) for c in window] == [
        (r, method, 4) for r in (16, 32, 64) for method in ("kivi", "hqq")
    ]
    for cell in window:  # a group of tokens lies in one block
        assert cell.group == (cell.residual_length if cell.method == "kivi" else 64)
    keys = [tuple(c.key.values()) for group in groups for c in group]
    assert len(set(keys)) == len(keys) == 22


def test_the_arms_are_mixed_axes_and_same_axis_with_whole_cache_flushes():
    cells = matrix.plan(Config())[0]
    kivi, hqq = (registry.make(c.label) for c in cells[1::2])
    assert (kivi.k_bits, kivi.v_bits, kivi.group, kivi.residual_length) == (4, 4, 64, 128)
    assert (hqq.key_axis, hqq.value_axis, hqq.refine) == ("token", "token", "exact")
    assert hqq.requantize_all and (hqq.k_bits, hqq.group, hqq.residual_length) == (4, 64, 128)
    other = dataclasses.replace(Config(), hqq_axis="channel", windows=(16,))
    assert matrix.plan(other)[-1][-1].group == 16


@pytest.mark.parametrize(
    "change, said",
    [({"methods": ("gear",)}, "of kivi and hqq"), ({"contexts": (), "windows": ()}, "both empty"),
     ({"quality_tokens": 9}, "quality_tokens=9"), ({"repeats": 0}, "repeats=0"),
     ({"windows": (8, 8)}, "windows"), ({"contexts": (0,)}, "at least 1"),
     ({"label": "a b"}, "label='a b'"), ({"group": 0}, "group=0 must be at least 1")],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        matrix.check(dataclasses.replace(TINY, **change))


def test_a_context_beyond_the_model_is_refused_before_anything_runs():
    with pytest.raises(ValueError, match="8200 tokens exceed the 8192 positions"):
        matrix.check_length(dataclasses.replace(TINY, contexts=(8192,)), hub.load("tiny"))


@pytest.mark.parametrize("context", [5, 512, 700])
def test_a_prompt_is_exactly_as_long_as_asked_and_its_hash_is_that_of_its_tokens(context):
    prompt = prompt_of(tiny.tokenizer(), context, 17, 3, None)
    assert len(prompt.context) == context and len(prompt.follows) == 17
    assert prompt == prompt_of(tiny.tokenizer(), context, 17, 3, None)
    changed = prompt._replace(context=(*prompt.context[:-1], prompt.context[-1] ^ 1))
    assert prompt.sha256 != changed.sha256 and len(prompt.sha256) == 64


def walked(context, new_tokens, residual, whole):
    """Flushes counted by walking through the positions."""
    coded = context if whole else context - context % residual
    count = 0
    for position in range(context + 1, context + new_tokens + 1):
        if position % residual == 0 and position - coded >= residual:
            coded, count = coded + residual, count + 1
    return count


@pytest.mark.parametrize("whole", [False, True])
def test_expected_flushes_are_those_of_a_walk_through_the_positions(whole):
    assert expected_flushes(512, 128, 16, whole) == 8
    assert expected_flushes(4096, 64, 128, whole) == 0
    for context in range(1, 40):
        for new_tokens in (1, 7, 16, 33):
            for residual in (1, 4, 16):
                found = expected_flushes(context, new_tokens, residual, whole)
                assert found == walked(context, new_tokens, residual, whole)


def test_quality_by_hand():
    targets = jnp.asarray([0, 1])
    full = Forced(jnp.log(jnp.asarray([[0.5, 0.2, 0.1, 0.1, 0.06, 0.04]] * 2)), targets)
    own = Forced(jnp.log(jnp.asarray([[0.25, 0.2, 0.1, 0.05, 0.1, 0.3]] * 2)), targets)
    found = compared(full, own)
    assert found["nll_full"] == pytest.approx(-np.log([0.5, 0.2]).mean())
    assert found["nll_difference"] == pytest.approx(np.log([2, 1]).mean(), abs=1e-6)
    assert found["nll_ratio"] == pytest.approx(found["nll"] / found["nll_full"])
    assert found["top5_overlap"] == pytest.approx(0.8)
    same = compared(full, full)
    assert (same["nll_difference"], same["top5_overlap"], same["nll_ratio"]) == (0, 1, 1)
    with pytest.raises(FloatingPointError, match="not finite"):
        compared(full, Forced(own.logits * jnp.nan, targets))


def test_bytes_of_a_kivi_cache_by_kind_and_by_hand():
    loaded, cell = hub.load("tiny"), matrix.plan(ODD)[0][1]
    prompt = prompt_of(loaded.tokenizer, 72, 1, 0, None)
    filled = decode.prefill(
        loaded.model, loaded.params, jnp.asarray([prompt.context]), jnp.zeros(1, jnp.int32)
    )
    method = registry.make(cell.label)
    before = memory.live_array_bytes()
    caches = decode.compress(method, filled.prompts, loaded.model, reserve=12)
    held = memory.live_array_bytes() - before
    stored = memory.storage(caches)
    # 2 layers, 2 heads of 32 at 4 bits: 64 of 72 keys and 56 of 72 values are read from codes
    assert stored["packed_bytes"] == 2 * 2 * (64 + 56) * 32 * 4 // 8
    assert stored["scale_bytes"] == 2 * 2 * (64 // 16 * 32 + 56 * 32 // 16) * 4
    assert stored["exact_bytes"] == 2 * 2 * (8 + 16) * 32 * 2
    kinds = ("packed", "scale", "exact", "bookkeeping")
    assert stored["live_bytes"] == sum(stored[f"{kind}_bytes"] for kind in kinds)
    assert stored["container_bytes"] == sum(stored[f"container_{kind}_bytes"] for kind in kinds)
    assert stored["container_bytes"] == held
    predicted, full = memory.predicted_bytes(method, loaded.model, 72, 12, "bfloat16")
    assert predicted == stored["container_bytes"] < full


def test_a_head_of_its_own_leaves_the_embedding_table_unread():
    params = {"embedding": jnp.zeros((10, 4)), "norm": jnp.zeros(4), "layers": [jnp.zeros(2)]}
    assert memory.weight_bytes_read(params) == (40 + 4 + 2) * 4
    assert memory.weight_bytes_read(params | {"head": jnp.zeros((4, 10))}) == (40 + 4 + 2) * 4


def test_a_device_s_own_peaks_are_preferred_and_named_where_both_are_there():
    field = "own_process_incremental_allocated_peak_bytes"
    arm, full = ({"incremental_live_peak_bytes": n} for n in (7, 11))
    assert measure.peaks_of(arm, full) == ("live arrays", 7, 11)
    arm[field] = 9
    assert measure.peaks_of(arm, full) == ("live arrays", 7, 11)
    full[field] = 20
    assert measure.peaks_of(arm, full) == ("allocated peak of the device", 9, 20)


@pytest.mark.parametrize("required", [True, False])
def test_a_second_process_that_is_refused_fails_an_arm_only_where_it_was_asked_for(
    required, monkeypatch
):
    def refuse(spec):
        raise jax.errors.JaxRuntimeError("the device is in use")

    monkeypatch.setattr(memory, "isolated", refuse)
    cell = matrix.plan(ODD)[0][0]
    settings = matrix.settings_of(ODD)._replace(own_process=True, peak_required=required)
    group = measure.Group(None, settings, [cell])
    group.attempt(cell, "peak", lambda: group._peak(cell))
    assert (cell in group.failures) == required
    if not required:
        assert group.facts[cell] == {"own_process_error": "the device is in use"}


def test_device_peaks_are_read_under_their_names(monkeypatch):
    class Device:
        def memory_stats(self):
            return {"bytes_in_use": 1, "peak_bytes_in_use": 5, "peak_pool_bytes": 8}

    assert memory.device_peaks() is None, "a CPU reports none"
    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    assert memory.device_peaks() == {
        "allocated_bytes": 1, "allocated_peak_bytes": 5, "reserved_peak_bytes": 8,
    }  # fmt: skip


def test_an_arm_alone_reports_the_process_and_no_device_on_a_cpu(monkeypatch):
    monkeypatch.setattr("experiments.runner.enable_compilation_cache", lambda: None)
    cell = matrix.plan(ODD)[0][1]
    found = memory.alone(memory.Spec("tiny", cell.label, 72, 12, "bfloat16", None, 0))
    assert found["incremental_allocated_peak_bytes"] is None
    assert found["incremental_process_peak_rss_bytes"] >= 0


def test_a_process_that_dies_says_why(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no memory left')\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(ChildProcessError, match="no memory left"):
        memory.isolated(memory.Spec("tiny", "full", 8, 2, "bfloat16", None, 0))


def test_every_arm_decodes_the_same_fixed_number_of_tokens_and_flushes_when_due(odd):
    assert [row["method"] for row in odd.rows] == ["full", "kivi", "hqq"]
    full, kivi, hqq = odd.rows
    assert (full["expected_flushes"], full["measured_flushes"]) == (0, 0)
    # position 80 closes a block of kivi's 8 left tokens; hqq has coded all 72 and waits for 96
    assert (kivi["expected_flushes"], kivi["measured_flushes"]) == (1, 1)
    assert (hqq["expected_flushes"], hqq["measured_flushes"]) == (0, 0)
    for row in odd.rows:
        assert row["new_tokens"] == 12 and len(row["ms_per_token_all"]) == 2
        assert row["ms_per_token_min"] <= row["ms_per_token"] <= max(row["ms_per_token_all"])
        assert row["failure_stage"] is None


def test_the_full_cache_is_its_own_reference_and_savings_are_differences_of_peaks(odd):
    full, *rivals = odd.rows
    assert full["decision"] == REFERENCE and full["latency_ratio"] == 1
    assert (full["saved_bytes"], full["nll_difference"], full["top5_overlap"]) == (0, 0, 1)
    assert (full["greedy_agreement"], full["first_divergence"]) == (1, 12)
    for row in rivals:
        assert row["decision"] in (ACCEPTED, REFUSED)
        peaks = full["incremental_peak_bytes"], row["incremental_peak_bytes"]
        assert row["saved_bytes"] == peaks[0] - peaks[1]
        assert row["saved_percent"] == pytest.approx(100 * (1 - peaks[1] / peaks[0]))
        assert 0 <= row["greedy_agreement"] <= 1 and 0 <= row["first_divergence"] <= 12
        assert (row["greedy_agreement"] == 1) == (row["first_divergence"] == 12)
        assert row["latency_ratio"] == pytest.approx(row["ms_per_token"] / full["ms_per_token"])
    for row in odd.rows:  # beside the cache, decoding holds logits and a few tokens
        rest = row["incremental_peak_bytes"] - row["container_bytes"]
        assert 0 < rest < 4 * tiny.config().vocab_size + 256
        assert row["container_bytes"] == row["predicted_container_bytes"]
        assert row["process_peak_rss_bytes"] > row["incremental_peak_bytes"]


def test_scratch_of_the_step_counts_against_what_is_saved(odd):
    full, kivi, _ = report.with_scratch(odd.rows)
    assert full["saved_with_scratch_percent"] == 0
    peaks = [r["incremental_live_peak_bytes"] + r["step_scratch_bytes"] for r in (full, kivi)]
    assert kivi["step_scratch_bytes"] > full["step_scratch_bytes"]
    assert kivi["saved_with_scratch_percent"] == pytest.approx(100 * (1 - peaks[1] / peaks[0]))
    assert kivi["saved_with_scratch_percent"] < kivi["saved_percent"]
    on_device = {"incremental_peak_source": "allocated peak of the device"}
    assert report.with_scratch([full, kivi | on_device])[1]["saved_with_scratch_percent"] is None


def test_the_study_is_one_json_with_everything_that_identifies_it(odd):
    made = study_of(odd)
    assert made["workload"]["id"] and made["workload"]["version"] == 1
    assert made["label"] == odd.path.name and made["evidence_level"] == "smoke"
    assert made["model"]["revision"] == "random weights of key 0"
    assert made["framework"]["jax"] == jax.__version__ and made["hardware"]["devices"]
    assert made["prompt"]["sha256_by_context"] == {"72": odd.rows[0]["prompt_sha256"]}
    assert made["cells"] == odd.rows and made["failure_stage"] is None
    assert made["gates"] == Gates()._asdict()
    assert made["decision"] in (ACCEPTED, REFUSED)
    assert (made["candidate"] is not None) == (made["decision"] == ACCEPTED)
    assert made["published"]["context"][2]["nll_difference"] == 0.973


def test_a_failed_arm_leaves_its_stage_and_the_others_go_on(broken):
    by_method = {row["method"]: row for row in broken.rows}
    assert by_method["hqq"]["decision"] == FAILED and by_method["hqq"]["failure_stage"] == "plan"
    assert "group=48 must divide head_dim=32" in by_method["hqq"]["error"]
    assert by_method["kivi"]["decision"] in (ACCEPTED, REFUSED)
    assert by_method["kivi"]["measured_flushes"] == 1
    made = study_of(broken)
    assert made["failure_stage"] == "plan" and len(made["failures"]) == 1
    assert "failed: plan" in (broken.path / "summary.md").read_text()


def test_without_its_reference_every_arm_fails(monkeypatch):
    def refuse(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("out of memory")

    monkeypatch.setattr(decode, "compress", refuse)
    cells, loaded = matrix.plan(ODD)[0], hub.load("tiny")
    seen = []
    group = measure.Group(loaded, matrix.settings_of(ODD), cells)
    rows = group.measure(lambda cell, stage: seen.append(cell))
    assert [rows[cell]["failure_stage"] for cell in cells] == ["compress", *["reference"] * 2]
    assert all("out of memory" in rows[cell]["error"] for cell in cells)
    assert len(seen) == len(cells) * (1 + ODD.repeats)


@pytest.mark.parametrize("defect", [ValueError, RuntimeError, TypeError])
def test_a_defect_of_our_own_is_no_failed_arm(defect, monkeypatch):
    def wrong(*args, **kwargs):
        raise defect("wrong")

    monkeypatch.setattr(decode, "compress", wrong)
    group = measure.Group(hub.load("tiny"), matrix.settings_of(ODD), matrix.plan(ODD)[0])
    with pytest.raises(defect, match="wrong"):
        group.measure(lambda cell, stage: None)


def test_blocks_that_were_not_coded_when_due_stop_the_run(monkeypatch):
    monkeypatch.setattr(measure, "expected_flushes", lambda *args: 7)
    group = measure.Group(hub.load("tiny"), matrix.settings_of(ODD), matrix.plan(ODD)[0])
    with pytest.raises(ValueError, match="1 blocks were coded while decoding, not 7"):
        group.measure(lambda cell, stage: None)


def test_a_lost_row_is_measured_again_beside_the_full_cache(odd, tmp_path):
    path = tmp_path / odd.path.parent.name / odd.path.name
    path.mkdir(parents=True)
    (path / "config.json").write_bytes((odd.path / "config.json").read_bytes())
    lines = (odd.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[:2]))
    with Run.resume(ODD, path) as again:
        matrix.run(ODD, again)
    assert again.rows[:2] == odd.rows[:2] and len(again.rows) == 3
    new, old = again.rows[2], odd.rows[2]
    steady = ("label", "container_bytes", "saved_bytes", "nll_difference", "greedy_agreement")
    assert {name: new[name] for name in steady} == {name: old[name] for name in steady}
    assert new["full_ms_per_token"] != old["full_ms_per_token"], "paired with a new measurement"


def test_a_dry_run_measures_nothing(tmp_path, monkeypatch, capsys):
    def refuse(*args, **kwargs):
        raise AssertionError("a dry run must not prefill")

    monkeypatch.setattr(decode, "prefill", refuse)
    run = finished(dataclasses.replace(BROKEN, dry_run=True), tmp_path)
    assert run.rows == []
    made = study_of(run)
    assert made["decision"] == "failed" and made["failure_stage"] == "plan"
    kinds = [cell["decision"] for cell in made["cells"]]
    assert kinds == ["planned", "planned", FAILED] and made["evidence_level"] == "planned"
    assert made["cells"][1]["expected_flushes"] == 1
    made = study_of(finished(dataclasses.replace(ODD, dry_run=True), tmp_path))
    assert made["decision"] == made["evidence_level"] == "planned"
    assert "container MiB" in capsys.readouterr().out


def test_a_label_is_given_once(tmp_path):
    config = dataclasses.replace(ODD, dry_run=True, label="mine")
    planned, first = finished(config, tmp_path), finished(config, tmp_path)  # plans take none
    assert study_of(planned)["label"] == study_of(first)["label"] == "mine"
    measured = study_of(first) | {"evidence_level": "smoke"}
    (first.path / "study.json").write_text(json.dumps(measured))
    with pytest.raises(ValueError, match=f"label='mine' is that of {first.path.name}"):
        finished(config, tmp_path)
    with Run.resume(config, first.path) as run:
        matrix.run(config, run)  # its own label is no other's


def row(context, saved, latency, nll, decision):
    return {"matrix": "context", "context": context, "method": "kivi", "bits": 4,
            "saved_bytes": saved, "latency_ratio": latency, "nll_difference": nll,
            "decision": decision, "failure_stage": None}  # fmt: skip


def test_transitions_of_an_arm_by_hand():
    rows = [row(100, -1, 3.0, 0.1, REFUSED), row(200, 3, 2.0, 0.3, ACCEPTED),
            row(300, 9, 0.0, 0.7, REFUSED)]  # fmt: skip
    (found,) = study.transitions(rows, Gates())
    assert found == {
        "method": "kivi", "bits": 4, "onset_context": 200, "crossover_context": 125,
        "latency_crossover_context": 250, "quality_crossover_context": pytest.approx(250),
        "first_refused_context": 100,
    }  # fmt: skip


def test_the_candidate_of_each_context_saves_most_of_what_passed_there():
    rows = [row(100, 5, 1.0, 0.1, ACCEPTED), row(100, 7, 1.0, 0.1, REFUSED),
            row(200, -1, 1.0, 0.1, ACCEPTED)]  # fmt: skip
    rows = [r | {"residual_length": 16} for r in rows]
    found = study.by_context(rows)
    assert found["100"]["saved_bytes"] == 5 and found["200"] is None


def test_figures_draw_every_arm_and_what_was_published():
    arms = {
        ("kivi", 4): [row(512, 2**20, 1.1, 0.1, ACCEPTED), row(2048, 2**22, 1.2, 0.2, ACCEPTED)]
    }
    latency, saved, nll = plots.matrix(arms, "context", Gates(), "title").axes
    drawn = {line.get_label(): line for line in saved.get_lines()}
    assert list(drawn["kivi 4-bit"].get_ydata()) == [1, 4]
    assert list(drawn["published: HQQ 4-bit, Qwen2.5-0.5B"].get_ydata()) == [17.3, 34.5]
    assert any(set(line.get_ydata()) == {2.0} for line in latency.get_lines())
    assert any(set(line.get_ydata()) == {0.5} for line in nll.get_lines())
    assert len(plots.matrix({}, "window", Gates(), "nothing measured").axes) == 3


def test_names_of_cells_tell_them_apart():
    cells = [cell for group in matrix.plan(Config()) for cell in group]
    assert len({(cell.matrix, cell.name) for cell in cells}) == len(cells) == 22
    assert Cell("context", 8, 1, "full", 16, None, None, "full").name == "full, 8 tokens"
