"""One wrong version of the library, and the tests that notice it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutation:
    """A wrong version, made by one replacement in one file.

    Attributes:
        name: What is wrong, in a few words; unique.
        breaks: The promise that no longer holds.
        file: The file, below ``graphshare/``.
        old: Text that the file has exactly once; kept short, so that it outlives other changes.
        new: What takes its place.
        tests: Ids of the tests that catch it; each of them must.
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def path(self, root: Path = ROOT) -> Path:
        return root / "graphshare" / self.file

    def places(self, root: Path = ROOT) -> int:
        """How often the old text occurs."""
        return self.path(root).read_text().count(self.old)

    def applied(self, root: Path = ROOT) -> str:
        """The text of the wrong file."""
        return self.path(root).read_text().replace(self.old, self.new)
