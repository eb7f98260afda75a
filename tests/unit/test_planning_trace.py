"""Traces are read line by line, and what is wrong is said with file and line."""

from __future__ import annotations

import gzip
import json
import pickle
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphshare.planning import Batch, Bin, Trace, TraceError, count_batches, read_trace

LINES = """\
{"tokens": 8, "requests": 2, "query_len": 4}

{"num_tokens": 8, "num_reqs": 2, "uniform_query_len": 4, "count": 3}
{"tokens": 13, "requests": 2, "query_len": null, "loras": 1}
{"tokens": 600, "requests": 3}
"""
TABLE = """\
tokens,requests,query_len,count,loras
8,2,4,,
 8 , 2,4,3,0

"13",2,,1,1
600,3,,1,0
"""


def _expected() -> Trace:
    return count_batches(
        [Batch(8, 2, 4), Batch(8, 2, 4, 0, 3), Batch(13, 2, None, 1), Batch(600, 3)]
    )


@pytest.mark.parametrize(
    ("name", "text"), [("t.jsonl", LINES), ("t.ndjson", LINES), ("t.csv", TABLE)]
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("compressed", [False, True])
def test_both_formats_say_the_same(
    name: str, text: str, end: str, compressed: bool, tmp_path: Path
) -> None:
    content = text.replace("\n", end).encode()
    file = tmp_path / (name + ".gz" if compressed else name)
    file.write_bytes(gzip.compress(content) if compressed else content)
    assert read_trace(file) == _expected()
    assert read_trace(str(file)).bins[Bin(8, 4, 0)] == 4


def test_a_last_line_may_have_no_end_and_a_file_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_bytes(b"\xef\xbb\xbftokens,requests\n4,2")
    assert read_trace(file).bins == {Bin(4, None, 0): 1}
    lines = tmp_path / "t.jsonl"
    lines.write_bytes(b'\xef\xbb\xbf{"tokens": 4, "requests": 2}')
    assert read_trace(lines).bins == {Bin(4, None, 0): 1}


def test_the_format_may_be_said(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text(TABLE)
    assert read_trace(file, kind="csv") == _expected()
    with pytest.raises(ValueError):
        read_trace(file)


def test_other_fields_are_refused_unless_they_are_to_be_ignored(tmp_path: Path) -> None:
    """A misspelt query length would look like a batch of differing ones."""
    file = tmp_path / "t.jsonl"
    file.write_text('{"tokens": 4, "requests": 2, "query_length": 2}\n')
    with pytest.raises(TraceError) as caught:
        read_trace(file)
    assert "query_length" in caught.value.problem
    assert read_trace(file, ignore_other_fields=True).bins == {Bin(4, None, 0): 1}


BAD = [
    ('{"tokens": 4}', "requests"),
    ('{"requests": 4}', "tokens"),
    ('{"tokens": null, "requests": 4}', "tokens"),
    ('{"tokens": "4", "requests": 4}', "tokens"),
    ('{"tokens": true, "requests": 1}', "tokens"),
    ('{"tokens": 4.5, "requests": 1}', "tokens"),
    ('{"tokens": NaN, "requests": 1}', "NaN"),
    ('{"tokens": 1e400, "requests": 1}', "tokens"),
    ('{"tokens": 0, "requests": 0}', "at least 1"),
    ('{"tokens": 4, "requests": -1}', "requests"),
    ('{"tokens": 4, "requests": 5}', "requests"),
    ('{"tokens": 4, "requests": 2, "query_len": 1}', "query_len"),
    ('{"tokens": 4, "requests": 2, "query_len": 0}', "query_len"),
    ('{"tokens": 4, "requests": 2, "count": 0}', "count"),
    ('{"tokens": 4, "requests": 2, "loras": 3}', "loras"),
    ('{"tokens": 4, "requests": 2, "loras": -1}', "loras"),
    ('{"tokens": 4, "num_tokens": 4, "requests": 2}', "twice"),
    ('{"tokens": 4, "requests": 2, "tokens": 8}', "twice"),
    ('{"tokens": 2147483648, "requests": 2}', "tokens"),
    ('{"tokens": 1e308, "requests": 2}', "tokens"),
    ('{"tokens": 4, "requests": 2, "count": 1e308}', "count"),
    ('{"tokens": 4, "requests": 2, "count": 9007199254740993}', "count"),
    ("{}", "tokens"),
    ('{"tokens": 4, "requests": 2} {}', "JSON"),
    ('{"tokens": 4, "requests": 2', "JSON"),
    ('{"tokens": ' + "9" * 5000 + ', "requests": 2}', "number"),
    ("[4, 2]", "object"),
    ("4", "object"),
    ("[" * 5000, "JSON"),
    ("\xff\xfe", "JSON"),
]


@pytest.mark.parametrize(("line", "word"), BAD)
def test_a_bad_line_is_named(line: str, word: str, tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_bytes(LINES.encode() + line.encode("latin-1") + b"\n" + LINES.encode())
    with pytest.raises(TraceError) as caught:
        read_trace(file)
    assert (caught.value.path, caught.value.line) == (str(file), 6)
    assert word in caught.value.problem
    assert str(caught.value).startswith(f"{file}:6: ")
    assert len(str(caught.value).splitlines()) == 1
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("4", "values"),
        ("4,2,2,1,0,9", "values"),
        ("x,2,,,", "tokens"),
        (",2,,,", "tokens"),
        ("4.0,2,,,", "tokens"),
        ("4_0,2,,,", "tokens"),
        ("٤,2,,,", "tokens"),
        ("--4,2,,,", "tokens"),
        ("9" * 5000 + ",2,,,", "tokens"),
        ('"4,2,,,', "CSV"),
        ("4,5,,,", "requests"),
        ("2147483648,2,,,", "tokens"),
        ("4,2,,9007199254740993,", "count"),
    ],
)
def test_a_bad_row_is_named(line: str, word: str, tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text(TABLE + line + "\n")
    with pytest.raises(TraceError) as caught:
        read_trace(file)
    assert caught.value.line == 7
    assert word in caught.value.problem


@pytest.mark.parametrize(
    "header", ["", "\n", "tokens", "requests", "tokens,requests,tokens", "tokens,requests,speed"]
)
def test_a_bad_header_is_named(header: str, tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text(header)
    with pytest.raises(TraceError) as caught:
        read_trace(file)
    assert caught.value.line == 1


def test_damaged_gzip_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(LINES.encode() * 1000)
    for damaged in (whole[:-9], whole[:20], b"no gzip", whole[:30] + b"\0" * 40 + whole[70:]):
        file = tmp_path / "t.jsonl.gz"
        file.write_bytes(damaged)
        with pytest.raises(TraceError) as caught:
            read_trace(file)
        after = caught.value.problem.startswith("after this line: ")
        assert after == bool(caught.value.line)


def test_a_file_of_one_endless_line_is_not_read_into_memory(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    with file.open("wb") as out:
        for _ in range(8):
            out.write(b" " * (1 << 20))
    with pytest.raises(TraceError) as caught:
        read_trace(file)
    assert caught.value.line == 1


def test_what_is_no_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(IsADirectoryError):
        read_trace(tmp_path / "folder.csv")


@given(
    st.lists(
        st.builds(
            lambda reqs, each, mixed, steps: Batch(
                reqs * each, reqs, None if mixed else each, 0, steps
            ),
            st.integers(1, 40),
            st.integers(1, 9),
            st.booleans(),
            st.integers(1, 10**6),
        ),
        max_size=50,
    ),
    st.integers(1, 300),
    st.none() | st.integers(1, 40),
    st.integers(1, 3),
    st.booleans(),
)
def test_reading_is_counting(
    batches: list[Batch],
    max_tokens: int,
    max_num_reqs: int | None,
    remembered: int,
    distinct: bool,
) -> None:
    """Whether lines repeat or not, and however few of them are remembered."""
    expected = count_batches(batches, max_tokens=max_tokens, max_num_reqs=max_num_reqs)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr("graphshare.planning.reading._MAX_REMEMBERED", remembered)
        patch.setattr("graphshare.planning.reading._BLOCK_BYTES", 64)
        file = Path(folder) / "t.jsonl"
        file.write_text(
            "".join(
                json.dumps(
                    {
                        "tokens": batch.num_tokens,
                        "requests": batch.num_reqs,
                        "query_len": batch.query_len,
                        "count": batch.steps,
                        **({"time": number} if distinct else {}),
                    }
                )
                + "\n"
                for number, batch in enumerate(batches)
            )
        )
        assert (
            read_trace(
                file,
                max_tokens=max_tokens,
                max_num_reqs=max_num_reqs,
                ignore_other_fields=True,
            )
            == expected
        )
