import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments import plots, runner
from experiments.report import Column, Progress, interval, markdown, table
from experiments.runner import Run, main

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Config:
    budgets: tuple[int, ...] = (1, 2, 3)
    """Budgets in tokens."""
    rate: float = 0.5
    """Rate."""
    folder: Path | None = None
    """A folder."""


COLUMNS = (
    Column("budget, tokens", "budget", "d"),
    Column("exact, %", interval("exact", ".1f", 100)),
    Column("kind", lambda row: "odd" if row["budget"] % 2 else None),
)

# An experiment as a user writes it; DIE_AFTER kills it from inside after that many new cells.
EXPERIMENT = textwrap.dedent(
    '''
    """Which budget is best? `python -m experiments.toy`."""
    import dataclasses, os, signal
    from experiments.plots import against_bytes
    from experiments.report import Column, markdown, table
    from experiments.runner import Run, main

    @dataclasses.dataclass(frozen=True)
    class Config:
        lengths: tuple[int, ...] = (10, 20, 30, 40)
        """Prompt lengths in tokens."""
        rate: float = 0.5
        """Share kept."""
        fail: str = ""
        """Message to fail with."""

    COLUMNS = (Column("length, tokens", "length", "d"), Column("score, %", "score", ".3f"))

    def scalars(row):
        yield "toy/score_percent", row["score"], row["length"]

    def run(config: Config, run: Run):
        run.watch(scalars)
        new = 0
        for length in config.lengths:
            if run.finished({"length": length}):
                continue
            if new == int(os.environ.get("DIE_AFTER", 99)):
                # in the background a shell has it ignored, and children inherit that
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.kill(os.getpid(), int(os.environ["DIE_BY"]))
            if config.fail:
                raise ValueError(config.fail)
            new += 1
            row = {"length": length, "method": "m", "score": 100 / length ** config.rate}
            run.append(row, kv_bytes={str(length): {"layers": [length]}})
        table(run.rows, COLUMNS, "toy")
        figure = against_bytes(run.rows, "score", x="length", title="toy", y_label="score, %")
        run.save_figure("score", figure)
        run.write_summary(markdown(run.rows, COLUMNS, "toy"))

    if __name__ == "__main__":
        main(Config, run)
    '''
)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Return the toy experiment as a module."""
    (tmp_path / "toy.py").write_text(EXPERIMENT)
    spec = importlib.util.spec_from_file_location("toy", tmp_path / "toy.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "toy", module)
    spec.loader.exec_module(module)
    # in this process: the cache would outlive the test
    monkeypatch.setattr("experiments.runner.enable_compilation_cache", lambda: None)
    return module


def start(tmp_path, *args, **variables):
    """Run the toy experiment as a user would."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "KVJAX_CACHE": str(tmp_path / "cache")}
    return subprocess.run(
        [sys.executable, "toy.py", *args],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment | {"JAX_PLATFORMS": "cpu"} | variables,
    )


def only_run(tmp_path):
    (path,) = (tmp_path / "runs" / "toy").iterdir()
    return path


def scalars(path, tag):
    events = EventAccumulator(str(path), size_guidance={"scalars": 0})
    events.Reload()
    return [(point.step, pytest.approx(point.value)) for point in events.Scalars(tag)]


def test_a_killed_run_keeps_its_events_and_resumes_to_the_same_table(toy, tmp_path):
    config = toy.Config(rate=0.7)
    with Run.create(config, tmp_path / "elsewhere") as run:
        toy.run(config, run)
    whole = run.path
    table_text = (whole / "summary.md").read_text().split("##")[1]
    want = {name: (whole / name).read_bytes() for name in ("metrics.jsonl", "kv_bytes.json")}
    points = scalars(whole, "toy/score_percent")
    assert len(points) == 4

    killed = start(tmp_path, "--rate", "0.7", DIE_AFTER="2", DIE_BY=str(signal.SIGKILL.value))
    assert killed.returncode == -signal.SIGKILL
    path = only_run(tmp_path)
    assert scalars(path, "toy/score_percent") == points[:2]  # readable after the crash
    with open(path / "metrics.jsonl", "a") as record:
        record.write('{"length": 30, "sco')  # what a kill in the middle of a write leaves

    resumed = start(tmp_path, "--resume", str(path))  # the run's own flags are taken over
    assert resumed.returncode == 0, resumed.stderr
    assert only_run(tmp_path) == path
    assert {name: (path / name).read_bytes() for name in want} == want
    assert (path / "summary.md").read_text().split("##")[1] == table_text
    assert scalars(path, "toy/score_percent") == points
    events = EventAccumulator(str(path), size_guidance={"images": 0})
    events.Reload()
    (image,) = events.Images("plots/score")
    assert image.encoded_image_string == (path / "score.png").read_bytes()
    assert len(json.loads((path / "config.json").read_text())["resumed"]) == 1

    assert (tmp_path / "cache" / "xla").is_dir()
    with pytest.raises(ValueError, match=r"lengths=\[10\] .*rate=0.8 \(was 0.7\)") as caught:
        Run.resume(toy.Config(rate=0.8, lengths=(10,)), path)
    assert "fail=" not in str(caught.value)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_says_how_to_resume(toy, tmp_path, number, code):
    stopped = start(tmp_path, DIE_AFTER="1", DIE_BY=str(number.value))
    assert stopped.returncode == code and "Traceback" not in stopped.stderr
    advice = f"go on with: python -m experiments.toy --resume {only_run(tmp_path)}"
    assert f"1 finished cells are kept, {advice}" in stopped.stderr


