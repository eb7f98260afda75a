"""Writes the source of refreshes, each with its check in line.

A build leaves the processor's caches cold. What is called from a refresh then costs as much as the
check in it, for the functions, closures and objects that are touched on the way: so it is one
function, which calls nothing that can stand in line. It does what there is to do while nothing has
happened since the last refresh; whatever is otherwise goes to ``full``, an object of
:mod:`graphshare.refreshing`. For an owner that returns new objects it reads::

    def make(ledger, owner, key, replay, full, record, lease, limit, watch, regrant):
        steady, first, others, matches, guard, constants = full.nothing_known

        def refresh(batch):
            nonlocal steady, first, others, matches, guard, constants
            if ledger.epoch is not steady:
                full.begin()
            try:
                v0 = owner.build(key, batch, replay)
            except BaseException as error:
                full.failed(error)
                raise
            while ledger.epoch is steady:
                if guard is None:
                    if not matches(v0):
                        break
                else:
                    try:
                        (
                            c0,
                            c1,
                        ) = constants
                        if type(v0) is not c0:
                            break
                        v1 = v0.lens
                        if v1.data_ptr() != c1 or v1.is_nested:
                            break
                        if not guard(*(v1,)):
                            break
                    except Exception:
                        break
                record.state = v0
                ...  # the leases
                return
            steady, first, others, matches, guard, constants = full.finish(v0)

        return refresh, None
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graphshare.state import Taking

__all__ = ["write_holding", "write_taking", "write_watching"]

_KNOWN = "steady, first, others, matches, guard, constants"
_MAKE = "def make(ledger, owner, key, replay, full, record, lease, limit, watch, regrant):"

# The epoch by identity: each one is an object of its own, and its number need not be fetched.
_BUILD = (
    "if ledger.epoch is not steady:",
    "    full.begin()",
    "try:",
    "    v0 = owner.build(key, batch, replay)",
    "except BaseException as error:",
    "    full.failed(error)",
    "    raise",
)
# As `Lease.grant`, for leases that nothing has stopped. Most states have one borrower at most.
_LEASES = (
    "left = lease.left",
    "if left != limit:",
    "    lease.granted += limit - left",
    "    lease.left = limit",
    "lease.refreshes += 1",
    "if first is not None:",
    "    left = first.left",
    "    if left != first.limit:",
    "        first.granted += first.limit - left",
    "        first.left = first.limit",
    "        first.avoided += 1",
    "    if others:",
    "        regrant(others)",
    "return",
)
_WATCHED = (
    "if (v0 is not watch.state or not watch.unmoved()) and (watch.chances or not matches(v0)):",
    "    break",
)


def _within(lines: Iterable[str], depth: int = 1) -> list[str]:
    return [f"{'    ' * depth}{line}" for line in lines]


def _refresh(look: Sequence[str], *, builds: bool) -> list[str]:
    keep = ["record.state = v0"] if builds else []
    return [
        f"def refresh({'batch' if builds else 'v0'}):",
        *_within([f"nonlocal {_KNOWN}", *(_BUILD if builds else ())]),
        "    while ledger.epoch is steady:",
        *_within([*look, *keep, *_LEASES], 2),
        f"    {_KNOWN} = full.finish(v0)",
    ]


def _make(before: Sequence[str], functions: Sequence[str], result: str) -> str:
    lines = [f"{_KNOWN} = full.nothing_known", *before, *functions, f"return {result}"]
    return "\n".join([_MAKE, *_within(lines)]) + "\n"


def write_watching(*, builds: bool) -> str:
    """For an owner of which nothing is known: what its watch says, else the check that it has.

    Args:
        builds: Whether the owner is asked to build; if not, the function takes the state in the
            place of the batch, and does not keep it.

    Returns:
        Source of ``make``, which returns the refresh and ``None``.
    """
    return _make((), _refresh(_WATCHED, builds=builds), "refresh, None")


def write_taking(taking: Taking, *, builds: bool) -> str:
    """For an owner whose objects can be assigned to, or are new each time.

    Args:
        taking: How they are taken apart.
        builds: As in :func:`write_watching`.

    Returns:
        Source of ``make``, likewise.
    """
    look = [
        "if guard is None:",
        "    if not matches(v0): break",
        "else:",
        "    try:",
        *_within([f"{taking.names()}= constants"] if taking.constants else [], 2),
        *_within([*taking.lines, f"if not guard(*{taking.tensors}): break"], 2),
        "    except Exception:",
        "        break",
    ]
    return _make((), _refresh(look, builds=builds), "refresh, None")


def write_holding(count: int) -> str:
    """For an owner that returns one object again and again, which nobody can assign to.

    Args:
        count: Of its tensors, at least one.

    Returns:
        Source of ``make``, which returns the refresh and ``hold(state, fixed)``: what is expected
        from now on, with its :class:`~graphshare.state.Fixed`; ``None`` to hold nothing.
    """
    tensors = "".join(f"t{i}, " for i in range(count))
    addresses = "".join(f"a{i}, " for i in range(count))
    everything = f"kept, alike, tensors, {tensors}{addresses}"
    forget = [f"{everything.removesuffix(', ').replace(', ', ' = ')} = nothing"]
    hold = [
        "def hold(state, fixed):",
        f"    nonlocal {everything.removesuffix(', ')}",
        "    if fixed is None:",
        *_within(forget, 2),
        "    else:",
        "        kept, alike, tensors = state, fixed.alike, fixed.tensors",
        f"        {tensors}= tensors",
        f"        {addresses}= fixed.addresses",
    ]
    look = [
        "if v0 is kept:",
        "    try:",
        *(f"        if t{i}.data_ptr() != a{i}: break" for i in range(count)),
        # Not asked whether they are nested: see `write_unmoved`.
        "        if not alike(*tensors): break",
        "    except Exception:",
        "        break",
        f"el{_WATCHED[0]}",
        *_WATCHED[1:],
    ]
    before = ["nothing = object()", *forget]
    return _make(before, [*hold, *_refresh(look, builds=True)], "refresh, hold")
