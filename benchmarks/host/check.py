"""What the check of a state's layout at a refresh costs, beside a walk that compares all.

``matches`` is the prepared check; ``walk`` takes the layout anew with ``layout_of`` and compares
it with the captured one, which is what a check without preparation does; ``floor`` only reads
the address, shape and stride of each distinct tensor, from a list, and compares nothing.

    python benchmarks/host/check.py --json check.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from _measure import interleave, print_table, repeated, save_results  # noqa: E402

from graphshare.state import (  # noqa: E402
    AttentionState,
    LayoutChecker,
    compare,
    device_tensors,
    layout_of,
)

HOST_VALUES = (512, 8, 1, None, True, 0.125, "causal", torch.bfloat16)
RULES = {"*.max_seq_len": "at_most"}
LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(64)]


def _metadata(tensors: int, slots: bool) -> Any:
    names = [f"tensor_{i}" for i in range(tensors)]
    names += ["max_seq_len", *(f"host_{i}" for i in range(1, len(HOST_VALUES)))]
    return make_dataclass("Metadata", names, slots=slots)


def _buffers(count: int, device: str) -> list[torch.Tensor]:
    one = [torch.zeros(512, dtype=torch.int32, device=device) for _ in range(count)]
    for i in range(0, count, 4):
        one[i] = torch.zeros(512, 128, dtype=torch.int32, device=device)
    return one


def one_object(device: str, slots: bool) -> Callable[[], AttentionState]:
    """16 tensors, sliced anew by each build, and 8 host values."""
    buffers = _buffers(16, device)
    metadata = _metadata(15, slots)

    def build() -> AttentionState:
        return AttentionState(
            metadata(*(b[:32] for b in buffers[:15]), *HOST_VALUES), buffers[15][:128]
        )

    return build


def layers(device: str, slots: bool) -> Callable[[], AttentionState]:
    """64 layers that share two metadata objects, of 8 tensors and 8 host values each."""
    buffers = _buffers(17, device)
    metadata = _metadata(8, slots)

    def build() -> AttentionState:
        two = [
            metadata(*(b[:32] for b in buffers[i : i + 8]), *HOST_VALUES) for i in range(0, 16, 8)
        ]
        slot_mapping = buffers[16][:128]
        return AttentionState(
            {name: two[i % 2] for i, name in enumerate(LAYERS)},
            dict.fromkeys(LAYERS, slot_mapping),
        )

    return build


def measure(build: Callable[[], AttentionState], device: str, rounds: int) -> dict[str, Any]:
    captured, state = build(), build()
    checker = LayoutChecker(captured, device, RULES)
    expected = checker.layout
    tensors = device_tensors(state, device)
    if not checker.matches(state) or compare(expected, layout_of(state, device, RULES)):
        raise RuntimeError("the rebuild differs from the capture")

    def floor() -> None:
        for tensor in tensors:
            tensor.data_ptr()
            tensor.shape  # noqa: B018
            tensor.stride()

    calls = 50
    timing = interleave(
        {
            "matches": repeated(lambda: checker.matches(state), calls),
            "walk": repeated(lambda: compare(expected, layout_of(state, device, RULES)), calls),
            "floor": repeated(floor, calls),
        },
        calls=calls,
        rounds=rounds,
    )
    return timing.facts(to="matches")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", metavar="PATH", help="write the results there")
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for make in (one_object, layers):
        for slots in (False, True):
            name = f"{make.__name__}, {'__slots__' if slots else '__dict__'}"
            results[name] = measure(make(options.device, slots), options.device, options.rounds)
    rows: list[list[str]] = []
    for name, variants in results.items():
        for variant, facts in variants.items():
            low, high = facts["quartiles_us"]
            ratio = facts.get("ratio")
            rows.append(
                [
                    f"{name}: {variant}",
                    f"{facts['median_us']:.2f}",
                    f"{low:.2f} to {high:.2f}",
                    f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"
                    if ratio
                    else "",
                ]
            )
    print_table(["state: variant", "us", "quartiles", "times matches [95%]"], rows)
    if options.json:
        save_results(options.json, "check", results)


if __name__ == "__main__":
    main()
