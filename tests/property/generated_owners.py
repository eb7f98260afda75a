"""Owners that are correct by construction: any buffers, paddings, host values and declarations."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from graphshare import BatchDescriptor, Phase
from graphshare.testing.strategies import Requests, batches, key_sets

DTYPES = (torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.uint8, torch.bool)
ROWS = ("reqs", "reqs + 1", "tokens", "fixed")
FIXED_ROWS = 3
HOST_KINDS = ("constant", "by key", "capacity", "free", "object", "text")


class Batch(NamedTuple):
    """Requests, and a seed for their contents."""

    requests: Requests
    seed: int

    num_tokens = property(lambda self: self.requests.num_tokens)
    num_reqs = property(lambda self: self.requests.num_reqs)
    max_query_len = property(lambda self: self.requests.max_query_len)


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One tensor of the state."""

    name: str
    rows: str
    inner: tuple[int, ...]
    dtype: torch.dtype
    padding: int
    by_key: bool  # a buffer for each key, or one for all
    turned: bool  # rows are the last dimension in memory
    constant: bool  # written when the owner is made, never again

    def num_rows(self, key: BatchDescriptor) -> int:
        reqs = key.num_reqs or key.num_tokens
        return {"reqs": reqs, "reqs + 1": reqs + 1, "tokens": key.num_tokens}.get(
            self.rows, FIXED_ROWS
        )

    def live(self, batch: Batch) -> int:
        return {
            "reqs": batch.num_reqs,
            "reqs + 1": batch.num_reqs + 1,
            "tokens": batch.num_tokens,
        }.get(self.rows, FIXED_ROWS)

    def values(self, rows: int, seed: int) -> torch.Tensor:
        shape = (rows, *self.inner)
        count = torch.Size(shape).numel()
        numbers = (torch.arange(count) * 7 + seed * 31 + len(self.name)) % 97
        return (numbers.reshape(shape) % (2 if self.dtype is torch.bool else 97)).to(self.dtype)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything about an owner."""

    keys: list[BatchDescriptor]
    buffers: list[Buffer]
    host: list[str]
    container: str
    writes: str | None  # "exact", "all" or not declared
    live_rows: bool
    arena: bool
    two_paths: bool
    temporaries: bool
    same_objects: bool
    fault: str | None = None
    victim: str = ""


class Owner:
    """Does what its plan says, and the plan's fault if it has one."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.memory: dict[Any, torch.Tensor] = {}
        self.states: dict[Any, Any] = {}
        self.things = {key: object() for key in plan.keys}
        self.count = 0
        self.host_values = {"*.capacity": "at_most", "*.free": "any", "free": "any"}
        if plan.live_rows:
            self.live_rows = self._live_rows
        if plan.writes is not None:
            self.writes = self._writes
        arena = torch.zeros(1 << 15, dtype=torch.uint8)
        place = 0
        for buffer in plan.buffers:
            for name in plan.keys if buffer.by_key else [None]:
                most = max(map(buffer.num_rows, plan.keys if name is None else [name]))
                shape = (*buffer.inner, most) if buffer.turned else (most, *buffer.inner)
                size = torch.Size(shape).numel() * buffer.dtype.itemsize
                if plan.arena and place + size <= len(arena):
                    made = arena[place : place + size].view(buffer.dtype).view(shape)
                    place += -(-size // 8) * 8
                else:
                    made = torch.zeros(shape, dtype=buffer.dtype)
                made = made.movedim(-1, 0) if buffer.turned else made
                made.copy_(buffer.values(most, 5))
                self.memory[buffer, name] = made

    def view(self, buffer: Buffer, key: BatchDescriptor) -> torch.Tensor:
        whole = self.memory[buffer, key if buffer.by_key else None]
        return whole[: buffer.num_rows(key)]

    def build(self, key: BatchDescriptor, batch: Batch | None, phase: Phase) -> Any:
        self.count += 1
        if batch is not None:
            self.refuse(key, batch)
        tensors = {buffer.name: self.write(buffer, key, batch) for buffer in self.plan.buffers}
        if self.plan.two_paths:
            name = self.plan.buffers[0].name
            tensors["again"] = tensors[name]
        host = {kind.replace(" ", "_"): self.value(kind, key, batch) for kind in self.plan.host}
        if self.plan.fault == "frozen-value":
            host["chosen"] = 0 if batch is None else 1
        parts = {**tensors, **host}
        if self.plan.same_objects:
            held = self.states.setdefault(key, {})
            held.update(parts)
            return held
        match self.plan.container:
            case "dict":
                return parts
            case "object":
                return SimpleNamespace(**parts)
            case "layers":
                shared = SimpleNamespace(**parts)
                return {f"layers.{i}": shared for i in range(3)}
            case _:
                return (parts, [SimpleNamespace(**tensors)])

    def refuse(self, key: BatchDescriptor, batch: Batch) -> None:
        for name in ("num_tokens", "num_reqs", "max_query_len"):
            most = getattr(key, name)
            if most is not None and getattr(batch, name) > most:
                raise ValueError(name)
        if batch.num_reqs > key.num_tokens:
            raise ValueError("num_reqs")

    def write(self, buffer: Buffer, key: BatchDescriptor, batch: Batch | None) -> torch.Tensor:
        view = self.view(buffer, key)
        if buffer.constant:
            return view
        hit = self.plan.victim == buffer.name
        fault = self.plan.fault if hit else None
        rows = len(view)
        live = rows if batch is None else buffer.live(batch)
        if not (fault == "unwritten" and batch is not None):
            values = buffer.values(live, 1 if batch is None else batch.seed)
            view[:live] = values * 1 if self.plan.temporaries else values
        if fault == "footprint":
            whole = self.memory[buffer, None]
            whole[rows:] = buffer.padding
        if not (fault in ("padding", "unwritten") and batch is not None):
            view[live:] = buffer.padding
        if fault == "allocation":
            return view.clone()
        if fault == "layout" and batch is not None:
            return view[:live]
        return view

    def value(self, kind: str, key: BatchDescriptor, batch: Batch | None) -> Any:
        match kind:
            case "constant":
                return 16
            case "by key":
                return key.num_tokens
            case "capacity":
                return 4096 if batch is None else max(batch.requests.seq_lens)
            case "free":
                return self.count
            case "object":
                return self.things[key]
            case _:
                return "".join(["NH", "D"])

    def _live_rows(self, key: BatchDescriptor, batch: Batch) -> dict[str, int]:
        rows = {f"*.{buffer.name}": buffer.live(batch) for buffer in self.plan.buffers}
        return {**rows, "*.again": self.plan.buffers[0].live(batch)}

    def _writes(self, key: BatchDescriptor) -> list[torch.Tensor]:
        if self.plan.writes == "all":
            return [made for (buffer, _), made in self.memory.items() if not buffer.constant]
        return [self.view(buffer, key) for buffer in self.plan.buffers if not buffer.constant]


@st.composite
def buffers(draw: st.DrawFn, name: str, *, constants: bool) -> Buffer:
    dtype = draw(st.sampled_from(DTYPES))
    return Buffer(
        name,
        draw(st.sampled_from(ROWS)),
        draw(st.sampled_from([(), (3,), (2, 2)])),
        dtype,
        draw(st.integers(0, 1)),
        by_key=draw(st.booleans()),
        turned=draw(st.booleans()),
        constant=constants and draw(st.booleans()),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    keys = draw(key_sets(max_size=3))
    writes = draw(st.sampled_from([None, "exact", "all"]))
    names = ["seq_lens", "block_table", "slots", "plan"][: draw(st.integers(1, 4))]
    made = [draw(buffers(name, constants=writes is not None)) for name in names]
    return Plan(
        keys,
        made,
        draw(st.lists(st.sampled_from(HOST_KINDS), unique=True)),
        draw(st.sampled_from(["dict", "object", "layers", "both"])),
        writes,
        *(draw(st.booleans()) for _ in range(5)),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, dict[BatchDescriptor, list[Batch]]]:
    """A plan, and batches for its keys: two of other contents, then some."""
    plan = draw(plans())
    seeds = iter(range(2, 100))
    given = {}
    for key in plan.keys:
        drawn = draw(st.lists(batches(key), min_size=2, max_size=3))
        given[key] = [Batch(requests, next(seeds)) for requests in drawn]
    return plan, given


def padded(plan: Plan, given: dict[BatchDescriptor, list[Batch]], buffer: Buffer) -> bool:
    """Whether a batch leaves rows of the buffer to be padded."""
    return any(
        buffer.live(batch) < buffer.num_rows(key) for key in plan.keys for batch in given[key]
    )


@st.composite
def faulty_cases(draw: st.DrawFn) -> tuple[Plan, dict[BatchDescriptor, list[Batch]]]:
    """As :func:`cases`, with one fault that these batches can show."""
    plan, given = draw(cases())
    open_to: list[tuple[str, str]] = [("frozen-value", "")]
    for buffer in plan.buffers:
        if buffer.constant:
            continue
        open_to += [("unwritten", buffer.name), ("allocation", buffer.name)]
        if padded(plan, given, buffer):
            open_to += [("padding", buffer.name), ("layout", buffer.name)]
        sizes = {buffer.num_rows(key) for key in plan.keys}
        if plan.writes == "exact" and not buffer.by_key and len(sizes) > 1:
            open_to.append(("footprint", buffer.name))
    fault, victim = draw(st.sampled_from(open_to))
    return dataclasses.replace(plan, fault=fault, victim=victim), given
