"""The text that the toy models learn: English prose that comes with every CPython.

The language reference that ``help()`` shows (``pydoc_data.topics``), the docstrings of the standard
library and its licence, all under the PSF licence (see ``NOTICE`` in this folder). Whole documents
are held out by a hash of their name, and any paragraph that a held-out document contains is taken
out of the rest, so held-out text is never trained on, not even where the documentation repeats
itself.
"""

from __future__ import annotations

import ast
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Corpus", "load_corpus", "shipped_passages"]

_HELD_OUT_EVERY = 16
_PASSAGES = Path(__file__).with_name("heldout.txt")
_PASSAGE_BREAK = "\n%%\n"
_SHORTEST_DOCUMENT = 80
_NOT_LIBRARY = frozenset({"site-packages", "test", "tests", "lib2to3", "idlelib", "__pycache__"})
# A heading or a lone "Note:" occurs everywhere; only text is worth holding out.
_SHORTEST_PARAGRAPH = 24


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents by use.

    Args:
        train: Learned from.
        validation: Chooses the moment to stop; not learned from.
        held_out: Looked at only to report.
    """

    train: tuple[str, ...]
    validation: tuple[str, ...]
    held_out: tuple[str, ...]


def shipped_passages() -> tuple[str, ...]:
    """Return the held-out passages that come with the package, for demos and tests."""
    passages = _PASSAGES.read_text(encoding="utf-8").split(_PASSAGE_BREAK)
    return tuple(passage.strip("\n") for passage in passages if passage.strip())


def _docstrings(root: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _NOT_LIBRARY.intersection(relative.parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:  # a template that only looks like a module
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text:
                    name = getattr(node, "name", "")
                    yield f"{relative.as_posix()}:{name}", text


def _documents() -> Iterator[tuple[str, str]]:
    from pydoc_data import topics  # large, and only training needs it

    for name, text in sorted(topics.topics.items()):
        yield f"topic:{name}", text
    root = Path(sysconfig.get_paths()["stdlib"])
    for candidate in (root / "LICENSE.txt", root.parent / "LICENSE.txt"):
        if candidate.is_file():
            yield "licence", candidate.read_text(encoding="utf-8", errors="replace")
            break
    yield from _docstrings(root)


def _paragraphs(text: str) -> Iterator[tuple[str, str]]:
    """Yield each paragraph as it stands, and in a form that ignores its spacing."""
    for paragraph in text.split("\n\n"):
        yield paragraph, " ".join(paragraph.split())


def _without(text: str, taken: set[str]) -> str:
    kept = [paragraph for paragraph, plain in _paragraphs(text) if plain not in taken]
    return "\n\n".join(kept).strip("\n")


def load_corpus() -> Corpus:
    """Collect the text of the running Python and split it.

    Returns:
        Documents, each at least a sentence long.
    """
    parts: tuple[dict[str, None], ...] = ({}, {}, {})  # dicts: duplicates go, order stays
    for name, text in _documents():
        bucket = zlib.crc32(name.encode()) % _HELD_OUT_EVERY
        parts[min(bucket, 2)][text.strip("\n")] = None
    held_out, validation, train = parts
    taken = {
        plain
        for text in (*held_out, *shipped_passages())
        for _, plain in _paragraphs(text)
        if len(plain) >= _SHORTEST_PARAGRAPH
    }
    taken_too = taken | {
        plain
        for text in validation
        for _, plain in _paragraphs(text)
        if len(plain) >= _SHORTEST_PARAGRAPH
    }

    def long_enough(texts: Iterator[str]) -> tuple[str, ...]:
        return tuple(text for text in texts if len(text) >= _SHORTEST_DOCUMENT)

    return Corpus(
        train=long_enough(_without(text, taken_too) for text in train),
        validation=long_enough(_without(text, taken) for text in validation),
        held_out=long_enough(iter(held_out)),
    )
