"""The draft of each version."""

from __future__ import annotations

from itertools import pairwise

import torch

from tests.vllm_standin.parts import (
    CUDAGraphMode,
    InputBuffers,
    build_attn_metadata,
    build_slot_mappings_by_layer,
    make_groups,
)


def uniform(num_reqs, num_tokens, max_query_len):
    return max_query_len if num_tokens == num_reqs * max_query_len else None


class Speculator:
    """A draft that proposes ``num_speculative_steps`` tokens after each step of the target."""

    def __init__(self, config, model, managers):
        self.num_speculative_steps = config.num_draft_tokens
        self.max_num_reqs = config.max_num_reqs
        self.max_model_len = config.max_model_len
        self.model = model
        self.draft_attn_layer_names = set(model.layers)
        self.input_buffers = InputBuffers(config.max_num_reqs, config.max_num_tokens, None)
        self.hidden_states = torch.zeros(config.max_num_tokens, dtype=torch.int64)
        self.idx_mapping = torch.zeros(config.max_num_reqs, dtype=torch.int64)
        self.last_token_indices = torch.zeros(config.max_num_reqs, dtype=torch.int64)
        self.draft_tokens = torch.zeros(
            config.max_num_reqs, self.num_speculative_steps, dtype=torch.int64
        )
        self._config, self._managers = config, managers
        self.eager_prefills = 0

    def init_cudagraph_manager(self, lora=True):
        prefill, decode = self._managers
        query_len = self.num_speculative_steps + 1
        self.prefill_cudagraph_manager = prefill(self._config, query_len)
        self.decode_cudagraph_manager = decode(self._config, 1, "FULL_DECODE_ONLY")

    def set_attn(self, model_state, kv_cache_config, block_tables, input_buffers, attn_groups):
        self.model_state, self.kv_cache_config = model_state, kv_cache_config
        self.block_tables = block_tables
        self.target_input_buffers, self.target_attn_groups = input_buffers, attn_groups
        layers = sorted(self.draft_attn_layer_names)
        self.attn_groups = make_groups(
            attn_groups[0][0].backend, layers, self.max_num_reqs, self._config.head_size
        )

    def _build(self, num_reqs, num_reqs_padded, num_tokens_padded, max_query_len):
        return build_attn_metadata(
            self.attn_groups,
            num_reqs_padded,
            num_tokens_padded,
            self.input_buffers.query_start_loc[: num_reqs_padded + 1],
            max_query_len,
            self.input_buffers.seq_lens[:num_reqs_padded],
            self.max_model_len,
            [each[:num_reqs_padded] for each in self.block_tables.input_block_tables],
            self.block_tables.slot_mappings[:, :num_tokens_padded],
        )

    def _run_model(self, num_tokens, metadata, slots):
        ids = self.input_buffers.input_ids[:num_tokens]
        return self.model.forward(
            ids * 13 + self.hidden_states[:num_tokens],
            self.input_buffers.positions[:num_tokens],
            metadata,
            slots,
        )

    def _prefill(self, num_reqs, num_tokens, metadata, slots, num_tokens_across_dp, cg_mode=None):
        last = self.last_token_indices[:num_reqs]
        positions = self.input_buffers.positions[last]
        hidden = self._run_model(num_tokens, metadata, slots)[last]
        self.draft_tokens[:num_reqs, 0] = self.model.token(hidden)
        self.hidden_states[:num_reqs] = hidden
        self.input_buffers.positions[:num_reqs] = positions

    def _one_draft(self, num_reqs, num_tokens, metadata, slots, step):
        hidden = self._run_model(num_tokens, metadata, slots)[:num_reqs]
        tokens = self.model.token(hidden)
        # In place, where the step is: a graph for all steps cannot know it.
        column = (torch.arange(self.num_speculative_steps) == step)[None]
        self.draft_tokens[:num_reqs] = torch.where(
            column, tokens[:, None], self.draft_tokens[:num_reqs]
        )
        self.input_buffers.input_ids[:num_reqs] = tokens
        self.hidden_states[:num_reqs] = hidden
        self.input_buffers.positions[:num_reqs] += 1
        self.input_buffers.seq_lens[:num_reqs] += 1

    def _prepare_prefill(self, batch, num_sampled, num_rejected, last_sampled):
        """Shift the target's inputs by one; take over its lengths, padding included."""
        num_reqs = batch.num_reqs
        mine = self.input_buffers
        starts = batch.query_start_loc[: num_reqs + 1].tolist()
        mine.input_ids[: batch.num_tokens_after_padding] = batch.input_ids
        mine.positions[: batch.num_tokens_after_padding] = batch.positions
        self.last_token_indices.zero_()
        for i, (start, end) in enumerate(pairwise(starts)):
            last = end - 1 - int(num_rejected[i])
            mine.input_ids[start:last] = batch.input_ids[start + 1 : last + 1]
            mine.input_ids[last] = last_sampled[i]
            self.last_token_indices[i] = last
        mine.query_start_loc[: num_reqs + 1] = batch.query_start_loc[: num_reqs + 1]
        mine.query_start_loc[num_reqs + 1 :] = starts[-1]
        mine.seq_lens.zero_()
        mine.seq_lens[:num_reqs] = batch.seq_lens[:num_reqs]

    def _prepare_decode(self, batch, num_rejected):
        num_reqs = batch.num_reqs
        mine = self.input_buffers
        mine.input_ids[:num_reqs] = self.draft_tokens[:num_reqs, 0]
        mine.positions[:num_reqs] += 1
        mine.query_start_loc.copy_(torch.arange(len(mine.query_start_loc)).clamp(max=num_reqs))
        mine.seq_lens.zero_()
        mine.seq_lens[:num_reqs] = batch.seq_lens[:num_reqs] - num_rejected + 1

    def _start(self, batch, last_hidden_states, num_sampled, num_rejected, last_sampled):
        num_tokens, num_reqs = batch.num_tokens_after_padding, batch.num_reqs
        self.hidden_states[:num_tokens] = last_hidden_states[:num_tokens]
        self.idx_mapping[:num_reqs] = batch.idx_mapping
        self._prepare_prefill(batch, num_sampled, num_rejected, last_sampled)
        return num_tokens, num_reqs


