"""Every Python block of the README and of docs/ runs, top to bottom, in one namespace a page.

A block that needs a GPU has the comment ``<!-- gpu: next -->`` in the line before its fence: it is
left out here, and the whole page runs again with it in the test that is marked ``gpu``. There is no
other way to leave a block out; what cannot run is not fenced as ``python``. No reader sees the
comment, so the text before it says that a GPU is needed.

Pages show what is refused in ``try`` statements. Each of them must raise, and its handler must look
at the error: another one of the same class is not what the page promises.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sybil")

from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GPU_BLOCK = re.compile(r"^<!-- gpu: next -->\n(?=```python$)", re.MULTILINE)
# Anything that a reader would take for Python, or for an instruction about it.
FENCE = re.compile(r"^[ \t>]*(?:```+|~~~+)[ \t]*\{?(?:code-block\}[ \t]*)?py\S*.*$", re.MULTILINE)
COMMENT = re.compile(r"^[ \t]*<!--+\s*(?:gpu|skip)\b.*$", re.MULTILINE)


class GpuParser(SkipParser):
    directive = "gpu"


class MustRaise(ast.NodeTransformer):
    """Gives each ``try`` without an ``else`` one that fails."""

    def visit_Try(self, node: ast.Try) -> ast.AST:
        self.generic_visit(node)
        if node.handlers and not node.orelse:
            node.orelse = ast.parse("raise AssertionError('nothing was refused')").body
            for added in node.orelse:
                ast.copy_location(added, node)
        return ast.fix_missing_locations(node)


def _evaluate(example: Example) -> None:
    tree = ast.parse(example.parsed)
    ast.increment_lineno(tree, example.line + example.parsed.line_offset)
    exec(compile(MustRaise().visit(tree), example.path, "exec"), example.namespace)


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _run(page: Path, *, gpu: bool) -> None:
    blocks = CodeBlockParser("python", _evaluate)
    for example in Document.parse(str(page), *([blocks] if gpu else [blocks, GpuParser()])):
        example.evaluate()


def _handlers(page: Path) -> Iterator[ast.ExceptHandler]:
    for example in Document.parse(str(page), CodeBlockParser("python", _evaluate)):
        for node in ast.walk(ast.parse(example.parsed)):
            if isinstance(node, ast.ExceptHandler):
                yield node


def _looks_at(handler: ast.ExceptHandler) -> bool:
    """Whether the error is asserted about, or kept for that."""
    looks = (node for node in handler.body if isinstance(node, (ast.Assert, ast.Assign)))
    names = (each.id for node in looks for each in ast.walk(node) if isinstance(each, ast.Name))
    return handler.name in set(names)


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
def test_refusals_are_looked_at(page: Path) -> None:
    unseen = [ast.unparse(handler) for handler in _handlers(page) if not _looks_at(handler)]
    assert unseen == []


def test_a_refusal_that_does_not_come_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\ntry:\n    pass\nexcept ValueError:\n    pass\n```\n")
    with pytest.raises(AssertionError, match="nothing was refused"):
        _run(page, gpu=False)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_what_needs_a_gpu_says_so(page: Path) -> None:
    text = page.read_text("utf-8")
    for block in GPU_BLOCK.finditer(text):
        paragraph = text[: block.start()].rstrip().rpartition("\n\n")[2]
        assert "GPU" in paragraph, f"{_name(page)}: before the block that is left out: {paragraph}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_no_block_escapes(page: Path) -> None:
    """A fence that is nearly ``python``, or a comment that is nearly ours, runs nothing."""
    text = page.read_text("utf-8")
    fences = FENCE.findall(text)
    assert [f for f in fences if f.lstrip(" \t>") != "```python"] == []
    assert len(list(Document.parse(str(page), PythonCodeBlockParser()))) >= len(fences)
    assert len(COMMENT.findall(text)) == len(GPU_BLOCK.findall(text))
