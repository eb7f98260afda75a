"""Progress and text while they come: redrawn on a terminal, line by line elsewhere, or not at all.

Everything goes to one console; with ``--json`` or ``--quiet`` nothing does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from typing_extensions import ParamSpec

from graphshare.adapters.toy.batch import Request
from graphshare.adapters.toy.demo.runs import NOBODY, Feed
from graphshare.adapters.toy.demo.workload import decoded
from graphshare.printing import printable

__all__ = ["LiveScreen", "PlainScreen", "Screen", "make_console", "screen_for"]

_SECONDS_BETWEEN_FRAMES = 0.05

_P = ParamSpec("_P")


class _PipeConsole(Console):
    """A console that leaves a broken pipe to whoever called."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise  # rich calls this while it handles the BrokenPipeError


def make_console() -> Console:
    """Return a console on the standard output."""
    return _PipeConsole(highlight=False)


class Screen:
    """Shows nothing; what the others build on."""

    def say(self, line: str) -> None:
        """Show a line that stays."""

    @contextmanager
    def running(self, title: str, *, texts: bool) -> Generator[Feed]:
        """Show a run while it goes on.

        Args:
            title: What runs.
            texts: Whether the texts are shown, or only how far they are.

        Yields:
            What to tell of the progress.
        """
        del title, texts
        yield NOBODY


class PlainScreen(Screen):
    """Writes a line when something is complete.

    Args:
        console: Where to write.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, line: str) -> None:
        """Write a line."""
        self._console.print(Text(line))

    @contextmanager
    def running(self, title: str, *, texts: bool) -> Generator[Feed]:
        """Write the title, and each text when it is complete."""
        self.say(title)
        shown: set[int] = set()

        def watch(requests: Sequence[Request]) -> None:
            for request in requests:
                if texts and request.finished and request.request_id not in shown:
                    shown.add(request.request_id)
                    self._console.print(_texts([request]))

        yield Feed(watcher=watch)


class LiveScreen(PlainScreen):
    """Redraws a part of the terminal: a bar, then the texts as they grow.

    Args:
        console: On a terminal.
    """

    @contextmanager
    def running(self, title: str, *, texts: bool) -> Generator[Feed]:
        """Draw what goes on; complete texts stay."""
        self.say(title)
        console = self._console
        last: Sequence[Request] = ()
        # No thread of its own: it would take time from the run that is measured.
        with Live(console=console, transient=True, auto_refresh=False) as live:

            def bar(done: int, total: int, what: str) -> None:
                row = Table.grid(padding=(0, 1))
                drawn = ProgressBar(total=total, completed=done, width=20)
                row.add_row(drawn, Text(what, "dim", overflow="ellipsis", no_wrap=True))
                live.update(row, refresh=True)

            def draw(requests: Sequence[Request]) -> None:
                if texts:
                    rows = max(1, (console.height - 4) // max(1, len(requests)))
                    live.update(_texts(requests, rows, console.width), refresh=True)
                else:
                    tokens = sum(len(request.output) for request in requests)
                    most = sum(request.max_new_tokens for request in requests)
                    bar(tokens, most, f"{tokens} tokens")

            draw_now_and_then = _rarely(draw)

            def watch(requests: Sequence[Request]) -> None:
                nonlocal last
                last = requests
                draw_now_and_then(requests)

            yield Feed(_rarely(bar), watch)
        if texts:
            console.print(_texts(last))


def _rarely(draw: Callable[_P, object]) -> Callable[_P, None]:
    due = 0.0

    def now_and_then(*args: _P.args, **kwargs: _P.kwargs) -> None:
        nonlocal due
        if time.monotonic() >= due:
            draw(*args, **kwargs)
            due = time.monotonic() + _SECONDS_BETWEEN_FRAMES

    return now_and_then


def _texts(requests: Sequence[Request], rows: int | None = None, width: int = 80) -> RenderableType:
    """Return a row for each request: its number, its prompt, and what was added.

    Args:
        requests: What to show.
        rows: Lines that one may take; more are cut off at its beginning.
        width: Of the terminal, for that.
    """
    table = Table.grid(padding=(0, 1))
    for request in requests:
        prompt = printable(decoded(request.prompt))
        whole = printable(decoded(request.tokens))
        text = Text(whole)
        text.stylize("dim", 0, len(prompt))
        if not request.finished:
            text.append("..." if request.pages else " (not here yet)", "dim")
        if rows is not None:
            room = rows * max(8, width - 6) - 8
            if len(text) > room:
                text = Text("...").append_text(text[len(text) - room :])
        table.add_row(Text(f"{request.request_id + 1}", "bold"), text)
    return table


def screen_for(console: Console, *, silent: bool) -> Screen:
    """Choose how to show progress on this console."""
    if silent:
        return Screen()
    return (
        LiveScreen(console)
        if console.is_terminal and not console.is_dumb_terminal
        else PlainScreen(console)
    )
