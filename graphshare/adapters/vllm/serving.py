"""Taking part in vLLM's steps: refreshes where vLLM builds, replays where it launches.

All of it hangs on instances: taking it off leaves vLLM's own methods and graphs. What somebody else
has wrapped since stays in its place, and then does what vLLM does: each hook asks whether its
installation is still the current one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from graphshare.adapters.vllm.choices import (
    NOT_GIVEN,
    Remembering,
    as_target,
    ask,
    packing,
    unpacking,
)
from graphshare.adapters.vllm.family import Family
from graphshare.adapters.vllm.launches import Graphs, Launching, Replay, bare
from graphshare.adapters.vllm.owners import DecodeBatch, TargetBatch
from graphshare.adapters.vllm.patches import Patches
from graphshare.adapters.vllm.signatures import is_released, released
from graphshare.adapters.vllm.twins import Twins
from graphshare.lease import Lease
from graphshare.pool import GraphPool
from graphshare.sharing import SharedStates

__all__ = ["Serving"]


class _Step:
    """What belongs to a step of the target on a full graph.

    Attributes:
        key: The descriptor.
        num_tokens: Its.
        num_reqs: Its.
        refresh: Takes what the runner has built, and makes the state fresh.
        lease: The draft's prefills' on that state, where they borrow it.
        draft: What the draft runs then.
    """

    __slots__ = ("draft", "key", "lease", "num_reqs", "num_tokens", "refresh")

    def __init__(
        self, key: Any, refresh: Callable[[Any], None], lease: Lease | None, draft: Any
    ) -> None:
        self.key, self.refresh, self.lease, self.draft = key, refresh, lease, draft
        self.num_tokens, self.num_reqs = key.num_tokens, key.num_reqs


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
        family: What is known of this version of vLLM.

    Attributes:
        verified: Draft prefills whose state was compared.
        steered: Draft prefills that vLLM would have run on a full graph though the target's step
            had no state for it.
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
        family: Family,
    ) -> None:
        self._runner, self._family = runner, family
        self.target, self.prefill, self.decode, self.shared = target, prefill, decode, shared
        self._verify, self._checks_decodes = verify, checks_decodes
        self._current: Patches | None = None
        # What tells hooks that others may have kept that they are off.
        self._enders: list[Callable[[], None]] = []
        self._prepare_attn: Any = None
        self._batch: TargetBatch | None = None
        self._refresh: Callable[[Any], None] | None = None
        self._twins = Twins()
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
            (
                speculator.decode_cudagraph_manager,
                self.decode,
                self._plain if self._checks_decodes else None,
            ),
        ]
        for manager, pool, replaying in managers:
            if len(pool):
                self._stand_in(patches, manager, pool, replaying)
        functions = released(self._family.version)
        self._shorten(patches, functions)
        self._follow_steps(patches, functions)
        self._drop_rebuilds(patches)
        if self._checks_decodes:
            self._follow_decodes(patches)

    def remove(self) -> None:
        """Take the hooks off; vLLM runs its own methods and graphs again."""
        for end in self._enders:
            end()
        self._enders.clear()
        current, self._current = self._current, None
        if current is not None:
            current.undo()
        self._batch = self._refresh = None

    def _stand_in(
        self,
        patches: Patches,
        manager: Any,
        pool: GraphPool[Any],
        replaying: Callable[[Any, Any], Any] | None,
    ) -> None:
        """Give a manager a pool's replays, if it has some, and keys that are found sooner."""
        candidates = self._twins.among(vars(manager).get("_candidates"), manager.graphs)
        if candidates is not None:
            patches.set(manager, "_candidates", candidates)
        graphs = {
            self._twins.of(desc): replaying(desc, pool.bind(desc))
            if replaying is not None and desc in pool
            else bare(graph)
            for desc, graph in manager.graphs.items()
        }
        patches.set(manager, "graphs", Graphs(graphs))

    def _shorten(self, patches: Patches, functions: Collection[Callable[..., Any]]) -> None:
        """Choose and launch with less on the way, where vLLM's own functions are what they were."""
        if not functions:
            return
        target, speculator = self._runner.cudagraph_manager, self._runner.speculator
        prefill, decode = speculator.prefill_cudagraph_manager, speculator.decode_cudagraph_manager
        module = self._family.managers()
        for manager in (target, prefill, decode):
            table = getattr(manager, "graphs", None)
            if not isinstance(table, Graphs):  # there is none, or it has no full graphs
                continue
            if manager is not prefill and is_released(manager, "dispatch", functions):
                remembering = Remembering(manager.dispatch)
                self._enders.append(remembering.forget)
                patches.set(manager, "dispatch", remembering.dispatch)
            returns = manager is target
            # Not rows of one tensor: an EAGLE-3 head reads several, and there may be none.
            more = returns and (
                manager.hidden_states is None or manager.use_aux_hidden_state_outputs
            )
            if not more and is_released(manager, "run_fullgraph", functions):
                launching = Launching(manager, table, module, returns=returns)
                self._enders.append(launching.end)
                patches.set(manager, "run_fullgraph", launching.run_fullgraph)

    @staticmethod
    def _plain(_: Any, bound: Any) -> Any:
        return bound

    def _draft_replay(self) -> Callable[[Any, Any], Any]:
        def replaying(desc: Any, bound: Any) -> Any:
            if not self.prefill.holdings.entries[desc].lease.borrowed:
                return Replay(lambda: self._replay_own(desc, bound))
            if self._verify:
                return Replay(lambda: self._replay_verified(desc, bound))
            return bound

        return replaying

    def _keeps_batch(self) -> bool:
        entries = self.prefill.holdings.entries.values()
        return self._verify or not all(entry.lease.borrowed for entry in entries)

    # The target's builds, and the draft's prefill that follows them.

    def _follow_steps(self, patches: Patches, functions: Collection[Callable[..., Any]]) -> None:
        # In vLLM's step the caches are cold: what a hook touches costs ten times what it does in a
        # loop. So there is little here, and all of it at hand.
        target, model_state = self.target, self._runner.model_state
        manager = self._runner.speculator.prefill_cudagraph_manager
        prepare_attn = self._prepare_attn = model_state.prepare_attn
        # That of others may be asked in other ways than vLLM's.
        own = is_released(manager, "dispatch", functions)
        dispatch = manager.dispatch if own else unpacking(manager.dispatch)
        steps, keeps_batch = self._steps(), self._keeps_batch()
        entries = self.prefill.holdings.entries
        owner: Any = target.owner
        pick = owner.pick
        latest: Any = target.keys()[0]
        ledger = target.ledger
        # The ledger's epoch after a step off the graphs was told of last.
        told: int | None = None
        full, mode = latest.cg_mode, latest.cg_mode
        # The last build, where it was for a full graph.
        step: _Step | None = None
        current = True

        def ended() -> None:
            nonlocal current, full, step
            current, full, step = False, None, None

        self._enders.append(ended)

        def prepared(
            input_batch: Any,
            cudagraph_mode: Any,
            block_tables: Any,
            slot_mappings: Any,
            attn_groups: Any,
            kv_cache_config: Any,
            for_capture: bool = False,
        ) -> Any:
            nonlocal step
            try:
                metadata = prepare_attn(
                    input_batch,
                    cudagraph_mode,
                    block_tables,
                    slot_mappings,
                    attn_groups,
                    kv_cache_config,
                    for_capture,
                )
            except BaseException:
                off_the_graphs(mode)  # it has written, too
                raise
            if cudagraph_mode is full and not for_capture:
                this = step
                tokens, reqs = (
                    input_batch.num_tokens_after_padding,
                    input_batch.num_reqs_after_padding,
                )
                # Most steps have the shape of the one before: no hash, no table.
                if this is None or this.num_tokens != tokens or this.num_reqs != reqs:
                    this = steps.get((tokens, reqs))
                if this is not None:
                    step = this
                    if keeps_batch:
                        self._batch = input_batch, cudagraph_mode, block_tables, slot_mappings
                        self._refresh = this.refresh
                    this.refresh(pick(metadata))
                    return metadata
            off_the_graphs(cudagraph_mode)
            return metadata

        def off_the_graphs(ran: Any) -> None:
            # Eager or piecewise: the same builders have written the same buffers. One key stands
            # for all that they write; a refusal names the last one as invalidated.
            nonlocal latest, mode, step, told
            if not current:
                return
            this = step  # once: another thread may end it
            if this is not None:
                latest = this.key
            # Else what it has written is stale already: nothing has become fresh since.
            if this is not None or ledger.epoch != told:
                target.invalidate(latest)
                told = ledger.epoch
            step, mode = None, ran

        def steered(
            num_reqs: int,
            num_tokens: int,
            uniform_token_count: int | None,
            num_active_loras: int = NOT_GIVEN,
        ) -> Any:
            this = step  # once: another thread may end it
            if this is not None and (lease := this.lease) is not None and lease.left > 0:
                return this.draft
            desc = ask(dispatch, num_reqs, num_tokens, uniform_token_count, num_active_loras)
            entry = entries.get(desc)
            # What does not borrow is built by the draft, from the batch of a step on a full graph.
            if not current or entry is None or (this is not None and not entry.lease.borrowed):
                return desc
            # The target's step has no state to lend: run as it did, or without a graph.
            self.steered += 1
            return as_target(manager, mode, desc, num_reqs, num_tokens)

        patches.set(model_state, "prepare_attn", prepared)
        patches.set(manager, "dispatch", steered if own else packing(steered))

    def _steps(self) -> dict[tuple[int, int], _Step]:
        """Return, by padded tokens and requests, what belongs to a step of this shape.

        Full graphs for several numbers of LoRA adapters have one shape, and one state.
        """
        found: dict[tuple[int, int], _Step] = {}
        for desc, entry in self.target.holdings.entries.items():
            shape = desc.num_tokens, desc.num_reqs
            if shape in found:
                continue
            lease = self.prefill.holdings.lease_on(entry.record.serial)
            if lease is not None and not lease.borrowed:
                lease = None
            # Verifying, the states are read: they have to be kept.
            refresh = entry.refresh if self._verify else self.target.accepting(desc)
            draft = None if lease is None else self._twins.of(lease.live_key)
            found[shape] = _Step(desc, refresh, lease, draft)
        return found

    def _replay_own(self, desc: Any, bound: Any) -> None:
        self.prefill.refresh(desc, self._batch)
        bound.replay()

    def _replay_verified(self, desc: Any, bound: Any) -> None:
        # One that is stale is refused by the replay, which says why.
        batch, refresh, runner = self._batch, self._refresh, self._runner
        if self.shared.live_key == desc and batch is not None and refresh is not None:
            owner: Any = self.prefill.owner
            owner.compared_with = self.prefill.states[desc]
            try:
                self.shared.verify(batch)
            finally:
                owner.compared_with = None
            self.verified += 1
            # It leaves the lender stale.
            lender: Any = self.target.owner
            again = self._prepare_attn(*batch, runner.attn_groups, runner.kv_cache_config)
            refresh(lender.pick(again))
        bound.replay()

    # What the draft builds by itself.

    def _drop_rebuilds(self, patches: Patches) -> None:
        without_rebuild, speculator = self._family.without_rebuild, self._runner.speculator
        if without_rebuild is None:
            return
        build = speculator._build_draft_attn_metadata
        built = without_rebuild(build, lambda: self._current is patches)
        patches.set(speculator, "_build_draft_attn_metadata", built)

    def _follow_decodes(self, patches: Patches) -> None:
        decode, speculator = self.decode, self._runner.speculator
        manager = speculator.decode_cudagraph_manager
        owner: Any = decode.owner
        rebuilds_prefill = self._family.rebuilds_prefill
        any_key = next(iter(decode.keys()), None)
        chosen: Any = None
        dispatch, build = manager.dispatch, speculator._build_draft_attn_metadata

        def dispatched(*args: Any, **kwargs: Any) -> Any:
            nonlocal chosen
            chosen = dispatch(*args, **kwargs)
            return chosen

        def built(*args: Any, **kwargs: Any) -> Any:
            if self._current is not patches:
                return build(*args, **kwargs)
            if rebuilds_prefill(kwargs):
                return build(*args, **kwargs)
            if chosen is None or chosen.cg_mode.name != "FULL":
                if any_key is not None:
                    decode.invalidate(any_key)
                return build(*args, **kwargs)
            decode.refresh(chosen, DecodeBatch(args, kwargs))
            return owner.metadata

        patches.set(manager, "dispatch", dispatched)
        patches.set(speculator, "_build_draft_attn_metadata", built)
