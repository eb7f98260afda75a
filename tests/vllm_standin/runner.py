"""The target's steps, and the worker that starts them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from tests.vllm_standin.model import Attention, Model
from tests.vllm_standin.parts import (
    PAGE,
    BlockTables,
    CUDAGraphMode,
    DefaultModelState,
    FlashAttentionBackend,
    InputBatch,
    InputBuffers,
    KVCacheConfig,
    KVCacheGroup,
    make_groups,
)
from tests.vllm_standin.speculators import uniform


@dataclass
class Config:
    """Sizes, and what a user of vLLM sets."""

    max_num_reqs: int = 4
    max_num_tokens: int = 32
    max_model_len: int = 48
    num_draft_tokens: int = 3
    num_blocks: int = 64
    capture_sizes: tuple[int, ...] = (4, 8, 16)
    cudagraph_mode: str = "FULL"
    backend: Any = FlashAttentionBackend
    head_size: int = 128
    layers_alone: int = 0
    method: str = "eagle"
    lora_cases: tuple[int, ...] = (0,)
    parallel: dict[str, int] = field(default_factory=dict)
    speculative: bool = True


def runner_class(version, world):
    """Return the version's ``GPUModelRunner``."""

    class GPUModelRunner:
        def __init__(self, config):
            self.config = config
            self.device = torch.device("cpu")
            self.parallel_config = SimpleNamespace(**config.parallel)
            self.model_config = SimpleNamespace(is_mm_prefix_lm=False, rswa_window=None)
            self.speculative_config = SimpleNamespace(method=config.method)
            self.input_buffers = InputBuffers(config.max_num_reqs, config.max_num_tokens, None)
            blocks = config.max_model_len // PAGE
            self.block_tables = BlockTables(config.max_num_reqs, config.max_num_tokens, blocks)
            self.model_state = DefaultModelState(config.max_model_len)
            layers = {
                name: Attention(config.num_blocks, config.max_model_len)
                for name in ("model.layers.0.attn", "model.layers.1.attn", "draft.layers.0.attn")
            }
            names = list(layers)
            self.kv_cache_config = KVCacheConfig([KVCacheGroup(names)])
            self.attn_groups = make_groups(
                config.backend, names, config.max_num_reqs, config.head_size, config.layers_alone
            )
            self.model = Model({name: layers[name] for name in names[:2]})
            more = (
                {} if version in ("0.20.2", "0.21.0") else {"lora_capture_cases": config.lora_cases}
            )
            self.cudagraph_manager = world.ModelCudaGraphManager(
                config, config.num_draft_tokens + 1, **more
            )
            self.speculator = None
            if config.speculative:
                self.speculator = world.EagleSpeculator(
                    config, Model({names[2]: layers[names[2]]}), world.draft_managers
                )
                self.speculator.init_cudagraph_manager()
                self.speculator.set_attn(
                    self.model_state,
                    self.kv_cache_config,
                    self.block_tables,
                    self.input_buffers,
                    self.attn_groups,
                )
            self.ran = []  # what the target ran, by step
            self.computed = [0] * config.max_num_reqs  # on the CPU, by row

        @torch.inference_mode()
        def capture_model(self):
            if not self.cudagraph_manager.needs_capture():
                return 0
            states = self.cudagraph_manager.capture(
                self.model,
                self.model_state,
                self.input_buffers,
                None,
                self.block_tables,
                self.attn_groups,
                self.kv_cache_config,
            )
            if self.speculator is not None:
                if version == "0.20.2":
                    self.speculator.capture_model()
                elif version == "0.26.0":
                    self.speculator.capture()
                else:
                    self.speculator.capture(states)
            return 1

        def _prepare_inputs(self, scheduled, desc):
            requests = [each for each, _, _ in scheduled]
            lengths = [len(tokens) for _, tokens, _ in scheduled]
            num_reqs, num_tokens = len(scheduled), sum(lengths)
            padded_reqs = desc.num_reqs or num_reqs
            buffers = self.input_buffers
            ids = [token for _, tokens, _ in scheduled for token in tokens]
            positions = [start + i for _, tokens, start in scheduled for i in range(len(tokens))]
            buffers.input_ids[:num_tokens] = torch.tensor(ids)
            buffers.positions[:num_tokens] = torch.tensor(positions)
            starts = torch.tensor([0, *lengths]).cumsum(0)
            buffers.query_start_loc[: num_reqs + 1] = starts
            buffers.query_start_loc[num_reqs + 1 :] = num_tokens
            buffers.seq_lens.zero_()
            ends = [start + len(tokens) for _, tokens, start in scheduled]
            for row, tokens, start in scheduled:
                # Before 0.25 rejected drafts are never taken off it.
                if start == 0 or version not in ("0.20.2", "0.21.0"):
                    self.computed[row] = start
                self.computed[row] += len(tokens)
            buffers.seq_lens[:num_reqs] = torch.tensor(ends, dtype=torch.int32)
            return InputBatch(
                num_reqs=num_reqs,
                num_reqs_after_padding=padded_reqs,
                num_tokens=num_tokens,
                num_tokens_after_padding=desc.num_tokens,
                num_scheduled_tokens=lengths,
                idx_mapping=torch.tensor(requests),
                query_start_loc=buffers.query_start_loc[: padded_reqs + 1],
                seq_lens=buffers.seq_lens[:padded_reqs],
                max_seq_len=max(self.computed[row] for row in requests),
                input_ids=buffers.input_ids[: desc.num_tokens],
                positions=buffers.positions[: desc.num_tokens],
            )

        @torch.inference_mode()
        def execute_model(self, scheduled, num_active_loras=0):
            """``scheduled``: for each request its row, tokens, and number of tokens before them."""
            lengths = [len(tokens) for _, tokens, _ in scheduled]
            args = [len(scheduled), sum(lengths), uniform(len(lengths), sum(lengths), max(lengths))]
            more = {}
            if version not in ("0.20.2", "0.21.0"):
                more["num_active_loras"] = num_active_loras
            desc = self.cudagraph_manager.dispatch(*args, **more)
            self.ran.append(desc)
            batch = self._prepare_inputs(scheduled, desc)
            tables = self.block_tables.gather_block_tables(
                batch.idx_mapping, batch.num_reqs_after_padding
            )
            slots = self.block_tables.compute_slot_mappings(
                batch.idx_mapping, batch.query_start_loc, batch.positions, desc.num_tokens
            )
            by_layer = world.build_slot_mappings_by_layer(slots, self.kv_cache_config)
            metadata = self.model_state.prepare_attn(
                batch, desc.cg_mode, tables, slots, self.attn_groups, self.kv_cache_config
            )
            if desc.cg_mode == CUDAGraphMode.FULL:
                hidden = self.cudagraph_manager.run_fullgraph(desc)
            else:
                hidden = self.model.forward(batch.input_ids, batch.positions, metadata, by_layer)
            return batch, metadata, by_layer, hidden

        @torch.inference_mode()
        def propose(self, executed, num_sampled, num_rejected, last_sampled):
            batch, metadata, by_layer, hidden = executed
            return self.speculator.propose(
                batch, metadata, by_layer, hidden, num_sampled, num_rejected, last_sampled
            )

    return GPUModelRunner


class Worker:
    def __init__(self, model_runner):
        self.model_runner = model_runner

    def compile_or_warm_up_model(self):
        return self.model_runner.capture_model()
