"""Which memory moves where."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from graphshare.arguments import listed, wrong_type
from graphshare.memory import MemoryRanges, address_of, plain_tensors

__all__ = ["MAX_ALIGNMENT", "Moves", "SplitError", "moves_of"]

MAX_ALIGNMENT = 256
"""Bytes. Libraries choose kernels by the alignment of what they are given; cuBLASLt looks at up to
256 (``CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES``), torch and Triton at 16."""


class SplitError(ValueError):
    """A tensor lies partly in memory that moves, and partly not, or in two that part."""


class _Move(NamedTuple):
    old: torch.Tensor
    new: torch.Tensor
    ranges: MemoryRanges
    target: MemoryRanges
    by: int


class Moves:
    """Pairs of an old tensor and the new one in its place.

    An address within the bytes of an old tensor moves by as much as the tensor itself; all moves
    happen at once, so two tensors may change places.

    Args:
        pairs: Old and new tensors, of one shape, stride, dtype and device.
        shared_ok: Whether new tensors may share memory.

    Attributes:
        pairs: As given, without those that stay where they are.
        each: The bytes of the old tensor of each pair.
        ranges: The bytes of the old tensors.
        targets: The bytes of the new ones.

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
            with plain_tensors():
                by = new.data_ptr() - old.data_ptr()
            ranges, target = _bytes_of(old), _bytes_of(new)
            _check_bytes("old", old, ranges)
            _check_bytes("new", new, target)
            if by and ranges:
                moves.append(_Move(old, new, ranges, target, by))
        self.pairs = tuple((move.old, move.new) for move in moves)
        self.each = tuple(move.ranges for move in moves)
        targets = tuple(move.target for move in moves)
        _check_apart("old", self.each)
        if not shared_ok:
            _check_apart("new", targets)
        self.ranges, self.targets = _together(self.each), _together(targets)
        runs = sorted(
            (start, end, place)
            for place, move in enumerate(moves)
            for start, end in zip(move.ranges.starts, move.ranges.ends, strict=True)
        )
        self._moves = moves
        self._runs = runs
        self._starts = [start for start, _, _ in runs]

    def __bool__(self) -> bool:
        return bool(self._moves)

    def pair_at(self, address: int) -> int | None:
        """Return the number of the pair whose old tensor an address lies in."""
        found = bisect_right(self._starts, address) - 1
        if found < 0 or address >= self._runs[found][1]:
            return None
        return self._runs[found][2]

    def _at(self, address: int) -> _Move | None:
        found = self.pair_at(address)
        return None if found is None else self._moves[found]

    def address(self, address: int) -> int:
        """Return where an address is after the moves."""
        move = self._at(address)
        return address if move is None else address + move.by

    def touched(self, ascending: list[int]) -> list[int]:
        """Return those of many addresses, in ascending order, that move."""
        found: list[int] = []
        place = 0
        for start, end, _ in self._runs:
            place = bisect_right(ascending, start - 1, place)
            while place < len(ascending) and ascending[place] < end:
                found.append(ascending[place])
                place += 1
        return found

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a view of new memory to be put in the place of ``tensor``.

        Returns:
            ``None`` if ``tensor`` lies in no memory that moves.

        Raises:
            SplitError: It lies there in part, or in two that move apart; or the new memory is not
                aligned for its dtype.
        """
        if tensor.device != self.ranges.device or tensor.layout is not torch.strided:
            return None
        if not tensor.numel():
            return self._empty(tensor)
        if not self.ranges.starts[0] - _extent(tensor) < tensor.data_ptr() < self.ranges.ends[-1]:
            return None  # far off, as most are: without a look at its bytes
        mine = MemoryRanges.of([tensor])
        if not mine.overlaps(self.ranges):
            return None
        with plain_tensors():
            start = tensor.data_ptr()
            move = self._at(start)
            if move is None or not move.ranges.contains(mine):
                raise SplitError(
                    f"a tensor of {tuple(tensor.shape)} {tensor.dtype} at {start:#x} lies in moved "
                    "memory only in part"
                )
            storage = move.new.untyped_storage()
            offset, rest = divmod(start + move.by - storage.data_ptr(), tensor.element_size())
            if rest:
                raise SplitError(
                    f"a tensor of {tensor.dtype} at {start:#x} would lie at "
                    f"{start + move.by:#x}, which is not aligned for it"
                )
            view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            view.set_(storage, offset, tensor.shape, tensor.stride())
            if tensor.is_neg():  # bits of a view that are no part of its place
                view = torch._neg_view(view)  # pyright: ignore[reportPrivateImportUsage]
            return view.conj() if tensor.is_conj() else view

    def _empty(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Put a tensor without elements on the new storage: it would keep the old one alive."""
        with plain_tensors():
            move = self._at(tensor.untyped_storage().data_ptr())
            if move is None:
                return None
            view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            return view.set_(move.new.untyped_storage(), 0, tensor.shape, tensor.stride())

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
            if _alignment(move.new) < _alignment(move.old)
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


