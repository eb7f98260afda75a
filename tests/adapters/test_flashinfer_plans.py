"""FlashInfer's plans by name, the memory that they take, and who may run on whose."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphshare import AttentionSpec, GraphPool, SpecMismatchError, share_states
from graphshare.adapters.flashinfer import (
    FlashInferSpec,
    batch_attention_float_bytes,
    decode_float_bytes,
    fa2_float_bytes,
)
from graphshare.adapters.flashinfer.attention import spec_of
from graphshare.adapters.flashinfer.library import PRIVATE
from graphshare.adapters.flashinfer.plans import int_workspace_bytes, named_plan
from graphshare.adapters.paged.shape import AttentionShape
from tests.flashinfer_library import SIGNATURES
from tests.flashinfer_pairs import PAIRS, Pair

# Seen on an H200 (132 multiprocessors) with FlashInfer 0.6.14, heads of 128, with the bytes of the
# smallest int workspace that the library accepted; one byte less was refused.
SEEN: dict[str, tuple[list[int], int]] = {
    "decode": ([132, 0, 2162688, 0, 528, 1056, 1600, 1588, 1, 1], 1732),
    "fa2": ([33, 64, 480, 128, 0, 144, 288, 496, 432, 468, 0, 69206016, 768, 1, 1], 801),
    "fa3": ([0, 1024, 2048, 3072, 4096, 5120, 6144, 6688, 0], 7712),
}
BATCH_ATTENTION = [
    *(1, 264),
    *range(0, 20 * 262144, 262144),
    *(5242880, 0, 77856768, 5242896, 5851152, 6459408),
]


@pytest.mark.parametrize("kernel", SEEN)
def test_the_int_workspace_ends_where_the_library_stops_writing(kernel: Any) -> None:
    numbers, nbytes = SEEN[kernel]
    assert int_workspace_bytes(named_plan(kernel, numbers)) == nbytes


def test_batch_attentions_plan_has_its_own_sizes() -> None:
    plan = named_plan("batch_attention", BATCH_ATTENTION)
    assert int_workspace_bytes(plan) == 6459412
    assert plan.partial_lse_offset + 77856768 // 2 // 128 * 4 == batch_attention_float_bytes(
        2, 128, 132
    )


@pytest.mark.parametrize("kernel", ["decode", "fa2", "fa3", "batch_attention"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_plan_of_another_length_has_no_names(kernel: Any, change: int) -> None:
    length = {"decode": 10, "fa2": 15, "fa3": 9, "batch_attention": 28}[kernel]
    assert tuple(named_plan(kernel, range(length))) == tuple(range(length))
    with pytest.raises(ValueError, match=f"expected {length} numbers"):
        named_plan(kernel, range(length + change))


@pytest.mark.parametrize(
    ("rows", "reqs", "s_offset", "blocks"),
    # Of real plans for 8 query and 2 KV heads: where the sums begin, and padded rows of all tiles.
    [
        (1, 1, 8650752, 132 * 16),
        (8, 4, 34603008, 132 * 64),
        (64, 8, 69206016, 132 * 128),
        (512, 64, 69206016, 132 * 128),
        (64, 16, 69206016, 132 * 128),
        (8, 8, 8650752, 132 * 16),
    ],
)
def test_fa2s_float_workspace(rows: int, reqs: int, s_offset: int, blocks: int) -> None:
    assert fa2_float_bytes(rows, reqs, 8, 2, 128, 132) == s_offset + 8 * blocks * 4


def test_decodes_float_workspace_holds_what_was_seen() -> None:
    seen = 2162688 + 8 * 528 * 4
    assert seen <= decode_float_bytes(8, 2, 128, 132) <= 2.1 * seen


@given(st.integers(1, 600), st.integers(1, 64), st.sampled_from([(8, 2), (32, 8), (4, 4), (16, 1)]))
def test_the_largest_key_bounds_every_key(rows: int, reqs: int, heads: tuple[int, int]) -> None:
    reqs = min(reqs, rows)
    bound = fa2_float_bytes(600, 64, *heads, 128, 132, largest_tile=True)
    assert fa2_float_bytes(rows, reqs, *heads, 128, 132) <= bound


def specs_of(pair: Pair) -> tuple[FlashInferSpec, FlashInferSpec]:
    shape = AttentionShape(num_q_heads=pair.lender[0], num_kv_heads=pair.lender[1], head_size=128)
    changes = dict(pair.changes)
    page_size = changes.pop("page_size", 16)
    lender = spec_of(shape, 16, "flashinfer/1", frozenset({pair.kernel}))
    return lender, spec_of(dataclasses.replace(shape, **changes), page_size, "flashinfer/1")


@pytest.mark.parametrize("name", PAIRS)
def test_each_pair_is_refused_by_its_fields_alone(name: str) -> None:
    lender, borrower = specs_of(PAIRS[name])
    assert sorted(lender.differing(borrower)) == sorted(PAIRS[name].named)


@pytest.mark.parametrize("name", [name for name, pair in PAIRS.items() if pair.named])
def test_a_loan_is_refused_before_anything_is_captured(name: str) -> None:
    lender, borrower = specs_of(PAIRS[name])
    target = GraphPool("target", spec=lender, device="cpu")
    with pytest.raises(SpecMismatchError) as refused:
        share_states(target, GraphPool("draft", spec=borrower, device="cpu"))
    assert sorted(refused.value.fields) == sorted(PAIRS[name].named)


def test_several_kernels_forbid_what_any_of_them_does() -> None:
    lender, borrower = specs_of(Pair("decode", (8, 2), {"num_q_heads": 4, "num_kv_heads": 1}))
    assert lender.differing(borrower) == ()
    both = dataclasses.replace(lender, kernels=frozenset({"decode", "fa3"}))
    assert both.differing(borrower) == ("num_q_heads",)


def test_a_further_plan_is_enough_but_for_every_kernel() -> None:
    lender, borrower = specs_of(Pair("fa3", (8, 2), {"num_q_heads": 16}))
    also = dataclasses.replace(borrower, kernels=lender.kernels)
    assert lender.differing(borrower) == ("num_q_heads",)
    assert dataclasses.replace(lender, also=(also,)).differing(borrower) == ()
    other = dataclasses.replace(also, num_q_heads=32)
    assert dataclasses.replace(lender, also=(other,)).differing(borrower) == ("num_q_heads",)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"head_size": 64}, "head_size"),
        ({"window": 128}, "window"),
        ({"softcap": 30.0}, "softcap"),
        ({"q_dtype": torch.float16}, "q_dtype"),
        ({"kv_dtype": torch.float8_e4m3fn}, "kv_dtype"),
        ({"backend": "flashinfer/2"}, "backend"),
    ],
)
@pytest.mark.parametrize("kernel", ["decode", "fa2", "fa3", "batch_attention"])
def test_what_is_compiled_in_must_agree_for_every_kernel(
    kernel: Any, change: dict[str, Any], named: str
) -> None:
    lender, borrower = specs_of(Pair(kernel, (8, 2), {}))
    assert lender.differing(dataclasses.replace(borrower, **change)) == (named,)
    unstated = dataclasses.replace(borrower, **dict.fromkeys(change))
    assert lender.differing(unstated) == ()


def test_heads_that_are_not_stated_are_not_compared() -> None:
    for kernel in ("decode", "fa2", "fa3", "batch_attention"):
        lender, borrower = specs_of(Pair(kernel, (8, 2), {"num_q_heads": 64, "num_kv_heads": 1}))
        assert lender.differing(borrower)
        for known in ({}, {"num_q_heads": 8}):
            heads = {"num_q_heads": None, "num_kv_heads": None, **known}
            assert lender.differing(dataclasses.replace(borrower, **heads)) == ()


def test_the_state_of_another_library_is_not_this_ones() -> None:
    lender, _ = specs_of(Pair("fa2", (8, 2), {}))
    other = AttentionSpec(num_q_heads=8, backend="flash_attn3/vllm")
    assert lender.differing(other) == ("backend",)


def test_what_the_adapter_reads_is_what_the_wrappers_set() -> None:
    wrappers = {
        "decode": "BatchDecodeWithPagedKVCacheWrapper",
        "fa2": "BatchPrefillWithPagedKVCacheWrapper",
        "fa3": "BatchPrefillWithPagedKVCacheWrapper",
        "batch_attention": "BatchAttention",
    }
    for kernel, names in PRIVATE.items():
        assert set(names) <= set(SIGNATURES["wrappers"][wrappers[kernel]]["attributes"])
