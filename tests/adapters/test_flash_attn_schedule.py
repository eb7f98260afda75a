"""The layout of FlashAttention 3's plans, and which specs may share one."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphshare import AttentionSpec
from graphshare.adapters.flash_attn import (
    FlashAttention2Spec,
    FlashAttention3Spec,
    metadata_size,
    resolve,
)
from tests.flash_attn_pairs import PAIRS

LAUNCH = {
    "num_reqs": 8,
    "max_query_len": 4,
    "max_seq_len": 4096,
    "gqa_ratio": 4,
    "head_size": 128,
    "page_size": 256,
    "causal": True,
    "window": -1,
    "num_splits": 16,
    "packs_always": True,
}

launches = st.fixed_dictionaries(
    {
        "num_reqs": st.integers(1, 1100),
        "max_query_len": st.sampled_from([1, 2, 4, 200, 1024]),
        "max_seq_len": st.sampled_from([256, 4096]),
        "gqa_ratio": st.sampled_from([1, 4, 8, 16]),
        "head_size": st.sampled_from([64, 96, 128, 192, 256]),
        "page_size": st.sampled_from([16, 128, 256]),
        "causal": st.booleans(),
        "window": st.sampled_from([-1, 0, 100, 254, 255, 4095]),
        "num_splits": st.sampled_from([1, 2, 32]),
        "packs_always": st.booleans(),
    }
)


@given(launches)
def test_sizes_are_those_of_the_documented_formulas(launch):
    num_reqs = launch["num_reqs"]
    rounded = (num_reqs + 3) & ~3
    vllm, upstream = (resolve(layout, **launch) for layout in ("vllm", "upstream"))
    assert vllm.mask == upstream.mask
    masked, local = vllm.mask != "full", vllm.mask == "local"
    splits = launch["num_splits"] > 1 and num_reqs <= 992
    assert metadata_size(num_reqs, len(vllm.vectors)) == rounded * (1 + splits + masked) + 1
    assert (
        metadata_size(num_reqs, len(upstream.vectors)) == rounded * (2 + (not local) + masked) + 1
    )
    assert vllm.packed or not (launch["packs_always"] or launch["num_splits"] > 1)


@pytest.mark.parametrize(
    ("changes", "mask"),
    [
        ({}, "causal"),
        ({"causal": False}, "full"),
        ({"window": 100}, "local"),
        ({"window": 100, "causal": False}, "local"),
        ({"window": 4095}, "causal"),  # a window as long as any request is none
        ({"window": 4094}, "local"),
        ({"window": 4095, "causal": False}, "full"),
        ({"max_query_len": 1}, "causal"),  # kept, for pages and this head size
        ({"max_query_len": 1, "head_size": 64}, "full"),
        ({"max_query_len": 1, "head_size": 96}, "causal"),
        ({"max_query_len": 1, "head_size": 192}, "full"),
        ({"max_query_len": 1, "head_size": 64, "window": 100}, "local"),
    ],
)
def test_what_a_launch_makes_of_its_mask(changes, mask):
    assert resolve("vllm", **{**LAUNCH, **changes}).mask == mask


# As vLLM 0.25.1's build returned them on an H200: requests, rows, head size, causal, window,
# splits, elements.
MEASURED = [
    (16, 4, 128, True, -1, 16, 49),
    (16, 4, 128, True, -1, 1, 33),
    (16, 4, 128, False, -1, 16, 33),
    (16, 4, 128, False, -1, 1, 17),
    (16, 1, 128, True, -1, 16, 49),
    (16, 4, 128, True, 300, 16, 49),
    (64, 1, 128, True, -1, 32, 193),
]


@pytest.mark.parametrize("case", MEASURED)
def test_sizes_that_a_gpu_returned(case):
    num_reqs, query_len, head_size, causal, window, num_splits, size = case
    launch = {
        **LAUNCH,
        "num_reqs": num_reqs,
        "max_query_len": query_len,
        "head_size": head_size,
        "causal": causal,
        "window": window,
        "num_splits": num_splits,
    }
    assert metadata_size(num_reqs, len(resolve("vllm", **launch).vectors)) == size


def test_equal_sizes_may_be_other_layouts():
    """Why a size proves nothing: these pass a launch's check, and are misread."""
    split = resolve("vllm", **{**LAUNCH, "causal": False})
    causal = resolve("vllm", **{**LAUNCH, "num_splits": 1})
    assert len(split.vectors) == len(causal.vectors)
    assert split.vectors != causal.vectors
    full = resolve("upstream", **{**LAUNCH, "causal": False})
    local = resolve("upstream", **{**LAUNCH, "window": 100})
    assert len(full.vectors) == len(local.vectors)
    assert full.vectors != local.vectors


