"""Files are written as a whole or not at all, and none is lost that nobody meant to replace."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphshare.cli import main
from graphshare.plan_file import write_whole

TRACE = '{"tokens": 4, "requests": 4}\n{"tokens": 8, "requests": 2}\n'
REPORT = (
    '{"format": 1, "pool": "p", "key": "k", "backend": "tape", "device": "cpu", "nodes": [], '
    '"places": [], "notes": [], "facts": {}}'
)


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for content in (b"one", b"another"):
        write_whole(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one(tmp_path: Path) -> None:
    real, link, dangling = (tmp_path / name for name in ("real", "link", "dangling"))
    real.write_bytes(b"old")
    link.symlink_to(real)
    dangling.symlink_to(tmp_path / "new")
    write_whole(link, b"content")
    write_whole(dangling, b"content")
    assert link.is_symlink()
    assert dangling.is_symlink()
    assert real.read_bytes() == (tmp_path / "new").read_bytes() == b"content"


def test_a_pipe_is_written_into(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_whole(pipe, b"content")
    reader.join(5)  # whoever replaces the pipe leaves it waiting
    assert read == [b"content"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.fixture
def terminal() -> Iterator[str]:
    """A device that nobody can replace."""
    master, slave = os.openpty()

    def read() -> None:
        with contextlib.suppress(OSError):  # when the other side is closed
            while os.read(master, 1 << 16):
                pass

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    yield os.ttyname(slave)
    os.close(slave)
    reader.join(30)
    os.close(master)


def test_a_device_is_written_into(terminal: str) -> None:
    """One was replaced once, by somebody who may write to /dev."""
    write_whole(terminal, b"content")
    assert stat.S_ISCHR(Path(terminal).stat().st_mode)


def test_an_error_names_the_file_that_was_meant(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere" / "plan.json", tmp_path / ("n" * 300)):
        with pytest.raises(OSError) as caught:
            write_whole(path, b"content")
        assert caught.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "trace.jsonl").write_text(TRACE)
    (tmp_path / "report.json").write_text(REPORT)
    (tmp_path / "linked").symlink_to("trace.jsonl")
    (tmp_path / "a.svg").symlink_to("trace.jsonl")
    os.link(tmp_path / "report.json", tmp_path / "hard.html")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "call",
    [
        "plan trace.jsonl --graphs 2 --output trace.jsonl",
        "plan trace.jsonl --graphs 2 --output ./linked",
        "plan linked --graphs 2 --format jsonl --output trace.jsonl",
        "plan trace.jsonl --graphs 2 --plot a.svg",
        "plan trace.jsonl --graphs 2 --output b.svg --plot ./b.svg",
        "plan trace.jsonl --graphs 2 --output .",
        "plan trace.jsonl --graphs 2 --output nowhere/plan.json",
        "inspect report.json --html report.json",
        "inspect report.json --html hard.html",
        "inspect report.json --dot ../{here}/report.json",
        "inspect report.json --html x --dot x",
        "inspect report.json --dot nowhere/x",
        "inspect report.json --html .",
    ],
)
def test_a_command_does_not_write_over_what_it_reads_or_writes(
    call: str, inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trace was lost, and the plan was in its place."""
    if "--plot" in call:
        pytest.importorskip("matplotlib")
    before = {path.name: path.read_bytes() for path in inputs.iterdir()}
    assert main(call.format(here=inputs.name).split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert {path.name: path.read_bytes() for path in inputs.iterdir()} == before


def test_an_empty_name_is_a_folder(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "trace.jsonl", "--graphs", "2", "--output", ""]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_a_device_may_be_given_twice(
    inputs: Path, terminal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    assert main(["inspect", "report.json", "--html", terminal, "--dot", terminal]) == 0
    assert capsys.readouterr().err == ""
