"""Every experiment, found by looking: it runs in its TINY configuration and leaves readable events.

An experiment is a module of experiments/ with a class `Config` and a function `run`; it must also
have `TINY`, an instance of `Config` that runs in seconds, offline, on random weights.
"""

import ast
import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import experiments
from experiments.runner import Run

FOLDER = Path(experiments.__file__).parent


def discover(folder):
    """Return the names of the modules in `folder` that define `Config` and `run`."""
    found = []
    for path in sorted(folder.glob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        classes = {node.name for node in body if isinstance(node, ast.ClassDef)}
        functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
        if "Config" in classes and "run" in functions:
            found.append(path.stem)
    return found


def read_events(path):
    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "images": 0})
    events.Reload()
    tags = events.Tags()
    return {tag: events.Scalars(tag) for tag in tags["scalars"]}, tags["images"]


def test_discovery_finds_experiments_and_nothing_else(tmp_path):
    (tmp_path / "__init__.py").touch()
    (tmp_path / "sweep.py").write_text("class Config: ...\ndef run(config, run): ...\n")
    (tmp_path / "runner.py").write_text("class Run: ...\ndef main(): ...\n")
    (tmp_path / "half.py").write_text("class Config: ...\n")
    assert discover(tmp_path) == ["sweep"]
    assert not {"runner", "plots", "report", "record"} & set(discover(FOLDER))


@pytest.mark.parametrize("name", discover(FOLDER))
def test_tiny_run_leaves_readable_events_and_resumes_to_the_same(name, tmp_path):
    module = importlib.import_module(f"experiments.{name}")
    assert isinstance(module.TINY, module.Config)
    assert f"python -m experiments.{name}" in module.__doc__, "the docstring names its command"
    with Run.create(module.TINY, tmp_path) as run:
        module.run(module.TINY, run)
    assert run.experiment == name
    rows = (run.path / "metrics.jsonl").read_bytes()
    summary = (run.path / "summary.md").read_text()
    assert rows.count(b"\n") == len(run.rows) > 0 and "|" in summary
    assert json.loads((run.path / "config.json").read_text())["versions"]["jax"]

    scalars, images = read_events(run.path)
    assert scalars, "no scalar in the event files: call run.watch"
    for tag, points in scalars.items():
        assert re.fullmatch(r"[\w.\-]+(/[\w.\-]+)+", tag)
        assert np.isfinite([point.value for point in points]).all(), tag
    plots = {f"plots/{path.stem}" for path in run.path.glob("*.png")}
    assert plots == set(images)

    with Run.resume(module.TINY, run.path) as again:
        module.run(module.TINY, again)
    assert (run.path / "metrics.jsonl").read_bytes() == rows
    assert (run.path / "summary.md").read_text() == summary
    resumed, _ = read_events(run.path)
    assert {t: [p.value for p in ps] for t, ps in resumed.items()} == {
        t: [p.value for p in ps] for t, ps in scalars.items()
    }
