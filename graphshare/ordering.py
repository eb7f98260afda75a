"""Stream order between builds and replays, for ``checks="strict"``.

Freshness follows the order of calls. On one stream that is the order of execution too; across
streams a replay must wait for the build, and the next build for the replay.
"""

from __future__ import annotations

import torch

__all__ = ["StreamOrder"]


class StreamOrder:
    """The last build of and the last replay on one state; does nothing on a CPU."""

    __slots__ = ("_build", "_device", "_replays")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._build: tuple[int, torch.cuda.Event] | None = None
        self._replays: dict[int, torch.cuda.Event] = {}

    def before_build(self) -> None:
        """Make the current stream wait for every replay since the last build."""
        for stream, event in self._replays.items():
            self._wait(stream, event)
        self._replays.clear()

    def after_build(self) -> None:
        """Note the build on the current stream."""
        if self._device.type == "cuda":
            self._build = self._mark()

    def before_replay(self) -> None:
        """Make the current stream wait for the build."""
        if self._build is not None:
            self._wait(*self._build)

    def after_replay(self) -> None:
        """Note the replay on the current stream."""
        if self._device.type == "cuda":
            stream, event = self._mark()
            self._replays[stream] = event

    def _mark(self) -> tuple[int, torch.cuda.Event]:
        stream = torch.cuda.current_stream(self._device)
        event = torch.cuda.Event()
        event.record(stream)
        return stream.cuda_stream, event

    def _wait(self, stream: int, event: torch.cuda.Event) -> None:
        current = torch.cuda.current_stream(self._device)
        if current.cuda_stream != stream:
            current.wait_event(event)
