"""No stale replay is ever let through, and no fresh one is ever refused.

Machines of several pools, loans, chains of loans, and owners with overlapping and disjoint
buffers, against the plain model of the freshness rules in `freshness_model.py`. Together they
run a little more than ten times the examples of a property, in every profile.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

from tests.property.freshness_machine import Machine
from tests.property.freshness_rules import Captures, Faults, Lifetimes, Verifying


class Owners(Faults, Captures):
    """Pools that own their states, some of them in the same memory."""

    loans = "none"


class Loans(Faults, Verifying):
    """Chains and stars of borrowers on one owner, or two."""

    loans = "all"
    max_owners = 2


class Mixed(Faults, Verifying, Captures):
    """Pools that borrow some keys and build others, and capture more as they go."""


class Lives(Captures, Lifetimes):
    """Keys, loans and pools that go while others still need them."""

    loans = "all"


MACHINES = [Owners, Loans, Mixed, Lives]
EXAMPLES = settings.default.max_examples


def _case(machine: type[Machine], name: str, examples: int, **attributes: Any) -> Any:
    case = type(name, (machine,), attributes).TestCase
    case.settings = settings(max_examples=examples, stateful_step_count=20)
    return case


TestOwners = _case(Owners, "OwnersOnTape", 3 * EXAMPLES)
TestLoans = _case(Loans, "LoansOnTape", 3 * EXAMPLES)
TestMixed = _case(Mixed, "MixedOnTape", 3 * EXAMPLES)
TestLives = _case(Lives, "LivesOnTape", 3 * EXAMPLES)


@pytest.mark.gpu
@pytest.mark.parametrize("machine", MACHINES)
def test_on_cuda_graphs(machine: type[Machine]) -> None:
    examples = max(1, EXAMPLES // 4)
    case = _case(machine, f"{machine.__name__}OnCuda", examples, backend="cuda", device="cuda")
    case().runTest()
