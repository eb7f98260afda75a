"""The file in which a capture plan is kept: JSON, with a version."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

__all__ = ["read_keys", "write_plan_file", "write_whole"]

FORMAT = "graphshare-plan"
VERSION = 1

_FIELDS = frozenset(
    {
        "num_tokens",
        "num_reqs",
        "uniform_query_len",
        "max_query_len",
        "num_active_loras",
        "num_ubatches",
    }
)


def read_keys(path: str | os.PathLike[str]) -> list[dict[str, int | None]]:
    """The fields of the descriptors in a plan.

    Args:
        path: A file that ``graphshare plan`` or :func:`write_plan_file` wrote.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no such file, or of a version that this graphshare does not know.
    """
    file = Path(path)
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: expected a capture plan, got no JSON ({error})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f'{file}: expected a capture plan ("format": "{FORMAT}"), got none')
    version = content.get("version")
    if type(version) is not int or version != VERSION:
        raise ValueError(f"{file}: expected a plan of version {VERSION}, got {version!r}")
    keys = content.get("keys")
    if not isinstance(keys, list):
        raise ValueError(f"{file}: keys: expected a list, got {type(keys).__name__}")
    for number, key in enumerate(cast("list[Any]", keys)):
        if not isinstance(key, dict) or "num_tokens" not in key:
            raise ValueError(f"{file}: keys[{number}]: expected an object with num_tokens")
        unknown = sorted(cast("dict[str, Any]", key).keys() - _FIELDS)
        if unknown:
            raise ValueError(f"{file}: keys[{number}]: no such field: {', '.join(unknown)}")
    return keys


def write_plan_file(
    path: str | os.PathLike[str],
    keys: Sequence[Mapping[str, int | None]],
    facts: Mapping[str, Any],
) -> None:
    """Write a plan; the file is there as a whole or not at all.

    Args:
        path: The file; one that is there is replaced.
        keys: The descriptors' fields.
        facts: Anything that JSON holds, beside them.

    Raises:
        OSError: It cannot be written.
    """
    content = {"format": FORMAT, "version": VERSION, **facts, "keys": list(keys)}
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file that is there as a whole or not at all.

    A link stays one. A device or a pipe is written into, not replaced.

    Args:
        path: The file; one that is there is replaced.
        content: What is in it.

    Raises:
        OSError: It cannot be written; its ``filename`` is ``path``.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if target.exists() and not target.is_file():
            target.write_bytes(content)
        else:
            _replace(target, content)
    except OSError as error:
        error.filename = os.fspath(path)  # not the file beside it
        raise


def _replace(target: Path, content: bytes) -> None:
    # Beside it: a file can be renamed in one step only within a file system.
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with beside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
