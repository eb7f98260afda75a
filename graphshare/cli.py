"""The ``graphshare`` command: finds the command that is meant, and turns what happens into a code.

A command is a module with two functions: ``add_arguments(parser)``, and ``run(options, refuse)``,
which returns the exit code or calls ``refuse(message)`` for what the user got wrong. It is imported
only when it is called for.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from graphshare import __version__
from graphshare.printing import printable

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "demo": (
        "graphshare.adapters.toy.demo.command",
        "decode speculatively on captured graphs, with a borrowed state; plant faults",
    ),
    "doctor": ("graphshare.commands.doctor", "what is installed here, and what is missing"),
    "inspect": (
        "graphshare.commands.inspect",
        "which memory a captured graph reads, from a report",
    ),
    "plan": ("graphshare.commands.plan", "which sizes to capture for a trace of batches"),
}
"""Name of a command to its module and a line about it."""

_REFUSED = 2
_INTERRUPTED = 128 + 2
_BROKEN_PIPE = 128 + 13


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # One line, whatever the user typed.
        self.exit(_REFUSED, f"{self.prog}: {printable(message)}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: By default those of the process.

    Returns:
        The exit code, 0; 1 when what was checked does not hold, or cannot be written; 2 for what
        the user got wrong; 130 after an interrupt; 141 when nobody reads the output any more.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What the encoding lacks, in the name of a file say, must not end a command.
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except SystemExit as done:  # argparse has said all there is to say
        return done.code if isinstance(done.code, int) else 1
    except KeyboardInterrupt:
        print("graphshare: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # Python flushes again at its end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            return _BROKEN_PIPE
        print(f"graphshare: cannot write: {error.strerror}", file=sys.stderr)
        return 1
    return code


def _run(arguments: list[str]) -> int:
    parser = _Parser(
        prog="graphshare",
        description="Captured CUDA graphs that share attention state safely.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"graphshare {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    called = next((each for each in arguments if not each.startswith("-")), None)
    for name, (module_name, about) in COMMANDS.items():
        command = commands.add_parser(name, help=about, allow_abbrev=False)
        if name == called:
            module: Any = importlib.import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run, refuse=command.error)
    options = parser.parse_args(arguments)
    return options.run(options, options.refuse)
