"""Writes the source of refreshes, each with its check in line.

A build leaves the processor's caches cold. What is called from a refresh then costs as much as the
check in it, for the functions, closures and objects that are touched on the way: so it is one
function, which calls nothing that can stand in line, and has few variables of its closure, since
each is an object too. It does what there is to do while nothing has happened since the last
refresh; what has, goes to ``full``, an object of :mod:`graphshare.refreshing`. For an owner that
returns new objects it reads, in short::

    def refresh(batch):
        if ledger.epoch is not steady:
            constants = full.begin()
        try:
            v0 = owner.build(key, batch, replay)
            right = False
            while constants is not None:
                try:
                    (
                        guard,
                        c0,
                        c1,
                    ) = constants
                    if type(v0) is not c0:
                        break
                    v1 = v0.lens
                    if v1.data_ptr() != c1 or v1.is_nested:
                        break
                    right = guard(*(v1,))
                except Exception:
                    pass
                break
            if ledger.epoch is steady and (right or (constants is None and full.matches(v0))):
                record.state = v0
                ...  # the leases
                return
            steady, first, matches, constants = full.finish(v0, right)
        except BaseException:
            full.unseen()
            raise
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graphshare.state import Taking

__all__ = ["write_holding", "write_taking", "write_watching"]

_MAKE = "def make(ledger, owner, key, replay, full, record, lease, limit, watch):"
_KNOWN = "steady, first, matches, constants"
_FINISH = f"{_KNOWN} = full.finish(v0, {{}})"
# As `Lease.grant`, for leases that nothing has stopped. Most states have one borrower at most.
_LEASES = (
    "left = lease.left",
    "if left: lease.unspent += left",
    "lease.left = limit",
    "lease.grants += 1",
    "if first is not None:",
    "    left = first.left",
    "    if left != first.limit:",
    "        if left: first.unspent += left",
    "        first.left = first.limit",
    "        first.grants += 1",
    "    if full.others:",
    "        full.grant_others()",
    "return",
)
_WATCHED = (
    "if (v0 is not watch.state or not watch.unmoved()) and (watch.chances or not matches(v0)):",
    "    break",
)


def _within(lines: Iterable[str], depth: int = 1) -> list[str]:
    return [f"{'    ' * depth}{line}" for line in lines]


def _refresh(body: Sequence[str], *, builds: bool, begin: str = "full.begin()") -> list[str]:
    # The epoch by identity: each one is an object of its own, and its number need not be fetched.
    begins = ["if ledger.epoch is not steady:", f"    {begin}"]
    build = [
        "try:",
        "    v0 = owner.build(key, batch, replay)",
        "except BaseException as error:",
        "    full.failed(error)",
        "    raise",
    ]
    # From the first write on, an interrupt must leave nobody on a state that was not looked at.
    before, guarded = (begins, [*build, *body]) if builds else ([], [*begins, *body])
    return [
        f"def refresh({'batch' if builds else 'v0'}):",
        *_within([f"nonlocal {_KNOWN}", *before, "try:", *_within(guarded)]),
        *_within(["except BaseException:", "    full.unseen()", "    raise"]),
    ]


def _keep(*, builds: bool) -> list[str]:
    return ["record.state = v0"] if builds else []


def _looking(look: Sequence[str], *, builds: bool) -> list[str]:
    body = [*look, *_keep(builds=builds), *_LEASES]
    body = ["while ledger.epoch is steady:", *_within(body), _FINISH.format(False)]
    return _refresh(body, builds=builds)


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
    return _make((), _looking(_WATCHED, builds=builds), "refresh, None")


def write_taking(taking: Taking, *, builds: bool) -> str:
    """For an owner whose objects can be assigned to, or are new each time.

    Args:
        taking: How they are taken apart.
        builds: As in :func:`write_watching`.

    Returns:
        Source of ``make``, likewise.
    """
    look = [f"guard, {taking.names()}= constants", *taking.lines]
    body = [
        "right = False",
        "while constants is not None:",
        "    try:",
        *_within([*look, f"right = guard(*{taking.tensors})"], 2),
        "    except Exception:",
        "        pass",
        "    break",
        "if ledger.epoch is steady and (right or (constants is None and full.matches(v0))):",
        *_within([*_keep(builds=builds), *_LEASES]),
        _FINISH.format("right"),
    ]
    begin = "constants = full.begin()"
    return _make((), _refresh(body, builds=builds, begin=begin), "refresh, None")


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
    moved = " or ".join(f"t{i}.data_ptr() != a{i}" for i in range(count))
    hold = [
        "def hold(state, fixed):",
        "    nonlocal kept, tensors, addresses, alike",
        "    if fixed is None:",
        "        kept = tensors = addresses = alike = nothing",
        "    else:",
        "        kept, (tensors, addresses, alike) = state, fixed",
    ]
    look = [
        "if v0 is kept:",
        "    try:",
        f"        {tensors}= tensors",
        f"        {addresses}= addresses",
        f"        if {moved}: break",
        # Not asked whether they are nested: see `write_unmoved`.
        "        if not alike(*tensors): break",
        "    except Exception:",
        "        break",
        f"el{_WATCHED[0]}",
        *_WATCHED[1:],
    ]
    before = ["nothing = object()", "kept = tensors = addresses = alike = nothing"]
    return _make(before, [*hold, *_looking(look, builds=True)], "refresh, hold")
