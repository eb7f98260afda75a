"""Small forwards of kernel libraries, with the tensors that each is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

REQUESTS, Q_HEADS, KV_HEADS, SIZE, PAGE, PAGES = 8, 32, 8, 128, 256, 4
DTYPE = torch.bfloat16


class Case(NamedTuple):
    """A forward, the tensors that it is given by name, and how to give it others of them.

    ``make(given)`` returns a forward on those tensors; ``given`` is what the first one takes.
    ``inner`` names what a library made for itself: given too, but not by us.
    """

    make: Callable[[dict[str, torch.Tensor]], Callable[[], Any]]
    given: dict[str, torch.Tensor]
    inner: dict[str, torch.Tensor]


def _paged() -> dict[str, torch.Tensor]:
    pages = REQUESTS * PAGES + 1
    key_cache = torch.randn(pages, PAGE, KV_HEADS, SIZE, device="cuda", dtype=DTYPE)
    table = torch.arange(REQUESTS * PAGES, device="cuda").view(REQUESTS, PAGES)
    return {
        "q": torch.randn(REQUESTS, Q_HEADS, SIZE, device="cuda", dtype=DTYPE),
        "key_cache": key_cache,
        "value_cache": torch.randn_like(key_cache),
        "seq_lens": torch.arange(100, 100 + REQUESTS, dtype=torch.int32, device="cuda"),
        "block_table": (1 + table).int(),
    }


def flash_attention_2() -> Case:
    from flash_attn import flash_attn_with_kvcache

    def make(t: dict[str, torch.Tensor]) -> Callable[[], Any]:
        return lambda: flash_attn_with_kvcache(
            t["q"][:, None],
            t["key_cache"],
            t["value_cache"],
            cache_seqlens=t["seq_lens"],
            block_table=t["block_table"],
            causal=True,
        )

    return Case(make, _paged(), {})


def flash_attention_3() -> Case:
    from vfa3.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

    given = _paged()
    given["cu_seqlens_q"] = torch.arange(REQUESTS + 1, dtype=torch.int32, device="cuda")
    given["metadata"] = get_scheduler_metadata(
        batch_size=REQUESTS,
        max_seqlen_q=1,
        max_seqlen_k=PAGE * PAGES,
        num_heads_q=Q_HEADS,
        num_heads_kv=KV_HEADS,
        headdim=SIZE,
        cache_seqlens=given["seq_lens"],
        qkv_dtype=DTYPE,
        cu_seqlens_q=given["cu_seqlens_q"],
        page_size=PAGE,
        causal=True,
        num_splits=16,
    )

    def make(t: dict[str, torch.Tensor]) -> Callable[[], Any]:
        return lambda: flash_attn_varlen_func(
            t["q"],
            t["key_cache"],
            t["value_cache"],
            max_seqlen_q=1,
            cu_seqlens_q=t["cu_seqlens_q"],
            max_seqlen_k=PAGE * PAGES,
            seqused_k=t["seq_lens"],
            block_table=t["block_table"],
            causal=True,
            fa_version=3,
            scheduler_metadata=t["metadata"],
            num_splits=16,
        )

    return Case(make, given, {})


def flashinfer_decode() -> Case:
    import flashinfer
    from flashinfer.utils import _cache_buf

    paged = _paged()
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    indptr = torch.zeros(REQUESTS + 1, dtype=torch.int32, device="cuda")
    indices = torch.zeros(REQUESTS * PAGES, dtype=torch.int32, device="cuda")
    last_page = torch.ones(REQUESTS, dtype=torch.int32, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        "NHD",
        use_cuda_graph=True,
        paged_kv_indptr_buffer=indptr,
        paged_kv_indices_buffer=indices,
        paged_kv_last_page_len_buffer=last_page,
    )
    pages = (paged["seq_lens"] + PAGE - 1) // PAGE
    starts = torch.cat([torch.zeros(1, dtype=torch.int32, device="cuda"), pages.cumsum(0).int()])
    flat = torch.cat([row[: int(n)] for row, n in zip(paged["block_table"], pages, strict=True)])
    wrapper.plan(
        starts,
        flat,
        (paged["seq_lens"] - 1) % PAGE + 1,
        Q_HEADS,
        KV_HEADS,
        SIZE,
        PAGE,
        q_data_type=DTYPE,
        kv_data_type=DTYPE,
    )
    given = {name: paged[name] for name in ("q", "key_cache", "value_cache")}
    given |= {"indptr": indptr, "indices": indices, "last_page": last_page, "workspace": workspace}
    wrapper.run(paged["q"], (paged["key_cache"], paged["value_cache"]))  # fills its caches
    held = {**vars(wrapper), **{str(key): each for key, each in _cache_buf.items()}}
    inner = {
        name: value
        for name, value in held.items()
        if isinstance(value, torch.Tensor) and value.is_cuda
        if all(value.data_ptr() != each.data_ptr() for each in given.values())
    }

    def make(t: dict[str, torch.Tensor]) -> Callable[[], Any]:
        return lambda: wrapper.run(t["q"], (t["key_cache"], t["value_cache"]))

    return Case(make, given, inner)


def triton_add() -> Case:
    from tests.gpu.triton_kernels import scaled_add

    x = torch.randn(1000, device="cuda")
    given = {"x": x, "y": torch.randn_like(x), "out": torch.zeros_like(x)}

    def make(t: dict[str, torch.Tensor]) -> Callable[[], Any]:
        def forward() -> torch.Tensor:
            scaled_add[(1,)](t["x"], t["y"], t["out"], 2.0, x.numel(), BLOCK=1024)
            return t["out"]

        return forward

    return Case(make, given, {})


def _matmul(rows: int, dtype: torch.dtype) -> Case:
    x = torch.randn(rows, 1024, device="cuda", dtype=dtype)
    weight = torch.randn(1024, 1024, device="cuda", dtype=dtype)
    given = {"x": x, "weight": weight, "out": torch.zeros_like(x)}

    def make(t: dict[str, torch.Tensor]) -> Callable[[], Any]:
        return lambda: torch.mm(t["x"], t["weight"], out=t["out"])

    return Case(make, given, {})


def torch_operators() -> Case:
    given = {
        "x": torch.randn(64, 64, device="cuda"),
        "index": torch.arange(63, -1, -1, device="cuda"),
        "lengths": torch.arange(64, device="cuda", dtype=torch.int32),
        "cache": torch.randn(64, 64, device="cuda"),
        "copy": torch.zeros(64, 64, device="cuda"),
        "fill": torch.ones(64, 64, device="cuda"),
        "stack": torch.randn(3, 64, 64, device="cuda"),
    }

    def make(t: dict[str, torch.Tensor]) -> Callable[[], Any]:
        def forward() -> torch.Tensor:
            t["cache"].index_copy_(0, t["index"], t["x"])
            seen = torch.arange(64, device="cuda") < t["lengths"][:, None]
            gathered = t["cache"][t["index"]].masked_fill(~seen, 0.0)
            t["copy"].copy_(t["x"])
            t["fill"].zero_()
            many = torch._foreach_add(list(t["stack"]), 1.0)
            return gathered.cumsum(0) + torch.cat(many).view(3, 64, 64).sum(0) + t["copy"]

        return forward

    return Case(make, given, {})


CASES: dict[str, Callable[[], Case]] = {
    "flash_attention_2": flash_attention_2,
    "flash_attention_3": flash_attention_3,
    "flashinfer_decode": flashinfer_decode,
    "triton": triton_add,
    "cublas_bf16_8_rows": lambda: _matmul(8, DTYPE),
    "cublas_bf16_4096_rows": lambda: _matmul(4096, DTYPE),
    "cublas_f32": lambda: _matmul(64, torch.float32),
    "torch": torch_operators,
}
