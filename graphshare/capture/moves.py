"""Which memory moves where."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from graphshare.arguments import listed, wrong_type
from graphshare.memory import MemoryRanges, address_of, plain_tensors

__all__ = ["MAX_ALIGNMENT", "Moves", "Shift", "SplitError", "moves_of"]

MAX_ALIGNMENT = 256
"""Bytes. Libraries choose kernels by the alignment of what they are given; cuBLASLt looks at up to
256 (``CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES``), torch and Triton at 16."""


Runs = list[tuple[int, int]]


_UNKNOWN = -1


class SplitError(ValueError):
    """A tensor lies partly in memory that moves, and partly not, or in two that part."""


class _Move(NamedTuple):
    old: torch.Tensor
    new: torch.Tensor
    runs: Runs  # bytes of the old tensor: start and end of each run
    targets: Runs  # of the new one
    by: int


class Shift:
    """Where addresses go, without the tensors that they are of: it keeps no memory alive.

    Args:
        runs: Start and end of each run of old memory, and the number of its pair; in order.
        steps: By how much each pair moves, in bytes.

    Attributes:
        steps: As given.
    """

    __slots__ = ("_runs", "_starts", "steps")

    def __init__(self, runs: list[tuple[int, int, int]], steps: list[int]) -> None:
        self._runs, self.steps = runs, steps
        self._starts = [start for start, _, _ in runs]

    def pair_at(self, address: int) -> int | None:
        """Return the number of the pair whose old tensor an address lies in."""
        found = bisect_right(self._starts, address) - 1
        if found < 0 or address >= self._runs[found][1]:
            return None
        return self._runs[found][2]

    def address(self, address: int) -> int:
        """Return where an address is after the moves."""
        pair = self.pair_at(address)
        return address if pair is None else address + self.steps[pair]


class Moves:
    """Pairs of an old tensor and the new one in its place.

    An address within the bytes of an old tensor moves by as much as the tensor itself; all moves
    happen at once, so two tensors may change places.

    Args:
        pairs: Old and new tensors, of one shape, stride, dtype and device.
        shared_ok: Whether new tensors may share memory.

    Attributes:
        pairs: As given, without those that stay where they are.
        ranges: The bytes of the old tensors.
        targets: The bytes of the new ones.
        steps: By how much each pair moves, in bytes.
        shift: Where addresses go.
        pair_at: Its method.
        address: Its method.
        outcomes: What was worked out for these moves, by what they do it to: the same for many
            graphs.

    Raises:
        TypeError: A value is no tensor with an address.
        ValueError: The tensors of a pair differ in more than their address, or two old tensors,
            or two new ones, share memory.
    """

    def __init__(
        self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], *, shared_ok: bool = False
    ) -> None:
        moves: list[_Move] = []
        for old, new in pairs:
            _check_alike(old, new)
            runs, targets = _bytes_of("old", old), _bytes_of("new", new)
            if runs and runs[0][0] != targets[0][0]:
                moves.append(_Move(old, new, runs, targets, targets[0][0] - runs[0][0]))
        self.pairs = tuple((move.old, move.new) for move in moves)
        device = _device_of(moves)
        runs = sorted(
            (start, end, place) for place, move in enumerate(moves) for start, end in move.runs
        )
        self.ranges = _together("old", [(start, end) for start, end, _ in runs], device)
        targets = sorted(run for move in moves for run in move.targets)
        self.targets = _together("new", targets, device, apart=not shared_ok)
        self._moves = moves
        self._runs = runs
        self._starts = [start for start, _, _ in runs]
        self.steps = [move.by for move in moves]
        self.shift = Shift(runs, self.steps)
        self.pair_at, self.address = self.shift.pair_at, self.shift.address
        self.outcomes: dict[Any, Any] = {}
        self._device = device
        # By place: a state as captured and as last built have the same views, and so do layers.
        self._views: dict[tuple[Any, ...], torch.Tensor] = {}
        # By pair and dtype.
        self._wholes: list[dict[torch.dtype, tuple[torch.Tensor, int]]] = [{} for _ in moves]

    def __bool__(self) -> bool:
        return bool(self._moves)

    def bytes_of(self, pair: int) -> MemoryRanges:
        """Return the bytes of the old tensor of a pair, by its number."""
        return MemoryRanges.merged(self._moves[pair].runs, self.ranges.device)

    def pair_of(self, tensor: torch.Tensor) -> int:
        """Return the number of the pair in whose old memory a tensor lies that moves.

        Raises:
            LookupError: It does not move.
        """
        with plain_tensors():
            found = self.pair_at(tensor.data_ptr())
            return (
                self.pair_at(tensor.untyped_storage().data_ptr()) or 0 if found is None else found
            )

    def moving(self, ascending: Sequence[int]) -> tuple[list[int], list[int]]:
        """Find those of many addresses that move.

        Args:
            ascending: The addresses, in ascending order.

        Returns:
            The places there of those that move, in ascending order, and for each the number of its
            pair.
        """
        found: list[int] = []
        pairs: list[int] = []
        last, number = 0, len(ascending)
        for start, end, pair in self._runs:
            first = bisect_left(ascending, start, last)
            if first == number:
                break
            last = first
            if ascending[first] < end:
                last = bisect_left(ascending, end, first)
                found += range(first, last)
                pairs += [pair] * (last - first)
        return found, pairs

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a view of new memory to be put in the place of ``tensor``.

        Returns:
            ``None`` if ``tensor`` lies in no memory that moves.

        Raises:
            SplitError: It lies there in part, or in two that move apart; or the new memory is not
                aligned for its dtype.
        """
        if type(tensor) is torch.Tensor:
            return self._other(tensor)
        with plain_tensors():
            return self._other(tensor)

    def _other(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor.layout is not torch.strided or tensor.device != self._device:
            return None
        if not tensor.numel():
            return self._empty(tensor)
        start, dtype = tensor.data_ptr(), tensor.dtype
        plain = type(tensor) is torch.Tensor and not (tensor.is_neg() or tensor.is_conj())
        place = start, dtype, tensor.shape, tensor.stride()
        if plain:
            view = self._views.get(place)
            if view is not None:
                return view
        pair = _UNKNOWN
        if tensor.is_contiguous():
            pair = self._whole(start, start + tensor.nbytes)
            if pair is None:
                return None
        if pair == _UNKNOWN:
            mine = MemoryRanges.of([tensor])
            if not mine.overlaps(self.ranges):
                return None
            pair = self.pair_at(start)
            if pair is None or not self.bytes_of(pair).contains(mine):
                raise SplitError(
                    f"a tensor of {tuple(tensor.shape)} {dtype} at {start:#x} lies in moved "
                    "memory only in part"
                )
        whole, base = self._wholes[pair].get(dtype) or self._whole_of(pair, dtype)
        there = start + self.steps[pair]
        offset, rest = divmod(there - base, dtype.itemsize)
        if rest:
            raise SplitError(
                f"a tensor of {dtype} at {start:#x} would lie at {there:#x}, which is not "
                "aligned for it"
            )
        view = whole.as_strided(place[2], place[3], offset)
        if plain:
            self._views[place] = view
            return view
        if tensor.is_neg():  # bits of a view that are no part of its place
            view = torch._neg_view(view)  # pyright: ignore[reportPrivateImportUsage]
        if tensor.is_conj():
            view = view.conj()
        if type(tensor) is torch.nn.Parameter:  # as the owner will return it
            view = torch.nn.Parameter(view, tensor.requires_grad)
        return view

    def _whole_of(self, pair: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """Return all of the storage of a pair's new tensor as one of a dtype, and its address."""
        new = self._moves[pair].new
        storage = new.untyped_storage()
        whole = torch.empty(0, dtype=dtype, device=new.device)
        whole.set_(storage, 0, (storage.nbytes() // whole.element_size(),), (1,))
        found = self._wholes[pair][dtype] = whole, storage.data_ptr()
        return found

    def _whole(self, start: int, end: int) -> int | None:
        """Return the pair in one run of which all bytes from ``start`` to ``end`` lie.

        Returns:
            ``None`` if none of them moves; ``_UNKNOWN`` if they are in several runs, or in part.
        """
        runs = self._runs
        found = bisect_right(self._starts, start) - 1
        if found >= 0 and start < runs[found][1]:
            return runs[found][2] if end <= runs[found][1] else _UNKNOWN
        after = found + 1
        return None if after == len(runs) or end <= runs[after][0] else _UNKNOWN

    def _empty(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Put a tensor without elements on the new storage: it would keep the old one alive."""
        pair = self.pair_at(tensor.untyped_storage().data_ptr())
        if pair is None:
            return None
        whole, _ = self._whole_of(pair, tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), 0)

    def memory(self, ranges: MemoryRanges) -> MemoryRanges:
        """Return where a set of bytes is after the moves."""
        if not ranges.overlaps(self.ranges):
            return ranges
        runs: list[tuple[int, int]] = []
        for start, end in zip(ranges.starts, ranges.ends, strict=True):
            while start < end:
                found = bisect_right(self._starts, start) - 1
                within = found >= 0 and start < self._runs[found][1]
                if within:
                    cut, by = self._runs[found][1], self._moves[self._runs[found][2]].by
                else:
                    after = found + 1
                    cut = self._starts[after] if after < len(self._starts) else end
                    by = 0
                cut = min(cut, end)
                runs.append((start + by, cut + by))
                start = cut
        return MemoryRanges.merged(runs, ranges.device)

    def misaligned(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The pairs whose new tensor is less aligned than the old one, up to the most that counts.

        Kernels were chosen by the alignment at capture, and may read past it elsewhere.
        """
        return [
            (move.old, move.new)
            for move in self._moves
            if _alignment(move.targets[0][0]) < _alignment(move.runs[0][0])
        ]


def moves_of(
    moves: Mapping[torch.Tensor, torch.Tensor] | Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> Moves:
    """Make :class:`Moves` of a mapping, or of pairs.

    Raises:
        TypeError: It is neither.
        ValueError: As :class:`Moves` does.
    """
    given: Any = moves
    if isinstance(given, torch.Tensor):  # iterable, by rows
        raise wrong_type(
            "rebind: moves", "{old: new}, or pairs", given, "Write rebind({old: new})."
        )
    pairs = listed("rebind: moves", given.items() if isinstance(given, Mapping) else given, "pairs")
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise wrong_type(
                "rebind: moves", "{old: new}, or pairs", pair, "Each is (old, new), two tensors."
            )
    return Moves(pairs)


def _alignment(address: int) -> int:
    return min(address & -address, MAX_ALIGNMENT)


def _check_alike(old: torch.Tensor, new: torch.Tensor) -> None:
    for tensor in (old, new):
        if not isinstance(tensor, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"rebind: expected pairs of tensors, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise TypeError(
                f"rebind: expected tensors with one memory, got a {tensor.layout} one"
                f"{' that is nested' if tensor.is_nested else ''}. Name the tensors it is made of."
            )
    if old.is_conj() != new.is_conj() or old.is_neg() != new.is_neg():
        bit = "is_neg" if old.is_conj() == new.is_conj() else "is_conj"
        raise ValueError(
            f"rebind: expected a new tensor whose {bit}() is {getattr(old, bit)()}, got the "
            "other. The graphs would read other numbers. Name the buffers, not views of them."
        )
    if old.shape != new.shape or old.dtype != new.dtype or old.device != new.device:
        field = next(
            name
            for name in ("shape", "dtype", "device")
            if getattr(old, name) != getattr(new, name)
        )
        raise ValueError(
            f"rebind: expected a new tensor of {field} {getattr(old, field)}, got "
            f"{getattr(new, field)}. The graphs bake the old one in. Capture them anew."
        )
    if old.stride() != new.stride():
        raise ValueError(
            f"rebind: expected a new tensor of stride {old.stride()}, got {new.stride()}. "
            "The graphs bake the old one in. Allocate it alike: torch.empty_like(old)."
        )


def _bytes_of(which: str, tensor: torch.Tensor) -> Runs:
    """Return the bytes of a tensor; refuse one whose bytes are not known, or not exactly."""
    if type(tensor) is torch.Tensor:
        run = _one_run(tensor)
    else:
        with plain_tensors():
            run = _one_run(tensor)
    if run is not None:  # most are in one
        return [run]
    with plain_tensors():
        nbytes = tensor.nbytes
    ranges = MemoryRanges.of([tensor])
    if nbytes and not ranges:
        raise ValueError(
            f"rebind: expected {which} tensors in memory, got {tuple(tensor.shape)} {tensor.dtype} "
            "without any: its storage was freed, or never was, and it has no address. Rebind "
            "before the old memory is given up."
        )
    # Too many runs to list count with what lies between them, which need not move along.
    if ranges.nbytes > nbytes:
        raise ValueError(
            f"rebind: expected whole buffers, got a view of {tuple(tensor.shape)} with stride "
            f"{tensor.stride()}, in too many pieces to tell its bytes from those between. Name the "
            "buffer that it is a view of."
        )
    return list(zip(ranges.starts, ranges.ends, strict=True))


def _one_run(tensor: torch.Tensor) -> tuple[int, int] | None:
    start, nbytes = address_of(tensor), tensor.nbytes
    return (start, start + nbytes) if start and nbytes and tensor.is_contiguous() else None


def _device_of(moves: list[_Move]) -> torch.device | None:
    devices = {move.old.device for move in moves}
    if len(devices) > 1:
        raise ValueError(
            f"rebind: expected tensors on one device, got {', '.join(sorted(map(str, devices)))}. "
            "Call it for each device."
        )
    return devices.pop() if devices else None


def _together(
    which: str, runs: Runs, device: torch.device | None, *, apart: bool = True
) -> MemoryRanges:
    """Return all bytes of the old tensors, or of the new ones, from their sorted runs."""
    if apart and any(one[1] > other[0] for one, other in itertools.pairwise(runs)):
        raise ValueError(
            f"rebind: two {which} tensors share memory. Where their addresses go would be "
            "ambiguous. Name the whole buffer once."
        )
    return MemoryRanges.merged(runs, device)
