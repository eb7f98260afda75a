"""Every Python block of the README and of docs/ runs, top to bottom, in one namespace a page.

A block that needs a GPU has the comment ``<!-- gpu: next -->`` in the line before its fence: it is
left out here, and the whole page runs again with it in the test that is marked ``gpu``. There is no
other way to leave a block out; what cannot run is not fenced as ``python``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("sybil")

from sybil import Document
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GPU_BLOCK = re.compile(r"^<!-- gpu: next -->\n(?=```python$)", re.MULTILINE)
# Anything that a reader would take for Python, or for an instruction about it.
FENCE = re.compile(r"^[ \t>]*(?:```+|~~~+)[ \t]*\{?(?:code-block\}[ \t]*)?py\S*.*$", re.MULTILINE)
COMMENT = re.compile(r"^[ \t]*<!--+\s*(?:gpu|skip)\b.*$", re.MULTILINE)


class GpuParser(SkipParser):
    directive = "gpu"


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _run(page: Path, *, gpu: bool) -> None:
    parsers = [PythonCodeBlockParser()] if gpu else [PythonCodeBlockParser(), GpuParser()]
    for example in Document.parse(str(page), *parsers):
        example.evaluate()


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _run(page, gpu=False)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "page", [page for page in PAGES if GPU_BLOCK.search(page.read_text("utf-8"))], ids=_name
)
def test_examples_run_on_a_gpu(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _run(page, gpu=True)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_no_block_escapes(page: Path) -> None:
    """A fence that is nearly ``python``, or a comment that is nearly ours, runs nothing."""
    text = page.read_text("utf-8")
    fences = FENCE.findall(text)
    assert [f for f in fences if f.lstrip(" \t>") != "```python"] == []
    assert len(list(Document.parse(str(page), PythonCodeBlockParser()))) >= len(fences)
    assert len(COMMENT.findall(text)) == len(GPU_BLOCK.findall(text))
