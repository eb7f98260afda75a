"""Write what the FlashInfer adapter uses of FlashInfer, as installed, to the file that tests use.

    python scripts/flashinfer_signatures.py $SITE/flashinfer [--out PATH]

Signatures of the wrappers, the attributes that they set on themselves, and the parameters and
plan lengths of the compiled plans, from Python and C++ source. Nothing is imported, so that
neither a GPU nor what the library needs is needed.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from pathlib import Path

OUT = Path(__file__).parents[1] / "tests" / "data" / "flashinfer_signatures.json"
CLASSES = {
    "BatchDecodeWithPagedKVCacheWrapper": "decode.py",
    "BatchPrefillWithPagedKVCacheWrapper": "prefill.py",
    "BatchAttention": "attention/_core.py",
}
METHODS = ("__init__", "reset_workspace_buffer", "plan", "run")
COMPILED = {
    "decode": ("batch_decode.cu", "BatchDecodeWithPagedKVCachePlan"),
    "fa2": ("batch_prefill.cu", "BatchPrefillWithKVCachePlan"),
    "fa3": ("batch_prefill_sm90.cu", "BatchPrefillWithKVCacheSM90Plan"),
    "batch_attention": ("batch_attention.cu", "BatchPagedAttentionPlan"),
}


def parameters(node: ast.FunctionDef) -> dict[str, str | None]:
    """By name, in order: the default's source, or ``None``; without ``self``."""
    given = node.args
    missing = len(given.args) - len(given.defaults)
    defaults = [None] * missing + [ast.unparse(each) for each in given.defaults]
    found = {each.arg: default for each, default in zip(given.args, defaults, strict=True)}
    for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found[each.arg] = None if default is None else ast.unparse(default)
    found.pop("self")
    return found


def wrapper(source: Path, name: str) -> dict[str, object]:
    """A class's methods, and every attribute that it sets on itself."""
    (cls,) = (
        node
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    methods: dict[str, dict[str, str | None]] = {}
    for node in cls.body:
        if isinstance(node, ast.FunctionDef) and node.name in METHODS:
            methods[node.name] = parameters(node)  # of overloads the last one, which is the method
    attributes = {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    return {"methods": methods, "attributes": sorted(attributes)}


def compiled(source: Path, name: str) -> list[str]:
    """Names of a C++ function's parameters."""
    (given,) = re.findall(rf"Array<int64_t> {name}\((.*?)\)\s*\{{", source.read_text(), re.DOTALL)
    return [re.sub(r"\s*=.*", "", each).split()[-1] for each in given.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("site", type=Path, help="the folder of the package flashinfer")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    site = options.site
    (version,) = re.findall(r'__version__ = "(.*)"', (site / "_build_meta.py").read_text())
    content = {
        "version": version,
        "wrappers": {name: wrapper(site / file, name) for name, file in CLASSES.items()},
        "compiled": {
            kernel: compiled(site / "data" / "csrc" / file, name)
            for kernel, (file, name) in COMPILED.items()
        },
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
