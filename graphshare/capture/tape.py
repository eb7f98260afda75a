"""The capture backend of the CPU: operators are recorded with their tensors, and run again.

What it cannot show, because nothing that PyTorch offers on a CPU sees it:

* writes and reads from C: a kernel that is handed ``data_ptr()``, NumPy memory that was shared
  before the capture, code that ``torch.compile`` made, operators that other threads run,
  ``torch.frombuffer``;
* memory that an operator's schema does not own up to: a custom operator that writes an argument
  must say so (``mutates_args``), or a capture leaves that write behind;
* reuse of memory between graphs: each tape keeps all its intermediate results, so outputs stay
  valid where another graph's replay would overwrite them on a GPU;
* races between kernels or streams, and reads out of bounds (the CPU operators raise);
* which tensors are on the host: every CPU tensor counts as one on the device, so ``x.to("cpu")``
  and an index tensor that lives on the host pass here, and fail in a CUDA graph.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from graphshare.capture._failure import forward_raised, graph_memory_moves, tape_not_kept
from graphshare.capture._recording import Recording
from graphshare.capture._tape_nodes import TapeMemory, moved_step, node_of, tensors_of
from graphshare.capture._tensors import storage_key
from graphshare.capture.moves import Moves, SplitError
from graphshare.capture.patching import Patch, Steps
from graphshare.capture.reading import GraphReading
from graphshare.errors import CaptureError, ReleasedStateError
from graphshare.memory import MemoryRanges

__all__ = ["TapeBackend", "TapeGraph"]


class _Active(threading.local):
    recording: bool = False


_active = _Active()


class TapeGraph:
    """A recorded forward; see :class:`~graphshare.capture.protocol.CapturedGraph`.

    Replays run below autograd, which does not notice that they change values, as with a CUDA
    graph: to go backward, capture the backward pass too.
    """

    outputs: Any
    nbytes: int

    def __init__(self, outputs: Any, recording: Recording, *, inspectable: bool = False) -> None:
        self.outputs = outputs
        self._inspectable = inspectable
        self.nbytes = recording.nbytes
        self._steps: list[Callable[[], Any]] | None = recording.steps
        self._operators = recording.operators
        held = {
            storage_key(tensor.untyped_storage())
            for op, step in zip(recording.operators, recording.steps, strict=True)
            for _, tensor in tensors_of(op, step)
        }
        # Only those that a step holds: the key of one that is gone may be another's by and by.
        self._own = held & recording.created.keys()

    def replay(self) -> None:
        """Run the recorded operators again into the same memory.

        Raises:
            ReleasedStateError: The tape was released.
            CaptureError: A recording is under way on this thread. A CUDA graph cannot be
                launched into a capture either.
        """
        steps = self._steps
        if steps is None:
            raise ReleasedStateError(
                "replay of a tape", expected="a captured graph", got="one that was released"
            )
        if _active.recording:
            raise CaptureError(
                "replay of a tape inside a capture",
                consequence="The captured graph would not contain it",
                remedy="Call the forward itself, or replay before the capture",
            )
        with _bare():
            for step in steps:
                step()

    def read(self) -> GraphReading:
        """Return the recorded operators as nodes; see ``InspectableGraph``."""
        steps = self._held("read")
        nodes = tuple(map(node_of, range(len(steps)), self._operators, steps))
        tensors = [
            tensor
            for op, step in zip(self._operators, steps, strict=True)
            for _, tensor in tensors_of(op, step)
        ]
        memory = TapeMemory(tensors, self._own)
        return GraphReading(nodes, memory.find)

    def patch(self, moves: Moves) -> Patch:
        """Prepare to put the recorded tensors elsewhere; see ``InspectableGraph``."""
        steps = self._held("rebind")
        if any(storage_key(t.untyped_storage()) in self._own for pair in moves.pairs for t in pair):
            raise graph_memory_moves()
        changes: list[_StepChange] = []
        pairs: set[int] = set()
        for number, (op, step) in enumerate(zip(self._operators, steps, strict=True)):
            try:
                moved = moved_step(step, moves)
            except SplitError as error:
                raise SplitError(f"operator {number} ({op}): {error}") from None
            if moved is not None:
                moving = [
                    tensor.data_ptr()
                    for _, tensor in tensors_of(op, step)
                    if moves.ranges.overlaps(MemoryRanges.of([tensor]))
                ]
                changes.append(_StepChange(steps, number, moved, len(moving)))
                found = map(moves.pair_at, moving)
                pairs.update(pair for pair in found if pair is not None)
        return Steps(changes, pairs)

    def _held(self, doing: str) -> list[Callable[[], Any]]:
        if self._steps is None:
            raise ReleasedStateError(
                f"{doing} of a tape", expected="a captured graph", got="one that was released"
            )
        if not self._inspectable:
            raise tape_not_kept()
        return self._steps

    def release(self) -> None:
        """Drop the recorded operators and the outputs."""
        self._steps = None
        self.outputs = None


class _StepChange:
    """One step of a tape on other tensors."""

    __slots__ = ("_number", "_other", "_steps", "words")

    def __init__(
        self, steps: list[Callable[[], Any]], number: int, other: Callable[[], Any], words: int
    ) -> None:
        self.words = words
        self._steps, self._number, self._other = steps, number, other

    def apply(self) -> None:
        steps, number = self._steps, self._number
        steps[number], self._other = self._other, steps[number]

    revert = apply


class TapeBackend:
    """Captures on the CPU.

    Args:
        device: The CPU.
        inspectable: Whether the tapes may be read and patched. It costs nothing here; the tape
            asks for it so that what runs on it runs on a GPU.
        generators: Generators, besides the default one, that forwards draw from.
    """

    name: str = "tape"
    device: torch.device

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        inspectable: bool = False,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self._inspectable = inspectable
        self.device = torch.device(device)
        if self.device.type != "cpu":
            raise ValueError(f"device: the tape runs on the CPU, got {self.device}")
        self._generators = (torch.default_generator, *generators)
        if any(generator.device.type != "cpu" for generator in generators):
            raise ValueError("generators: the tape needs generators of the CPU")

    def session(self) -> AbstractContextManager[None]:
        """Do nothing: the tape has no stream and no memory pool."""
        return contextlib.nullcontext()

    def warmup(self, forward: Callable[[], Any]) -> Any:
        """Run ``forward`` and return what it returns.

        Raises:
            CaptureError: ``forward`` raised.
        """
        try:
            return forward()
        except Exception as error:
            raise forward_raised("warmup", error) from error

    def capture(
        self, forward: Callable[[], Any], *, protected: Sequence[torch.Tensor] = ()
    ) -> TapeGraph:
        """Record one call of ``forward``.

        Args:
            forward: Takes nothing, returns any nest.
            protected: Tensors that it may not write.

        Raises:
            CaptureError: ``forward`` raised, wrote into ``protected``, or did what a capture
                forbids; every buffer and generator is as before.
        """
        if _active.recording:
            raise CaptureError(
                "capture inside a capture",
                expected="one recording on a thread",
                got="a second one",
                remedy="Capture the two forwards one after the other",
            )
        if torch._C._len_torch_dispatch_stack():
            raise CaptureError(
                "capture under a TorchDispatchMode",
                consequence="What the mode does to operators would not be done at a replay",
                remedy="Leave the mode before the capture",
            )
        recording = Recording(self._generators, protected)
        _active.recording = True
        try:
            outputs = recording.run(forward)
            # A refusal that the forward swallowed is one still: a GPU's capture is void by then.
            if recording.refusal is not None:
                raise recording.refusal
        except CaptureError:
            recording.clear()
            raise
        except Exception as error:
            raise recording.abandon() or forward_raised("capture", error) from error
        except BaseException:
            recording.clear()
            raise
        finally:
            _active.recording = False
        with _bare():
            recording.poison()
        return TapeGraph(outputs, recording, inspectable=self._inspectable)

    def synchronize(self) -> None:
        """Do nothing: operators on a CPU have run when they return."""


@contextlib.contextmanager
def _bare() -> Generator[None, None, None]:
    """Run operators with nothing around them: no autograd, autocast, modes or subclasses."""
    with contextlib.ExitStack() as stack:
        # In inference mode ordinary tensors and inference tensors may both be written.
        stack.enter_context(torch.inference_mode())
        stack.enter_context(torch._C.DisableTorchFunction())
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(torch._C._DisableTorchDispatch())
        if torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", enabled=False))
        yield
