"""An owner that conforms, and owners that each have one fault planted in them."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from graphshare import PersistentBuffer, Phase
from tests.small_engine import MAX_LEN, MAX_PAGES, MAX_REQS, PAGE_SIZE, Batch, key_of

KEYS = [key_of(n) for n in (8, 4, 2)]
BOUNDS = {"*.seq_lens": (1, MAX_LEN), "*.block_table": (0, MAX_PAGES * MAX_REQS)}


def batches(key: Any) -> list[Batch]:
    """A full one, then smaller ones, all unlike, those of other keys too."""
    most = key.num_reqs
    return [
        Batch(tuple(3 + i % 2 for i in range(most)), shift=most // 2),
        Batch((7, 6, 5, 4, 3, 2)[: max(1, most // 2)], shift=most + 1),
        Batch((8,), shift=most + 2),
    ]


def impossible(key: Any) -> list[Batch]:
    """A length of zero, and one past the maximum, in otherwise possible batches."""
    return [Batch((0,)), Batch((MAX_LEN + 1,))]


@dataclasses.dataclass
class Metadata:
    """seq_lens ``[reqs]`` int32, block_table ``[reqs, MAX_PAGES]`` int64, and host values."""

    seq_lens: torch.Tensor
    block_table: torch.Tensor
    page_size: int
    max_seq_len: int
    num_actual_tokens: int
    initialised: bool = False


class Honest:
    """Does everything that is asked of an owner."""

    host_values: ClassVar[dict[str, str]] = {
        "*.max_seq_len": "at_most",
        "*.num_actual_tokens": "any",
    }

    def __init__(self, device: str = "cpu") -> None:
        def buffer(name: str, shape: Any, dtype: torch.dtype, padding: int) -> PersistentBuffer:
            return PersistentBuffer(shape, dtype, device, padding=padding, name=name)

        self.device = device
        self.seq_lens = buffer("seq_lens", MAX_REQS, torch.int32, 1)
        self.block_table = buffer("block_table", (MAX_REQS, MAX_PAGES), torch.int64, 0)
        self.slot_mapping = buffer("slot_mapping", MAX_REQS, torch.int64, 0)

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        rows = key.num_reqs
        if batch is None:
            return self.state(
                self.seq_lens.fill(1, rows),
                self.block_table.fill(0, rows),
                self.slot_mapping.fill(0, rows),
                MAX_LEN,
                rows,
            )
        self.refuse(rows, batch)
        return self.state(
            self.seq_lens.write(batch.seq_lens, rows),
            self.block_table.write(torch.tensor(batch.pages()), rows),
            self.slot_mapping.write(batch.slots(), rows),
            max(batch.seq_lens),
            batch.num_reqs,
        )

    def refuse(self, rows: int, batch: Batch) -> None:
        if batch.num_reqs > rows:
            raise ValueError(f"{batch.num_reqs} requests in {rows} rows")
        if not 1 <= min(batch.seq_lens) <= max(batch.seq_lens) <= MAX_LEN:
            raise ValueError("a length is out of range")

    def state(
        self,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
        max_seq_len: int,
        num_actual_tokens: int,
    ) -> Any:
        metadata = Metadata(seq_lens, block_table, PAGE_SIZE, max_seq_len, num_actual_tokens)
        return {"attn": metadata, "slot_mapping": slot_mapping}

    def live_rows(self, key: Any, batch: Batch) -> dict[str, int]:
        return {"*": batch.num_reqs}


def sent(values: Any, device: torch.device) -> torch.Tensor:
    """A tensor on the device, without waiting for it."""
    return torch.tensor(values).to(device, non_blocking=True)


def plan(key: Any, state: Any) -> None:
    """A forward whose first run on a metadata object initialises it."""
    state["attn"].initialised = True


class Declares(Honest):
    """Honest about what it writes."""

    def writes(self, key: Any) -> list[torch.Tensor]:
        rows = key.num_reqs
        buffers = (self.seq_lens, self.block_table, self.slot_mapping)
        return [buffer.tensor[:rows] for buffer in buffers]


# One fault each. The name says what is wrong, the docstring where that happened.


class MisspeltRule(Honest):
    """A rule that there is not."""

    host_values: ClassVar[dict[str, str]] = {
        "*.max_seq_len": "at_most",
        "*.num_actual_tokens": "ignore",
    }

    def state(self, *parts: Any) -> Any:
        return super().state(*parts[:3], MAX_LEN, 0)


class WritesNames(Declares):
    """Names instead of tensors."""

    def writes(self, key: Any) -> Any:
        return ["seq_lens"]


class NegativeRows(Honest):
    def live_rows(self, key: Any, batch: Batch) -> dict[str, int]:
        return {"*": -1}


class NeedsABatch(Honest):
    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        if batch is None and key.num_reqs == 2:
            raise KeyError(key)
        return super().build(key, batch, phase)


class ForgetsToReturn(Honest):
    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        super().build(key, batch, phase)


class ForgetsToReturnBatches(Honest):
    """Only what is built for a batch is not returned."""

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        state = super().build(key, batch, phase)
        if batch is None:
            return state
        return None


class ReturnsArrays(Honest):
    """NumPy arrays alone, which no graph reads."""

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        metadata = super().build(key, batch, phase)["attn"]
        arrays = {
            name: getattr(metadata, name).cpu().numpy() for name in ("seq_lens", "block_table")
        }
        return {"attn": dataclasses.replace(metadata, **arrays)}


class ReturnsTheBuffer(Honest):
    """The buffer, and not the view that ``write`` returned."""

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        return {**super().build(key, batch, phase), "slot_mapping": self.slot_mapping}


class OnMeta(Honest):
    """A tensor without contents beside those on the device."""

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        mask = torch.empty(MAX_REQS, device="meta")
        return {"mask": mask, **super().build(key, batch, phase)}


class OneObject(Honest):
    """A warmup's object serves the capture (vLLM PR 42444, 44253)."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.metadata: dict[Any, Any] = {}

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        new = super().build(key, batch, phase)
        held = self.metadata.setdefault(key, new)
        held["attn"].max_seq_len = new["attn"].max_seq_len
        return held


