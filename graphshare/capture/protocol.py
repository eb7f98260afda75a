"""What a capture backend is: it warms a forward up, captures it once, and replays it.

Two backends obey this protocol and one contract suite (``tests/contract``):
:class:`graphshare.capture.cuda.CudaBackend` and, on a CPU,
:class:`graphshare.capture.tape.TapeBackend`.

Both keep these promises:

1. A capture freezes addresses and host values. A replay reads what the captured addresses hold
   then; a Python variable that was bound anew, or a number that changed, has no effect.
2. A replay does not run Python code of the forward.
3. A capture computes nothing: no buffer that existed before is changed by it, no random number
   is drawn, and the outputs hold garbage until the first replay.
4. Every replay leaves its outputs at the same addresses.
5. A replay draws new random numbers, from where its generator stands then.
6. What needs the host during a capture (``item``, ``tolist``, a boolean mask as an index,
   ``torch.tensor`` of host data, ...) is refused with :class:`~graphshare.errors.CaptureError`.
7. A capture that fails leaves nothing behind: no memory, no changed buffer, no advanced
   generator; a later capture works.

A graph that can be read and patched (:class:`InspectableGraph`) also keeps these:

8. ``read`` names every tensor that the graph was given by its address; it runs nothing, and
   changes nothing.
9. After a patch was applied, replays read and write the new memory in place of the old, and never
   touch the old. Applied and reverted, or failed halfway, a patch leaves the graph as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch

from graphshare.capture.moves import Moves
from graphshare.capture.patching import Patch
from graphshare.capture.reading import GraphReading

__all__ = ["CaptureBackend", "CapturedGraph", "InspectableGraph"]


class CapturedGraph(Protocol):
    """One captured forward.

    Attributes:
        outputs: What the forward returned, any nest. Its tensors keep their addresses; their
            contents are garbage until the first replay, and valid until the next replay of any
            graph in the same memory pool.
        nbytes: Bytes by which this capture grew the memory held for graphs.
    """

    outputs: Any
    nbytes: int

    @property
    def replay(self) -> Callable[[], None]:
        """Call it to run the captured work again, on the current stream.

        Raises:
            ReleasedStateError: The graph was released.
        """
        ...

    def release(self) -> None:
        """Free the graph and drop its outputs. A second call does nothing."""
        ...


@runtime_checkable
class InspectableGraph(CapturedGraph, Protocol):
    """A captured forward that can be read, and put on other memory.

    Addresses that move are those within the bytes of an old tensor. Nothing moves within the
    memory that the graph itself allocated: its parts are used again and again in one replay.
    """

    def read(self) -> GraphReading:
        """Return the nodes and the addresses in them.

        Raises:
            ReleasedStateError: The graph was released.
            ProvenanceError: It was not captured so that it can be read.
        """
        ...

    def patch(self, moves: Moves) -> Patch:
        """Prepare what ``moves`` asks for; the graph is as it was until the patch is applied.

        Raises:
            ReleasedStateError: The graph was released.
            ProvenanceError: It was not captured so that it can be read.
            RebindError: A node that holds a moved address cannot be changed; named.
            graphshare.capture.moves.SplitError: A named tensor moves only in part.
        """
        ...


class CaptureBackend(Protocol):
    """How graphs are captured on one device.

    Attributes:
        name: ``"tape"`` or ``"cuda"``.
        device: The device that the captured tensors live on, with its index.
    """

    name: str
    device: torch.device

    def session(self) -> AbstractContextManager[None]:
        """Bracket all warmups and captures that belong together.

        Work that costs much and need be done once only is done here: the side stream waits for
        the current one and the reverse, garbage is collected. Sessions nest; the outermost
        counts. An exception of the body passes through unchanged.
        """
        ...

    def warmup(self, forward: Callable[[], Any]) -> Any:
        """Run ``forward`` for real, where a capture would run it, and return what it returns.

        Raises:
            CaptureError: ``forward`` raised; chained from its exception.
        """
        ...

    def capture(
        self, forward: Callable[[], Any], *, protected: Sequence[torch.Tensor] = ()
    ) -> CapturedGraph:
        """Capture one call of ``forward``.

        Args:
            forward: Takes nothing, returns any nest of tensors and other values.
            protected: Tensors that ``forward`` may not write. The tape refuses such a write; the
                CUDA backend cannot see one, and ignores them.

        Raises:
            CaptureError: ``forward`` raised or did what a capture forbids.
        """
        ...

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        ...
