"""Moving a KV cache and its metadata under captured graphs: patched, or captured anew.

A decode step of Llama's layers, captured for some keys, on FlashAttention 3 where it is installed
and else on PyTorch's operators. In each round, in turn and in one process: all keys are captured
anew (`recapture`: warmup, capture, checks); all buffers of the cache and the
metadata move to the other of two places, which also reads each graph for the first time (`first`);
and they move back (`again`). Before that, replays after a move are compared with those of a fresh
capture on the same memory, bit for bit, and the old memory is filled with nonsense.

    python -m benchmarks.gpu.rebind [--json PATH] [--rounds N] [--device cpu]
                                    [--layers N ...] [--keys N ...] [--width N] [--attention NAME]
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from time import perf_counter_ns as now
from typing import Any

import torch

from benchmarks._layered import (
    Attend,
    LayeredModel,
    LayeredOwner,
    buffers_of,
    flash_attention_3,
    gathered,
    key_of,
    move,
    put,
)
from benchmarks._measure import Timing, print_table
from benchmarks._states import device_of, waiting
from benchmarks._turns import Figure, arguments, report
from graphshare import GraphPool

TARGET = 1 / 50
"""What a move may take of what capturing anew takes."""


def measure(
    device: torch.device, layers: int, count: int, width: int, rounds: int, attend: Attend
) -> Any:
    """Return the timing, and what was moved."""
    keys = [key_of(number + 1) for number in range(count)]
    owner = LayeredOwner(layers, count, device)
    model = LayeredModel(layers, count, width, device, attend)
    pool: GraphPool[Any] = GraphPool("target", owner=owner, device=device, inspectable=True)
    pool.capture(keys, model.forward, progress=False)
    check(pool, owner, model, keys)
    wait = waiting(device) or _nothing
    there = {old: old.clone() for old in buffers_of(owner, model)}
    back = {new: old for old, new in there.items()}
    seconds: dict[str, list[float]] = {"recapture": [], "first": [], "again": []}
    done = None
    gc.collect()
    for turn in range(1 + rounds):
        for name, moves in (("recapture", None), ("first", there), ("again", back)):
            wait()
            start = now()
            if moves is None:
                pool.recapture(progress=False)
                wait()
            else:
                put(owner, model, moves)
                done = pool.rebind(moves)
            took = (now() - start) * 1e-9
            if turn:
                seconds[name].append(took)
    if done is None or not done.nodes:
        raise SystemExit("nothing was moved")
    nodes = sum(len(pool.provenance(key).nodes) for key in keys)
    pool.close()
    return Timing(1, seconds), {
        "layers": layers,
        "keys": count,
        "nodes": nodes,
        "nodes_changed": done.nodes,
        "addresses": done.addresses,
        "tensors": len(there),
    }


def attention_named(name: str, device: torch.device) -> tuple[str, Attend]:
    """Return an attention and its name; of ``auto``, the best that there is."""
    if name == "torch" or (name == "auto" and device.type == "cpu"):
        return "torch", gathered
    try:
        return "flash_attention_3", flash_attention_3()
    except ModuleNotFoundError:
        if name == "auto":
            return "torch", gathered
        raise


def _nothing() -> None:
    """What there is to wait for on a CPU."""


def check(pool: GraphPool[Any], owner: LayeredOwner, model: LayeredModel, keys: Any) -> None:
    """Refuse to measure what is not right."""
    moves = move(owner, model)
    pool.rebind(moves)
    if pool.device.type == "cuda":
        torch.cuda.synchronize()
    for old in moves:
        old.view(torch.uint8).fill_(0xA5)
    fresh: GraphPool[Any] = GraphPool("fresh", owner=owner, device=pool.device)
    fresh.capture(keys, model.forward, progress=False)
    for key in keys:
        results: list[torch.Tensor] = []
        for each in (pool, fresh):
            each.refresh(key, 20)
            results.append(each.replay(key, copy=True))
        if not torch.equal(*results) or results[0].isnan().any():
            raise SystemExit(f"{key}: a replay after the move differs from a fresh capture's")
    if not all(bool((old.view(torch.uint8) == 0xA5).all()) for old in moves):
        raise SystemExit("old memory was written")
    fresh.close()


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, rounds=11)
    parser.add_argument("--device", default="cuda", help="cpu exercises the code without a GPU")
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32], metavar="N")
    parser.add_argument("--keys", type=int, nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument("--width", type=int, default=1024, metavar="N")
    parser.add_argument(
        "--attention", choices=("auto", "torch", "flash_attention_3"), default="auto"
    )
    options = parser.parse_args(argv)
    device = device_of(options.device)
    attention, attend = attention_named(options.attention, device)
    print(f"attention: {attention}")
    figures: list[Figure] = []
    details: list[dict[str, Any]] = []
    for layers in options.layers:
        for count in options.keys:
            timing, facts = measure(device, layers, count, options.width, options.rounds, attend)
            where = f"{layers} layers, {count} keys"
            for name in ("again", "first"):
                ratio = timing.ratio(name, "recapture")
                target = TARGET if name == "again" else None
                figures.append(
                    Figure.of(f"{where}: rebind ({name}) / recapture", ratio, "", target)
                )
            details.append({**facts, "attention": attention, "variants": timing.facts("recapture")})
    print_table(
        ["layers", "keys", "nodes", "changed", "recapture ms", "first ms", "again ms", "us/node"],
        [
            [
                str(each["layers"]),
                str(each["keys"]),
                str(each["nodes"]),
                str(each["nodes_changed"]),
                *(
                    f"{each['variants'][name]['median_us'] / 1e3:.2f}"
                    for name in ("recapture", "first", "again")
                ),
                f"{each['variants']['again']['median_us'] / each['nodes_changed']:.1f}",
            ]
            for each in details
        ],
    )
    report(options.json, "gpu/rebind", figures, details)


if __name__ == "__main__":
    main()
