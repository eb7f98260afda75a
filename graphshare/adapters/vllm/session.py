"""graphshare beside one model runner: three pools, their capture, and the log line after it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from graphshare.adapters.vllm.backends import look_at_fields
from graphshare.adapters.vllm.family import Family
from graphshare.adapters.vllm.loops import CaptureLoops
from graphshare.adapters.vllm.owners import DecodeOwner, PrefillOwner, TargetOwner, only
from graphshare.adapters.vllm.patches import Patches
from graphshare.adapters.vllm.serving import Serving
from graphshare.adapters.vllm.switch import Mode
from graphshare.owner import AttentionSpec
from graphshare.pool import GraphPool
from graphshare.sharing import share_states
from graphshare.state import AttentionState
from graphshare.statistics import PoolStatistics

__all__ = ["Session", "VllmStatistics"]

_logger = logging.getLogger("vllm.graphshare")

When = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class VllmStatistics:
    """A snapshot of graphshare's part in this process.

    Attributes:
        version: Of vLLM; empty where none was found.
        mode: What the switch says.
        active: Whether vLLM's steps go through the pools.
        reason: Why not, as it was logged; empty while it is active.
        builds_avoided: Draft prefills that ran on the target's state without a build.
        builds: Builds of metadata that were checked while serving, by who built: ``"target"``,
            ``"draft_prefill"``, and ``"draft_decode"``, whose own are left alone in the mode
            ``on``.
        refusals: Errors raised, by class name.
        verified: Draft prefills whose state was compared with the draft's own.
        steered: Draft prefills kept from a full graph because the target's step had no state for
            it: it had run none.
        graphs: Captured graphs, by pool.
        borrowed: Draft prefill graphs that borrow.
        graph_bytes: Memory that all captures added.
        pools: All that each pool counts, by name.
    """

    version: str
    mode: str
    active: bool
    reason: str
    builds_avoided: int
    builds: Mapping[str, int]
    refusals: Mapping[str, int]
    verified: int
    steered: int
    graphs: Mapping[str, int]
    borrowed: int
    graph_bytes: int
    pools: Mapping[str, PoolStatistics]


class Session:
    """What graphshare is to one model runner, from its capture on.

    Args:
        runner: vLLM's V2 model runner, before it captures; one that is supported.
        family: What is known of this version of vLLM.
        mode: What the switch says; not off.
        when: As for :func:`graphshare.share_states`: descriptors for which it is false are built
            by the draft before each of its prefills.

    Attributes:
        target: The target's pool.
        prefill: That of the draft's prefills.
        decode: That of the draft's decodes.
        shared: The loan.
        serving: The hooks in vLLM's steps.
        family: What is known of this version of vLLM.
        mode: What the switch says.
    """

    def __init__(
        self, runner: Any, family: Family, mode: Mode, *, when: When | None = None
    ) -> None:
        self._runner, self.family, self.mode = runner, family, mode
        look_at_fields()
        layers = sorted(runner.speculator.draft_attn_layer_names)
        self._layers = layers
        self._target_owner = TargetOwner(runner, family)
        self._prefill_owner = PrefillOwner(runner, family, layers)
        self._decode_owner = DecodeOwner(runner, family)
        pool = partial(_pool, runner, "strict" if mode is Mode.STRICT else "fast")
        self.target = pool(
            "target",
            self._target_owner,
            # Graphs for several numbers of LoRA adapters read one state.
            state_key=_without_loras,
            spec=_spec(runner.attn_groups, layers),
        )
        self.prefill = pool(
            "draft_prefill",
            self._prefill_owner,
            spec=_spec(runner.speculator.attn_groups, layers),
        )
        self.decode = pool("draft_decode", self._decode_owner)
        self.shared = share_states(
            self.target, self.prefill, view=self._target_owner.lent(layers), when=when
        )
        self.serving = Serving(
            runner,
            self.target,
            self.prefill,
            self.decode,
            self.shared,
            verify=mode is Mode.VERIFY,
            checks_decodes=mode is not Mode.ON,
            family=family,
        )

    def capture(self, original: Callable[[], Any]) -> Any:
        """Run vLLM's ``capture_model``, with the pools in its loops; then take part in its steps.

        Raises:
            GraphShareError: A state is not what a capture can be made on.
        """
        runner = self._runner
        speculator = runner.speculator
        loops = CaptureLoops(
            {
                id(runner.cudagraph_manager): (
                    self.target,
                    False,
                    self._target_owner.built,
                ),
                id(speculator.prefill_cudagraph_manager): (self.prefill, False, self._to_prefill),
                id(speculator.decode_cudagraph_manager): (
                    self.decode,
                    True,  # its forward advances the sequence lengths
                    self._decode_owner.built,
                ),
            },
            self.family.capture_inputs(),
        )
        with Patches() as patches:
            self.family.patch_loops(loops, runner.cudagraph_manager, patches)
            result = original()
        self.serving.install()
        self._log()
        return result

    def _to_prefill(self) -> AttentionState:
        # For a key that borrows, the draft's own owner has built nothing.
        own = self._prefill_owner.built()
        self._prefill_owner.metadata = {}
        return only(self._layers, own if own.attn_metadata else self._target_owner.built())

    def pause(self) -> None:
        """Take the hooks off vLLM's steps: it runs on its own, on the same graphs."""
        self.serving.remove()

    def resume(self) -> None:
        """Put the hooks on again; nothing is fresh then, for what vLLM wrote was not seen."""
        if not self.serving.installed:
            for pool in (self.target, self.prefill, self.decode):
                pool.invalidate()
        self.serving.install()

    def close(self) -> None:
        """Leave vLLM as it was, with the graphs that it captured."""
        self.serving.remove()
        for pool in (self.decode, self.prefill, self.target):
            pool.close()

    def statistics(self) -> VllmStatistics:
        """Return a snapshot of what is counted."""
        pools = {each.name: each.statistics() for each in (self.target, self.prefill, self.decode)}
        refusals: dict[str, int] = {}
        for each in pools.values():
            for name, number in each.refusals.items():
                refusals[name] = refusals.get(name, 0) + number
        active = self.serving.installed
        return VllmStatistics(
            version=self.family.version,
            mode=self.mode.value,
            active=active,
            reason="" if active else "the hooks are off vLLM's steps",
            builds_avoided=pools["draft_prefill"].builds_avoided,
            builds=MappingProxyType({name: each.builds["replay"] for name, each in pools.items()}),
            refusals=MappingProxyType(refusals),
            verified=self.serving.verified,
            steered=self.serving.steered,
            graphs=MappingProxyType({name: each.keys for name, each in pools.items()}),
            borrowed=self._borrowed(),
            graph_bytes=sum(sum(each.bytes.values()) for each in pools.values()),
            pools=MappingProxyType(pools),
        )

    def _borrowed(self) -> int:
        entries = self.prefill.holdings.entries.values()
        return sum(entry.lease.borrowed for entry in entries)

    def _log(self) -> None:
        seen = self.statistics()
        _logger.info(
            "graphshare in vLLM %s (%s): %d target, %d draft prefill and %d draft decode graphs, "
            "%.1f MiB; %d draft prefill graphs borrow the target's attention state",
            seen.version,
            seen.mode,
            *seen.graphs.values(),
            seen.graph_bytes / 2**20,
            seen.borrowed,
        )


