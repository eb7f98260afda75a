"""Stand-ins for builds of FlashAttention, on the CPU: the real signatures, attention in float32.

They show the faults that the real kernels have: a plan of another size is refused, rows that a
plan does not count are not computed, a plan for more splits than the launch has room for spoils
the output, lengths beyond those that FlashAttention 2 is told are cut.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from graphshare.adapters.flash_attn import metadata_size, resolve

RECORDED: dict[str, dict[str, dict[str, str | None]]] = json.loads(
    (Path(__file__).parent / "data" / "flash_attn_signatures.json").read_text()
)
_KEYS_OF_A_TILE = 128


def signature(build: str, function: str) -> inspect.Signature:
    """The real function's."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature(
        [
            inspect.Parameter(
                name, kind, default=inspect.Parameter.empty if default is None else _value(default)
            )
            for name, default in RECORDED[build][function].items()
        ]
    )


def _value(source: str) -> Any:
    # DEFAULT_FA_VERSION is a constant of vLLM's module.
    return eval(source, {"torch": torch, "DEFAULT_FA_VERSION": 2})


def _module(name: str, build: str, **functions: Callable[[Mapping[str, Any]], Any]) -> ModuleType:
    module = ModuleType(name)

    def bound(function: str, implementation: Callable[[Mapping[str, Any]], Any]) -> Any:
        real = signature(build, function)

        def call(*args: Any, **options: Any) -> Any:
            arguments = real.bind(*args, **options)
            arguments.apply_defaults()
            return implementation(arguments.arguments)

        return call

    for function, implementation in functions.items():
        setattr(module, function, bound(function, implementation))
    return module


def attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    table: torch.Tensor,
    given: Mapping[str, Any],
) -> torch.Tensor:
    """Attention of every row, without a look at any value, so that the tape can record it.

    query: [rows, heads, size]; starts: [requests + 1]; lens: [requests]; table: [requests, pages].
    Rows past the last request are left as 7.
    """
    keys = key_cache[table.long()].flatten(1, 2).float()
    values = value_cache[table.long()].flatten(1, 2).float()
    rows = torch.arange(query.shape[0], dtype=torch.int32)
    request = torch.searchsorted(starts[1:].contiguous(), rows, right=True)
    used = request < lens.shape[0]
    request = request.clamp(max=lens.shape[0] - 1)
    position = (lens + starts[:-1] - starts[1:])[request] + rows - starts[request]
    places = torch.arange(keys.shape[1])[None]
    seen = places < lens[request, None]
    left, right = given["window_size"]
    if given["causal"]:
        right = 0
    if right >= 0:
        seen &= places <= position[:, None] + right
    if left >= 0:
        seen &= places >= position[:, None] - left
    ratio = query.shape[1] // keys.shape[2]
    keys, values = (part[request].repeat_interleave(ratio, 2) for part in (keys, values))
    scores = torch.einsum("rhd,rnhd->rhn", query.float(), keys)
    scores = scores * (given["softmax_scale"] or query.shape[-1] ** -0.5)
    if given["softcap"]:
        scores = given["softcap"] * torch.tanh(scores / given["softcap"])
    weights = scores.masked_fill(~seen[:, None], -1e30).softmax(-1)
    # What is not seen is not read: it may be NaN.
    values = values.masked_fill(~seen[:, :, None, None], 0.0)
    out = torch.einsum("rhn,rnhd->rhd", weights, values)
    return torch.where(used[:, None, None], out, 7.0).to(query.dtype)


