"""A run: one folder that records every finished cell, and the command that starts or resumes it.

`metrics.jsonl` is the record, one JSON row a finished cell; TensorBoard events, plots and tables
are made from the rows only, so a resumed run gives what an unbroken one gives. An experiment is

    @dataclass(frozen=True)
    class Config: ...                      # a docstring under each field becomes its --help
    TINY = Config(...)                     # seconds on random weights; tests/test_experiments.py
    def run(config: Config, run: Run): ...
    if __name__ == "__main__":
        main(Config, run)
"""

import dataclasses
import json
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from matplotlib.figure import Figure

from experiments.events import Events
from experiments.record import (
    Row,
    config_hash,
    finite_or_none,
    is_finite,
    new_folder,
    plain,
    read_record,
    read_rows,
    replace_text,
    surroundings,
    write_json,
)
from experiments.report import Progress, print_line

Scalars = Callable[[Row], Iterable[tuple[str, float, int]]]

_TAG = re.compile(r"[\w.\-]+(/[\w.\-]+)+")


class Run:
    """Owner of one folder `runs/<experiment>/<stamp>-<confighash>/`; a context manager.

    Attributes:
        path: the folder; holds config.json, metrics.jsonl, kv_bytes.json, summary.md, PNG plots
            and TensorBoard event files.
        experiment: name of the experiment's module.
        config: the experiment's configuration.
        rows: the finished cells, as metrics.jsonl holds them.
    """

    def __init__(self, path: Path, config: Any, rows: list[Row]):
        """Open an existing folder; use `create` or `resume`."""
        self.path, self.config, self.rows = path, config, rows
        self.experiment = path.parent.name
        self._scalars: Scalars | None = None
        self._events = Events(path)
        self._record = open(path / "metrics.jsonl", "a", encoding="utf-8")

    @classmethod
    def create(
        cls,
        config: Any,
        runs_dir: str | Path = "runs",
        experiment: str | None = None,
        arguments: Collection[str] = (),
    ) -> "Run":
        """Make a new folder and write its config.json; an existing folder is never touched.

        Args:
            config: a dataclass instance.
            runs_dir: folder that holds the experiments' folders.
            experiment: name of the experiment; by default that of the module of `config`.
            arguments: the command line after the program's name, read again when resuming.
        """
        experiment = experiment or experiment_name(type(config))
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        path = new_folder(Path(runs_dir) / experiment, f"{stamp}-{config_hash(config)}")
        record = {
            "experiment": experiment,
            "config": plain(config),
            "config_hash": config_hash(config),
            "arguments": list(arguments),
            "command": shlex.join(["python", "-m", f"experiments.{experiment}", *arguments]),
            "started": stamp,
            **surroundings(),
            "resumed": [],
        }
        write_json(path / "config.json", record)
        return cls(path, config, [])

    @classmethod
    def resume(cls, config: Any, path: str | Path) -> "Run":
        """Open a run that was stopped: drop a half-written last row, keep the finished ones.

        Event files are deleted: `watch` writes them again from the rows.

        Raises:
            FileNotFoundError: when `path` is not the folder of a run.
            ValueError: when `config` is not the run's, naming each field that differs, or when a
                row before the last cannot be read.
        """
        path = Path(path).resolve()
        record = read_record(path)
        ours, theirs = plain(config), record["config"]
        if config_hash(config) != record["config_hash"]:
            fields = [f for f in {**theirs, **ours} if ours.get(f) != theirs.get(f)]
            pairs = ", ".join(f"{f}={ours.get(f)!r} (was {theirs.get(f)!r})" for f in fields)
            raise ValueError(
                f"the configuration differs from that of {path}: {pairs or 'unknown fields'}. "
                "Resume with the same flags or start a new run."
            )
        rows = read_rows(path / "metrics.jsonl")
        for events in path.glob("events.out.tfevents.*"):
            events.unlink()
        record["resumed"].append(surroundings() | {"finished_rows": len(rows)})
        write_json(path / "config.json", record)
        return cls(path, config, rows)

    def finished(self, key: Mapping[str, Any]) -> Row | None:
        """Return the finished row whose fields equal all of `key`, or None.

        Raises:
            ValueError: when several rows match: the key does not identify a cell.
        """
        wanted = plain(dict(key))
        found = [r for r in self.rows if all(f in r and r[f] == v for f, v in wanted.items())]
        if len(found) > 1:
            raise ValueError(f"{wanted} matches {len(found)} rows; a key must identify one cell.")
        return found[0] if found else None

    def append(
        self,
        row: Mapping[str, Any],
        *,
        kv_bytes: Mapping[str, Any] | None = None,
        nan_allowed: Collection[str] = (),
    ) -> Row:
        """Record a finished cell: on disk when this returns.

        Args:
            row: JSON values, numpy or JAX scalars and arrays.
            kv_bytes: tables to add to kv_bytes.json, by the name of the arm; written first.
            nan_allowed: fields in which NaN and infinities are expected; they become null.

        Returns:
            The row as a resumed run would read it.

        Raises:
            ValueError: for a NaN or an infinity in any other field: it is a defect.
        """
        row = plain(dict(row))
        for field, value in row.items():
            if field in nan_allowed:
                row[field] = finite_or_none(value)
            elif not is_finite(value):
                raise ValueError(
                    f"{field}={value} in the row {_names(row)}: a metric must be finite; where "
                    f"it may be undefined pass nan_allowed=({field!r},) to append."
                )
        if kv_bytes:
            file = self.path / "kv_bytes.json"
            known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            write_json(file, known | plain(dict(kv_bytes)))
        self._record.write(json.dumps(row, allow_nan=False) + "\n")
        self._record.flush()
        os.fsync(self._record.fileno())
        self.rows.append(row)
        self._log(row)
        return row

    def watch(self, scalars: Scalars) -> None:
        """Write `scalars(row)` of every row to TensorBoard: finished ones now, others as they come.

        Args:
            scalars: gives (tag, value, step) triples of a row; a tag is `group/metric_unit` and
                may go on with the arm, as in `needle/exact_percent/snapkv`. None is skipped.
        """
        self._scalars = scalars
        for row in self.rows:
            self._log(row)

    def log(self, tag: str, value: float, step: int) -> None:
        """Write one scalar to TensorBoard, for what is made of several rows."""
        self._events.scalar(tag, value, step)

    def save_figure(self, name: str, figure: Figure) -> Path:
        """Write a matplotlib figure as `<name>.png` and as the TensorBoard image `plots/<name>`."""
        file = self.path / f"{name}.png"
        figure.savefig(file, dpi=figure.dpi)
        width, height = figure.canvas.get_width_height()
        self._events.image(f"plots/{name}", file.read_bytes(), height, width)
        self._events.flush()
        return file

    def write_summary(self, text: str) -> Path:
        """Write summary.md: title, command, machine and revisions, then `text` (markdown)."""
        record = read_record(self.path)
        versions, revisions = record["versions"], self._revisions(record)
        head = (
            f"# {self.experiment}\n\n```\n{record['command']}\n```\n\n"
            f"{', '.join(sorted(set(record['devices'])))}, {record['cpus']} CPUs; "
            f"JAX {versions['jax']}, Python {versions['python']}; "
            f"revision{'s' * (len(revisions) > 1)} {', '.join(revisions)}.\n\n"
        )
        file = self.path / "summary.md"
        replace_text(file, head + text.strip() + "\n")
        return file

    def _revisions(self, record: Mapping[str, Any]) -> list[str]:
        """The revisions that made the rows; of a run without rows the one that began it."""
        begun = [(record["revision"], 0)]
        begun += [(again["revision"], again["finished_rows"]) for again in record["resumed"]]
        ends = [*(rows for _, rows in begun[1:]), len(self.rows)]
        made = [name for (name, first), end in zip(begun, ends, strict=True) if end > first]
        return list(dict.fromkeys(name or "unknown" for name in made or [record["revision"]]))

    def progress(self, total: int, title: str) -> Progress:
        """Return a progress bar with the time left, a context manager with `advance`."""
        return Progress(total, title)

    def close(self) -> None:
        """Flush and close every file; safe to call twice."""
        self._events.close()
        self._record.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _log(self, row: Row) -> None:
        if self._scalars is None:
            return
        for tag, value, step in self._scalars(row):
            if not _TAG.fullmatch(tag):
                raise ValueError(f"tag={tag!r} must read group/metric_unit, as in speed/decode_ms.")
            if value is not None:
                self._events.scalar(tag, value, step)
        self._events.flush()


