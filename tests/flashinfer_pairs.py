"""Borrowers on FlashInfer plans: what each pair of lender and borrower may do.

The GPU tests run each pair on the lender's plan; without a GPU the specs alone are compared.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Pair(NamedTuple):
    """Who lends, how the borrower differs, and the fields for which a loan is refused."""

    kernel: str
    lender: tuple[int, int]  # query heads, KV heads
    changes: dict[str, Any]
    named: tuple[str, ...] = ()


def _heads(num_q_heads: int, num_kv_heads: int) -> dict[str, Any]:
    return {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads}


PAIRS = {
    f"{pair.kernel}: {name}": pair
    for name, pair in [
        ("alike", Pair("decode", (8, 2), {})),
        ("another scale", Pair("decode", (8, 2), {"softmax_scale": 0.2})),
        ("half the heads", Pair("decode", (8, 2), _heads(4, 1))),
        ("as many KV heads", Pair("decode", (8, 2), _heads(8, 8))),
        ("one KV head", Pair("decode", (8, 2), _heads(8, 1))),
        ("eight times the heads", Pair("decode", (8, 2), _heads(64, 16), ("num_q_heads",))),
        ("other pages", Pair("decode", (8, 2), {"page_size": 32}, ("page_size",))),
        ("alike", Pair("fa2", (8, 2), {})),
        ("another scale", Pair("fa2", (8, 2), {"softmax_scale": 0.2})),
        ("not causal", Pair("fa2", (8, 2), {"causal": False})),
        ("half the heads", Pair("fa2", (8, 2), _heads(4, 1))),
        ("as many KV heads", Pair("fa2", (8, 2), _heads(8, 8))),
        ("four times the heads", Pair("fa2", (8, 2), _heads(32, 8))),
        ("one KV head", Pair("fa2", (8, 2), _heads(8, 1), ("num_kv_heads",))),
        ("sixteen times the heads", Pair("fa2", (4, 1), _heads(64, 16), ("num_q_heads",))),
        ("other pages", Pair("fa2", (8, 2), {"page_size": 32}, ("page_size",))),
        ("alike", Pair("fa3", (8, 2), {})),
        ("another scale", Pair("fa3", (8, 2), {"softmax_scale": 0.2})),
        ("not causal", Pair("fa3", (8, 2), {"causal": False})),
        ("as many KV heads", Pair("fa3", (8, 2), _heads(8, 8))),
        ("one KV head", Pair("fa3", (8, 2), _heads(8, 1))),
        ("half the heads", Pair("fa3", (8, 2), _heads(4, 1), ("num_q_heads",))),
        ("twice the heads", Pair("fa3", (8, 2), _heads(16, 4), ("num_q_heads",))),
        ("other pages", Pair("fa3", (8, 2), {"page_size": 32}, ("page_size",))),
        ("alike", Pair("batch_attention", (8, 2), {})),
        ("another scale", Pair("batch_attention", (8, 2), {"softmax_scale": 0.2})),
        ("not causal", Pair("batch_attention", (8, 2), {"causal": False}, ("causal",))),
        (
            "half the heads",
            Pair("batch_attention", (8, 2), _heads(4, 1), ("num_kv_heads", "num_q_heads")),
        ),
        ("as many KV heads", Pair("batch_attention", (8, 2), _heads(8, 8), ("num_kv_heads",))),
        (
            "twice the heads a group",
            Pair("batch_attention", (8, 2), _heads(16, 2), ("num_q_heads",)),
        ),
        ("other pages", Pair("batch_attention", (8, 2), {"page_size": 32}, ("page_size",))),
    ]
}