def test_an_expected_error_is_one_line(toy, tmp_path, capsys, monkeypatch):
    args = ["--runs-dir", str(tmp_path), "--fail", "budget=3 must be\n at least window=4."]
    with pytest.raises(SystemExit) as stopped:
        main(toy.Config, toy.run, args)
    shown = capsys.readouterr().err
    assert stopped.value.code == 1 and shown.count("\n") == 1
    assert shown.startswith("error: budget=3 must be at least window=4. (")
    monkeypatch.setenv("KVJAX_TRACEBACK", "1")
    with pytest.raises(ValueError, match="budget=3"):
        main(toy.Config, toy.run, args)


def run_main(args, function=lambda config, run: None):
    with pytest.raises(SystemExit) as stopped:
        main(Config, function, args)
    return stopped.value.code


def test_an_unknown_flag_exits_with_the_nearest_name(capsys):
    assert run_main(["--budgts", "3"]) == 2
    assert "--budgets" in capsys.readouterr().err


def test_help_shows_every_flag_with_its_docstring(capsys):
    assert run_main(["--help"]) == 0
    shown = capsys.readouterr().out
    for text in ("--budgets", "Budgets in tokens.", "--runs-dir", "--resume"):
        assert text in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "holds no config.json"),
        ("{", "config.json must be JSON"),
        ('{"model_type": "llama"}', "config.json is not a run's"),
        ("[]", "config.json is not a run's"),
    ],
)
def test_resume_of_what_is_no_run_is_one_line(tmp_path, capsys, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert run_main(["--resume", str(tmp_path)]) == 1
    shown = capsys.readouterr().err
    assert message in shown and str(tmp_path) in shown and shown.count("\n") == 1


def test_resume_of_another_experiment_names_it(tmp_path, capsys):
    with Run.create(Config(), tmp_path, "other", ["--unknown", "1"]) as run:
        pass
    assert run_main(["--resume", str(run.path)]) == 1
    advice = (
        f"is a run of other, not of test_runner: python -m experiments.other --resume {run.path}"
    )
    assert advice in capsys.readouterr().err


def test_an_existing_folder_is_never_written_to(tmp_path):
    runs = [Run.create(Config(), tmp_path) for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    for run in runs:
        run.close()
    assert all(run.path.parent.name == "test_runner" for run in runs)


def test_nan_is_a_defect_unless_declared(tmp_path):
    with Run.create(Config(), tmp_path) as run:
        for bad in (float("nan"), np.float32("inf"), [1.0, float("nan")], jnp.asarray(jnp.nan)):
            with pytest.raises(ValueError, match="loss=.*metric must be finite.*nan_allowed"):
                run.append({"method": "m", "loss": bad})
        row = run.append({"method": "m", "loss": float("nan")}, nan_allowed=["loss"])
        assert row == {"method": "m", "loss": None} and run.rows == [row]
    assert (run.path / "metrics.jsonl").read_text() == '{"method": "m", "loss": null}\n'


def test_rows_hold_scalars_of_every_kind_and_round_trip(tmp_path):
    with Run.create(Config(folder=tmp_path), tmp_path) as run:
        run.watch(lambda row: [("a/bf16_nats", row["bf16"], 3), ("a/none", None, 3)])
        row = run.append(
            {
                "bf16": jnp.asarray(1.5, jnp.bfloat16),
                "f32": jnp.asarray([0.1, 2.0]),
                "int": np.int64(2**40),
                "bool": np.bool_(True),
                "tuple": (1, "a"),
                "path": tmp_path,
            }
        )
        with pytest.raises(TypeError, match="cannot be recorded"):
            run.append({"x": object()})
    assert row["bf16"] == 1.5 and row["int"] == 2**40 and row["bool"] is True
    assert json.loads((run.path / "metrics.jsonl").read_text()) == row
    assert scalars(run.path, "a/bf16_nats") == [(3, 1.5)]
    with Run.resume(Config(folder=tmp_path), run.path) as again:
        assert again.rows == [row]
        assert again.finished({"int": np.int64(2**40), "tuple": (1, "a")}) == row
        assert again.finished({"int": 1}) is None and again.finished({"absent": None}) is None


def test_a_key_that_matches_two_rows_is_an_error(tmp_path):
    with Run.create(Config(), tmp_path) as run:
        run.append({"method": "a", "budget": 1})
        run.append({"method": "a", "budget": 2})
        assert run.finished({"method": "a", "budget": 2}) == {"method": "a", "budget": 2}
        with pytest.raises(ValueError, match="matches 2 rows"):
            run.finished({"method": "a"})


def test_a_broken_row_in_the_middle_is_an_error(tmp_path):
    with Run.create(Config(), tmp_path) as run:
        run.append({"a": 1})
    text = (run.path / "metrics.jsonl").read_text()
    (run.path / "metrics.jsonl").write_text(text + "broken\n" + text)
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        Run.resume(Config(), run.path)


def test_files_are_closed_and_complete_after_an_exception(tmp_path):
    with pytest.raises(RuntimeError), Run.create(Config(), tmp_path) as run:
        run.watch(lambda row: [("a/b", row["x"], 0)])
        run.append({"x": 1.0})
        raise RuntimeError
    assert run._record.closed and scalars(run.path, "a/b") == [(0, 1.0)]


def test_a_tag_without_group_is_an_error(tmp_path):
    with Run.create(Config(), tmp_path) as run:
        run.watch(lambda row: [("loss", 1.0, 0)])
        with pytest.raises(ValueError, match="group/metric_unit"):
            run.append({"x": 1})


def test_tables_agree_and_mark_what_is_missing(capsys):
    rows = [
        {"budget": 1, "exact": 0.5, "exact_low": 0.25, "exact_high": 0.75},
        {"budget": 2, "exact": None},
    ]
    text = markdown(rows, COLUMNS, "a title")
    assert "## a title" in text and "| 1 | 50.0 [25.0, 75.0] | odd |" in text
    assert "| 2 | – | – |" in text
    table(rows, COLUMNS, "a title")
    shown = capsys.readouterr().out
    assert "a title" in shown and "50.0 [25.0, 75.0]" in shown


def test_progress_prints_lines_without_a_terminal(capsys):
    with Progress(3, "cells") as progress:
        progress.advance(skipped=True)
        assert progress.time_left() == "time left unknown"
        progress.advance()
        assert progress.time_left().endswith(" left")
        progress.advance("last")
    assert capsys.readouterr().out.startswith("cells: 3/3, took 0:0")


def test_group_means_and_styles():
    rows = [{"m": m, "x": x, "e": e} for m in "ab" for x in (1, 2) for e in (0.0, 1.0, 2.0, None)]
    means = plots.group_means(rows, ("m", "x"), ["e"])
    assert [(r["m"], r["x"], r["e"], r["n"]) for r in means][:2] == [("a", 1, 1, 4), ("a", 2, 1, 4)]
    assert means[0]["e_low"] < 1 < means[0]["e_high"]
    known = list(plots._STYLES)
    assert len({plots.style(m)[0] for m in known}) == len({plots.style(m) for m in known})
    assert plots.style("anchorkv:paper_short")[:2] == plots.style("anchorkv")[:2]
    assert plots.style("anchorkv:paper_short")[2] != plots.style("anchorkv")[2]
    assert plots.bytes_text(1536) == "1.5 KiB" and plots.bytes_text(3 * 2**30) == "3 GiB"


@pytest.mark.parametrize("log_y", [False, True])
def test_plots_draw_every_method_and_take_missing_values(log_y):
    rows = [{"method": "full", "kv_bytes": 4096, "s": 90.0, "s_low": 80.0, "s_high": 95.0}]
    rows += [
        {"method": m, "kv_bytes": b, "s": s, "s_low": None, "layer": b}
        for m in ("snapkv", "novel")
        for b, s in ((512, 0.0), (1024, 40.0), (2048, None))
    ]
    figure = plots.against_bytes(rows, "s", title="t", y_label="s, %", log_y=log_y)
    axes = figure.axes[0]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["full", "snapkv", "novel"]
    assert axes.get_xscale() == "log" and axes.get_yscale() == ("log" if log_y else "linear")
    stars = [line for line in axes.lines if line.get_marker() == "*"]
    assert len(stars) == 1 and stars[0].get_xdata().tolist() == [4096]
    layers = plots.by_layer(rows[1:], "s", title="t", y_label="e", log_y=log_y)
    assert layers.axes[0].get_xlabel() == "layer"


def test_programs_are_dropped_only_when_memory_maps_run_out():
    double = jax.jit(lambda x: 2 * x)
    double(1.0)
    runner.bound_programs()
    assert double._cache_size() == 1
    runner.bound_programs(most_maps=0)
    assert double._cache_size() == (0 if Path("/proc/self/maps").exists() else 1)
    assert double(2.0) == 4.0


def test_a_summary_names_the_revisions_that_made_its_rows(tmp_path, monkeypatch):
    there = runner.surroundings()

    def at(revision):
        monkeypatch.setattr(runner, "surroundings", lambda: there | {"revision": revision})

    def head(run):
        return run.write_summary("text").read_text().split("revision")[1].split(".")[0]

    config = Config()
    at("aaa")
    with Run.create(config, tmp_path) as run:
        assert head(run) == " aaa"
        run.append({"x": 1})
    path = run.path
    for revision in ("bbb", "ccc"):
        at(revision)
        with Run.resume(config, path) as run:
            if revision == "ccc":  # the one before only reported
                run.append({"x": 2})
            text = head(run)
    assert text == "s aaa, ccc"
