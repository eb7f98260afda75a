"""Extract from vLLM's wheels what the adapter relies on: ``extract_vllm_signatures.py WHEEL...``.

Writes ``graphshare/adapters/vllm/signatures.json``, with an entry for each wheel; entries of other
versions stay. A wheel is read, not installed: ``pip download --no-deps --only-binary=:all:
--python-version 3.12 --abi abi3 --platform manylinux_2_31_x86_64 vllm==VERSION`` fetches one.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graphshare.adapters.vllm.signatures import digest_of

OUT = Path(__file__).parents[1] / "graphshare/adapters/vllm/signatures.json"

GPU = "vllm.v1.worker.gpu"
UTILS = f"{GPU}.cudagraph_utils"
EAGLE = f"{GPU}.spec_decode.eagle.speculator"
AUTOREGRESSIVE = f"{GPU}.spec_decode.autoregressive"

FUNCTIONS = [
    "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model",
    f"{GPU}.model_runner:GPUModelRunner.capture_model",
    f"{UTILS}:CudaGraphManager.capture",
    f"{UTILS}:CudaGraphManager.dispatch",
    f"{UTILS}:CudaGraphManager.run_fullgraph",
    f"{UTILS}:ModelCudaGraphManager.capture",
    f"{UTILS}:prepare_inputs_to_capture",
    f"{GPU}.model_states.default:DefaultModelState.prepare_attn",
    "vllm.v1.attention.backends.fa_utils:get_flash_attn_version",
    "vllm.v1.worker.utils:AttentionGroup.get_metadata_builder",
]
METADATA = [
    "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadata",
    "vllm.v1.attention.backends.triton_attn:TritonAttentionMetadata",
]
# What it is called where it is made; `common_attn_metadata` is another thing.
METADATA_VARIABLES = {"attn_metadata", "metadata", "new_metadata"}
LAYERS = "vllm.model_executor.layers.attention"
SET_BESIDE = {
    # Its builder supports no graphs; a function that no kernel gets.
    f"{LAYERS}.chunked_local_attention": {"make_virtual_batches_block_table"},
    # A copy of the metadata that is common to all backends has the name of one of theirs.
    f"{LAYERS}.cross_attention": {"_seq_lens_cpu", "causal", "encoder_seq_lens_cpu"},
}
# Functions in whose place the adapter acts, where their source is that of the release.
SOURCES = [
    f"{UTILS}:CudaGraphManager.dispatch",
    f"{UTILS}:CudaGraphManager.run_fullgraph",
    f"{UTILS}:ModelCudaGraphManager.run_fullgraph",
    f"{UTILS}:_is_compatible",
]
FIELDS = [f"{UTILS}:BatchExecutionDescriptor", *METADATA]
# Set on `self` somewhere in the class.
ATTRIBUTES = {
    f"{GPU}.model_runner:GPUModelRunner": [
        "attn_groups", "block_tables", "cudagraph_manager", "device", "input_buffers",
        "kv_cache_config", "model_config", "model_state", "parallel_config", "speculative_config",
        "speculator",
    ],
    f"{UTILS}:CudaGraphManager": ["_capture_descs", "graphs"],
    f"{UTILS}:ModelCudaGraphManager": ["hidden_states", "use_aux_hidden_state_outputs"],
    f"{GPU}.block_table:BlockTables": ["input_block_tables", "slot_mappings"],
    f"{GPU}.input_batch:InputBuffers": ["query_start_loc", "seq_lens"],
    "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder": ["scheduler_metadata"],
}  # fmt: skip
SPECULATOR_ATTRIBUTES = ["attn_groups", "draft_attn_layer_names", "input_buffers"]
MANAGER_ATTRIBUTES = ["decode_cudagraph_manager", "prefill_cudagraph_manager"]

OF_VERSION = {
    "0.20.2": {
        "functions": [
            f"{GPU}.spec_decode.eagle.cudagraph:EagleCudaGraphManager.capture",
            f"{EAGLE}:EagleSpeculator._build_draft_attn_metadata",
            f"{EAGLE}:EagleSpeculator.capture_model",
        ],
        "fields": [],
        "attributes": {f"{EAGLE}:EagleSpeculator": SPECULATOR_ATTRIBUTES + MANAGER_ATTRIBUTES},
    },
    "0.21.0": {
        "functions": [
            f"{GPU}.spec_decode.eagle.cudagraph:DecodeEagleCudaGraphManager.capture",
            f"{GPU}.spec_decode.eagle.cudagraph:PrefillEagleCudaGraphManager.capture",
            f"{EAGLE}:EagleSpeculator._build_draft_attn_metadata",
            f"{EAGLE}:EagleSpeculator.capture",
        ],
        "fields": [f"{UTILS}:CapturedAttentionState"],
        "attributes": {f"{EAGLE}:EagleSpeculator": SPECULATOR_ATTRIBUTES + MANAGER_ATTRIBUTES},
    },
    "0.25.1": {
        "functions": [
            f"{AUTOREGRESSIVE}.cudagraph_utils:DecodeSpeculatorCudaGraphManager.capture",
            f"{AUTOREGRESSIVE}.cudagraph_utils:PrefillSpeculatorCudaGraphManager.capture",
            f"{AUTOREGRESSIVE}.speculator:AutoRegressiveSpeculator.capture",
            f"{GPU}.spec_decode.speculator:DraftModelSpeculator._build_draft_attn_metadata",
        ],
        "fields": [f"{UTILS}:AttentionState", f"{UTILS}:AttentionStatePair"],
        "sources": [f"{UTILS}:CudaGraphManager._resolve_effective_loras"],
        "attributes": {
            f"{AUTOREGRESSIVE}.speculator:AutoRegressiveSpeculator": MANAGER_ATTRIBUTES,
            f"{GPU}.spec_decode.speculator:DraftModelSpeculator": SPECULATOR_ATTRIBUTES,
        },
    },
    "0.26.0": {
        "functions": [
            f"{AUTOREGRESSIVE}.cudagraph_utils:SpeculatorCudaGraphManager.capture",
            f"{AUTOREGRESSIVE}.speculator:AutoRegressiveSpeculator.capture",
            f"{GPU}.spec_decode.speculator:DraftModelSpeculator._build_draft_attn_metadata",
        ],
        "fields": [f"{UTILS}:AttentionState"],
        "sources": [f"{UTILS}:CudaGraphManager._resolve_effective_loras"],
        "attributes": {
            f"{AUTOREGRESSIVE}.speculator:AutoRegressiveSpeculator": MANAGER_ATTRIBUTES,
            f"{GPU}.spec_decode.speculator:DraftModelSpeculator": SPECULATOR_ATTRIBUTES,
        },
    },
}


class Wheel:
    def __init__(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path)
        self._sources: dict[str, str] = {}
        self._modules: dict[str, ast.Module] = {}
        self.version = path.name.split("-")[1].partition("+")[0]

    def find(self, name: str) -> ast.AST:
        module, _, path = name.partition(":")
        if module not in self._modules:
            file = module.replace(".", "/") + ".py"
            self._sources[module] = self._archive.read(file).decode()
            self._modules[module] = ast.parse(self._sources[module])
        found: ast.AST = self._modules[module]
        for part in filter(None, path.split(".")):
            (found,) = (node for node in _named(found) if node.name == part)
        return found

    def source(self, name: str) -> str:
        """Return the lines of a function, from its first decorator on."""
        node = self.find(name)
        if not isinstance(node, ast.FunctionDef):
            raise SystemExit(f"expected a function, got {ast.dump(node)[:80]}")
        first = min(each.lineno for each in (node, *node.decorator_list))
        lines = self._sources[name.partition(":")[0]].splitlines()
        return "\n".join(lines[first - 1 : node.end_lineno])

    def modules(self, package: str) -> list[str]:
        """Return the names of all modules in a package."""
        inside = package.replace(".", "/") + "/"
        return [
            name.removesuffix(".py").replace("/", ".")
            for name in self._archive.namelist()
            if name.startswith(inside) and name.endswith(".py")
        ]


def _named(node: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield child


def parameters(node: ast.AST) -> list[str]:
    if not isinstance(node, ast.FunctionDef):
        raise SystemExit(f"expected a function, got {ast.dump(node)[:80]}")
    a = node.args
    plain = [each.arg for each in (*a.posonlyargs, *a.args)]
    first_default = len(plain) - len(a.defaults)
    found = [name + ("=" if i >= first_default else "") for i, name in enumerate(plain)]
    if a.vararg:
        found.append("*" + a.vararg.arg)
    for each, default in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        found.append(each.arg + ("=" if default is not None else ""))
    if a.kwarg:
        found.append("**" + a.kwarg.arg)
    return found


def fields(node: ast.AST) -> list[str]:
    return [
        child.target.id
        for child in ast.iter_child_nodes(node)
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
    ]


def attributes(node: ast.AST) -> set[str]:
    return {attribute for owner, attribute in assigned(node) if owner == "self"}


def check_assigned(wheel: Wheel) -> None:
    """End if the runner or a backend puts into a metadata object what is no field of it."""
    for name in METADATA:
        known = set(fields(wheel.find(name)))
        for module in [name.partition(":")[0], *wheel.modules(GPU), *wheel.modules(LAYERS)]:
            beside = known | SET_BESIDE.get(module, set())
            for owner, attribute in assigned(wheel.find(f"{module}:")):
                if owner in METADATA_VARIABLES and attribute not in beside:
                    raise SystemExit(
                        f"vLLM {wheel.version}: {module} sets {owner}.{attribute}, "
                        f"no field of {name}"
                    )


def assigned(node: ast.AST) -> set[tuple[str, str]]:
    """Return variable and attribute wherever an attribute of a variable is set."""
    return {
        (each.value.id, each.attr)
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
    }


def extract(wheel: Wheel) -> dict[str, dict[str, Any]]:
    check_assigned(wheel)
    more = OF_VERSION[wheel.version]
    wanted = ATTRIBUTES | more["attributes"]
    for name, names in wanted.items():
        missing = set(names) - attributes(wheel.find(name))
        if missing:
            raise SystemExit(f"vLLM {wheel.version}: {name} sets no {', '.join(sorted(missing))}")
    return {
        "functions": {
            n: parameters(wheel.find(n)) for n in sorted([*FUNCTIONS, *more["functions"]])
        },
        "fields": {n: fields(wheel.find(n)) for n in sorted([*FIELDS, *more["fields"]])},
        "attributes": {name: sorted(names) for name, names in sorted(wanted.items())},
        "sources": {
            n: digest_of(wheel.source(n)) for n in sorted([*SOURCES, *more.get("sources", [])])
        },
    }


def main(paths: list[str]) -> None:
    known = json.loads(OUT.read_text("utf-8")) if OUT.exists() else {}
    for path in paths:
        wheel = Wheel(Path(path))
        known[wheel.version] = extract(wheel)
    OUT.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
