"""Traces from files, line by line."""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from graphshare.arguments import shown, wrong_type
from graphshare.planning.trace import Batch, Histogram, Trace, problem_of

__all__ = ["TraceError", "read_trace"]

TraceFormat = Literal["jsonl", "csv"]

FIELDS = ("tokens", "requests", "query_len", "count", "loras")
ALIASES = {
    "num_tokens": "tokens",
    "num_reqs": "requests",
    "uniform_query_len": "query_len",
    "num_active_loras": "loras",
}
_SUFFIXES: dict[str, TraceFormat] = {
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
}
_MAX_LINE_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 20
_MAX_REMEMBERED = 1 << 14
_MAX_REMEMBERED_CHARS = 256
_MAX_LAYOUTS = 64


class TraceError(ValueError):
    """A line of a trace is not a batch.

    Attributes:
        path: The file.
        line: Number of the line, from 1; 0 where it is the file as a whole.
        problem: What is wrong with it.
    """

    path: str
    line: int
    problem: str

    def __init__(self, path: str, line: int, problem: str) -> None:
        self.path, self.line, self.problem = path, line, problem
        super().__init__(f"{path}:{line}: {problem}" if line else f"{path}: {problem}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.line, self.problem)


def read_trace(
    path: str | os.PathLike[str],
    *,
    max_tokens: int = 512,
    max_num_reqs: int | None = None,
    kind: TraceFormat | None = None,
    ignore_other_fields: bool = False,
) -> Trace:
    """Read a trace: JSON lines or CSV with a header, compressed by gzip or not.

    A line has ``tokens`` and ``requests``, and may have ``query_len`` (the query length that all
    requests have; empty, ``null`` or left out where they differ), ``count`` (steps of this shape,
    by default 1) and ``loras`` (adapters in use, by default 0). The names of the descriptor's
    fields are understood too.

    Args:
        path: The file. A name that ends in ``.gz`` is decompressed.
        max_tokens: As in :func:`graphshare.planning.count_batches`.
        max_num_reqs: Likewise.
        kind: The format; by default by the name, which then ends in ``.jsonl``, ``.ndjson``,
            ``.json`` or ``.csv``.
        ignore_other_fields: Pass over fields of other names; by default they are refused, since
            a misspelt ``query_len`` would look like a batch of differing lengths.

    Raises:
        TraceError: A line is not a batch; the file's name and the number of the line are in it.
        OSError: The file cannot be read.
        TypeError: The path is none.
        ValueError: The format is not known.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise wrong_type("read_trace: path", "the path of a file", path)
    name = os.fspath(path)
    histogram = Histogram(max_tokens, max_num_reqs)
    plain = name.removesuffix(".gz")
    if kind is None:
        kind = _SUFFIXES.get(Path(plain).suffix)
        if kind is None:
            raise ValueError(f"{name}: expected a name in {', '.join(_SUFFIXES)}, or kind=")
    if kind not in ("jsonl", "csv"):
        raise ValueError(f"kind: expected 'jsonl' or 'csv', got {shown(kind)}")
    with ExitStack() as stack:
        file: BinaryIO | gzip.GzipFile = stack.enter_context(Path(name).open("rb"))
        if plain != name:
            file = stack.enter_context(gzip.GzipFile(fileobj=file))
        lines = _lines(name, file)
        parse: Callable[[str], Batch]
        if kind == "csv":
            parse = _csv_parser(name, lines, ignore_other_fields)
        else:
            parse = _json_parser(ignore_other_fields)
        _read(name, lines, parse, histogram)
    return histogram.trace()


def _read(
    name: str,
    lines: Iterator[tuple[int, str]],
    parse: Callable[[str], Batch],
    histogram: Histogram,
) -> None:
    # Shapes repeat, so most lines do, unless they have a time in them: what a line said is
    # remembered, as far as memory is bounded, and as long as that helps.
    remembered: dict[str, Batch] = {}
    remembering, misses, lookups = True, 0, 0
    add = histogram.add
    for number, line in lines:
        if remembering:
            batch = remembered.get(line)
            if batch is not None:
                add(batch)
                continue
            misses += 1
        if not line or line.isspace():
            continue
        try:
            batch = parse(line)
        except _LineError as error:
            raise TraceError(name, number, str(error)) from None
        add(batch)
        if remembering and len(line) <= _MAX_REMEMBERED_CHARS:
            if len(remembered) >= _MAX_REMEMBERED:
                remembered.clear()
                remembering = number - lookups > 2 * misses
                misses, lookups = 0, number
            remembered[line] = batch


def _lines(name: str, file: BinaryIO | gzip.GzipFile) -> Iterator[tuple[int, str]]:
    """Number and text of each line; in blocks, so that a file of one long line is not read in."""
    number, rest = 0, b""
    while True:
        try:
            block = file.read(_BLOCK_BYTES)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            after = "after this line: " if number else ""
            raise TraceError(name, number, f"{after}damaged gzip data ({error})") from None
        if not block:
            break
        if not number and not rest:
            block = block.removeprefix(codecs.BOM_UTF8)
        *complete, rest = (rest + block).split(b"\n")
        for line in complete:
            number += 1
            if len(line) > _MAX_LINE_BYTES:
                raise TraceError(name, number, f"longer than {_MAX_LINE_BYTES} bytes")
            yield number, line.decode("utf-8", "backslashreplace")
        if len(rest) > _MAX_LINE_BYTES:
            raise TraceError(name, number + 1, f"longer than {_MAX_LINE_BYTES} bytes")
    if rest:
        yield number + 1, rest.decode("utf-8", "backslashreplace")


class _LineError(Exception):
    pass


def _json_parser(ignore_other_fields: bool) -> Callable[[str], Batch]:
    # Without the two regular expressions of decode(), which take as long as small objects do.
    # Pairs, since a dict would keep the last of two values for one name, and say nothing.
    decode = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=tuple).raw_decode
    layouts: dict[tuple[str, ...], _Layout] = {}

    def parse(line: str) -> Batch:
        text = line.strip()
        try:
            values, end = decode(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise _LineError(f"not JSON: {error}") from None
        except ValueError as error:  # more digits than Python converts
            raise _LineError(f"not a number: {error}") from None
        if end != len(text):
            raise _LineError(f"not JSON: more after the object, at character {end}")
        if not isinstance(values, tuple):
            raise _LineError(f"expected an object, got {_shown(values)}")
        pairs = cast("tuple[tuple[str, Any], ...]", values)
        names, row = zip(*pairs, strict=True) if pairs else ((), ())
        layout = layouts.get(names)
        if layout is None:
            layout = _layout(names, ignore_other_fields)
            if len(layouts) < _MAX_LAYOUTS:
                layouts[names] = layout
        return _batch([None if at is None else row[at] for at in layout], _json_integer)

    return parse


def _refuse_constant(name: str) -> Any:
    raise _LineError(f"not a number: {name}")


def _csv_parser(
    name: str, lines: Iterator[tuple[int, str]], ignore_other_fields: bool
) -> Callable[[str], Batch]:
    number, text = next(lines, (0, ""))
    header = [field.strip() for field in next(csv.reader([text]), [])]
    if not header:
        raise TraceError(name, 1, "expected a header with tokens and requests, got nothing")
    try:
        layout = _layout(header, ignore_other_fields)
    except _LineError as error:
        raise TraceError(name, number, f"header: {error}") from None

    def parse(line: str) -> Batch:
        try:
            row = next(csv.reader([line], strict=True)) if '"' in line else line.split(",")
        except csv.Error as error:
            raise _LineError(f"not CSV: {error}") from None
        if len(row) != len(header):
            raise _LineError(f"expected {len(header)} values, got {len(row)}")
        return _batch([None if at is None else row[at] for at in layout], _csv_integer)

    return parse


_Layout = tuple[int | None, ...]
"""Where each of ``FIELDS`` stands in a line."""


def _layout(names: Sequence[str], ignore_other_fields: bool) -> _Layout:
    places: dict[str, int] = {}
    for place, name in enumerate(names):
        field = ALIASES.get(name, name)
        if field not in FIELDS:
            if ignore_other_fields:
                continue
            raise _LineError(f"{name}: no such field; a batch has {', '.join(FIELDS)}")
        if field in places:
            raise _LineError(f"{field}: given twice")
        places[field] = place
    for field in ("tokens", "requests"):
        if field not in places:
            raise _LineError(f"{field}: missing")
    return tuple(places.get(field) for field in FIELDS)


def _batch(values: Sequence[Any], integer: Callable[[str, Any], int | None]) -> Batch:
    """Make a batch of the values of ``FIELDS``."""
    tokens, reqs, query_len, count, loras = map(integer, FIELDS, values)
    if tokens is None or reqs is None:
        raise _LineError(f"{'tokens' if tokens is None else 'requests'}: missing")
    loras = 0 if loras is None else loras
    count = 1 if count is None else count
    problem = problem_of(tokens, reqs, query_len, loras, count)
    if problem is not None:
        raise _LineError(problem)
    return Batch(tokens, reqs, query_len, loras, count)


def _json_integer(field: str, value: Any) -> int | None:
    if value is None or type(value) is int:
        return value
    if type(value) is float and value.is_integer():
        return int(value)
    raise _LineError(f"{field}: expected an integer, got {_shown(value)}")


def _csv_integer(field: str, value: str | None) -> int | None:
    if not value:
        return None
    text = value.strip()
    if not text:
        return None
    try:
        if text.isascii() and text.removeprefix("-").isdigit():
            return int(text)
    except ValueError:  # more digits than Python converts
        pass
    raise _LineError(f"{field}: expected an integer, got {_shown(value)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