class FirstBuildDiffers(Honest):
    """The build itself switches a flag: only the first warmup sees it fresh."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.seen: set[Any] = set()

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        state = super().build(key, batch, phase)
        state["attn"].initialised = key in self.seen
        self.seen.add(key)
        return state


class BatchShaped(Honest):
    """The batch's shape, not the key's."""

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        state = super().build(key, batch, phase)
        if batch is not None:
            state["slot_mapping"] = state["slot_mapping"][: batch.num_reqs]
        return state


class TwoBuffers(Honest):
    """Double buffers without a field of the key that says which."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.sides = [torch.zeros(MAX_REQS, dtype=torch.int64, device=device) for _ in range(2)]
        self.turn = 0

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        state = super().build(key, batch, phase)
        self.turn += 1
        side = self.sides[self.turn % 2][: key.num_reqs]
        state["slot_mapping"] = side.copy_(state["slot_mapping"])
        return state


class ComesAndGoes(Honest):
    """A tensor that only some batches have."""

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        state = super().build(key, batch, phase)
        if batch is not None and batch.num_reqs == 1:
            state["slot_mapping"] = None
        return state


class FreshTensor(Honest):
    """A build that allocates what it returns (SGLang 27664)."""

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        state = super().build(key, batch, phase)
        state["slot_mapping"] = state["slot_mapping"] + 0
        return state


class GrowingWorkspace(Honest):
    """A smaller batch needs a larger workspace (TensorRT-LLM 16319)."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.workspace = torch.zeros(4, device=device)

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        state = super().build(key, batch, phase)
        need = 4 if batch is None else max(batch.seq_lens)
        if need > len(self.workspace):
            self.workspace = torch.zeros(need, device=self.device)
        state["workspace"] = self.workspace.fill_(need)
        return state

    def live_rows(self, key: Any, batch: Batch) -> dict[str, int]:
        return {"workspace": 4, "*": batch.num_reqs}


class KeepsCopies(Honest):
    """Each build leaves a tensor behind."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.log: list[torch.Tensor] = []

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        state = super().build(key, batch, phase)
        self.log.append(state["slot_mapping"].clone())
        return state


