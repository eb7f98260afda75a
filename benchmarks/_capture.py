"""`pool.capture` against loops written by hand, with the same builds, warmups and captures.

Each loop builds every key's state before its warmup, before its capture, and once more at the end
to look at the addresses, as `capture` does; the counts are compared, or the run is void.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks._measure import Ratio, interleave
from benchmarks._states import LayeredOwner
from benchmarks._turns import Figure, difference_us, report
from graphshare import (
    AttentionState,
    BatchDescriptor,
    GraphPool,
    Phase,
    capture_descriptors,
    share_states,
)
from graphshare.capture import make_backend

AT_MOST = 1.1
SIZES = [1, 2, 4, *range(8, 257, 8)]
Forward = Callable[[BatchDescriptor, AttentionState], torch.Tensor]


class Decoder:
    """A decoder's forward as an eager engine runs it: about 45 kernels a layer.

    Norms, one projection to queries, keys and values, rotary positions, writes to a cache by slot,
    reads from it, weights by softmax, an output projection, and a gated feed-forward.
    """

    def __init__(self, device: torch.device, layers: int, width: int, max_num_tokens: int) -> None:
        def floats(*shape: int) -> torch.Tensor:
            return torch.rand(shape, device=device) / width

        self.hidden = floats(max_num_tokens, width)
        self.angles = floats(max_num_tokens, width // 2)
        self.layers = [
            {
                "norm": floats(width),
                "qkv": floats(width, 3 * width),
                "out": floats(width, width),
                "keys": floats(max_num_tokens, width),
                "values": floats(max_num_tokens, width),
                "norm_2": floats(width),
                "gate_up": floats(width, 4 * width),
                "down": floats(2 * width, width),
            }
            for _ in range(layers)
        ]

    def __call__(self, key: BatchDescriptor, state: AttentionState) -> torch.Tensor:
        hidden = self.hidden[: key.num_tokens]
        angles = self.angles[: key.num_tokens]
        cos, sin = angles.cos(), angles.sin()
        for metadata, layer in zip(state.attn_metadata.values(), self.layers, strict=True):
            qkv = _norm(hidden, layer["norm"]) @ layer["qkv"]
            query, new_keys, new_values = qkv.chunk(3, dim=-1)
            slots = metadata.slot_mapping
            layer["keys"].index_copy_(0, slots, _rotate(new_keys, cos, sin))
            layer["values"].index_copy_(0, slots, new_values)
            scores = _rotate(query, cos, sin) * layer["keys"][slots]
            seen = scores.masked_fill(metadata.seq_lens[:1] < 1, -1e9)
            attended = seen.softmax(-1) * layer["values"][slots]
            hidden = hidden + attended @ layer["out"]
            gate, up = (_norm(hidden, layer["norm_2"]) @ layer["gate_up"]).chunk(2, dim=-1)
            hidden = hidden + (torch.nn.functional.silu(gate) * up) @ layer["down"]
        return hidden


def _norm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6) * weight


def _rotate(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    one, two = rows.chunk(2, dim=-1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)


class WritingOwner(LayeredOwner):
    """Fills the buffers of each metadata object, in place."""

    def build(self, key: BatchDescriptor, batch: Any, phase: Phase) -> AttentionState:
        for group in self.groups:
            for lens in group.lens:
                lens.fill_(1)
            group.query_start_loc.zero_()
            group.block_table.zero_()
            group.slot_mapping.zero_()
        return super().build(key, batch, phase)


def _by_backend(keys: list[BatchDescriptor], owner: WritingOwner, forward: Forward) -> list[Any]:
    """The loop on the tape."""
    backend = make_backend("tape", "cpu")
    for key in keys:
        backend.warmup(partial(forward, key, owner.build(key, None, Phase.WARMUP)))
    graphs = [
        backend.capture(partial(forward, key, owner.build(key, None, Phase.CAPTURE)))
        for key in keys
    ]
    for key in keys:
        owner.build(key, None, Phase.CAPTURE)
    return graphs


class CudaLoop:
    """The loops on a GPU: one memory pool, one side stream.

    Args:
        each: Captures by the context manager ``torch.cuda.graph``, which synchronises and empties
            the allocator's cache before every capture; else that is done once, before the first.
    """

    def __init__(self, device: torch.device, *, each: bool) -> None:
        self.device = device
        self.each = each
        self.stream = torch.cuda.Stream(device)

    def __call__(
        self, keys: list[BatchDescriptor], owner: WritingOwner, forward: Forward
    ) -> list[Any]:
        pool = torch.cuda.graph_pool_handle()
        current, side = torch.cuda.current_stream(), self.stream
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        for key in keys:
            state = owner.build(key, None, Phase.WARMUP)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                forward(key, state)
            current.wait_stream(side)
        graphs: list[Any] = []
        for key in keys:
            state = owner.build(key, None, Phase.CAPTURE)
            graph = torch.cuda.CUDAGraph()
            if self.each:
                with torch.cuda.graph(
                    graph, pool=pool, stream=side, capture_error_mode="thread_local"
                ):
                    outputs = forward(key, state)
            else:
                side.wait_stream(current)
                with torch.cuda.stream(side):
                    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                    outputs = forward(key, state)
                    graph.capture_end()
                current.wait_stream(side)
            graphs.append((graph, outputs))
        for key in keys:
            owner.build(key, None, Phase.CAPTURE)
        return graphs


class Run:
    """One of the variants, with what it must let go of before the next."""

    def __init__(self, owner: WritingOwner, make: Callable[[], Any]) -> None:
        self.owner = owner
        self.make = make
        self.held: Any = None
        self.counts: set[int] = set()

    def __call__(self) -> None:
        before = self.owner.builds
        self.held = self.make()
        self.counts.add(self.owner.builds - before)

    def let_go(self) -> None:
        if isinstance(self.held, GraphPool):
            self.held.release()
        self.held = None


def _captured(
    pool: GraphPool[BatchDescriptor], keys: list[BatchDescriptor], forward: Forward
) -> GraphPool[BatchDescriptor]:
    pool.capture(keys, forward, progress=False)
    return pool


def measure(
    name: str,
    device: torch.device,
    *,
    layers: int,
    width: int,
    sizes: int,
    rounds: int,
    path: str | None,
) -> None:
    """Measure whole captures in turn, letting each go before the next.

    Args:
        name: Of the benchmark.
        device: CUDA graphs on a GPU, the tape on a CPU.
        layers, width: Of the decoder.
        sizes: Sizes to capture, the largest of vLLM's usual list up to 256, one mixed key and one
            uniform key of query length 4 for each.
        rounds: Captures of each variant.
        path: Of the JSON.
    """
    on_gpu = device.type == "cuda"
    if not on_gpu:
        torch.set_num_threads(1)
    keys = capture_descriptors(SIZES[-sizes:], 256, [4])
    forward = Decoder(device, layers, width, max(SIZES))

    def owner() -> WritingOwner:
        return WritingOwner(device, layers)

    own, lender, hand = owner(), owner(), owner()
    pool = GraphPool("own", owner=own, device=device)
    target = _captured(GraphPool("target", owner=lender, device=device), keys, forward)
    draft = GraphPool[BatchDescriptor]("draft", device=device)
    share_states(target, draft)
    runs = {
        "pool.capture": Run(own, lambda: _captured(pool, keys, forward)),
        "pool.capture, borrowed": Run(lender, lambda: _captured(draft, keys, forward)),
    }
    if on_gpu:
        once, each = CudaLoop(device, each=False), CudaLoop(device, each=True)
        runs["loop"] = Run(hand, lambda: once(keys, hand, forward))
        runs["loop, torch.cuda.graph"] = Run(hand, lambda: each(keys, hand, forward))
    else:
        runs["loop"] = Run(hand, lambda: _by_backend(keys, hand, forward))

    def between() -> None:
        for run in runs.values():
            run.let_go()
        if on_gpu:
            torch.cuda.synchronize(device)
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()

    def finished(run: Run) -> Callable[[], None]:
        def call() -> None:
            run()
            if on_gpu:
                torch.cuda.synchronize(device)

        return call

    timing = interleave(
        {variant: finished(run) for variant, run in runs.items()},
        calls=1,
        rounds=rounds,
        warmup=1,
        between=between,
        # On a CPU the process alone does the work, on one thread.
        clock=time.perf_counter_ns if on_gpu else time.process_time_ns,
    )
    between()
    counts = {variant: sorted(run.counts) for variant, run in runs.items()}
    if any(each != [3 * len(keys)] for each in counts.values()):
        raise RuntimeError(f"the variants do not build equally often: {counts}")
    figures = [
        Figure.of(f"{variant}, {len(keys)} keys", timing.ratio(variant, "loop"), "x loop", target_x)
        for variant, target_x in (("pool.capture", AT_MOST), ("pool.capture, borrowed", AT_MOST))
    ]
    if "loop, torch.cuda.graph" in runs:
        ratio = timing.ratio("pool.capture", "loop, torch.cuda.graph")
        figures.append(Figure.of(f"pool.capture, {len(keys)} keys", ratio, "x loop by cuda.graph"))
    for variant in ("pool.capture", "pool.capture, borrowed"):
        added = difference_us(timing, variant, "loop")
        for_a_key = Ratio(*(each / len(keys) for each in added))
        figures.append(Figure.of(f"{variant}, added for a key", for_a_key, "us over loop"))
    figures += [
        Figure(f"{variant}, for a key", timing.median_us(variant) / len(keys), "us")
        for variant in runs
    ]
    shape = {"keys": len(keys), "layers": layers, "width": width, "builds": 3 * len(keys)}
    report(path, name, figures, {**shape, "variants": timing.facts(to="loop")})
