"""The page on FlashInfer says of who may borrow what was run, and what the specs refuse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from graphshare.adapters.flashinfer import FlashInferSpec
from tests.flashinfer_pairs import PAIRS

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "run-on-flashinfer.md"
SEEN = ("wrong numbers; refused", "NaN; refused", "not right; refused")
LENDER = (8, 2)


def _cells() -> list[tuple[str, str, str]]:
    """Borrower, kernel and what is said of them."""
    table = PAGE.read_text("utf-8").split("| borrower |")[1].split("\n\n")[0]
    head, _, *rows = table.splitlines()
    kernels = [cell.strip() for cell in head.strip("|").split("|")]
    found: list[tuple[str, str, str]] = []
    for row in rows:
        borrower, *said = (cell.strip() for cell in row.strip("|").split("|"))
        found += [(borrower, *each) for each in zip(kernels, said, strict=True) if each[1]]
    return found


def _pair(borrower: str) -> tuple[tuple[int, int], list[dict[str, Any]]]:
    """The lender's heads, and in what a borrower differs, each of which counts."""
    heads = re.fullmatch(r"(\d+) query, (\d+) KV heads?", borrower)
    if heads:
        return LENDER, [{"num_q_heads": int(heads[1]), "num_kv_heads": int(heads[2])}]
    return {
        "other layers, another softmax scale": (LENDER, [{}, {"softmax_scale": 0.2}]),
        "not causal": (LENDER, [{"causal": False}]),
        "sixteen times the heads, of a lender of 4 and 1": (
            (4, 1),
            [{"num_q_heads": 64, "num_kv_heads": 16}],
        ),
        "other pages": (LENDER, [{"page_size": 32}]),
    }[borrower]


def _spec(heads: tuple[int, int], kernel: str, changes: dict[str, Any]) -> FlashInferSpec:
    fields: dict[str, Any] = {
        "num_q_heads": heads[0],
        "num_kv_heads": heads[1],
        "head_size": 128,
        "page_size": 16,
        "causal": True,
        "kernels": frozenset({kernel}),
    }
    compared = {name: value for name, value in changes.items() if name != "softmax_scale"}
    return FlashInferSpec(**{**fields, **compared})


@pytest.mark.parametrize(("borrower", "kernel", "said"), _cells())
def test_a_cell_says_what_was_run(borrower: str, kernel: str, said: str) -> None:
    lender, differences = _pair(borrower)
    for changes in differences:
        found = [
            pair
            for pair in PAIRS.values()
            if (pair.kernel, pair.lender, pair.changes) == (kernel, lender, changes)
        ]
        refused = bool(_spec(lender, kernel, {}).differing(_spec(lender, kernel, changes)))
        if said == "right":
            assert [pair.named for pair in found] == [()]
            assert not refused
        elif said in SEEN:
            assert [bool(pair.named) for pair in found] == [True]
            assert refused
        else:
            assert not found
            assert said == ("refused" if refused else "allowed")


def test_every_pair_that_was_run_is_in_the_table() -> None:
    said = {
        (kernel, lender, *sorted(changes.items()))
        for borrower, kernel, _ in _cells()
        for lender, differences in [_pair(borrower)]
        for changes in differences
    }
    for pair in PAIRS.values():
        assert (pair.kernel, pair.lender, *sorted(pair.changes.items())) in said
