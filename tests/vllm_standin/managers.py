"""Graph managers: which descriptors there are, and the capture loops of each version."""

from __future__ import annotations

from typing import Any

from graphshare.capture import make_backend
from tests.vllm_standin.offloader import get_offloader
from tests.vllm_standin.parts import (
    AttentionState,
    AttentionStatePair,
    BatchExecutionDescriptor,
    CapturedAttentionState,
    CUDAGraphMode,
    InputBatch,
    OldBatchExecutionDescriptor,
    build_slot_mappings_by_layer,
)


def prepare_inputs_to_capture(
    num_reqs, num_tokens, model_state, input_buffers, block_tables, attn_groups, kv_cache_config,
    skip_attn=False,
):  # fmt: skip
    batch = InputBatch.make_dummy(num_reqs, num_tokens, input_buffers)
    tables = block_tables.get_dummy_block_tables(num_reqs)
    slots = block_tables.get_dummy_slot_mappings(num_tokens)
    metadata = None
    if not skip_attn:
        metadata = model_state.prepare_attn(
            batch, CUDAGraphMode.NONE, tables, slots, attn_groups, kv_cache_config, for_capture=True
        )
    return AttentionState(metadata, build_slot_mappings_by_layer(slots, kv_cache_config))


def old_prepare_inputs_to_capture(
    num_reqs, num_tokens, model_state, input_buffers, block_tables, attn_groups, kv_cache_config
):
    return tuple(
        prepare_inputs_to_capture(
            num_reqs,
            num_tokens,
            model_state,
            input_buffers,
            block_tables,
            attn_groups,
            kv_cache_config,
        )
    )


def _is_compatible(desc, num_reqs, uniform_token_count):
    return desc.uniform_token_count in (None, uniform_token_count) and (
        desc.num_reqs is None or desc.num_reqs >= num_reqs
    )