def main(
    config_class: type, run_function: Callable[[Any, Run], None], args: list[str] | None = None
) -> None:
    """Run an experiment from the command line; an expected error is one line and exit status 1.

    Args:
        config_class: frozen dataclass whose fields all have defaults.
        run_function: the experiment; gets the configuration and the open run.
        args: command line without the program's name.
    """
    args = list(sys.argv[1:] if args is None else args)
    experiment, run = experiment_name(config_class), None
    terminate = _interrupt_on_terminate()
    try:
        config, place, arguments = _parse(config_class, args)
        enable_compilation_cache()
        if place.resume is None:
            run = Run.create(config, place.runs_dir, experiment, arguments)
        else:
            run = Run.resume(config, place.resume)
        print_line(f"run: {run.path}")
        with run:
            run_function(config, run)
        print_line(f"done: {run.path} ({len(run.rows)} rows)")
    except KeyboardInterrupt as stop:
        how = f"; {_how_to_resume(experiment, run)}" if run else "."
        print(f"\ninterrupted{how}", file=sys.stderr)
        raise SystemExit(128 + (stop.args or (signal.SIGINT,))[0]) from None
    except (ValueError, NotImplementedError, OSError) as error:
        if os.environ.get("KVJAX_TRACEBACK", "0") not in ("", "0"):
            raise
        hints = ["KVJAX_TRACEBACK=1 shows where"]
        if run and run.rows:
            hints.append(_how_to_resume(experiment, run))
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"error: {message} ({'; '.join(hints)})", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        if terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def enable_compilation_cache() -> Path:
    """Turn on JAX's persistent compilation cache in `KVJAX_CACHE`/xla and return that folder."""
    from models.hub import cache_directory  # here: it loads Orbax

    folder = cache_directory() / "xla"
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return folder


