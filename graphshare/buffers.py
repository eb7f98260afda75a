"""Persistent buffers: sized once, written in place, with a defined padding.

A captured graph reads whole padded buffers. Rows past the live batch that keep an earlier
batch's indices make it touch pages that belong to someone else by now, so every write here
fills them too.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal

import torch

from graphshare.arguments import wrong_type
from graphshare.device import device_of
from graphshare.dtypes import holds, refusal_of, tensor_of

__all__ = ["PersistentBuffer"]

# Two staging areas let the host fill one while the device still reads the other.
_STAGES = 2
_UNCHANGED = "The buffer is as it was."


class _Stage:
    """One pinned host area and the event after its last copy to the device."""

    def __init__(self, like: torch.Tensor) -> None:
        self.host = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        self.copied = torch.cuda.Event()

    def wait(self) -> None:
        # Without this the host would overwrite values that an earlier copy has not read yet.
        self.copied.synchronize()


class PersistentBuffer:
    """One device buffer whose address, shape and dtype never change.

    Args:
        shape: Full capacity, rows first, e.g. ``(max_num_reqs, max_pages)``.
        dtype: Element type.
        device: Where it lies.
        padding: What rows past the live ones hold: a number, or ``"last"`` to repeat the last live
            row (``query_start_loc`` must not decrease).
        name: For messages.

    Attributes:
        tensor: ``[*shape]``, address fixed for the buffer's life.
        live_rows: Rows that the last write called live.

    Raises:
        TypeError: For an argument of another type.
        ValueError: For a shape without a row, or a padding that the dtype cannot hold.
        RuntimeError: The device is not there.
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        padding: float | Literal["last"],
        name: str = "buffer",
    ) -> None:
        if not isinstance(name, str):
            raise wrong_type("PersistentBuffer: name", "a string", name)
        sizes = _sizes(name, shape)
        if not isinstance(dtype, torch.dtype):
            raise wrong_type(
                f"{name}: dtype",
                "a torch.dtype",
                dtype,
                "Such as torch.int32, by position or name.",
            )
        place = device_of(f"{name}: device", device)
        if isinstance(padding, str):
            if padding != "last":
                raise ValueError(f'{name}: padding must be a number or "last", got {padding!r}')
            fill: float = 0
        else:
            fill = self._number(name, "padding", dtype, padding)
        self.name = name
        self.padding = padding
        self.live_rows = 0
        self._fill = fill
        self.tensor = torch.full(sizes, fill, dtype=dtype, device=place)
        self._dtype = dtype
        self._stages: list[_Stage] = []
        self._turn = 0

    def __repr__(self) -> str:
        sizes = tuple(self.tensor.shape)
        return f"PersistentBuffer({self.name!r}, {sizes}, padding={self.padding!r})"

    def write(
        self, values: torch.Tensor | Sequence[int] | Sequence[float], rows: int
    ) -> torch.Tensor:
        """Write the live rows, pad up to ``rows``, and return the view that a key reads.

        Args:
            values: ``[live, *shape[1:]]``, or narrower in the last dimension (the rest of each
                row is padding too); a tensor on any device, an array, or a sequence for a buffer
                of one dimension. An integer buffer takes integers alone, whichever way they come,
                and those in its range; integers of a wider dtype that lie on a device are not
                looked at, since that would wait for the device: they wrap. A floating buffer
                rounds.
            rows: The key's padded number of rows, at least ``live``.

        Returns:
            ``tensor[:rows]``: the same address for each call.

        Raises:
            TypeError: ``rows`` is no integer, or ``values`` hold no rows.
            ValueError: When the values do not fit. The buffer is unchanged in either case.
        """
        if type(rows) is not int:
            rows = self._rows(values, rows)
        source = values if isinstance(values, torch.Tensor) else self._from_host(values)
        if source.dtype is not self._dtype:
            self._check_values(source)
        live = self._check(source, rows)
        view = self.tensor[:rows]
        if source.device.type == "cpu" and self.tensor.is_cuda:
            source = self._stage(source)
        inner = source.shape[-1] if source.ndim > 1 else None
        if inner is not None and inner < self.tensor.shape[-1]:
            view[:live, ..., :inner].copy_(source, non_blocking=True)
            view[:live, ..., inner:].fill_(self._fill)
        else:
            view[:live].copy_(source, non_blocking=True)
        self._pad(view, live)
        self._sent()
        self.live_rows = live
        return view

    def fill(self, value: float, rows: int) -> torch.Tensor:
        """Set the first ``rows`` rows to one value, and return the view; for captures.

        Raises:
            TypeError: ``value`` is no number, or ``rows`` no integer.
            ValueError: When the buffer has fewer rows, or its dtype cannot hold the value.
        """
        if type(rows) is not int:
            rows = self._rows(value, rows)
        self._number(self.name, "value", self._dtype, value)
        self._check_rows(rows)
        view = self.tensor[:rows]
        view.fill_(value)
        self.live_rows = rows
        return view

    @staticmethod
    def _number(name: str, what: str, dtype: torch.dtype, number: Any) -> float:
        try:
            held = holds(dtype, number)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            held = False
        if held:
            return number
        if not isinstance(number, (int, float)):
            raise wrong_type(f"{name}: {what}", "a number", number)
        raise ValueError(
            f"{name}: {what}: expected what {dtype} can hold, got {number}. Choose another, or a "
            "buffer of another dtype."
        )

    def _rows(self, values: object, rows: Any) -> int:
        """Return rows that are an integer of another type (NumPy's), or refuse them."""
        if not isinstance(rows, bool):
            try:
                return operator.index(rows)
            except TypeError:
                pass
        swapped = isinstance(values, int) and hasattr(rows, "__len__")
        raise wrong_type(
            f"{self.name}: rows",
            "an integer",
            rows,
            "The values come first, the rows second." if swapped else "",
        )

    def _from_host(self, values: Any) -> torch.Tensor:
        if not hasattr(type(values), "__len__"):
            raise wrong_type(
                f"{self.name}: values", "a tensor, an array or a sequence of numbers", values
            )
        try:
            return tensor_of(values, self._dtype)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(
                f"{self.name}: values: expected numbers that {self._dtype} holds, in one "
                f"dimension, got others: {error}. {_UNCHANGED}"
            ) from error

    def _check_values(self, source: torch.Tensor) -> None:
        wrong = refusal_of(source, self._dtype)
        if wrong is not None:
            raise ValueError(
                f"{self.name}: values: expected what {self._dtype} holds, got {wrong}. "
                f"{_UNCHANGED} Convert them where it is known that nothing is lost."
            )

    def _check_rows(self, rows: int) -> None:
        if not 0 <= rows <= self.tensor.shape[0]:
            raise ValueError(
                f"{self.name}: rows: expected at most the {self.tensor.shape[0]} of the buffer, "
                f"got {rows}. {_UNCHANGED} Size the buffer for the largest key."
            )

    def _check(self, source: torch.Tensor, rows: int) -> int:
        self._check_rows(rows)
        target = self.tensor.shape
        if source.ndim != len(target) or source.shape[1:-1] != target[1:-1]:
            raise self._misshapen(source)
        if source.ndim > 1 and source.shape[-1] > target[-1]:
            raise self._misshapen(source)
        live = source.shape[0]
        if live > rows:
            raise ValueError(
                f"{self.name}: values: expected at most {rows} live rows, as many as the key has, "
                f"got {live}. {_UNCHANGED} Dispatch this batch to a larger key, or run it eagerly."
            )
        if live == 0 and rows > 0 and self.padding == "last":
            raise ValueError(
                f"{self.name}: values: expected at least one row, got none: there is no last row "
                f"to repeat. {_UNCHANGED}"
            )
        return live

    def _misshapen(self, source: torch.Tensor) -> ValueError:
        target = tuple(self.tensor.shape)
        return ValueError(
            f"{self.name}: values: expected a shape that fits {target}, only the last size "
            f"narrower, got {tuple(source.shape)}. {_UNCHANGED}"
        )

    def _pad(self, view: torch.Tensor, live: int) -> None:
        if live == view.shape[0]:
            return
        if self.padding == "last":
            view[live:].copy_(view[live - 1 : live].expand_as(view[live:]))
        else:
            view[live:].fill_(self._fill)

    def _stage(self, source: torch.Tensor) -> torch.Tensor:
        if source.is_pinned():
            return source  # the caller's own; the caller knows when it may be rewritten
        if not self._stages:
            self._stages = [_Stage(self.tensor) for _ in range(_STAGES)]
        self._turn = (self._turn + 1) % _STAGES
        stage = self._stages[self._turn]
        stage.wait()
        # Packed, so that the copy to the device is one transfer whatever the row width.
        staged = stage.host.view(-1)[: source.numel()].view(source.shape)
        return staged.copy_(source)

    def _sent(self) -> None:
        if self._stages:
            self._stages[self._turn].copied.record(torch.cuda.current_stream(self.tensor.device))


def _sizes(name: str, shape: Any) -> tuple[int, ...]:
    given: Any = shape
    try:
        sizes = tuple(
            operator.index(size) for size in ((given,) if hasattr(given, "__index__") else given)
        )
    except TypeError:
        raise wrong_type(f"{name}: shape", "an integer, or several", shape) from None
    if not sizes or min(sizes) < 1:
        raise ValueError(f"{name}: shape: every size must be at least 1, got {sizes}")
    return sizes
