"""Taking part in vLLM's steps: refreshes where vLLM builds, replays where it launches.

All of it hangs on instances: taking it off leaves vLLM's own methods and graphs. What somebody else
has wrapped since stays in its place, and then does what vLLM does: each hook asks whether its
installation is still the current one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphshare.adapters.vllm.owners import DecodeBatch, TargetBatch
from graphshare.adapters.vllm.patches import Patches
from graphshare.pool import GraphPool
from graphshare.sharing import SharedStates

__all__ = ["Serving"]


class Serving:
    """The hooks in one runner.

    Args:
        runner: vLLM's V2 model runner.
        target: Pool of the target's graphs.
        prefill: Pool of the draft's prefill graphs.
        decode: Pool of the draft's decode graphs.
        shared: The loan of the target's states.
        verify: Whether each borrowed state is also built by the draft, and compared.
        checks_decodes: Whether the draft's decodes go through their pool. They borrow nothing, and
            vLLM builds before each: what is checked there costs more than it can find.
        rebuilds_prefill: Whether the speculator, asked with these arguments to build, would do so
            for a prefill; ``None`` where it never does.

    Attributes:
        verified: Draft prefills whose state was compared.
        steered: Draft prefills that vLLM would have run on a full graph though the target had not.
    """

    def __init__(
        self,
        runner: Any,
        target: GraphPool[Any],
        prefill: GraphPool[Any],
        decode: GraphPool[Any],
        shared: SharedStates[Any, Any],
        *,
        verify: bool,
        checks_decodes: bool,
        rebuilds_prefill: Callable[[Any], bool] | None,
    ) -> None:
        self._runner = runner
        self._rebuilds_prefill = rebuilds_prefill
        self.target, self.prefill, self.decode, self.shared = target, prefill, decode, shared
        self._verify, self._checks_decodes = verify, checks_decodes
        self._current: Patches | None = None
        self._batch: TargetBatch | None = None
        self._ran: Any = None
        self.verified = self.steered = 0

    @property
    def installed(self) -> bool:
        """Whether vLLM's steps go through the pools."""
        return self._current is not None

    def install(self) -> None:
        """Put the hooks on; without effect where they are on."""
        if self.installed:
            return
        runner = self._runner
        patches = self._current = Patches()
        speculator = runner.speculator
        managers = [
            (runner.cudagraph_manager, self.target, self._plain),
            (speculator.prefill_cudagraph_manager, self.prefill, self._draft_replay()),
        ]
        if self._checks_decodes:
            managers.append((speculator.decode_cudagraph_manager, self.decode, self._plain))
        for manager, pool, replaying in managers:
            if len(pool):
                graphs = {
                    desc: replaying(desc, pool.bind(desc)) if desc in pool else graph
                    for desc, graph in manager.graphs.items()
                }
                patches.set(manager, "graphs", graphs)
        self._follow_target(patches)
        self._steer_prefill(patches)
        if self._checks_decodes:
            self._follow_decodes(patches)
        elif self._rebuilds_prefill is not None:
            self._drop_rebuilds(patches, self._rebuilds_prefill)

    def remove(self) -> None:
        """Take the hooks off; vLLM runs its own methods and graphs again."""
        current, self._current = self._current, None
        if current is not None:
            current.undo()
        self._batch = None

    @staticmethod
    def _plain(_: Any, bound: Any) -> Any:
        return bound

    def _draft_replay(self) -> Callable[[Any, Any], Any]:
        def replaying(desc: Any, bound: Any) -> Any:
            if not self.prefill.holdings.entries[desc].lease.borrowed:
                return _Replay(lambda: self._replay_own(desc, bound))
            if self._verify:
                return _Replay(lambda: self._replay_verified(desc, bound))
            return bound

        return replaying

    def _keeps_batch(self) -> bool:
        entries = self.prefill.holdings.entries.values()
        return self._verify or not all(entry.lease.borrowed for entry in entries)

    # The target.

    def _follow_target(self, patches: Patches) -> None:
        runner, target = self._runner, self.target
        manager, model_state = runner.cudagraph_manager, runner.model_state
        dispatch, prepare_attn = manager.dispatch, model_state.prepare_attn
        latest = target.keys()[0]
        keeps_batch = self._keeps_batch()
        refresh, shared = target.refresh, self.shared
        clock, lease_on = target.clock, target.holdings.lease_on
        owner: Any = target.owner

        def dispatched(*args: Any, **kwargs: Any) -> Any:
            # A new step: its inputs come next, and the draft's decodes have moved the slots. In a
            # healthy step nothing is left by now, so that telling it is rare.
            lease = lease_on(clock.latest)
            left = shared.live_key is not None or (lease is not None and lease.left > 0)
            if left and self._current is patches:
                target.invalidate(latest)
            self._ran = desc = dispatch(*args, **kwargs)
            return desc

        def prepared(
            input_batch: Any,
            cudagraph_mode: Any,
            block_tables: Any,
            slot_mappings: Any,
            attn_groups: Any,
            kv_cache_config: Any,
            for_capture: bool = False,
        ) -> Any:
            nonlocal latest
            if for_capture or cudagraph_mode.name != "FULL" or self._current is not patches:
                # Eager or piecewise: the same builders write the same buffers. Before they do:
                # a build that fails has written, too. One key stands for all that they write, and
                # a refusal names the last one as invalidated.
                if self._current is patches:
                    target.invalidate(latest)
                return prepare_attn(
                    input_batch,
                    cudagraph_mode,
                    block_tables,
                    slot_mappings,
                    attn_groups,
                    kv_cache_config,
                    for_capture,
                )
            latest = desc = self._ran
            batch = input_batch, cudagraph_mode, block_tables, slot_mappings
            refresh(desc, batch)
            if keeps_batch:
                self._batch = batch
            return owner.metadata

        patches.set(manager, "dispatch", dispatched)
        patches.set(model_state, "prepare_attn", prepared)

    # The draft's prefill.

    def _steer_prefill(self, patches: Patches) -> None:
        manager = self._runner.speculator.prefill_cudagraph_manager
        dispatch, shared, entries = manager.dispatch, self.shared, self.prefill.holdings.entries

        def steered(num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
            current = self._current is patches
            live = shared.live_key if current else None
            if live is not None:
                return live
            desc = dispatch(num_reqs, num_tokens, *args, **kwargs)
            entry = entries.get(desc)
            if entry is None or not entry.lease.borrowed or not current:
                return desc
            # The target ran no full graph, so nothing was built for one: run as it did.
            self.steered += 1
            return self._as_target(desc, num_reqs, num_tokens)

        patches.set(manager, "dispatch", steered)

    def _as_target(self, desc: Any, num_reqs: int, num_tokens: int) -> Any:
        ran = self._ran
        manager = self._runner.speculator.prefill_cudagraph_manager
        if ran is not None and ran.cg_mode.name == "PIECEWISE":
            for descs in manager._capture_descs.values():
                if ran in descs:
                    return ran
        mode = type(desc.cg_mode).NONE
        return type(desc)(cg_mode=mode, num_tokens=num_tokens, num_reqs=num_reqs)

    def _replay_own(self, desc: Any, bound: Any) -> None:
        self.prefill.refresh(desc, self._batch)
        bound.replay()

    def _replay_verified(self, desc: Any, bound: Any) -> None:
        # One that is stale is refused by the replay, which says why.
        if self.shared.live_key == desc:
            owner: Any = self.prefill.owner
            owner.compared_with = self.prefill.states[desc]
            try:
                self.shared.verify(self._batch)
            finally:
                owner.compared_with = None
            self.verified += 1
            self.target.refresh(self._ran, self._batch)  # verify leaves the lender stale
        bound.replay()

    # What the draft builds by itself.

    def _drop_rebuilds(self, patches: Patches, rebuilds_prefill: Callable[[Any], bool]) -> None:
        speculator = self._runner.speculator
        build = speculator._build_draft_attn_metadata

        def built(*args: Any, **kwargs: Any) -> Any:
            if self._current is patches and rebuilds_prefill(kwargs):
                return None  # vLLM drops it anyway: the call was for its effect on the buffers
            return build(*args, **kwargs)

        patches.set(speculator, "_build_draft_attn_metadata", built)

    def _follow_decodes(self, patches: Patches) -> None:
        decode, speculator = self.decode, self._runner.speculator
        manager = speculator.decode_cudagraph_manager
        owner: Any = decode.owner
        rebuilds_prefill = self._rebuilds_prefill
        any_key = next(iter(decode.keys()), None)
        chosen: Any = None
        if rebuilds_prefill is not None:
            self._drop_rebuilds(patches, rebuilds_prefill)
        dispatch, build = manager.dispatch, speculator._build_draft_attn_metadata

        def dispatched(*args: Any, **kwargs: Any) -> Any:
            nonlocal chosen
            chosen = dispatch(*args, **kwargs)
            return chosen

        def built(*args: Any, **kwargs: Any) -> Any:
            if self._current is not patches:
                return build(*args, **kwargs)
            if rebuilds_prefill is not None and rebuilds_prefill(kwargs):
                return build(*args, **kwargs)
            if chosen is None or chosen.cg_mode.name != "FULL":
                if any_key is not None:
                    decode.invalidate(any_key)
                return build(*args, **kwargs)
            decode.refresh(chosen, DecodeBatch(args, kwargs))
            return owner.metadata

        patches.set(manager, "dispatch", dispatched)
        patches.set(speculator, "_build_draft_attn_metadata", built)


class _Replay:
    """A graph to vLLM: something with ``replay``."""

    __slots__ = ("replay",)

    def __init__(self, replay: Callable[[], None]) -> None:
        self.replay = replay
