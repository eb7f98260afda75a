"""The padded shape that a graph was captured for, and which shapes it covers.

A descriptor is both: as a *key* it says what a graph was captured for, as a *shape* what a batch
needs. In a key ``None`` means that the graph does not constrain the field. In a shape it means
that nothing is known, so that only a key that does not constrain the field either covers it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, overload

from typing_extensions import Self, dataclass_transform, override

from graphshare.arguments import listed, whole_number, wrong_type
from graphshare.matching import MATCH, Field, Match, anything, bound, exact, fields_of
from graphshare.plan_file import read_keys

__all__ = ["BatchDescriptor", "Match", "anything", "bound", "capture_descriptors", "exact"]


def _plain(name: str, value: Any) -> Any:
    """An exact or free value: NumPy integers become ints, NaN is refused."""
    if not isinstance(value, int) and hasattr(type(value), "__index__"):
        return operator.index(value)
    if value != value:  # NaN: such a key would not even cover itself
        raise ValueError(f"{name}: expected a value that equals itself, got {value!r}")
    return value


def _rank(value: Any) -> tuple[int, int, str]:
    """A place in a total order over values of any type."""
    if value is None:
        return 2, 0, ""
    if isinstance(value, int):
        return 0, int(value), ""
    return 1, 0, f"{type(value).__qualname__} {value!r}"


class _Values:
    # Apart from the dataclass, so that these are neither fields nor in its ``__dict__``.
    __slots__: tuple[str, ...] = ("_hash", "_values")
    _hash: int
    _values: tuple[Any, ...]


@dataclass_transform(frozen_default=True, field_specifiers=(exact, bound, anything))
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BatchDescriptor(_Values):
    """The padded shape of one captured graph; frozen, hashable, compared by type and value.

    A subclass adds fields by annotation and needs no decorator; each says how it matches, by
    :func:`exact`, :func:`bound` or :func:`anything`. Integers of other types (NumPy's) become
    ``int``.

    Args:
        num_tokens: Tokens, padding included. A bound.
        num_reqs: Requests, padding included. A bound.
        uniform_query_len: Query length that all requests have. Exact. Implies ``max_query_len``.
        max_query_len: Longest query length. A bound.
        num_active_loras: LoRA adapters in use. Exact.
        num_ubatches: Microbatches that the batch is split into. Exact.

    Raises:
        TypeError: A count is no integer, or a value is not hashable.
        ValueError: No batch has this shape: more requests than tokens, a longest query longer
            than all tokens, a uniform length that does not divide ``num_tokens``, needs more of
            them than there are, or differs from ``max_query_len``.

    Example:
        >>> key = BatchDescriptor(num_tokens=8, num_reqs=4)
        >>> key.covers(BatchDescriptor(num_tokens=5, num_reqs=4, uniform_query_len=1))
        True
        >>> key.covers(BatchDescriptor(num_tokens=5))
        False
    """

    num_tokens: int = dataclasses.field(metadata={MATCH: Match.BOUND})
    num_reqs: int | None = bound(None)
    uniform_query_len: int | None = exact(None)
    max_query_len: int | None = bound(None)
    num_active_loras: int | None = exact(0)
    num_ubatches: int | None = exact(1)

    _fields: ClassVar[tuple[Field, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inherited = cls._fields
        dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        cls._fields = fields_of(cls)
        # dataclass() leaves the default of each field that is declared here in the class itself.
        again = [name for name, *_ in inherited if name in vars(cls)]
        if again or cls._fields[: len(inherited)] != inherited:
            raise TypeError(f"{cls.__name__}: a subclass cannot redeclare {', '.join(again)}")

    def __post_init__(self) -> None:
        # Frozen: the instance is written through ``object`` while it is being made, never after.
        put = object.__setattr__
        values = vars(self)
        for name, _, _, least in self._fields:
            value = values[name]
            if least is None:
                put(self, name, _plain(name, value))
            elif value is not None or name == "num_tokens":
                put(self, name, whole_number(name, value, least))
        self._refuse_impossible()
        put(self, "_values", tuple(values[field.name] for field in self._fields))
        try:
            put(self, "_hash", hash((type(self), self._values)))
        except TypeError as error:
            raise TypeError(
                f"{type(self).__name__}: every value must be hashable ({error})"
            ) from None

    def _refuse_impossible(self) -> None:
        tokens, reqs = self.num_tokens, self.num_reqs
        if reqs is not None and reqs > tokens:
            raise ValueError(f"num_reqs: expected at most num_tokens={tokens}, got {reqs}")
        each = self.uniform_query_len
        if each is not None:
            if self.max_query_len is None:
                object.__setattr__(self, "max_query_len", each)
            elif self.max_query_len != each:
                raise ValueError(
                    f"max_query_len: expected uniform_query_len={each} or None, "
                    f"got {self.max_query_len}"
                )
            if tokens % each:
                raise ValueError(
                    f"num_tokens: expected a multiple of uniform_query_len={each}, got {tokens}"
                )
            if reqs is not None and reqs * each > tokens:
                raise ValueError(
                    f"num_reqs: expected at most num_tokens / uniform_query_len = "
                    f"{tokens // each}, got {reqs}"
                )
        if self.max_query_len is not None and self.max_query_len > tokens:
            raise ValueError(
                f"max_query_len: expected at most num_tokens={tokens}, got {self.max_query_len}"
            )

    def covers(self, shape: Self) -> bool:
        """Whether a graph captured for this key can serve a batch of that shape.

        Raises:
            TypeError: ``shape`` is of another type; what its fields mean is not known.
        """
        if type(shape) is not type(self):
            raise TypeError(
                f"covers: expected {type(self).__qualname__}, got {type(shape).__qualname__}"
            )
        for (_, match, _, _), mine, other in zip(
            self._fields, self._values, shape._values, strict=True
        ):
            if mine is None or match is Match.ANY:
                continue
            if other is None or (mine < other if match is Match.BOUND else mine != other):
                return False
        return True

    def cost(self) -> tuple[Any, ...]:
        """What a replay of this key costs, to be compared with that of another key of its type.

        Fewest tokens first, then fewest requests (``None`` counts as unbounded), then the most
        constrained, then a fixed order of what is left, so that no two keys compare equal. A key
        that covers another is never cheaper.
        """
        compared = [
            (match, value)
            for (_, match, _, _), value in zip(self._fields, self._values, strict=True)
            if match is not Match.ANY
        ]
        return (
            self.num_tokens,
            math.inf if self.num_reqs is None else self.num_reqs,
            sum(value is None for _, value in compared),
            tuple(value is None for _, value in compared),
            tuple(value for match, value in compared if match is Match.BOUND and value is not None),
            tuple(map(_rank, self._values)),
        )

    @classmethod
    def matching(cls) -> Mapping[str, Match]:
        """How each field matches, by name, in order of declaration."""
        return MappingProxyType({field.name: field.match for field in cls._fields})

    @override
    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not type(self):
            return NotImplemented
        return self._values == other._values

    @override
    def __hash__(self) -> int:
        return self._hash

    @override
    def __repr__(self) -> str:
        shown = [
            f"{name}={value!r}"
            for (name, _, default, _), value in zip(self._fields, self._values, strict=True)
            if value is not default
            and value != default
            and not (name == "max_query_len" and value == self.uniform_query_len)
        ]
        return f"{type(self).__qualname__}({', '.join(shown)})"

    # Hashes of types and strings differ between processes, so a copy is made by the constructor.
    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._values

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


BatchDescriptor._fields = fields_of(BatchDescriptor)


@overload
def capture_descriptors(
    num_tokens: Iterable[int],
    max_num_reqs: int,
    uniform_query_lens: Iterable[int] = (),
    *,
    num_active_loras: Iterable[int | None] = (0,),
    num_ubatches: Iterable[int | None] = (1,),
    plan: None = None,
) -> list[BatchDescriptor]: ...
@overload
def capture_descriptors(*, plan: str | os.PathLike[str]) -> list[BatchDescriptor]: ...
def capture_descriptors(
    num_tokens: Iterable[int] | None = None,
    max_num_reqs: int | None = None,
    uniform_query_lens: Iterable[int] = (),
    *,
    num_active_loras: Iterable[int | None] = (0,),
    num_ubatches: Iterable[int | None] = (1,),
    plan: str | os.PathLike[str] | None = None,
) -> list[BatchDescriptor]:
    """The keys to capture so that every batch up to the largest size is covered.

    For each size a mixed key (at most ``max_num_reqs`` requests of any query lengths), and for
    each uniform query length the key of the next size that it divides, but of no more than
    ``max_num_reqs`` requests. So a uniform key may be up to ``uniform_query_len - 1`` tokens larger
    than the largest size: buffers must hold the first key's tokens, not the largest size. And where
    a uniform length divides no size, a uniform batch may fit a mixed key with less padding; sizes
    that it divides keep it on its own graphs.

    Args:
        num_tokens: Sizes, in tokens, in any order.
        max_num_reqs: The most requests that a batch has.
        uniform_query_lens: Query lengths for which all requests alike deserve graphs of their own.
        num_active_loras: Numbers of active LoRA adapters, each with all these keys.
        num_ubatches: Numbers of microbatches, each with all these keys.
        plan: A file that ``graphshare plan`` wrote; the keys are those in it, and nothing else
            is given.

    Returns:
        No two equal, the costliest first.

    Raises:
        TypeError: A size, length or count is no integer; or other arguments beside ``plan``.
        ValueError: One is out of range, or the plan is no plan.
        OSError: The plan cannot be read.

    Example:
        >>> for key in capture_descriptors([2, 4], max_num_reqs=2, uniform_query_lens=[3]):
        ...     print(key)
        BatchDescriptor(num_tokens=6, num_reqs=2, uniform_query_len=3)
        BatchDescriptor(num_tokens=4, num_reqs=2)
        BatchDescriptor(num_tokens=3, num_reqs=1, uniform_query_len=3)
        BatchDescriptor(num_tokens=2, num_reqs=2)
    """
    loras = _several("num_active_loras", num_active_loras)
    ubatches = _several("num_ubatches", num_ubatches)
    lengths = {
        whole_number("uniform_query_lens", length, 1)
        for length in _several("uniform_query_lens", uniform_query_lens)
    }
    if plan is not None:
        if not isinstance(plan, (str, os.PathLike)):
            raise wrong_type("capture_descriptors: plan", "the path of a file", plan)
        if num_tokens is not None or max_num_reqs is not None or lengths:
            raise TypeError("capture_descriptors: expected a plan or sizes, got both")
        if (loras, ubatches) != ((0,), (1,)):
            raise TypeError("capture_descriptors: a plan says itself how many LoRAs and ubatches")
        planned = {_from_plan(plan, number, key) for number, key in enumerate(read_keys(plan))}
        return sorted(planned, key=BatchDescriptor.cost, reverse=True)
    if num_tokens is None or max_num_reqs is None:
        raise TypeError("capture_descriptors: expected num_tokens and max_num_reqs, or a plan")
    sizes = {whole_number("num_tokens", size, 1) for size in _several("num_tokens", num_tokens)}
    most = whole_number("max_num_reqs", max_num_reqs, 1)
    shapes = {(size, min(size, most), None) for size in sizes} | {
        (reqs * length, reqs, length)
        for size in sizes
        for length in lengths
        for reqs in (min(-(-size // length), most),)
    }
    keys = {
        BatchDescriptor(size, reqs, length, num_active_loras=lora_count, num_ubatches=ubatch_count)
        for (size, reqs, length), lora_count, ubatch_count in itertools.product(
            shapes, loras, ubatches
        )
    }
    return sorted(keys, key=BatchDescriptor.cost, reverse=True)


def _several(name: str, values: Any) -> tuple[Any, ...]:
    remedy = f"Put a single one into a list: {name}=[{values}]." if values is not None else ""
    return tuple(listed(f"capture_descriptors: {name}", values, "integers", remedy))


def _from_plan(
    plan: str | os.PathLike[str], number: int, fields: Mapping[str, Any]
) -> BatchDescriptor:
    try:
        return BatchDescriptor(**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{os.fspath(plan)}: keys[{number}]: {error}") from None
