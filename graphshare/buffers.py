"""Persistent buffers: sized once, written in place, with a defined padding.

A captured graph reads whole padded buffers. Rows past the live batch that keep an earlier
batch's indices make it touch pages that belong to someone else by now, so every write here
fills them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

__all__ = ["PersistentBuffer"]

# Two staging areas let the host fill one while the device still reads the other.
_STAGES = 2


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
        ValueError: For a shape without a row, or a padding that the dtype cannot hold.
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
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if not sizes or min(sizes) < 1:
            raise ValueError(f"{name}: every size must be at least 1, got {sizes}")
        if isinstance(padding, str):
            if padding != "last":
                raise ValueError(f'{name}: padding must be a number or "last", got {padding!r}')
            fill = 0
        else:
            fill = padding
            held = torch.tensor(padding, dtype=torch.float64).to(dtype).double().item()
            if held != padding and not (held != held and padding != padding):
                raise ValueError(f"{name}: {dtype} cannot hold the padding {padding}")
        self.name = name
        self.padding = padding
        self.live_rows = 0
        self._fill = fill
        self.tensor = torch.full(sizes, fill, dtype=dtype, device=device)
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
                row is padding too); a tensor on any device, or a sequence for a buffer of one
                dimension. Cast to the buffer's dtype.
            rows: The key's padded number of rows, at least ``live``.

        Returns:
            ``tensor[:rows]``: the same address for each call.

        Raises:
            ValueError: When the values do not fit; the buffer is then unchanged.
        """
        source = values if isinstance(values, torch.Tensor) else self._from_host(values)
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
            ValueError: When the buffer has fewer rows.
        """
        self._check_rows(rows)
        view = self.tensor[:rows]
        view.fill_(value)
        self.live_rows = rows
        return view

    def _from_host(self, values: Sequence[int] | Sequence[float]) -> torch.Tensor:
        try:
            return torch.tensor(values, dtype=self.tensor.dtype)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"{self.name}: values are not {self.tensor.dtype}: {error}") from error

    def _check_rows(self, rows: int) -> None:
        if not 0 <= rows <= self.tensor.shape[0]:
            raise ValueError(
                f"{self.name}: {rows} rows do not fit a buffer of {self.tensor.shape[0]}"
            )

    def _check(self, source: torch.Tensor, rows: int) -> int:
        self._check_rows(rows)
        target = self.tensor.shape
        if source.ndim != len(target) or source.shape[1:-1] != target[1:-1]:
            raise ValueError(f"{self.name}: {tuple(source.shape)} into {tuple(target)}")
        if source.ndim > 1 and source.shape[-1] > target[-1]:
            raise ValueError(f"{self.name}: {tuple(source.shape)} into {tuple(target)}")
        live = source.shape[0]
        if live > rows:
            raise ValueError(f"{self.name}: {live} live rows, but the key has {rows}")
        if live == 0 and rows > 0 and self.padding == "last":
            raise ValueError(f"{self.name}: there is no last row to repeat")
        return live

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
