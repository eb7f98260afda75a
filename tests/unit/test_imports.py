"""What importing graphshare costs and gives: which modules come along, which names are there."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.package import ON_DEMAND, ROOT, files, import_or_skip, module_names

_PROBE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch, typing_extensions
before = set(sys.modules)
from graphshare import *
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_importing_graphshare_brings_only_the_standard_library_besides_torch() -> None:
    result = subprocess.run(
        [sys.executable, "-I", "-c", _PROBE, str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    loaded = json.loads(result.stdout)
    allowed = sys.stdlib_module_names | {"graphshare", "torch", "typing_extensions"}
    assert [name for name in loaded if name.partition(".")[0] not in allowed] == []
    assert [
        name for name in loaded if name.split(".")[1:2] and name.split(".")[1] in ON_DEMAND
    ] == []
    assert "graphshare" in loaded


@pytest.mark.parametrize("file", files(core=True), ids=lambda f: f.relative_to(ROOT).as_posix())
def test_the_core_names_no_other_package(file: Path) -> None:
    """Also not inside a function or under TYPE_CHECKING, where a run does not see it."""
    roots: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            roots.add((node.module or "").partition(".")[0])
    assert roots - sys.stdlib_module_names <= {"graphshare", "torch", "typing_extensions"}


def test_all_of_the_package_is_what_it_defines() -> None:
    package = import_or_skip("graphshare")
    exported = set(package.__all__)
    assert {name for name in exported if not hasattr(package, name)} == set()
    public = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    assert public <= exported
    assert len(package.__all__) == len(exported)


def test_the_package_loads_what_its_type_checking_block_names() -> None:
    source = ast.parse((ROOT / "graphshare" / "__init__.py").read_text("utf-8"))
    seen_by_checkers = {
        alias.name: (node.module or "").removeprefix("graphshare.")
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("graphshare.")
        for alias in node.names
    }
    package = import_or_skip("graphshare")
    assert vars(package)["_HOMES"] == seen_by_checkers
    assert set(package.__all__) == {*seen_by_checkers, "__version__"}
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError):
        _ = package.no_such_name


def test_importing_graphshare_alone_does_not_import_torch() -> None:
    """Where torch is broken, ``graphshare doctor`` must still be able to say so."""
    probe = "import sys; sys.path.insert(0, sys.argv[1]); import graphshare; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-I", "-c", probe, str(ROOT)], capture_output=True, text=True, check=True
    )
    assert "torch" not in result.stdout.split()


def test_all_of_errors_is_its_classes_and_its_tree() -> None:
    errors = import_or_skip("graphshare.errors")
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__ and name[0] != "_"
    }
    assert set(errors.__all__) == defined
    assert list(errors.__all__) == sorted(errors.__all__)
    assert all(issubclass(getattr(errors, name), errors.GraphShareError) for name in defined)
    assert set(re.findall(r"[├└]── (\w+)", errors.__doc__ or "")) == defined


@pytest.mark.parametrize("name", module_names())
def test_a_module_exports_names_that_it_has(name: str) -> None:
    module = import_or_skip(name)
    missing = [n for n in getattr(module, "__all__", ()) if not hasattr(module, n)]
    assert missing == []


@pytest.mark.parametrize("name", module_names())
def test_everything_public_has_a_docstring(name: str) -> None:
    module = import_or_skip(name)
    assert module.__doc__
    bare = [
        attribute
        for attribute, value in vars(module).items()
        if not attribute.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == name
        # A dataclass without a docstring is given its signature as one.
        and (not value.__doc__ or value.__doc__.startswith(f"{attribute}("))
    ]
    assert bare == []