def bound_programs(most_maps: int = 45_000) -> None:
    """Drop all compiled programs when they are about to use up the process's memory maps.

    Every program takes some, a Linux process has about 65,000, and beyond that the compiler dies.
    What is needed again comes from the persistent cache. To be called between cells.

    Args:
        most_maps: of the process; where the system does not tell how many, nothing is done.
    """
    try:
        maps = Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return
    if maps > most_maps:
        jax.clear_caches()


def experiment_name(config_class: type) -> str:
    """Return the last part of the name of the module that defines `config_class`."""
    module = sys.modules[config_class.__module__]
    spec = getattr(module, "__spec__", None)
    if spec is not None:
        return spec.name.rsplit(".", 1)[-1]
    return Path(getattr(module, "__file__", module.__name__)).stem


@dataclasses.dataclass(frozen=True)
class _Place:
    runs_dir: Path = Path("runs")
    """Folder that the run's own folder is made in."""
    resume: Path | None = None
    """Folder of a killed run: its finished cells are kept, its flags are taken over."""


def _parse(config_class: type, args: list[str]) -> tuple[Any, _Place, list[str]]:
    """Return the configuration, where to run, and the arguments that say both.

    When resuming, the run's own arguments come first: `--resume DIR` alone is enough.

    Raises:
        ValueError: when the run to resume is another experiment's.
    """
    name = experiment_name(config_class)
    where = [a.split("=", 1)[1] for a in args if a.startswith("--resume=")]
    where += [b for a, b in zip(args, args[1:], strict=False) if a == "--resume" and b != "None"]
    arguments = args
    if where:
        record = read_record(Path(where[-1]))
        own = record["experiment"]
        if own != name:
            raise ValueError(
                f"{where[-1]} is a run of {own}, not of {name}: python -m experiments.{own}"
                f" --resume {where[-1]}"
            )
        arguments = [*record["arguments"], *args]
    parts = [(n, Annotated[c, tyro.conf.arg(name="")]) for n, c in
             (("config", config_class), ("place", _Place))]  # fmt: skip
    command = dataclasses.make_dataclass("Command", parts)
    doc = (sys.modules[config_class.__module__].__doc__ or "").strip()
    prog = f"python -m experiments.{name}"
    parsed = tyro.cli(command, args=arguments, prog=prog, description=doc)
    return parsed.config, parsed.place, arguments


def _interrupt_on_terminate() -> bool:
    """Make SIGTERM an interrupt, as Ctrl-C is; False where something else handles it already."""
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return False

    def interrupt(number, frame):
        raise KeyboardInterrupt(number)

    signal.signal(signal.SIGTERM, interrupt)
    return True


def _how_to_resume(experiment: str, run: Run) -> str:
    rows = f"{len(run.rows)} finished cells are kept"
    return f"{rows}, go on with: python -m experiments.{experiment} --resume {run.path}"


def _names(row: Row) -> str:
    named = {f: v for f, v in row.items() if isinstance(v, (str, int)) and not isinstance(v, bool)}
    return str(named or list(row))