class Manager:
    """What the managers of all versions have in common.

    ``world`` is the module that a version's functions are looked up in, as in vLLM: a name that is
    patched there is the one that is called.
    """

    descriptor: type = BatchExecutionDescriptor

    def __init__(self, config, decode_query_len, mode=None, lora_capture_cases=(0,)):
        self.max_num_reqs = config.max_num_reqs
        self.lora_cases = lora_capture_cases
        self.graphs: dict[Any, Any] = {}
        self._capture_descs: dict[CUDAGraphMode, list[Any]] = {}
        self._graphs_captured = False
        self._recorder = make_backend("tape", "cpu")
        self._init_candidates(config, decode_query_len, mode or config.cudagraph_mode)
        self._candidates = self._by_size()

    def _init_candidates(self, config, query_len, mode):
        for size in sorted(config.capture_sizes, reverse=True):
            for loras in self.lora_cases:
                more = {"num_active_loras": loras} if self.descriptor is not _OLD else {}
                if mode == "FULL":
                    reqs = min(size, self.max_num_reqs)
                    self._add(self.descriptor(CUDAGraphMode.FULL, size, reqs, **more))
                    continue
                rounded = -(-size // query_len) * query_len
                if (
                    rounded <= max(config.capture_sizes)
                    and rounded // query_len <= config.max_num_reqs
                ):
                    reqs = rounded // query_len
                    desc = self.descriptor(CUDAGraphMode.FULL, rounded, reqs, query_len, **more)
                    self._add(desc)
                if mode == "FULL_AND_PIECEWISE":
                    self._add(self.descriptor(CUDAGraphMode.PIECEWISE, size, None, **more))

    def _add(self, desc):
        descs = self._capture_descs.setdefault(desc.cg_mode, [])
        if desc not in descs:
            descs.append(desc)

    def _by_size(self):
        """By tokens, and from 0.25.1 on by adapters too: what may hold so many, the best first."""
        descs = sorted(
            (desc for descs in self._capture_descs.values() for desc in descs),
            key=lambda desc: (desc.num_tokens, desc.uniform_token_count is None),
        )
        sizes = range(max((desc.num_tokens for desc in descs), default=0) + 1)
        if self.descriptor is _OLD:
            return [[desc for desc in descs if desc.num_tokens >= size] for size in sizes]
        return {
            (size, loras): [
                desc for desc in descs if desc.num_tokens >= size and desc.num_active_loras == loras
            ]
            for size in sizes
            for loras in self.lora_cases
        }

    def needs_capture(self):
        return bool(self._capture_descs)

    def _resolve_effective_loras(self, num_active_loras):
        return num_active_loras

    def _dispatch(self, num_reqs, num_tokens, uniform_token_count, num_active_loras=0):
        if self.descriptor is _OLD:
            descs = self._candidates[num_tokens : num_tokens + 1]
            descs = descs[0] if descs else ()
        else:
            loras = self._resolve_effective_loras(num_active_loras)
            descs = self._candidates.get((num_tokens, loras), ())
        for desc in descs if self._graphs_captured else ():
            if _is_compatible(desc, num_reqs, uniform_token_count):
                return desc
        return self.descriptor(CUDAGraphMode.NONE, num_tokens, num_reqs)

    def _loop(self, forwards):
        """Warm up and capture, piecewise first; ``forwards(desc)`` yields one for each of both."""
        for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
            for desc in self._capture_descs.get(mode, ()):
                made = forwards(desc)
                next(made)(CUDAGraphMode.NONE)
                if mode is CUDAGraphMode.PIECEWISE:
                    continue
                forward = next(made)
                assert desc not in self.graphs
                self.graphs[desc] = self._recorder.capture(
                    lambda forward=forward: forward(CUDAGraphMode.NONE)
                )
        self._graphs_captured = True

    def run_fullgraph(self, desc):
        assert desc.cg_mode == CUDAGraphMode.FULL
        assert desc in self.graphs
        get_offloader().sync_prev_onload()
        self.graphs[desc].replay()


_OLD = OldBatchExecutionDescriptor


def base_manager(version):
    """Return the version's ``CudaGraphManager``."""

    class CudaGraphManager(Manager):
        descriptor = _OLD if version in ("0.20.2", "0.21.0") else BatchExecutionDescriptor

    if version in ("0.20.2", "0.21.0"):

        def dispatch(self, num_reqs, num_tokens, uniform_token_count):
            return self._dispatch(num_reqs, num_tokens, uniform_token_count)

        def capture(self, create_forward_fn, progress_bar_desc=""):
            states = {}

            def forwards(desc):
                made = create_forward_fn(desc)
                forward = made
                if version == "0.21.0":
                    forward, states[desc] = made
                yield forward
                yield forward

            self._loop(forwards)
            return states if version == "0.21.0" else None

    else:

        def dispatch(self, num_reqs, num_tokens, uniform_token_count, num_active_loras):
            return self._dispatch(num_reqs, num_tokens, uniform_token_count, num_active_loras)

        def capture(self, create_forward_fn, progress_bar_desc=""):
            states = {}

            def forwards(desc):
                warm = create_forward_fn(desc, warmup=True)
                forward, state = warm if version == "0.25.1" else (warm, None)
                states[desc] = AttentionStatePair(state, state)
                yield forward
                cold = create_forward_fn(desc, warmup=False)
                forward, captured = cold if version == "0.25.1" else (cold, None)
                states[desc] = AttentionStatePair(state, captured)
                yield forward

            self._loop(forwards)
            return states if version == "0.25.1" else None

    CudaGraphManager.dispatch = dispatch
    CudaGraphManager.capture = capture
    return CudaGraphManager


def with_state(version, forward, state):
    """Return what a factory of the version returns."""
    if version == "0.25.1":
        return forward, AttentionState(*state)
    if version == "0.21.0":
        return forward, CapturedAttentionState(*state)
    return forward


def model_manager(version, base, world):
    """Return the version's ``ModelCudaGraphManager``."""

    class ModelCudaGraphManager(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.hidden_states = None
            self.aux_hidden_states = []
            self.use_aux_hidden_state_outputs = False

        def _capture_model(self, model, inputs):
            input_buffers = inputs[1]

            def create_forward_fn(desc, warmup=True):
                num_tokens = desc.num_tokens
                num_reqs = desc.num_reqs or min(num_tokens, self.max_num_reqs)
                more = {}
                if version != "0.20.2":
                    more["skip_attn"] = desc.cg_mode == CUDAGraphMode.PIECEWISE
                metadata, slots = world.prepare_inputs_to_capture(
                    num_reqs, num_tokens, *inputs, **more
                )

                def forward(cg_mode):
                    hidden = model.forward(
                        input_buffers.input_ids[:num_tokens],
                        input_buffers.positions[:num_tokens],
                        metadata,
                        slots,
                    )
                    if self.hidden_states is None:
                        self.hidden_states = hidden.clone()
                    self.hidden_states[:num_tokens] = hidden

                return with_state(version, forward, (metadata, slots))

            return super().capture(create_forward_fn, "Capturing CUDA graphs")

        def run_fullgraph(self, desc):
            super().run_fullgraph(desc)
            hidden = self.hidden_states[: desc.num_tokens]
            if self.use_aux_hidden_state_outputs:
                return hidden, [each[: desc.num_tokens] for each in self.aux_hidden_states]
            return hidden

    if version in ("0.20.2", "0.21.0"):

        def capture(
            self, model, model_state, input_buffers, intermediate_tensors, block_tables,
            attn_groups, kv_cache_config, has_lora=False, use_aux_hidden_state_outputs=False,
            progress_bar_desc="",
        ):  # fmt: skip
            return self._capture_model(
                model, (model_state, input_buffers, block_tables, attn_groups, kv_cache_config)
            )

    else:

        def capture(
            self, model, model_state, input_buffers, intermediate_tensors, block_tables,
            attn_groups, kv_cache_config, has_lora=False, use_aux_hidden_state_outputs=False,
            lora_capture_hook=None, progress_bar_desc="",
        ):  # fmt: skip
            return self._capture_model(
                model, (model_state, input_buffers, block_tables, attn_groups, kv_cache_config)
            )

    ModelCudaGraphManager.capture = capture
    return ModelCudaGraphManager


def building_manager(version, base, world):
    """Return a draft's manager that builds its states: for decodes; in 0.20.2 and 0.26.0, all."""

    class Building(base):
        def capture(
            self, forward_fn, model_state, input_buffers, block_tables, attn_groups,
            kv_cache_config, progress_bar_desc="",
        ):  # fmt: skip
            def create_forward_fn(desc, warmup=True):
                num_reqs = desc.num_reqs or min(desc.num_tokens, self.max_num_reqs)
                more = {}
                if version != "0.20.2":
                    more["skip_attn"] = desc.cg_mode == CUDAGraphMode.PIECEWISE
                state = world.prepare_inputs_to_capture(
                    num_reqs,
                    desc.num_tokens,
                    model_state,
                    input_buffers,
                    block_tables,
                    attn_groups,
                    kv_cache_config,
                    **more,
                )
                metadata, slots = state

                def forward(cg_mode):
                    forward_fn(num_reqs, desc.num_tokens, metadata, slots, None, cg_mode)

                return with_state(version, forward, (metadata, slots))

            super().capture(create_forward_fn, progress_bar_desc)

    return Building


def reading_manager(version, base):
    """Return a draft's manager that captures on the states that it is handed: 0.21.0 and 0.25.1."""

    class Reading(base):
        def _capture_on(self, forward_fn, states):
            def create_forward_fn(desc, warmup=True):
                num_reqs = desc.num_reqs or min(desc.num_tokens, self.max_num_reqs)
                state = states[desc]
                if version == "0.25.1":
                    state = state.warmup if warmup else state.captured
                metadata, slots = state

                def forward(cg_mode):
                    forward_fn(num_reqs, desc.num_tokens, metadata, slots, None, cg_mode)

                return with_state(version, forward, state)

            super().capture(create_forward_fn, "prefill")

    if version == "0.21.0":

        def capture(self, forward_fn, full_cg_attn_states, progress_bar_desc=""):
            self._capture_on(forward_fn, full_cg_attn_states)

    else:

        def capture(self, forward_fn, attn_states, progress_bar_desc=""):
            self._capture_on(forward_fn, attn_states)

    Reading.capture = capture
    return Reading
