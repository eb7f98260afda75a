"""Taking part in vLLM's capture loops: owners build the states, pools get the graphs.

vLLM keeps its loops. Each asks a factory for a forward, warms it up, captures, and files the graph
in a dictionary. The factory asks for the state in one of two ways, by calling
``prepare_inputs_to_capture`` or by looking into a mapping: both are answered here, by the pool
whose loop it is. The dictionary hands what is filed to the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from graphshare.adapters.vllm.launches import launch_of
from graphshare.adapters.vllm.support import full_keys
from graphshare.capturing import Capturing
from graphshare.owner import Phase
from graphshare.pool import GraphPool
from graphshare.state import AttentionState

__all__ = ["CaptureLoops", "Hand", "LentStates"]

Hand = Callable[[], AttentionState]
"""Gives what vLLM gets, right after its owner has built it."""


class CaptureLoops:
    """The capture loops of one model runner.

    Args:
        pools: For each graph manager of the runner, by identity, its pool, whether its forward
            writes its state, and what vLLM gets for a state that was just built.
        capture_inputs: vLLM's ``prepare_inputs_to_capture``.
    """

    def __init__(
        self,
        pools: Mapping[int, tuple[GraphPool[Any], bool, Hand]],
        capture_inputs: Callable[..., Any],
    ) -> None:
        self._pools = pools
        self._capture_inputs = capture_inputs
        self._at: tuple[Capturing[Any], Any, Phase] | None = None
        self._hand: Hand | None = None
        self.graphs: dict[int, dict[Any, Any]] = {}
        """By manager: the graphs that were captured, as vLLM filed them."""

    def run(
        self,
        original: Callable[..., Any],
        manager: Any,
        wrap: Callable[[CaptureLoops, Capturing[Any], Any], Any],
        create_forward_fn: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a manager's loop (``CudaGraphManager.capture``) within its pool's capture.

        Args:
            original: vLLM's loop.
            manager: Whose loop it is; one without a pool runs as it would.
            wrap: Puts :meth:`make` around the factory, as the version calls it.
            create_forward_fn: The factory.
            args: Further arguments of the loop.
            kwargs: The same, by name.
        """
        found = self._pools.get(id(manager))
        keys = full_keys(manager)
        if found is None or not keys:
            return original(manager, create_forward_fn, *args, **kwargs)
        pool, writes_state, self._hand = found
        with pool.capturing(keys, writes_state=writes_state) as capturing:
            filed = _Filed(manager.graphs, capturing, pool)
            manager.graphs = filed
            try:
                result = original(
                    manager, wrap(self, capturing, create_forward_fn), *args, **kwargs
                )
            finally:
                manager.graphs = dict(filed)
            # The loop ran on a stream of its own, and every key is now built once more on this one.
            pool.backend.synchronize()
        self.graphs[id(manager)] = manager.graphs
        return result

    def make(
        self, capturing: Capturing[Any], desc: Any, phase: Phase, factory: Callable[[], Any]
    ) -> Any:
        """Call the factory; what it asks for is built for this descriptor and phase."""
        if desc.cg_mode.name != "FULL":
            return factory()
        self._at = capturing, desc, phase
        try:
            return factory()
        finally:
            self._at = None

    def state(self, desc: Any = None) -> AttentionState | None:
        """Have the state built that the factory asks for; ``None`` where nobody asked for one.

        Args:
            desc: For which it asks, where it says so.
        """
        if self._at is None or self._hand is None:
            return None
        capturing, at, phase = self._at
        capturing.state(at if desc is None else desc, phase)
        return self._hand()

    def inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``prepare_inputs_to_capture``."""
        state = self.state()
        return self._capture_inputs(*args, **kwargs) if state is None else state


class LentStates(Mapping[Any, Any]):
    """What the target's loop returns to be handed to the draft's: states, built when looked up.

    Args:
        loops: Of the runner.
        own: What vLLM's loop returned.
        shape: Makes the value that vLLM expects from a state.
    """

    def __init__(
        self, loops: CaptureLoops, own: Mapping[Any, Any], shape: Callable[[AttentionState], Any]
    ) -> None:
        self._loops, self._own, self._shape = loops, own, shape

    def __getitem__(self, desc: Any) -> Any:
        state = self._loops.state(desc) if desc.cg_mode.name == "FULL" else None
        return self._own[desc] if state is None else self._shape(state)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


class _Filed(dict[Any, Any]):
    """vLLM's dictionary of graphs; each that is filed goes to the pool at once."""

    def __init__(
        self, graphs: Mapping[Any, Any], capturing: Capturing[Any], pool: GraphPool[Any]
    ) -> None:
        super().__init__(graphs)
        self._capturing = capturing
        self._device = pool.device
        self._held_bytes = _reserved_bytes(self._device)

    def __setitem__(self, desc: Any, graph: Any) -> None:
        held = _reserved_bytes(self._device)
        # vLLM owns the graph: no `release`, and it outlives the pool.
        replay = launch_of(graph) or graph.replay
        self._capturing.commit(desc, replay, nbytes=max(0, held - self._held_bytes))
        self._held_bytes = held
        super().__setitem__(desc, graph)


def _reserved_bytes(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
