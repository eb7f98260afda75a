"""What a pool can say of its graphs' addresses, and change of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from graphshare.arguments import check_flag, listed, wrong_type
from graphshare.capture.moves import moves_of
from graphshare.core import PoolCore
from graphshare.errors import GraphShareError

if TYPE_CHECKING:
    from graphshare.pool import GraphPool
    from graphshare.provenance.rebinding import Rebinding
    from graphshare.provenance.report import Provenance

__all__ = ["InspectedPool"]

K = TypeVar("K", bound=Hashable)

_PAIRS = "Tensors go in pairs: rebind({old: new})."


class InspectedPool(PoolCore[K]):
    """The part of a :class:`graphshare.GraphPool` that reads and patches its graphs.

    The pool must have been made with ``inspectable=True``; on a GPU ``cuda-bindings`` must be
    installed too (the extra ``inspect``).
    """

    def label(
        self,
        *,
        inputs: Any = None,
        outputs: Any = None,
        weights: Any = None,
        buffers: Any = None,
    ) -> None:
        """Name tensors that the graphs of this pool read or write, for :meth:`provenance`.

        The tensors are kept alive until the pool is closed; a rebind moves the names too. Name
        whole buffers rather than views of them.

        Args:
            inputs: ``{name: tensor}``, any nest of tensors, or a module, for its parameters and
                buffers.
            outputs: The same. What a forward returned has a name already.
            weights: The same.
            buffers: The same, for all else: caches, workspaces.

        Raises:
            TypeError: A bare tensor, without a name, or what holds no tensors.
            ReleasedStateError: The pool is closed.
        """
        from graphshare.provenance.labels import labels

        if self.closed:
            raise self.refuse.closed("label")
        self.holdings.named.update(
            labels(inputs=inputs, outputs=outputs, weights=weights, buffers=buffers)
        )

    def provenance(
        self,
        key: K,
        *,
        inputs: Any = None,
        outputs: Any = None,
        weights: Any = None,
        buffers: Any = None,
        confirm: bool = False,
    ) -> Provenance:
        """Read the graph of ``key``: every node, every address, and what each address is.

        Args:
            key: A captured key.
            inputs: Names for this call, as :meth:`label` takes them.
            outputs: The same.
            weights: The same.
            buffers: The same.
            confirm: Capture the forward once more, on a copy of its state in other memory, and
                settle which words move with it. Runs the forward's Python, no kernel.

        Raises:
            KeyMismatchError: The key is not captured.
            ProvenanceError: Its graph cannot be read; says what to do.
            TypeError: What is named is a bare tensor, or holds none.
            ValueError: ``confirm``, and the key was captured by the engine itself.
            CaptureError: ``confirm``, and the forward failed.
        """
        from graphshare.provenance.confirming import confirmed
        from graphshare.provenance.finding import places_of, readable_graph, report_of
        from graphshare.provenance.labels import labels
        from graphshare.provenance.places import Places

        check_flag(f"{self.name}: provenance: confirm", confirm)
        entry = self.lookup(key, "provenance")
        graph = readable_graph(entry, self.refuse, "provenance")
        given = labels(inputs=inputs, outputs=outputs, weights=weights, buffers=buffers)
        try:
            reading = graph.read()
            if confirm:
                reading = confirmed(entry, reading, self.backend, self.forward_of(key))
        except GraphShareError as error:
            raise self.refuse.of(error, key) from error
        return report_of(
            entry,
            reading,
            Places(places_of(entry, self.device, {**self.holdings.named, **given})),
            pool=self.name,
            backend=self.backend.name,
            device=self.device,
        )

    def rebind(
        self,
        moves: Mapping[torch.Tensor, torch.Tensor] | Iterable[tuple[torch.Tensor, torch.Tensor]],
        keys: Iterable[K] | None = None,
        *,
        also: Iterable[GraphPool[Any]] = (),
        unused_ok: bool = False,
    ) -> Rebinding:
        """Put captured graphs on other memory without capturing them anew.

        Every address within the bytes of an old tensor moves by as much as the tensor itself, in
        the graphs of this pool, of its lenders and its borrowers; all of them, or none. States
        that lie there are stale afterwards: the owner has to build in the new memory from now on,
        and the next refresh checks that it does. Contents are not copied. Work that was launched
        before reads the old memory still; keep that until it is done.

        Args:
            moves: ``{old: new}`` or pairs; each new tensor of the shape, stride, dtype and device
                of the old one. Whole buffers, not views of them. Tensors may change places.
            keys: Of this pool; other keys stay. By default all.
            also: Further pools that read the same memory, and move together with this one.
            unused_ok: Do not refuse an old tensor that no graph and no state has.

        Raises:
            KeyMismatchError: A key is not captured.
            ReleasedStateError: A pool is closed.
            ProvenanceError: A graph cannot be read.
            RebindError: A node cannot be changed, a tensor lies in moved memory in part, the new
                memory is less aligned, or another pool reads the old memory.
            TypeError, ValueError: The pairs are wrong in themselves.
            RuntimeError: A capture is under way on the device.
        """
        from graphshare.provenance.rebinding import rebind

        where = f"{self.name}: rebind"
        pools: list[Any] = [
            self,
            *listed(f"{where}: also", also, "pools", "Name a pool in a list."),
        ]
        for pool in pools:
            if not isinstance(pool, PoolCore):
                raise wrong_type(f"{where}: also", "pools", pool)
        check_flag(f"{where}: unused_ok", unused_ok)
        if isinstance(keys, torch.Tensor):
            raise wrong_type(f"{where}: keys", "keys of this pool", keys, _PAIRS)
        given = moves_of(moves)
        if keys is not None:
            keys = listed(f"{where}: keys", keys, "keys", "Put a single key into a list.")
        return rebind(pools, given, keys=keys, unused_ok=unused_ok)


# Python names a method by its class where the arguments are wrong, and users know GraphPool alone.
for _method in (InspectedPool.label, InspectedPool.provenance, InspectedPool.rebind):
    _method.__qualname__ = f"GraphPool.{_method.__name__}"
