"""What an experiment shows in a terminal and in summary.md: tables from columns, time left."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

_SECONDS_BETWEEN_LINES = 10.0  # without a terminal
_SCALAR_NAME = str.maketrans({c: "_" for c in "():,='+[] "})


class Column(NamedTuple):
    """One column of a table.

    Attributes:
        title: heading, with the unit.
        value: field of the row, or a function of the row.
        form: format specification of a number, such as ".3f" or ",d".
    """

    title: str
    value: str | Callable[[Mapping[str, Any]], Any]
    form: str = ""

    def text(self, row: Mapping[str, Any]) -> str:
        """Return the cell of `row`; a dash where it has none."""
        value = self.value(row) if callable(self.value) else row.get(self.value)
        if value is None:
            return "–"
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return format(value, self.form)
        return str(value)


def interval(field: str, form: str = ".1f", scale: float = 1.0) -> Callable[[Mapping], str | None]:
    """Return a column value that shows `field` with its `_low` and `_high` bounds in brackets."""

    def text(row: Mapping[str, Any]) -> str | None:
        mean, low, high = (row.get(field + end) for end in ("", "_low", "_high"))
        if mean is None:
            return None
        shown = format(mean * scale, form)
        if low is None or high is None:
            return shown
        return f"{shown} [{format(low * scale, form)}, {format(high * scale, form)}]"

    return text


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], title: str) -> None:
    """Print a table; numbers are right-aligned, cells wrap where the terminal is narrow."""
    cells = [[column.text(row) for column in columns] for row in rows]
    grid = Table(title=title, title_justify="left", header_style="bold")
    for i, column in enumerate(columns):
        right = all(_is_number(line[i]) for line in cells)
        grid.add_column(column.title, justify="right" if right else "left", no_wrap=i == 0)
    for line in cells:
        grid.add_row(*line)
    console().print(grid, markup=False)


def markdown(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], title: str = "") -> str:
    """Return the same table as markdown, under a heading of the second level."""
    cells = [[_escaped(column.text(row)) for column in columns] for row in rows]
    right = [all(_is_number(line[i]) for line in cells) for i in range(len(columns))]
    lines = [[_escaped(c.title) for c in columns], ["---:" if r else "---" for r in right], *cells]
    head = f"## {title}\n\n" if title else ""
    return head + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def scalar_name(label: str) -> str:
    """Return a label without the characters that a scalar's name may not hold."""
    return label.translate(_SCALAR_NAME)


def print_line(text: str) -> None:
    """Print one line unwrapped and unstyled, at once."""
    print(text, flush=True)


def console() -> Console:
    """Return a console on today's standard output, wide enough for tables when it is a file."""
    return Console() if sys.stdout.isatty() else Console(width=160)


class Progress:
    """A bar with the time left in a terminal, a plain line every few seconds elsewhere.

    The time left counts only cells computed now: those that a resumed run skips take no time.
    """

    def __init__(self, total: int, title: str):
        """Count `total` cells under a `title`."""
        self.total, self.title = total, title
        self.done = self.computed = 0
        self._start = self._line = time.monotonic()
        self._bar: Bar | None = None

    def advance(self, note: str = "", *, skipped: bool = False) -> None:
        """Count one more cell as done; `skipped` when its row was there already."""
        self.done += 1
        self.computed += not skipped
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, left=self.time_left(), note=note)
        elif self.done == self.total or now - self._line >= _SECONDS_BETWEEN_LINES:
            self._line = now
            line = f"{self.title}: {self.done}/{self.total}, {self.time_left()} {note}"
            print_line(line.rstrip())

    def time_left(self) -> str:
        """Return the time left or, at the end, the time taken, as text."""
        elapsed, remaining = time.monotonic() - self._start, self.total - self.done
        if remaining <= 0:
            return f"took {_clock(elapsed)}"
        if self.computed == 0:
            return "time left unknown"
        return f"{_clock(elapsed / self.computed * remaining)} left"

    def __enter__(self) -> "Progress":
        self._start = self._line = time.monotonic()
        if console().is_terminal:
            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
            ends = TextColumn("{task.fields[left]}"), TextColumn("[dim]{task.fields[note]}")
            self._bar = Bar(*columns, *ends, console=console())
            self._task = self._bar.add_task(self.title, total=self.total, left="", note="")
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _is_number(text: str) -> bool:
    return text[:1].isdigit() or text[:1] in "-+–" or text == ""
