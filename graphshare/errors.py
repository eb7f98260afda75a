"""What graphshare refuses, and why.

::

    Exception
     └── GraphShareError
          ├── KeyMismatchError          (also a KeyError)
          ├── StaleStateError
          ├── AddressChangedError
          ├── BakedValueChangedError
          ├── LazyStateError
          ├── SpecMismatchError
          ├── ReleasedStateError
          ├── OwnershipError
          ├── StateDifferenceError
          ├── CaptureError
          ├── ProvenanceError
          └── RebindError

What is wrong in a call itself, whatever the pool holds (a descriptor of -1 tokens, a misspelt
option), raises ``TypeError``, ``ValueError`` or ``RuntimeError`` as elsewhere in Python, to be
mended rather than caught. What depends on what a pool holds, or on what an owner, a view or a
forward did, raises one of these, and an engine may catch it and run eagerly.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

__all__ = [
    "AddressChangedError",
    "BakedValueChangedError",
    "CaptureError",
    "GraphShareError",
    "KeyMismatchError",
    "LazyStateError",
    "OwnershipError",
    "ProvenanceError",
    "RebindError",
    "ReleasedStateError",
    "SpecMismatchError",
    "StaleStateError",
    "StateDifferenceError",
]


def _sentence(text: str) -> str:
    text = text.strip()
    if not text:
        return ""
    ended = text.endswith((".", "?")) and not text.endswith("..")  # an ellipsis is no end
    return f" {text}" if ended else f" {text}."


class GraphShareError(Exception):
    """Base of all that graphshare refuses.

    The message reads ``<what>: expected E, got G (key <descriptor>). <consequence>. <remedy>.``

    Args:
        what: What was refused, with the pool's name.
        expected: What would have been right.
        got: What was found.
        key: The descriptor concerned, if there is one.
        consequence: What would have happened had it been let through.
        remedy: What the caller can do.
        facts: Further attributes of the subclass.
    """

    what: str
    expected: Any
    got: Any
    key: Hashable
    consequence: str
    remedy: str

    def __init__(
        self,
        what: str,
        *,
        expected: Any = None,
        got: Any = None,
        key: Hashable = None,
        consequence: str = "",
        remedy: str = "",
        **facts: Any,
    ) -> None:
        unknown = [name for name in facts if not self._declares(name)]
        if unknown:
            raise TypeError(f"{type(self).__name__} has no attribute {', '.join(unknown)}")
        self.what = what
        self.expected = expected
        self.got = got
        self.key = key
        self.consequence = consequence
        self.remedy = remedy
        for name, value in facts.items():
            setattr(self, name, value)
        super().__init__(self._message())

    @classmethod
    def _declares(cls, name: str) -> bool:
        return any(name in vars(base).get("__annotations__", ()) for base in cls.__mro__)

    def _message(self) -> str:
        text = self.what
        if self.expected is not None:
            text += f": expected {self._shown(self.expected)}, got {self._shown(self.got)}"
        if self.key is not None:
            text += f" (key {self.key})"
        return text + "." + _sentence(self.consequence) + _sentence(self.remedy)

    def _shown(self, fact: Any) -> Any:
        """Return what the message says of ``expected`` or ``got``."""
        return fact

    def __str__(self) -> str:  # KeyError would show the repr of its argument
        return str(self.args[0])

    # Engines send exceptions between processes; keyword arguments need this to survive pickling.
    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(vars(self)))


def _rebuild(cls: type[GraphShareError], args: tuple[Any, ...], facts: dict[str, Any]) -> Any:
    error = cls.__new__(cls, *args)
    error.args = args
    vars(error).update(facts)
    return error


class KeyMismatchError(GraphShareError, KeyError):
    """A key is not captured, or has no producer state.

    Attributes:
        missing: The keys that are not there.
        nearest: The captured keys that come closest.
    """

    missing: tuple[Hashable, ...] = ()
    nearest: tuple[Hashable, ...] = ()


class StaleStateError(GraphShareError):
    """A replay, and the state is not fresh for its key.

    Attributes:
        rule: Why it is stale, a :class:`graphshare.Staleness` value.
        written_by: ``(pool name, key)`` of who made it stale, or ``None``. Of several that wrote
            over it this is the first.
    """

    rule: str = ""
    written_by: tuple[str, Hashable] | None = None


class AddressChangedError(GraphShareError):
    """A rebuild returned a tensor elsewhere or otherwise shaped than the graph baked in.

    ``expected`` and ``got`` are the values of the field, an address as a number; text where several
    fields of the leaf differ.

    Attributes:
        path: The leaf's path in the state.
        field: What differs: ``"address"``, ``"shape"``, ``"stride"``, ``"dtype"``, ``"device"``,
            or ``"presence"`` for a leaf that came or went.
        fields: All that differs of this leaf.
        paths: All leaves that differ.
        keys: Every captured key that is affected.
    """

    path: str = ""
    field: str = ""
    fields: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    keys: tuple[Hashable, ...] = ()

    def _shown(self, fact: Any) -> Any:
        # What a debugger and pool.provenance show is in hex too.
        return hex(fact) if self.field == "address" and isinstance(fact, int) else fact


class BakedValueChangedError(GraphShareError):
    """A host value breaks its rule at a refresh.

    Attributes:
        path: The leaf's path in the state.
        rule: ``"equal"`` or ``"at_most"``.
        paths: All leaves that differ.
    """

    path: str = ""
    rule: str = "equal"
    paths: tuple[str, ...] = ()


class LazyStateError(GraphShareError):
    """The build for a capture returned a value that the warmup's forward had left behind.

    Attributes:
        path: The leaf's path in the state.
    """

    path: str = ""


class SpecMismatchError(GraphShareError):
    """The specs of producer and consumer differ in a field that the kernel bakes in.

    Attributes:
        fields: The names of the fields that differ.
    """

    fields: tuple[str, ...] = ()


class ReleasedStateError(GraphShareError):
    """What a replay needs was released or closed."""


class OwnershipError(GraphShareError):
    """A pool did what only the state's owner may, or a loan that cannot be."""


class StateDifferenceError(GraphShareError):
    """``verify`` found that a borrowed state and the consumer's own differ.

    Attributes:
        path: The first leaf that differs.
        paths: All leaves that differ.
    """

    path: str = ""
    paths: tuple[str, ...] = ()


class CaptureError(GraphShareError):
    """A forward did what a capture forbids, or failed, or the state is none that a graph can read.

    The pool is as before.
    """


class ProvenanceError(GraphShareError):
    """A graph cannot be read, or ``prove`` found that it does not read what it should.

    Attributes:
        keys: Every captured key that is affected.
        path: The borrowed leaf that is not read, or the leaf of the consumer's own that is.
        paths: All leaves of the key that are not read, or every path of the one that is.
        node: The node that reads what it must not, as ``number: name``.
    """

    keys: tuple[Hashable, ...] = ()
    path: str = ""
    paths: tuple[str, ...] = ()
    node: str = ""


class RebindError(GraphShareError):
    """Graphs cannot be put on other memory; all of them are as they were.

    Attributes:
        keys: Every captured key that is affected.
        node: The node that cannot be changed, as ``number: name``.
        path: The leaf that stands in the way.
    """

    keys: tuple[Hashable, ...] = ()
    node: str = ""
    path: str = ""
