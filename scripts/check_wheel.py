"""Check an installed wheel: ``python -I scripts/check_wheel.py WHEEL SOURCE_PACKAGE``.

Run by the ``wheel`` session of noxfile.py in an environment that holds the wheel and what it
requires, nothing else, so that a forgotten file or dependency shows.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import zipfile
from pathlib import Path

# Not part of what `import graphshare` gives, and free to need an extra.
OPTIONAL = (
    "graphshare.adapters",
    "graphshare.testing",
    "graphshare.commands",
    "graphshare.cli",
    "graphshare.__main__",
)


def _within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in packages)


def _module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def problems(wheel: Path, source: Path) -> list[str]:
    """All that is wrong with the wheel, a line each; an import that fails is raised."""
    found: list[str] = []
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    here = {
        path.relative_to(source.parent).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    found += [f"not in the wheel: {name}" for name in sorted(here - packed)]
    found += [f"in the wheel, not in the source: {name}" for name in sorted(packed - here)]
    if "graphshare/py.typed" not in packed:
        found.append("no py.typed")

    package = importlib.import_module("graphshare")
    if package.__file__ is None or source in Path(package.__file__).parents:
        found.append(f"imported from {package.__file__}, not from the wheel")
    version = importlib.metadata.version("graphshare")
    if package.__version__ != version:
        found.append(f"__version__ is {package.__version__}, the wheel's version is {version}")
    for name in package.__all__:
        getattr(package, name)  # loaded when first asked for
    found += [f"graphshare's names import {m}" for m in sorted(sys.modules) if _within(m, OPTIONAL)]
    for name in sorted(_module_name(file) for file in packed if file.endswith(".py")):
        if not _within(name, OPTIONAL):
            importlib.import_module(name)
    return found


def main() -> int:
    """Print the problems; the exit status says whether there were any."""
    wheel, source = (Path(argument).resolve() for argument in sys.argv[1:])
    found = problems(wheel, source)
    print(*(found or [f"{wheel.name}: complete, and imports with its own requirements"]), sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