class FrozenSplits(Honest):
    """The number of splits depends on the batch (vLLM issue 20301)."""

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        state = super().build(key, batch, phase)
        state["num_splits"] = 1 if batch is None else max(batch.seq_lens) // 2
        return state


class FreshWrapper(Honest):
    """A host object without equality, new for each build."""

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        state = super().build(key, batch, phase)
        state["wrapper"] = lambda: None
        return state


class LowCapacity(Honest):
    """``at_most``, but captured below what batches need."""

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        state = super().build(key, batch, phase)
        if batch is None:
            state["attn"].max_seq_len = 4
        return state


class NothingForCaptures(Honest):
    """A capture on whatever the last batch left (vLLM PR 48261)."""

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        if batch is not None:
            return super().build(key, batch, phase)
        rows = key.num_reqs
        table = self.block_table.tensor[:rows]
        return self.state(
            self.seq_lens.fill(1, rows), table, self.slot_mapping.fill(0, rows), MAX_LEN, 0
        )


class ForgetsTheTable(Honest):
    """The page table is written by captures alone (TensorRT-LLM PR 18769)."""

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        if batch is None:
            return super().build(key, batch, phase)
        self.refuse(key.num_reqs, batch)
        rows = key.num_reqs
        return self.state(
            self.seq_lens.write(batch.seq_lens, rows),
            self.block_table.tensor[:rows],
            self.slot_mapping.write(batch.slots(), rows),
            max(batch.seq_lens),
            0,
        )


class SkipsWhatItKnows(Honest):
    """Writes nothing if the batch is the one of the build before, whoever wrote since."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.last: Any = None

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        if batch is not None and self.last is not None and self.last[0] == (key, batch):
            return self.last[1]
        state = super().build(key, batch, phase)
        self.last = (key, batch), state
        return state


class StalePadding(Honest):
    """Rows past the batch keep old indices (vLLM PR 21691, 34903; SGLang 22958, 26880)."""

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        if batch is None:
            return super().build(key, batch, phase)
        self.refuse(key.num_reqs, batch)
        rows, table = key.num_reqs, self.block_table.tensor
        table[: batch.num_reqs] = sent(batch.pages(), table.device)
        return self.state(
            self.seq_lens.write(batch.seq_lens, rows),
            table[:rows],
            self.slot_mapping.write(batch.slots(), rows),
            max(batch.seq_lens),
            0,
        )


class StaleRowEnds(Honest):
    """Live rows are written up to the last page in use, and no further."""

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        if batch is None:
            return super().build(key, batch, phase)
        self.refuse(key.num_reqs, batch)
        rows, table = key.num_reqs, self.block_table.tensor
        for i, (length, pages) in enumerate(zip(batch.seq_lens, batch.pages(), strict=True)):
            used = -(-length // PAGE_SIZE)
            table[i, :used] = sent(pages[:used], table.device)
        table[batch.num_reqs : rows] = 0
        return self.state(
            self.seq_lens.write(batch.seq_lens, rows),
            table[:rows],
            self.slot_mapping.write(batch.slots(), rows),
            max(batch.seq_lens),
            0,
        )


class StaleStaging(Honest):
    """Everything is written, but from a host buffer whose padding is an earlier batch's."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.staged = [0] * MAX_REQS

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        state = super().build(key, batch, phase)
        if batch is not None:
            self.staged[: batch.num_reqs] = batch.slots()
            slots = torch.tensor(self.staged[: key.num_reqs])
            state["slot_mapping"] = self.slot_mapping.write(slots, key.num_reqs)
        return state