@pytest.mark.parametrize(
    ("changes", "packed"),
    [
        ({}, False),  # whole tiles: nothing to gain
        ({"num_splits": 2}, True),
        ({"packs_always": True}, True),
        ({"page_size": 16}, True),  # pages are not loaded whole
        ({"window": 100}, True),
        ({"max_query_len": 128}, True),  # might be less than a tile
        ({"max_query_len": 132}, True),  # half of the second tile would be empty
        ({"gqa_ratio": 1}, False),
        ({"causal": False, "page_size": 176}, False),
        ({"causal": False, "page_size": 256}, True),
    ],
)
def test_when_a_launch_packs_by_its_own_choice(changes, packed):
    launch = {**LAUNCH, "max_query_len": 1024, "num_splits": 1, "packs_always": False, **changes}
    assert resolve("vllm", **launch).packed is packed


TARGET = FlashAttention3Spec(
    num_q_heads=32,
    num_kv_heads=8,
    head_size=128,
    page_size=256,
    causal=True,
    window=-1,
    backend="flash_attn3/vllm",
    max_seq_len=4096,
    max_query_len=512,
)

MORE = [
    ({"head_size": 64, "least_query_len": 2}, ()),
    ({"page_size": 128}, ("page_size",)),
    ({"backend": "flash_attn3/upstream"}, ("backend",)),
    ({"max_query_len": 4}, ()),
]


@pytest.mark.parametrize(
    ("changes", "named"), [*PAIRS.values(), *MORE], ids=[*PAIRS, *(str(each[0]) for each in MORE)]
)
def test_who_may_borrow_from_a_target(changes, named):
    changes = {name: value for name, value in changes.items() if name != "dtype"}
    assert TARGET.differing(dataclasses.replace(TARGET, **changes)) == named


def test_splits_count_where_both_say_them():
    ours = dataclasses.replace(TARGET, num_splits=16)
    assert ours.differing(TARGET) == TARGET.differing(ours) == ()
    assert ours.differing(dataclasses.replace(TARGET, num_splits=32)) == ("num_splits",)


def test_what_is_not_stated_is_not_compared():
    assert TARGET.differing(AttentionSpec()) == ()
    assert TARGET.differing(AttentionSpec(num_q_heads=16, num_kv_heads=8)) == ("num_q_heads",)
    assert TARGET.differing(AttentionSpec(causal=False)) == ("causal",)
    assert TARGET.differing(FlashAttention2Spec(backend="flash_attn2/flash_attn")) == ("backend",)
    assert FlashAttention3Spec().differing(TARGET) == ()


def test_the_originals_plans_count_tiles_of_a_head_size():
    lender = dataclasses.replace(
        TARGET, layout="upstream", packs_always=False, backend="flash_attn3/upstream"
    )
    assert lender.differing(dataclasses.replace(lender, head_size=96)) == ("head_size",)
    # A window has no order of requests in its plan.
    assert lender.differing(dataclasses.replace(lender, window=300)) == ("window",)
    assert lender.differing(dataclasses.replace(lender, num_q_heads=16, num_kv_heads=4)) == ()


def test_flash_attention_2_compares_pages_alone():
    lender = FlashAttention2Spec(
        num_q_heads=32, num_kv_heads=8, head_size=128, page_size=256, causal=True, window=-1
    )
    other = dataclasses.replace(
        lender, num_q_heads=6, num_kv_heads=2, head_size=64, causal=False, window=9
    )
    assert lender.differing(other) == ()
    assert lender.differing(dataclasses.replace(other, page_size=512)) == ("page_size",)


@given(st.sampled_from(["vllm", "upstream"]), launches, launches, st.booleans())
def test_specs_that_do_not_differ_resolve_alike(layout, one, two, packs):
    """Whatever the key: the borrower's launch finds the plan that it would have made itself."""

    def spec(launch):
        return FlashAttention3Spec(
            num_q_heads=launch["gqa_ratio"],
            num_kv_heads=1,
            head_size=launch["head_size"],
            page_size=one["page_size"],
            causal=launch["causal"],
            window=launch["window"],
            layout=layout,
            packs_always=packs,
            max_seq_len=one["max_seq_len"],
            max_query_len=one["max_query_len"],
        )

    allowed = not spec(one).differing(spec(two))
    common = {name: one[name] for name in ("num_reqs", "max_seq_len", "page_size", "num_splits")}
    alike = True
    for query_len in range(1, min(one["max_query_len"], 200) + 1):
        mine, theirs = (
            resolve(
                layout,
                **{**each, **common, "max_query_len": query_len, "packs_always": packs},
            )
            for each in (one, two)
        )
        same_rows = layout == "vllm" or mine.rows == theirs.rows
        same_ratio = not mine.packed or one["gqa_ratio"] == two["gqa_ratio"]
        alike &= mine.vectors == theirs.vectors and mine.packed == theirs.packed
        alike &= same_rows and same_ratio
    assert alike or not allowed
