"""Write the signatures of FlashAttention's functions, as installed, to the file that tests use.

    python scripts/flash_attn_signatures.py LABEL=SOURCE ... [--out PATH]

LABEL names a build (``flash_attn``, ``vllm``, ``upstream``); SOURCE is the file of its Python
interface. Nothing is imported, so that neither a GPU nor what the libraries need is needed.
Builds that are not named keep their entries. What a label stands for is written by hand, under
``sources``.

    python scripts/flash_attn_signatures.py \\
        flash_attn=$SITE/flash_attn/flash_attn_interface.py \\
        vllm=$SITE/vllm/vllm_flash_attn/flash_attn_interface.py
"""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path

OUT = Path(__file__).parents[1] / "tests" / "data" / "flash_attn_signatures.json"
FUNCTIONS = ("flash_attn_with_kvcache", "flash_attn_varlen_func", "get_scheduler_metadata")


def signatures(source: Path) -> dict[str, dict[str, str | None]]:
    """By function, its parameters in order: by name, the default's source, or ``None``."""
    found: dict[str, dict[str, str | None]] = {}
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS:
            given = node.args
            if given.posonlyargs or given.kwonlyargs or given.vararg or given.kwarg:
                raise SystemExit(f"{source}: {node.name} has parameters of another kind")
            missing = len(given.args) - len(given.defaults)
            defaults = [None] * missing + [ast.unparse(each) for each in given.defaults]
            names = [each.arg for each in given.args]
            found[node.name] = dict(zip(names, defaults, strict=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sources", nargs="+", metavar="LABEL=SOURCE")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    content = json.loads(options.out.read_text()) if options.out.exists() else {}
    for each in options.sources:
        label, _, source = each.partition("=")
        content[label] = signatures(Path(source))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
