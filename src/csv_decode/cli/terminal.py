"""What the commands show: text and tables on stdout, progress and notes on stderr, plain where there is no terminal."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["Bars", "err", "note", "out", "problem", "show_facts", "show_table", "size", "speak", "working"]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Whoever read has gone: the command group decides what becomes of it, not rich."""
        raise BrokenPipeError


out = _Console(highlight=False)
err = _Console(highlight=False, stderr=True)
_PATIENCE = 15.0  # seconds between two lines about a stage that goes on


def _say(console: Console, text: Text) -> None:
    # A terminal wraps at words; a file or a pipe gets the paragraph on one line.
    console.print(text, soft_wrap=not console.is_terminal)


def note(text: str) -> None:
    """One sentence on stderr."""
    _say(err, Text(text, style="dim"))


def problem(text: str, kind: str = "error") -> None:
    """One paragraph on stderr."""
    style = "bold red" if kind == "error" else "bold yellow"
    _say(err, Text.assemble((f"{kind}: ", style), text))


class _Speaker(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            problem(record.getMessage(), "warning")
        else:
            note(record.getMessage())


def speak(debug: bool) -> None:
    """Sends the library's messages and warnings here. Other people's warnings are shown in debug mode only."""
    logger = logging.getLogger("csv_decode")
    logger.handlers = [_Speaker()]
    logger.propagate = False
    logger.setLevel(logging.INFO)
    if debug:
        return
    warnings.simplefilter("ignore")
    warnings.filterwarnings("default", module="csv_decode")
    warnings.showwarning = lambda message, *_, **__: problem(str(message), "warning")


def size(count: float) -> str:
    """Bytes for people: 1.5 GB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def show_facts(facts: Sequence[tuple[str, str]], console: Console = out) -> None:
    """Names and values in two columns."""
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        if console.is_terminal:
            table = Table.grid(padding=(0, 2))
            table.add_column(style="bold", min_width=width)
            table.add_column(overflow="fold")
            table.add_row(Text(name), Text(value))
            console.print(table)
        else:
            console.print(Text(f"{name:<{width}}  {value}"), soft_wrap=True)


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; for a pipe, without wrapping and padding to a terminal's width."""
    if out.is_terminal:
        table = Table(*header, box=None, padding=(0, 2, 0, 0), header_style="bold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        out.print(table)
        return
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    for line in (header, *rows):
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        out.print(Text(text.rstrip()), soft_wrap=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Says that something takes a while: a spinner in a terminal, nothing elsewhere."""
    if not err.is_terminal:
        yield
        return
    with err.status(Text(what, style="dim")):
        yield


class Bars:
    """Progress of several stages, as a callback ``bars(stage, done, total)``.

    In a terminal, a bar with the time left for each stage; elsewhere, lines: when a stage begins, each quarter of a
    minute, and when it is done, with the seconds it took.
    """

    def __init__(self) -> None:
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}
        self._finished: set[str] = set()
        self._stage: str | None = None  # of a plain stream: what runs, since when, and when it was last spoken of
        self._since = self._told = time.perf_counter()

    def __enter__(self) -> Bars:
        if err.is_terminal:
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            self._bars = Progress(
                TextColumn("{task.description:<12}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=err,
            )
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._bars is None:
            now = time.perf_counter()
            if stage != self._stage:
                self._stage, self._told = stage, now
                note(f"{stage} ...")
            elif done < total and now - self._told > _PATIENCE:
                self._told = now
                note(f"{stage}: {done:,} of {total:,} after {now - self._since:.0f} s")
            if done >= total and stage not in self._finished:
                self._finished.add(stage)
                note(f"{stage}: done in {now - self._since:.1f} s")
                self._since = now
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=done, total=total)
