"""Borrowers beside a target of 32 query and 8 KV heads of 128, causal: what each pair may do.

The GPU tests run each pair on the lender's plan; without a GPU the specs alone are compared.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Pair(NamedTuple):
    """How the borrower differs, and the fields for which a loan is refused."""

    changes: dict[str, Any]
    named: tuple[str, ...]


PAIRS = {
    "alike": Pair({}, ()),
    "half the heads": Pair({"num_q_heads": 16, "num_kv_heads": 4}, ()),
    "an eighth of the heads": Pair({"num_q_heads": 4, "num_kv_heads": 1}, ()),
    "twice the heads": Pair({"num_q_heads": 64, "num_kv_heads": 16}, ()),
    "float16": Pair({"dtype": "float16"}, ()),
    "a window": Pair({"window": 300}, ()),
    "a window longer than any request": Pair({"window": 5000}, ()),
    "a window, not causal": Pair({"window": 300, "causal": False}, ()),
    "head size 96": Pair({"head_size": 96}, ()),
    "head size 64, a window": Pair({"head_size": 64, "window": 300}, ()),
    "twice the query heads": Pair({"num_q_heads": 64}, ("num_q_heads",)),
    "half the KV heads": Pair({"num_kv_heads": 4}, ("num_kv_heads",)),
    "half the query heads": Pair({"num_q_heads": 16}, ("num_q_heads",)),
    "as many KV heads": Pair({"num_q_heads": 8}, ("num_q_heads",)),
    "not causal": Pair({"causal": False}, ("causal",)),
    "head size 64": Pair({"head_size": 64}, ("head_size",)),
}