def _plan(layout: Any, given: Mapping[str, Any], packs_always: bool) -> torch.Tensor:
    """Scheduler metadata: the entries between the vectors are left as they come."""
    starts, lens = given["cu_seqlens_q"], given["cache_seqlens"]
    ratio = given["num_heads_q"] // given["num_heads_kv"]
    resolved = resolve(
        layout,
        num_reqs=given["batch_size"],
        max_query_len=given["max_seqlen_q"],
        max_seq_len=given["max_seqlen_k"],
        gqa_ratio=ratio,
        head_size=given["headdim"],
        page_size=given["page_size"],
        causal=given["causal"],
        window=given["window_size"][0],
        num_splits=given["num_splits"],
        packs_always=packs_always,
    )
    num_reqs = given["batch_size"]
    query_len = (starts[1:] - starts[:-1]) * (ratio if resolved.packed else 1)
    splits = ((lens + _KEYS_OF_A_TILE - 1) // _KEYS_OF_A_TILE).clamp(1, given["num_splits"])
    vectors = {
        "query_len": query_len,
        "num_splits": splits,
        "num_m_blocks": (query_len + resolved.rows - 1) // resolved.rows,
        "request": torch.arange(num_reqs),
        "num_heads_in_l2": torch.full_like(lens, given["num_heads_kv"]),
    }
    plan = torch.empty(metadata_size(num_reqs, len(resolved.vectors)), dtype=torch.int32)
    plan.random_()
    entries = plan[:-1].view(len(resolved.vectors), -1)
    for row, name in zip(entries, resolved.vectors, strict=True):
        row[:num_reqs].copy_(vectors[name])
    plan[-1] = 0
    return plan


def _launch_planned(
    layout: Any,
    given: Mapping[str, Any],
    packs_always: bool,
    *,
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    lens: torch.Tensor,
    table: torch.Tensor,
    max_seq_len: int,
) -> torch.Tensor:
    starts, plan = given["cu_seqlens_q"], given["scheduler_metadata"]
    num_reqs, ratio = lens.shape[0], query.shape[1] // caches[0].shape[2]
    resolved = resolve(
        layout,
        num_reqs=num_reqs,
        max_query_len=given["max_seqlen_q"],
        max_seq_len=max_seq_len,
        gqa_ratio=ratio,
        head_size=query.shape[2],
        page_size=caches[0].shape[1],
        causal=given["causal"],
        window=given["window_size"][0],
        num_splits=given["num_splits"],
        packs_always=packs_always,
    )
    if plan.shape != (metadata_size(num_reqs, len(resolved.vectors)),):
        raise RuntimeError("scheduler_metadata must have shape (metadata_size)")
    entries = plan[:-1].view(len(resolved.vectors), -1)[:, :num_reqs]
    vectors = dict(zip(resolved.vectors, entries, strict=True))
    out = attend(query, *caches, starts, lens, table, given)
    rows = torch.arange(query.shape[0], dtype=torch.int32)
    request = torch.searchsorted(starts[1:].contiguous(), rows, right=True)
    request = request.clamp(max=num_reqs - 1)
    row = (rows - starts[request]) * (ratio if resolved.packed else 1)
    if "query_len" in vectors:
        planned = vectors["query_len"][request]
    else:
        planned = vectors["num_m_blocks"][request] * resolved.rows
    out = torch.where(((row < planned) & (plan[-1] == 0))[:, None, None], out, 7.0)
    if "num_splits" in vectors:
        spoilt = (vectors["num_splits"] > given["num_splits"]).any()
        out = torch.where(spoilt, float("nan"), out)
    return out.to(query.dtype)


def flash_attention_2() -> ModuleType:
    """As ``flash_attn`` 2.8."""

    def check(given: Mapping[str, Any], caches: tuple[torch.Tensor, torch.Tensor]) -> None:
        if caches[0].shape[1] % 256:
            raise RuntimeError("Paged KV cache block size must be divisible by 256")

    def with_kvcache(given: Mapping[str, Any]) -> torch.Tensor:
        query, caches = given["q"], (given["k_cache"], given["v_cache"])
        check(given, caches)
        starts = torch.arange(query.shape[0] + 1, dtype=torch.int32) * query.shape[1]
        lens, table = given["cache_seqlens"], given["block_table"]
        out = attend(query.flatten(0, 1), *caches, starts, lens, table, given)
        live = (lens > 0).repeat_interleave(query.shape[1])
        return torch.where(live[:, None, None], out, 0.0).to(query.dtype).view(query.shape)

    def varlen(given: Mapping[str, Any]) -> torch.Tensor:
        query, caches = given["q"], (given["k"], given["v"])
        check(given, caches)
        starts, ends = given["cu_seqlens_q"], given["cu_seqlens_k"]
        if given["max_seqlen_q"] == 1 and query.shape[0] != starts.shape[0] - 1:
            raise RuntimeError("shape is invalid for input")
        lens = (ends[1:] - ends[:-1]).clamp(max=given["max_seqlen_k"])
        return attend(query, *caches, starts, lens, given["block_table"], given)

    return _module(
        "flash_attn",
        "flash_attn",
        flash_attn_with_kvcache=with_kvcache,
        flash_attn_varlen_func=varlen,
    )


def flash_attention_3(layout: str, *, packs_always: bool | None = None) -> ModuleType:
    """As vLLM's build, or the original's."""
    packs = layout == "vllm" if packs_always is None else packs_always

    def vllm(given: Mapping[str, Any]) -> torch.Tensor:
        if given["fa_version"] != 3:
            raise RuntimeError("another kernel")
        out = _launch_planned(
            layout,
            {**given, "window_size": given["window_size"] or (-1, -1)},
            packs,
            query=given["q"],
            caches=(given["k"], given["v"]),
            lens=given["seqused_k"],
            table=given["block_table"],
            max_seq_len=given["max_seqlen_k"],
        )
        return out if given["out"] is None else given["out"].copy_(out)

    def upstream(given: Mapping[str, Any]) -> torch.Tensor:
        table = given["page_table"]
        return _launch_planned(
            layout,
            given,
            packs,
            query=given["q"],
            caches=(given["k_cache"], given["v_cache"]),
            lens=given["cache_seqlens"],
            table=table,
            max_seq_len=table.shape[1] * given["k_cache"].shape[1],
        )

    name = "flash_attn_varlen_func" if layout == "vllm" else "flash_attn_with_kvcache"
    return _module(
        "flash_attn_interface",
        layout,
        get_scheduler_metadata=lambda given: _plan(layout, given, packs),
        **{name: vllm if layout == "vllm" else upstream},
    )
