"""What an engine implements to have its attention state captured and shared.

An *owner* is the one object that writes a state. It needs one method, :meth:`StateOwner.build`;
the optional attributes below are looked up by name and may be left out.

``host_values``: ``Mapping[str, "equal" | "at_most" | "any"]``
    Path pattern to rule, for values that a capture freezes. ``equal`` (the default): the value
    must come out as it was captured. ``at_most``: it was captured at capacity and may be smaller.
    ``any``: no kernel in any graph on this state, a borrower's included, depends on it. A pattern
    may name a tensor on the device too; ``any`` leaves it out of the layout.

``writes(key) -> Iterable[torch.Tensor]``
    The tensors that a build for this key may write: fewer than the state's leaves where the owner
    only reads some of them, more where it writes past what it returns (zeroing a tail). Asked
    after a build, and for every key when a capture ends, in vain too; never during a refresh. An
    answer holds for its own key. Default: every leaf of every key of this owner.

``live_rows(key, batch) -> Mapping[str, int]``
    Path pattern to the number of leading rows that this batch uses; the rest is padding. Nothing
    that serves asks: :meth:`graphshare.SharedStates.verify` and
    :func:`graphshare.testing.check_owner` do.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import torch

from graphshare.arguments import shown
from graphshare.errors import CaptureError

__all__ = [
    "AttentionSpec",
    "Phase",
    "StateOwner",
    "check_build",
    "declared_tensors",
    "name_build",
]


class Phase(enum.Enum):
    """Why :meth:`StateOwner.build` is called."""

    WARMUP = "warmup"
    """Before an eager run that lets kernels initialise; ``batch`` is ``None``."""
    CAPTURE = "capture"
    """Before a capture, and to look at the addresses after one; ``batch`` is ``None``."""
    REPLAY = "replay"
    """For a batch that is about to run."""


@runtime_checkable
class StateOwner(Protocol):
    """Writes a state in place. The class is never inherited from; its shape is enough."""

    def build(self, key: Any, batch: Any, phase: Phase, /) -> Any:
        """Fill the persistent buffers for ``key`` and return the state that lies in them.

        Args:
            key: The captured descriptor, with its padded sizes.
            batch: Whatever the engine passes to :meth:`graphshare.GraphPool.refresh`; ``None``
                unless ``phase`` is ``REPLAY``, and the contents are then the owner's choice, but
                must be valid for the kernels (lengths of at least 1, pages that exist).
            phase: Why it is called. Tells a build for a batch from one without better than
                ``batch`` does: an engine whose owner holds the batch may refresh with ``None``. A
                warmup and a capture should get separate host objects where a kernel initialises
                them lazily.

        Returns:
            An :class:`graphshare.AttentionState`, or any nest of tensors and host values. Tensors
            lie at the same addresses, with the same shapes, for each call with this key.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What a pool's states were planned for. A field left ``None`` is not stated, so not checked.

    ``share_states`` refuses two pools whose specs differ in a field that both state. An adapter
    for one kernel library narrows this to the fields which that kernel bakes in, by a subclass
    that overrides :meth:`differing`.

    Args:
        num_q_heads: Query heads of one rank.
        num_kv_heads: Key and value heads of one rank.
        head_size: Elements of one head.
        page_size: Tokens of one page of the KV cache.
        causal: Whether a query sees only earlier positions.
        window: Tokens that a sliding window reaches back; -1 for no window.
        q_dtype: Of the queries.
        kv_dtype: Of the KV cache.
        backend: The kernel and its build, e.g. ``"flash_attn3/vllm"``.
    """

    num_q_heads: int | None = None
    num_kv_heads: int | None = None
    head_size: int | None = None
    page_size: int | None = None
    causal: bool | None = None
    window: int | None = None
    q_dtype: torch.dtype | None = None
    kv_dtype: torch.dtype | None = None
    backend: str | None = None

    def differing(self, other: AttentionSpec) -> tuple[str, ...]:
        """Return the names of the fields that forbid sharing between the two specs.

        Args:
            other: The spec of the borrower, where ``self`` is the lender's.
        """
        shared = {field.name for field in fields(other)}
        pairs = (
            (field.name, getattr(self, field.name), getattr(other, field.name))
            for field in fields(self)
            if field.name in shared
        )
        return tuple(
            name
            for name, mine, theirs in pairs
            if mine is not None and theirs is not None and mine != theirs
        )


def check_build(what: str, owner: Any) -> None:
    """Refuse an owner whose ``build`` cannot be called as :class:`StateOwner` says.

    Args:
        what: Which argument, with the pool's name.
        owner: The owner.

    Raises:
        TypeError: It has no ``build``, or one of other parameters, or is a class.
    """
    build = getattr(owner, "build", None)
    if not callable(build):
        raise TypeError(f"{what}: expected an object with a method build, got {shown(owner)}.")
    if isinstance(owner, type):
        found = inspect.getattr_static(owner, "build")
        if not isinstance(found, (classmethod, staticmethod)):
            raise TypeError(
                f"{what}: expected an owner, got {shown(owner)}. Make one: {owner.__name__}(...)."
            )
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):  # an extension's; the first build tells
        return
    try:
        signature.bind(None, None, Phase.WARMUP)
    except TypeError:
        name = getattr(owner, "__qualname__", type(owner).__qualname__)
        raise TypeError(
            f"{what}: expected a method build(key, batch, phase), got {name}.build{signature}. "
            "It is called with these three, by position."
        ) from None


def name_build(error: BaseException, pool: str, key: Any, phase: Phase) -> None:
    """Note on an exception of an owner which of its builds raised it.

    Python 3.10 has no notes; there the exception passes as it is.
    """
    note = getattr(error, "add_note", None)
    if note is not None:
        note(f"graphshare: in the owner's build for {pool}, key {key!r}, {phase}")


def declared_tensors(pool: str, key: Any, declared: Any) -> list[torch.Tensor]:
    """Return what an owner's ``writes`` returned, as a list.

    Args:
        pool: The name of the pool that it was asked for.
        key: For which it was asked.
        declared: What it returned.

    Raises:
        CaptureError: It is no iterable of tensors.
    """
    wrong: Any = declared
    if not isinstance(declared, torch.Tensor) and isinstance(declared, Iterable):  # not its rows
        found: list[Any] = list(declared)
        others = [each for each in found if not isinstance(each, torch.Tensor)]
        if not others:
            return found
        wrong = others[0]
    raise CaptureError(
        f"{pool}: writes(key) of the owner",
        expected="a list of tensors",
        got=shown(wrong) if wrong is declared else f"one with {shown(wrong)} in it",
        key=key,
        consequence="What a build writes over would not be known",
        remedy="Return the tensors that a build for this key may write; of a PersistentBuffer, "
        "buffer.tensor",
    )
