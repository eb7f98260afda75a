"""``graphshare inspect``: what a saved report says of a captured graph."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from graphshare.commands.outputs import check_outputs
from graphshare.plan_file import write_whole
from graphshare.provenance.places import Use
from graphshare.provenance.report import Provenance

__all__ = ["add_arguments", "run"]

Refuse = Callable[[str], NoReturn]

_NOT_HELD = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        "Show which memory a captured graph reads and writes, from a report that "
        "pool.provenance(key).save(FILE) wrote. Needs no GPU."
    )
    parser.add_argument("report", metavar="REPORT", type=Path, help="the file")
    parser.add_argument(
        "--use",
        choices=[use.value for use in Use],
        action="append",
        metavar="USE",
        help="only nodes with an address of this use: state, borrowed, dangling, ...; may be "
        "given again",
    )
    parser.add_argument("--html", metavar="FILE", type=Path, help="draw the graph as a page")
    parser.add_argument("--dot", metavar="FILE", type=Path, help="draw the graph for Graphviz")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if an address lies in no live allocation"
    )


def run(options: argparse.Namespace, refuse: Refuse) -> int:
    """Do what the options ask for; return the exit code."""
    check_outputs(options.report, {"--html": options.html, "--dot": options.dot}, refuse)
    try:
        report = Provenance.load(options.report)
    except OSError as error:
        refuse(f"{options.report}: {error.strerror}")
    except ValueError as error:
        refuse(f"{options.report}: {error}")
    uses = frozenset(Use(use) for use in options.use or ())
    if options.html is not None:
        from graphshare.commands.inspect_page import page

        _write(options.html, page(report), refuse)
    if options.dot is not None:
        from graphshare.commands.inspect_drawing import dot

        _write(options.dot, dot(report), refuse)
    try:
        from graphshare.commands.inspect_table import show
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "rich":
            raise
        refuse("the table needs rich: pip install 'graphshare[cli]'")
    show(report, uses)
    return _NOT_HELD if options.check and report.dangling else 0


def _write(path: Path, text: str, refuse: Refuse) -> None:
    try:
        write_whole(path, text.encode())
    except OSError as error:
        refuse(f"{path}: {error.strerror}")
