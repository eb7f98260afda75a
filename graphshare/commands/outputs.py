"""Files that a command is to write: looked at before it begins, so that none is lost."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

__all__ = ["check_outputs"]


def check_outputs(
    read: Path, written: Mapping[str, Path | None], refuse: Callable[[str], NoReturn]
) -> None:
    """Refuse files that cannot be written, or that would replace what is read or written too.

    Args:
        read: The file that the command reads.
        written: By option, the files that it is to write.
        refuse: Called with a line for what is wrong; does not return.
    """
    taken: list[tuple[Path, str]] = [(read, "that is the file to read")]
    for option, path in written.items():
        if path is None:
            continue
        if path.is_dir():
            refuse(f"{option}: {path} is a folder")
        if not path.absolute().parent.is_dir():
            refuse(f"{option}: {path}: the folder is not there")
        if path.exists() and not path.is_file():
            continue  # a device or a pipe: nothing is replaced
        for other, what in taken:
            if _same(path, other):
                refuse(f"{option}: {path}: {what}")
        taken.append((path, f"{option} writes it"))


def _same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:  # one is not there yet
        return os.path.realpath(path) == os.path.realpath(other)
