"""Whether the vLLM at hand has the functions, fields and attributes that the adapter relies on.

``signatures.json`` holds them for each version, extracted from the released wheels by
``scripts/extract_vllm_signatures.py``.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib
import inspect
import json
import textwrap
import tokenize
import types
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

__all__ = [
    "digest_of",
    "expected",
    "find",
    "first_difference",
    "is_released",
    "parameters_of",
    "released",
]

# No source, or another one by now: the file was replaced under the running process.
_UNREADABLE = (OSError, ValueError, SyntaxError, tokenize.TokenError)

_FILE = Path(__file__).with_name("signatures.json")


@lru_cache(maxsize=1)
def expected() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Return what was extracted: by version, kind and name.

    Kinds are ``functions`` (parameters), ``fields``, ``attributes`` (names), ``sources`` (digests).
    """
    return json.loads(_FILE.read_text("utf-8"))


def first_difference(version: str) -> str | None:
    """Return the first thing in which the installed vLLM is not what was released.

    Args:
        version: Of vLLM, one that was extracted.
    """
    return _first_difference(version, {"functions": parameters_of, "fields": _fields_of})


def _first_difference(version: str, kinds: Mapping[str, Callable[[Any], Any]]) -> str | None:
    for kind, look in kinds.items():
        for name, wanted in expected()[version][kind].items():
            try:
                got = look(find(name))
            except (ImportError, AttributeError, TypeError, ValueError) as error:
                return f"{name}: expected {wanted}, got {error!r}"
            if got != wanted:
                return f"{name}: expected {wanted}, got {got}"
    return None


def parameters_of(function: Any) -> list[str]:
    """Return the parameters: a default shows as ``=``, variable ones with their stars."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [
        stars.get(each.kind, "")
        + each.name
        + ("" if each.default is inspect.Parameter.empty else "=")
        for each in inspect.signature(function).parameters.values()
    ]


def released(version: str) -> frozenset[Callable[..., Any]]:
    """Return the functions of vLLM whose work the adapter may do in their place.

    Empty if one of them is not what was released: what it does then is not known.

    Args:
        version: Of vLLM, one that was extracted.
    """
    if _first_difference(version, {"sources": _digest_of_its_source}) is not None:
        return frozenset()
    return frozenset(find(name) for name in expected()[version]["sources"])


def is_released(manager: Any, name: str, functions: Collection[Callable[..., Any]]) -> bool:
    """Whether a manager's method is vLLM's own, so that what it does is known.

    Args:
        manager: One of vLLM's.
        name: Of the method.
        functions: Those that are as they were released, see :func:`released`.
    """
    if not hasattr(manager, "__dict__") or name in vars(manager):
        return False
    # All of them: each may call that of the class before.
    methods = [vars(each)[name] for each in type(manager).__mro__ if name in vars(each)]
    # Without any, it is something that hands on what it is asked for.
    return bool(methods) and all(any(each is one for one in functions) for each in methods)


def _digest_of_its_source(function: Any) -> str:
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
        raise TypeError("a wrapper shows the source of what it wraps")
    try:
        return digest_of(inspect.getsource(function))
    except _UNREADABLE as error:
        raise ValueError("its source cannot be read") from error


def digest_of(source: str) -> str:
    """Return a digest of the function that a source begins with, wherever it is indented."""
    source = textwrap.dedent(source)
    (function, *_) = ast.parse(source).body
    lines = source.splitlines()[: function.end_lineno]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _fields_of(kind: Any) -> list[str]:
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return list(kind._fields)


def find(name: str) -> Any:
    """Return what ``signatures.json`` calls ``module:name.of.it``.

    Raises:
        ImportError, AttributeError: It is not there.
    """
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found
