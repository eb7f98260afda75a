"""The page on the command line has every command, with every option."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from graphshare.cli import COMMANDS

PAGE = (Path(__file__).parents[2] / "docs/reference/command-line.md").read_text("utf-8")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_named(command: str) -> None:
    module = pytest.importorskip(COMMANDS[command][0])
    parser = argparse.ArgumentParser(add_help=False)
    module.add_arguments(parser)
    options = {each for action in parser._actions for each in action.option_strings}
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    (section,) = [part for part in sections if part.startswith(f"`graphshare {command}")]
    assert set(re.findall(r"--[a-z][a-z-]*", section)) == {o for o in options if o.startswith("--")}


def test_every_command_is_in_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(COMMANDS)
