"""Buffers, tables, builders and model states."""

from __future__ import annotations

import enum
import itertools
import sys
from dataclasses import dataclass, field, fields, make_dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from graphshare.adapters.vllm.signatures import expected

PAGE = 4


class CUDAGraphMode(enum.Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2


@dataclass(frozen=True)
class BatchExecutionDescriptor:
    cg_mode: CUDAGraphMode
    num_tokens: int
    num_reqs: int | None
    uniform_token_count: int | None = None
    num_active_loras: int = 0


@dataclass(frozen=True)
class OldBatchExecutionDescriptor:
    cg_mode: CUDAGraphMode
    num_tokens: int
    num_reqs: int | None
    uniform_token_count: int | None = None


class AttentionState(NamedTuple):
    attn_metadata: Any
    slot_mappings: Any


class CapturedAttentionState(NamedTuple):
    attn_metadata: Any
    slot_mappings: Any


class AttentionStatePair(NamedTuple):
    warmup: AttentionState
    captured: AttentionState


class InputBuffers:
    def __init__(self, max_num_reqs, max_num_tokens, device):
        self.input_ids = torch.zeros(max_num_tokens, dtype=torch.int64)
        self.positions = torch.zeros(max_num_tokens, dtype=torch.int64)
        self.query_start_loc = torch.zeros(max_num_reqs + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(max_num_reqs, dtype=torch.int32)


@dataclass
class InputBatch:
    num_reqs: int
    num_reqs_after_padding: int
    num_tokens: int
    num_tokens_after_padding: int
    num_scheduled_tokens: list[int]
    idx_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    input_ids: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def make_dummy(cls, num_reqs, num_tokens, input_buffers):
        each, rest = divmod(num_tokens, num_reqs)
        lengths = [each] * (num_reqs - 1) + [each + rest]
        input_buffers.seq_lens.zero_()
        input_buffers.seq_lens[:num_reqs] = torch.tensor(lengths, dtype=torch.int32)
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
        input_buffers.query_start_loc[: num_reqs + 1] = starts
        input_buffers.query_start_loc[num_reqs + 1 :] = num_tokens
        input_buffers.input_ids[:num_tokens].zero_()
        input_buffers.positions[:num_tokens].zero_()
        return cls(
            num_reqs=num_reqs,
            num_reqs_after_padding=num_reqs,
            num_tokens=num_tokens,
            num_tokens_after_padding=num_tokens,
            num_scheduled_tokens=lengths,
            idx_mapping=torch.arange(num_reqs),
            query_start_loc=input_buffers.query_start_loc[: num_reqs + 1],
            seq_lens=input_buffers.seq_lens[:num_reqs],
            max_seq_len=max(lengths),
            input_ids=input_buffers.input_ids[:num_tokens],
            positions=input_buffers.positions[:num_tokens],
        )


class BlockTables:
    """Rows of pages by request, and the rows of the batch at hand; one cache group."""

    def __init__(self, max_num_reqs, max_num_tokens, max_num_blocks):
        self.rows = torch.zeros(max_num_reqs, max_num_blocks, dtype=torch.int32)
        self.input_block_tables = [torch.zeros_like(self.rows)]
        self.slot_mappings = torch.zeros(1, max_num_tokens, dtype=torch.int64)

    def gather_block_tables(self, idx_mapping, num_reqs_padded):
        (table,) = self.input_block_tables
        table[: len(idx_mapping)] = self.rows[idx_mapping]
        table[len(idx_mapping) : num_reqs_padded] = 0
        return (table[:num_reqs_padded],)

    def get_dummy_block_tables(self, num_reqs):
        return tuple(table[:num_reqs] for table in self.input_block_tables)

    def compute_slot_mappings(self, idx_mapping, query_start_loc, positions, num_tokens_padded):
        # Whole tensors only: 0.20.2 captures this.
        rows = self.slot_mappings.shape[1]
        at = torch.arange(rows)
        starts = query_start_loc[: len(idx_mapping) + 1].long()
        request = torch.searchsorted(starts[1:].contiguous(), at, right=True)
        live = at < starts[-1]
        request = request.clamp(max=len(idx_mapping) - 1)
        position = torch.zeros(rows, dtype=torch.int64)
        position[: len(positions)] = positions
        position = torch.where(live, position, 0)
        page = self.rows[idx_mapping[request].long(), position // PAGE].long()
        self.slot_mappings[0] = torch.where(live, page * PAGE + position % PAGE, -1)
        return self.slot_mappings[:, :num_tokens_padded]

    def get_dummy_slot_mappings(self, num_tokens):
        self.slot_mappings.fill_(-1)
        return self.slot_mappings[:, :num_tokens]


@dataclass
class KVCacheSpec:
    head_size: int
    num_kv_heads: int = 2
    block_size: int = PAGE
    dtype: torch.dtype = torch.bfloat16


@dataclass
class KVCacheGroup:
    layer_names: list[str]


@dataclass
class KVCacheConfig:
    kv_cache_groups: list[KVCacheGroup]


@lru_cache
def _metadata(version, backend, name):
    fields = expected()[version]["fields"][f"vllm.v1.attention.backends.{backend}:{name}"]
    return make_dataclass(name, [(each, Any, field(default=None)) for each in fields])


def flash_metadata(version):
    return _metadata(version, "flash_attn", "FlashAttentionMetadata")


def triton_metadata(version):
    return _metadata(version, "triton_attn", "TritonAttentionMetadata")


def _made(backend, name, **values):
    """Metadata of the version that is installed, which may lack some of these fields."""
    kind = getattr(sys.modules[f"vllm.v1.attention.backends.{backend}"], name)
    known = {each.name for each in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in known})


class FlashAttentionBackend:
    @staticmethod
    def get_name():
        return "FLASH_ATTN"


class TritonAttentionBackend:
    @staticmethod
    def get_name():
        return "TRITON_ATTN"


_GARBAGE = itertools.count(1_000_000)


class FlashAttentionBuilder:
    def __init__(self, max_num_reqs):
        self.scheduler_metadata = torch.zeros(1 + 4 * (max_num_reqs + 3), dtype=torch.int32)
        self.builds = 0

    def build(self, common, for_capture):
        self.builds += 1
        lengths = (common["query_start_loc"].diff() * 1000 + common["seq_lens"]).int()
        # Three vectors, padded to a multiple of four with whatever memory holds, and a counter.
        stride = -(-len(lengths) // 4) * 4
        n = 1 + 3 * stride
        vectors = torch.full((3, stride), next(_GARBAGE), dtype=torch.int32)
        vectors[:, : len(lengths)] = lengths
        self.scheduler_metadata[: n - 1] = vectors.flatten()
        self.scheduler_metadata[n - 1 :] = 0
        return _made(
            "flash_attn",
            "FlashAttentionMetadata",
            **common,
            use_cascade=False,
            common_prefix_len=0,
            scheduler_metadata=self.scheduler_metadata[:n],
            max_num_splits=32,
            causal=True,
            sliding_window=(-1, -1),
        )


class TritonAttentionBuilder:
    def __init__(self, max_num_reqs):
        self.softmax_segm_output = torch.zeros(max_num_reqs, 2, 4)
        self.softmax_segm_max = torch.zeros(max_num_reqs, 2)
        self.softmax_segm_expsum = torch.zeros(max_num_reqs, 2)
        self.builds = 0

    def build(self, common, for_capture):
        self.builds += 1
        metadata = _made(
            "triton_attn",
            "TritonAttentionMetadata",
            **common,
            seq_threshold_3D=8,
            num_par_softmax_segments=16,
            softmax_segm_output=self.softmax_segm_output,
            softmax_segm_max=self.softmax_segm_max,
            softmax_segm_expsum=self.softmax_segm_expsum,
            causal=True,
            use_cascade=False,
            common_prefix_len=0,
        )
        if for_capture:
            metadata.seq_lens.fill_(1)
        return metadata


@dataclass
class AttentionGroup:
    backend: Any
    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    metadata_builders: list[Any] = field(default_factory=list)

    def get_metadata_builder(self, ubatch_id=0):
        return self.metadata_builders[ubatch_id]


def make_groups(backend, layer_names, max_num_reqs, head_size=128, alone=0):
    """Groups of one cache group: one for each of the first ``alone`` layers, one for the rest."""
    builder = TritonAttentionBuilder if backend is TritonAttentionBackend else FlashAttentionBuilder
    parts = [[name] for name in layer_names[:alone]] + [list(layer_names[alone:])]
    return [
        [
            AttentionGroup(backend, names, KVCacheSpec(head_size), [builder(max_num_reqs)])
            for names in parts
        ]
    ]


def build_slot_mappings_by_layer(slot_mappings, kv_cache_config):
    return {
        name: row
        for row, group in zip(slot_mappings, kv_cache_config.kv_cache_groups, strict=True)
        for name in group.layer_names
    }


def build_attn_metadata(
    attn_groups, num_reqs, num_tokens, query_start_loc, max_query_len, seq_lens, max_seq_len,
    block_tables, slot_mappings, for_cudagraph_capture=False,
):  # fmt: skip
    found = {}
    for within, table, slots in zip(attn_groups, block_tables, slot_mappings, strict=True):
        common = {
            "num_actual_tokens": num_tokens,
            "max_query_len": max_query_len,
            "query_start_loc": query_start_loc,
            "max_seq_len": max_seq_len,
            "seq_lens": seq_lens[:num_reqs],
            "block_table": table,
            "slot_mapping": slots,
        }
        for group in within:
            metadata = group.get_metadata_builder(0).build(common, for_cudagraph_capture)
            found.update(dict.fromkeys(group.layer_names, metadata))
    return found


class DefaultModelState:
    def __init__(self, max_model_len):
        self.max_model_len = max_model_len

    def prepare_attn(
        self, input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups,
        kv_cache_config, for_capture=False,
    ):  # fmt: skip
        full = cudagraph_mode == CUDAGraphMode.FULL
        num_reqs = input_batch.num_reqs_after_padding if full else input_batch.num_reqs
        num_tokens = input_batch.num_tokens_after_padding if full else input_batch.num_tokens
        return build_attn_metadata(
            attn_groups,
            num_reqs,
            num_tokens,
            input_batch.query_start_loc,
            max(input_batch.num_scheduled_tokens),
            input_batch.seq_lens,
            self.max_model_len if for_capture else input_batch.max_seq_len,
            block_tables,
            slot_mappings,
            for_capture,
        )