class Accumulates(Honest):
    """Adds to what is there."""

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        state = super().build(key, batch, phase)
        if "total" not in vars(self):
            self.total = torch.zeros(1, dtype=torch.int64, device=self.device)
        if batch is None:
            self.total.zero_()
        state["total"] = self.total.add_(key.num_reqs)
        return state

    def live_rows(self, key: Any, batch: Batch) -> dict[str, int]:
        return {"total": 1, "*": batch.num_reqs}


class Counts(Honest):
    """A step number in a tensor that kernels read."""

    steps = 0

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        state = super().build(key, batch, phase)
        if "step" not in vars(self):
            self.step = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.steps += 1
        state["step"] = self.step.fill_(self.steps)
        return state

    def live_rows(self, key: Any, batch: Batch) -> dict[str, int]:
        return {"step": 1, "*": batch.num_reqs}


class EmptyDummies(Honest):
    """Lengths of zero at capture (vLLM PR 49364, issue 53658)."""

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        state = super().build(key, batch, phase)
        if batch is None:
            state["attn"].seq_lens.zero_()
        return state


class PagesThatAreNot(Honest):
    """Pages past the cache in a batch, with nothing that says which rows it uses."""

    live_rows: ClassVar[None] = None  # pyright: ignore[reportIncompatibleMethodOverride]

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        state = super().build(key, batch, phase)
        if batch is not None:
            state["attn"].block_table[:1, :1].fill_(99999)  # an assignment would wait for a GPU
        return state


class CutsBatches(Honest):
    """Takes as much of a batch as there is room for."""

    def refuse(self, rows: int, batch: Batch) -> None:
        super().refuse(rows, batch._replace(seq_lens=batch.seq_lens[:rows]))

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        if batch is not None:
            self.refuse(key.num_reqs, batch)
            batch = batch._replace(seq_lens=batch.seq_lens[: key.num_reqs])
        return super().build(key, batch, phase)


class TakesEmptyRequests(Honest):
    def refuse(self, rows: int, batch: Batch) -> None:
        super().refuse(rows, batch._replace(seq_lens=tuple(max(1, n) for n in batch.seq_lens)))


class WritesThenRefuses(Honest):
    def refuse(self, rows: int, batch: Batch) -> None:
        self.seq_lens.tensor[0].fill_(batch.seq_lens[0])
        super().refuse(rows, batch)


class ZeroesTheTail(Declares):
    """Zeroes the whole table, and says that it writes the key's rows."""

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        if batch is not None:
            self.refuse(key.num_reqs, batch)
        self.block_table.tensor[key.num_reqs :] = 0
        return super().build(key, batch, phase)


class Reads(Honest):
    """Takes a value from the device on each build."""

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> Any:
        state = super().build(key, batch, phase)
        state["slot_mapping"].sum().item()
        return state


FAULTS: dict[type[Honest], str] = {
    MisspeltRule: "protocol",
    WritesNames: "protocol",
    NegativeRows: "protocol",
    NeedsABatch: "build",
    ForgetsToReturn: "state",
    ForgetsToReturnBatches: "state",
    ReturnsArrays: "state",
    ReturnsTheBuffer: "state",
    OnMeta: "state",
    OneObject: "lazy",
    FirstBuildDiffers: "lazy",
    BatchShaped: "layout",
    TwoBuffers: "layout",
    ComesAndGoes: "layout",
    FreshTensor: "allocation",
    GrowingWorkspace: "allocation",
    KeepsCopies: "allocation",
    FrozenSplits: "frozen-value",
    FreshWrapper: "frozen-value",
    LowCapacity: "broken-rule",
    NothingForCaptures: "stale-capture",
    ForgetsTheTable: "unwritten",
    SkipsWhatItKnows: "unwritten",
    StalePadding: "padding",
    StaleRowEnds: "padding",
    StaleStaging: "padding",
    Accumulates: "repeatable",
    Counts: "repeatable",
    EmptyDummies: "bounds",
    PagesThatAreNot: "bounds",
    CutsBatches: "impossible",
    TakesEmptyRequests: "impossible",
    WritesThenRefuses: "late-refusal",
    ZeroesTheTail: "footprint",
}
"""Each faulty owner and the one check that must reject it."""