class SteppingSpeculator(Speculator):
    """0.21.0 and later: each draft step is a graph of its own, and its metadata is rebuilt."""

    dispatch_more: dict[str, int] = {}

    def propose(
        self, batch, attn_metadata, slot_mappings, hidden, num_sampled, num_rejected, last_sampled
    ):
        num_tokens, num_reqs = self._start(batch, hidden, num_sampled, num_rejected, last_sampled)
        desc = self.prefill_cudagraph_manager.dispatch(
            num_reqs,
            num_tokens,
            uniform(num_reqs, batch.num_tokens, max(batch.num_scheduled_tokens)),
            **self.dispatch_more,
        )
        if desc.cg_mode == CUDAGraphMode.FULL:
            self.prefill_cudagraph_manager.run_fullgraph(desc)
        else:
            self.eager_prefills += 1
            self._prefill(num_reqs, desc.num_tokens, attn_metadata, slot_mappings, None)
        if self.num_speculative_steps == 1:
            return self.draft_tokens[:num_reqs]
        self._prepare_decode(batch, num_rejected)
        desc = self.decode_cudagraph_manager.dispatch(num_reqs, num_reqs, 1, **self.dispatch_more)
        for step in range(1, self.num_speculative_steps):
            slots = self.block_tables.compute_slot_mappings(
                self.idx_mapping[:num_reqs],
                self.input_buffers.query_start_loc[: num_reqs + 1],
                self.input_buffers.positions[:num_reqs],
                desc.num_tokens,
            )
            by_layer = build_slot_mappings_by_layer(slots, self.kv_cache_config)
            metadata = self._build_draft_attn_metadata(
                num_reqs=num_reqs,
                num_reqs_padded=desc.num_reqs or num_reqs,
                num_tokens_padded=desc.num_tokens,
            )
            self._step.fill_(step)
            if desc.cg_mode == CUDAGraphMode.FULL:
                self.decode_cudagraph_manager.run_fullgraph(desc)
            else:
                self._generate_draft(num_reqs, desc.num_tokens, metadata, by_layer, None)
        return self.draft_tokens[:num_reqs]

    def _generate_draft(self, num_reqs, num_tokens, metadata, slots, across_dp, cg_mode=None):
        self._one_draft(num_reqs, num_tokens, metadata, slots, self._step)

    def __init__(self, config, model, managers):
        super().__init__(config, model, managers)
        self._step = torch.zeros((), dtype=torch.int64)

    def _capture_decode(self):
        if self.num_speculative_steps > 1:
            self.decode_cudagraph_manager.capture(
                self._generate_draft,
                self.model_state,
                self.input_buffers,
                self.block_tables,
                self.attn_groups,
                self.kv_cache_config,
            )


class HandedSpeculator(SteppingSpeculator):
    """0.21.0 and 0.25.1: handed the target's states."""

    def capture(self, attn_states):
        self.prefill_cudagraph_manager.capture(self._prefill, attn_states)
        self._capture_decode()