def _pool(runner: Any, checks: Any, name: str, owner: Any, **options: Any) -> GraphPool[Any]:
    return GraphPool(
        name,
        owner=owner,
        device=runner.device,
        covers=_covers,
        cost=_cost,
        checks=checks,
        **options,
    )


def _covers(key: Any, shape: Any) -> bool:
    """Whether vLLM would run a batch of this shape on the graph of ``key``."""
    return (
        key.num_tokens >= shape.num_tokens
        and (key.num_reqs is None or (shape.num_reqs or key.num_reqs + 1) <= key.num_reqs)
        and key.uniform_token_count in (None, shape.uniform_token_count)
        and _loras(key) == _loras(shape)
    )


def _cost(key: Any) -> tuple[int, int, bool, int]:
    uniform = key.uniform_token_count is None
    return key.num_tokens, key.num_reqs or key.num_tokens, uniform, _loras(key)


def _loras(key: Any) -> int:
    return getattr(key, "num_active_loras", 0)


def _without_loras(key: Any) -> tuple[Any, ...]:
    return key.cg_mode, key.num_tokens, key.num_reqs, key.uniform_token_count


def _spec(groups: list[list[Any]], layers: list[str]) -> AttentionSpec | None:
    """Return what the draft's layers are built for through these groups, where it is one thing."""
    found = [
        group
        for within in groups
        for group in within
        if not set(layers).isdisjoint(group.layer_names)
    ]
    if len(found) != 1:
        return None
    (group,) = found
    cache = group.kv_cache_spec
    return AttentionSpec(
        num_kv_heads=cache.num_kv_heads,
        head_size=cache.head_size,
        page_size=cache.block_size,
        kv_dtype=cache.dtype,
        backend=group.backend.get_name(),
    )
