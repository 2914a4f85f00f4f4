"""The sweep on random weights: arms, equal bytes, one compilation a setting, resume."""

import dataclasses
import json

import numpy as np
import pytest

from experiments import anchorkv_sweep, arms, equal_bytes
from experiments.anchorkv_sweep import TINY, run
from experiments.runner import Run, main
from kvjax import accounting, decode, registry
from kvjax.types import PromptShape

SHAPE = PromptShape(1024, 3, 64)


def test_arms_meet_their_targets_or_say_what_they_reach():
    labels = ("anchorkv", "anchorkv:paper_short", "snapkv", "kivi")
    planned = arms.plan(labels, (2.0, 4.0, 10.0, 40.0), ("anchorkv",), SHAPE)
    assert {arm.label for arm in planned} == set(labels)
    for arm in planned:
        stored = arm.method.layer_bytes(SHAPE)
        if arm.limit is None:
            target = SHAPE.full_bytes / arm.target_ratio
            assert target * 0.98 - 2 * 3 * 64 * 2 <= stored <= target
    limits = {arm.label for arm in planned if arm.limit and arm.limit.startswith("limit")}
    assert "anchorkv:paper_short" in limits  # plain storage does not reach 40x here
    points = [a.method.layer_bytes(SHAPE) for a in planned if a.label == "kivi"]
    assert len(points) == len(registry.make("kivi").points())
    own = [a.method.layer_bytes(SHAPE) for a in planned if a.label == "anchorkv"]
    for point in points:  # AnchorKV also runs at exactly the bytes of each of KIVI's settings
        assert any(0 <= point - mine <= 0.02 * point for mine in own)


def test_a_setting_that_answers_several_targets_stands_once():
    planned = arms.plan(("anchorkv:paper_short",), (20.0, 40.0, 80.0), (), SHAPE)
    assert len(planned) == 1 and planned[0].limit.startswith("limit")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with Run.create(TINY, tmp_path_factory.mktemp("runs")) as made:
        run(TINY, made)
    return made


def test_every_row_is_within_its_bytes_and_the_full_cache_is_exact(made):
    rows = made.rows
    full = [r for r in rows if r["method"] == "full"]
    assert len(full) == TINY.prompts and all(r["kl"] == 0 and r["error"] < 1e-5 for r in full)
    for row in rows:
        assert row["removed"] == pytest.approx(1 - 1 / row["ratio"])
        if row["limit"] is None and row["method"] != "full":
            assert row["target_ratio"] * 0.9999 <= row["ratio"] <= row["target_ratio"] * 1.03
            assert row["kl"] > 0 and row["error"] > 0
    table = json.loads((made.path / "kv_bytes.json").read_text())
    arm = next(name for name in table if "/anchorkv@3.00x" in name)
    live = sum(part["live"] for layer in table[arm] for part in layer.values() if
               part["role"] != "tail")  # fmt: skip
    row = next(r for r in rows if r["method"] == "anchorkv" and r["target_ratio"] == 3.0)
    assert live == row["kv_bytes"] * TINY.batch


def test_each_setting_compiles_once_for_all_layers_and_batches(tmp_path):
    config = dataclasses.replace(TINY, prompts=3, batch=1, ratios=(3.5,), matched=())
    before = decode._compress._cache_size()
    with Run.create(config, tmp_path) as made:
        run(config, made)
        settings = {(r["method"], r["target_ratio"]) for r in made.rows}
    assert len(settings) == 7  # full, anchorkv, snapkv and four of kivi
    assert decode._compress._cache_size() - before <= len(settings) + 1  # and the no-op arm


@pytest.mark.parametrize(
    "changes",
    [
        {"aware": True, "methods": ("snapkv",)},
        {"generate": True, "methods": ("snapkv",)},
        {"task": "text", "continuation": 16, "methods": ("snapkv",)},
    ],
)
def test_variants_run(tmp_path, changes):
    config = dataclasses.replace(TINY, lengths=(256,), ratios=(3.0,), **changes)
    with Run.create(config, tmp_path) as made:
        run(config, made)
    assert (made.path / "summary.md").is_file()
    if "generate" in changes:
        assert all("generated_exact" in row for row in made.rows)


def test_a_killed_run_resumes_to_the_same_table(made):
    summary = (made.path / "summary.md").read_text()
    lines = (made.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (made.path / "metrics.jsonl").write_text("".join(lines[:5]) + lines[5][:20])
    with Run.resume(TINY, made.path) as again:
        run(TINY, again)
    assert (made.path / "summary.md").read_text() == summary
    assert (made.path / "metrics.jsonl").read_text() == "".join(lines)


def test_the_no_op_check_can_fail():
    class Broken:
        logits = np.zeros((1, 2, 3))

    def views(method):
        assert method == registry.make("snapkv").exact()
        return None, None

    real, equal_bytes.continuation.force = equal_bytes.continuation.force, lambda *_: Broken
    try:
        full = type("Full", (), {"logits": np.ones((1, 2, 3))})
        with pytest.raises(ValueError, match="no-op"):
            equal_bytes.check_no_op(views, (None, None), (None, None, None), full)
    finally:
        equal_bytes.continuation.force = real


def test_bytes_above_the_target_stop_the_run():
    method = accounting.solve(registry.make("snapkv"), SHAPE.full_bytes / 4, SHAPE)
    arm = arms.Arm("snapkv", 4.0, method, None)
    most = SHAPE.full_bytes / 4 * 2
    equal_bytes.check_bytes(arm, np.array([most]), SHAPE, layers=2)
    with pytest.raises(ValueError, match="within the target"):
        equal_bytes.check_bytes(arm, np.array([most + 1]), SHAPE, layers=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "snapvk"], "unknown method 'snapvk'"),
        (["--methods", "snapkv:papr"], "snapkv has no preset 'papr'"),
        (["--model", "/nowhere/model.gguf"], "model.gguf"),
        (["--model", "tiny", "--needles", "hay_7"], "must read like noise_7"),
        (["--model", "tiny", "--ratios", "-1"], "exactly one positive value"),
        (["--model", "tiny", "--lengths", "40"], "num_tokens=40"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(anchorkv_sweep.Config, run, [*arguments, "--runs-dir", str(tmp_path)])
    assert stopped.value.code == 1
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error
