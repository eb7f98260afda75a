"""The modules of the package, for tests that look at each of them."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "graphshare"

# What an extra installs; a module that needs one of these is looked at where it is there.
EXTRAS = frozenset(
    {"cuda", "flash_attn", "flashinfer", "matplotlib", "rich", "safetensors", "vllm"}
)

# Modules that `import graphshare` does not import.
ON_DEMAND = ("adapters", "testing", "commands", "cli", "__main__")


def files(*, core: bool = False) -> list[Path]:
    """The package's source files; with ``core`` only those that need no extra."""
    found = sorted(PACKAGE.rglob("*.py"))
    if core:
        found = [f for f in found if _first_part(f) not in ON_DEMAND]
    return found


def module_names() -> list[str]:
    """Dotted names of all modules but ``__main__``, which runs when it is imported."""
    parts = [f.relative_to(ROOT).with_suffix("").parts for f in files()]
    names = [p[:-1] if p[-1] == "__init__" else p for p in parts if p[-1] != "__main__"]
    return [".".join(p) for p in names]


def import_or_skip(name: str) -> ModuleType:
    """Import a module, or skip the test where an extra that it needs is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRAS:
            raise
        pytest.skip(f"{name} needs {error.name}")


def _first_part(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")