def _extent(tensor: torch.Tensor) -> int:
    """Return at least the bytes from the first element to the last's end."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return sum(size * step for size, step in steps) * tensor.element_size() + tensor.element_size()


def _alignment(tensor: torch.Tensor) -> int:
    address = tensor.data_ptr()
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
    for bit in ("is_conj", "is_neg"):
        if getattr(old, bit)() != getattr(new, bit)():
            raise ValueError(
                f"rebind: expected a new tensor whose {bit}() is {getattr(old, bit)()}, got the "
                "other. The graphs would read other numbers. Name the buffers, not views of them."
            )
    for field in ("shape", "dtype", "device"):
        if getattr(old, field) != getattr(new, field):
            raise ValueError(
                f"rebind: expected a new tensor of {field} {getattr(old, field)}, got "
                f"{getattr(new, field)}. The graphs bake the old one in. Capture them anew."
            )
    if old.stride() != new.stride():
        raise ValueError(
            f"rebind: expected a new tensor of stride {old.stride()}, got {new.stride()}. "
            "The graphs bake the old one in. Allocate it alike: torch.empty_like(old)."
        )


def _check_bytes(which: str, tensor: torch.Tensor, ranges: MemoryRanges) -> None:
    """Refuse a tensor whose bytes are not known, or not exactly."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes and not ranges:
        raise ValueError(
            f"rebind: expected {which} tensors in memory, got {tuple(tensor.shape)} {tensor.dtype} "
            "without any: its storage was freed, or never was, and it has no address. Rebind "
            "before the old memory is given up."
        )
    # Too many runs to list count with what lies between them, which need not move along.
    if sum(ranges.ends) - sum(ranges.starts) > nbytes:
        raise ValueError(
            f"rebind: expected whole buffers, got a view of {tuple(tensor.shape)} with stride "
            f"{tensor.stride()}, in too many pieces to tell its bytes from those between. Name the "
            "buffer that it is a view of."
        )


def _bytes_of(tensor: torch.Tensor) -> MemoryRanges:
    start = address_of(tensor)
    if start and tensor.is_contiguous() and tensor.numel():  # most are: in one run
        end = start + tensor.numel() * tensor.element_size()
        return MemoryRanges((start,), (end,), tensor.device)
    return MemoryRanges.of([tensor])


def _check_apart(which: str, parts: Iterable[MemoryRanges]) -> None:
    runs = sorted(run for part in parts for run in zip(part.starts, part.ends, strict=True))
    if any(one[1] > other[0] for one, other in itertools.pairwise(runs)):
        raise ValueError(
            f"rebind: two {which} tensors share memory. Where their addresses go would be "
            "ambiguous. Name the whole buffer once."
        )


def _together(parts: Iterable[MemoryRanges]) -> MemoryRanges:
    devices = {part.device for part in parts}
    if len(devices) > 1:
        raise ValueError(
            f"rebind: expected tensors on one device, got {', '.join(sorted(map(str, devices)))}. "
            "Call it for each device."
        )
    device = devices.pop() if devices else None
    runs = (run for part in parts for run in zip(part.starts, part.ends, strict=True))
    return MemoryRanges.merged(runs, device)