class Speculator_0_21(HandedSpeculator):
    def _build_draft_attn_metadata(self, num_reqs, num_reqs_padded, num_tokens_padded):
        return self._build(num_reqs, num_reqs_padded, num_tokens_padded, 1)


class Speculator_0_25(HandedSpeculator):
    dispatch_more = {"num_active_loras": 0}

    def _build_draft_attn_metadata(
        self, num_reqs, num_reqs_padded, num_tokens_padded, num_query_per_req=1, causal=True
    ):
        return self._build(num_reqs, num_reqs_padded, num_tokens_padded, num_query_per_req)


class Speculator_0_26(SteppingSpeculator):
    """0.26.0: builds through the target's buffers and groups for each capture."""

    dispatch_more = {"num_active_loras": 0}

    def capture(self):
        self.prefill_cudagraph_manager.capture(
            self._prefill,
            self.model_state,
            self.target_input_buffers,
            self.block_tables,
            self.target_attn_groups,
            self.kv_cache_config,
        )
        self._capture_decode()

    _build_draft_attn_metadata = Speculator_0_25._build_draft_attn_metadata


class Speculator_0_20(Speculator):
    """0.20.2: rebuilds before each prefill; all draft decodes of a step are one graph."""

    def _build_draft_attn_metadata(
        self, num_reqs, num_reqs_padded, num_tokens_padded, max_query_len
    ):
        return self._build(num_reqs, num_reqs_padded, num_tokens_padded, max_query_len)

    def capture_model(self):
        mine = (
            self.model_state,
            self.input_buffers,
            self.block_tables,
            self.attn_groups,
            self.kv_cache_config,
        )
        self.prefill_cudagraph_manager.capture(self._prefill, *mine)
        if self.num_speculative_steps > 1:
            self.decode_cudagraph_manager.capture(self.generate_draft, *mine)

    def generate_draft(self, num_reqs, num_tokens, metadata, slots, across_dp, cg_mode=None):
        for step in range(1, self.num_speculative_steps):
            self._one_draft(num_reqs, num_tokens, metadata, slots, step)
            if step < self.num_speculative_steps - 1 and metadata is not None:
                self.block_tables.compute_slot_mappings(
                    self.idx_mapping[:num_reqs],
                    self.input_buffers.query_start_loc[: num_reqs + 1],
                    self.input_buffers.positions[:num_reqs],
                    num_tokens,
                )

    def propose(
        self, batch, attn_metadata, slot_mappings, hidden, num_sampled, num_rejected, last_sampled
    ):
        num_tokens, num_reqs = self._start(batch, hidden, num_sampled, num_rejected, last_sampled)
        # On padded tokens: another answer than the target's, for a padded batch.
        longest = max(batch.num_scheduled_tokens)
        desc = self.prefill_cudagraph_manager.dispatch(
            num_reqs, num_tokens, uniform(num_reqs, num_tokens, longest)
        )
        if desc.cg_mode == CUDAGraphMode.FULL:
            self._build_draft_attn_metadata(
                num_reqs=num_reqs,
                num_reqs_padded=desc.num_reqs or num_reqs,
                num_tokens_padded=desc.num_tokens,
                max_query_len=self.num_speculative_steps + 1,
            )
            self.prefill_cudagraph_manager.run_fullgraph(desc)
        else:
            self.eager_prefills += 1
            self._prefill(num_reqs, desc.num_tokens, attn_metadata, slot_mappings, None)
        if self.num_speculative_steps == 1:
            return self.draft_tokens[:num_reqs]
        self._prepare_decode(batch, num_rejected)
        desc = self.decode_cudagraph_manager.dispatch(num_reqs, num_reqs, 1)
        slots = self.block_tables.compute_slot_mappings(
            self.idx_mapping[:num_reqs],
            self.input_buffers.query_start_loc[: num_reqs + 1],
            self.input_buffers.positions[:num_reqs],
            desc.num_tokens,
        )
        metadata = self._build_draft_attn_metadata(
            num_reqs=num_reqs,
            num_reqs_padded=desc.num_reqs or num_reqs,
            num_tokens_padded=desc.num_tokens,
            max_query_len=1,
        )
        if desc.cg_mode == CUDAGraphMode.FULL:
            self.decode_cudagraph_manager.run_fullgraph(desc)
        else:
            by_layer = build_slot_mappings_by_layer(slots, self.kv_cache_config)
            self.generate_draft(num_reqs, desc.num_tokens, metadata, by_layer, None)
        return self.draft_tokens[:num_reqs]
