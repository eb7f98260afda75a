"""Owners, graphs and pools that the benchmarks of the core have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from graphshare import AttentionState, BatchDescriptor, GraphPool, Phase, share_states
from graphshare.capture import make_backend

HOST_VALUES = {"*.max_seq_len": "at_most", "*.num_actual_tokens": "any"}
LAYERS = 64
MAX_NUM_REQS = 256
MAX_NUM_TOKENS = 2048
PAGES = 64


@dataclass
class Metadata:
    """The shape of a paged attention backend's metadata: tensors of one batch, host values."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    cu_prefix_query_lens: torch.Tensor
    prefix_kv_lens: torch.Tensor
    suffix_kv_lens: torch.Tensor
    scheduler_metadata: torch.Tensor
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    common_prefix_len: int
    max_num_splits: int
    use_cascade: bool
    causal: bool
    window: tuple[int, int]


class MetadataBuffers:
    """Persistent buffers for one :class:`Metadata`; each build slices them anew, as engines do."""

    def __init__(self, device: torch.device) -> None:
        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.query_start_loc = ints(MAX_NUM_REQS + 1)
        self.lens = [ints(MAX_NUM_REQS) for _ in range(5)]
        self.block_table = ints(MAX_NUM_REQS, PAGES)
        self.slot_mapping = torch.zeros(MAX_NUM_TOKENS, dtype=torch.int64, device=device)

    def metadata(self, num_tokens: int, num_reqs: int, max_seq_len: int) -> Metadata:
        one, two, three, four, five = self.lens
        return Metadata(
            self.query_start_loc[: num_reqs + 1],
            one[:num_reqs],
            self.block_table[:num_reqs],
            self.slot_mapping[:num_tokens],
            two[:num_reqs],
            three[:num_reqs],
            four[:num_reqs],
            five[:num_reqs],
            num_tokens,
            num_tokens,
            max_seq_len,
            0,
            32,
            use_cascade=False,
            causal=True,
            window=(-1, -1),
        )


class FlatOwner:
    """A state of 16 tensors and 8 host values, in one object. Writes nothing: the benchmarks ask
    what comes on top of a build, whatever it writes."""

    host_values = HOST_VALUES

    def __init__(self, device: torch.device) -> None:
        self.buffers = MetadataBuffers(device)
        self.slot_mappings = [
            torch.zeros(MAX_NUM_TOKENS, dtype=torch.int64, device=device) for _ in range(8)
        ]
        self.builds = 0

    def build(self, key: BatchDescriptor, batch: Any, phase: Phase) -> AttentionState:
        del phase
        self.builds += 1
        tokens, reqs = key.num_tokens, key.num_reqs or MAX_NUM_REQS
        metadata = self.buffers.metadata(tokens, reqs, 8192 if batch is None else batch)
        return AttentionState(metadata, [each[:tokens] for each in self.slot_mappings])


class LayeredOwner:
    """A dict of 64 layers, each with one of two metadata objects of 8 tensors and 8 host values."""

    host_values = HOST_VALUES

    def __init__(self, device: torch.device, layers: int = LAYERS) -> None:
        self.names = [f"model.layers.{layer}.self_attn.attn" for layer in range(layers)]
        self.groups = [MetadataBuffers(device) for _ in range(2)]
        self.builds = 0

    def build(self, key: BatchDescriptor, batch: Any, phase: Phase) -> AttentionState:
        del phase
        self.builds += 1
        tokens, reqs = key.num_tokens, key.num_reqs or MAX_NUM_REQS
        max_seq_len = 8192 if batch is None else batch
        even, odd = (each.metadata(tokens, reqs, max_seq_len) for each in self.groups)
        metadata = {name: odd if place % 2 else even for place, name in enumerate(self.names)}
        return AttentionState(metadata)


class NoGraph:
    """A launch that does nothing, so that what is around it can be seen."""

    outputs: Any = None

    def replay(self) -> None:
        pass

    def release(self) -> None:
        pass


@dataclass(frozen=True)
class Lent:
    """A pool, a borrower of its states, and the borrower's graphs."""

    target: GraphPool[BatchDescriptor]
    draft: GraphPool[BatchDescriptor]
    graphs: dict[BatchDescriptor, Any]

    def close(self) -> None:
        self.draft.close()
        self.target.close()


def lend(owner: Any, keys: list[BatchDescriptor], device: torch.device, **options: Any) -> Lent:
    """Capture the same keys in a pool and in a borrower of its states, and refresh the first.

    On a CPU without ``graphs``, launches that do nothing stand for the graphs.

    Args:
        owner: Of the target's states.
        keys: To capture.
        device: Where.
        options: For both pools; ``graphs=True`` records real graphs on a CPU as well.
    """
    real = options.pop("graphs", device.type == "cuda")
    backend = make_backend("auto", device)
    target = GraphPool("target", owner=owner, device=device, **options)
    draft = GraphPool("draft.prefill", device=device, **options)
    share_states(target, draft)
    graphs: dict[BatchDescriptor, Any] = {}
    scratch = torch.zeros(32, device=device)
    with backend.session():
        backend.warmup(partial(scratch.add_, 1))
        for pool in (target, draft):
            with pool.capturing(keys) as capturing:
                for key in capturing.keys:
                    capturing.state(key, Phase.CAPTURE)
                    # One small kernel, so that the device keeps up with the launches.
                    graph = backend.capture(partial(scratch.add_, 1)) if real else NoGraph()
                    capturing.commit(key, graph.replay, graph.outputs, release=graph.release)
                    graphs[key] = graph
    target.refresh(keys[0], None)
    return Lent(target, draft, {key: getattr(each, "graph", each) for key, each in graphs.items()})


def device_of(name: str) -> torch.device:
    """The device of an option, with its index."""
    device = torch.device(name)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def waiting(device: torch.device) -> Callable[[], object] | None:
    """What waits for a device, or ``None`` where there is nothing to wait for."""
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else None
