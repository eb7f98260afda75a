"""What must agree for one model to run on the plans that were made for another.

FlashInfer's ``run`` compares dtypes and the window with the plan, and nothing else: heads that the
plan was not made for give wrong numbers or touch memory that is not theirs, in silence. Each rule
below is as narrow as the kernel allows; each was tried on both sides on an H200 with 0.6.14.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from typing_extensions import override

from graphshare.adapters.flashinfer.plans import Kernel
from graphshare.owner import AttentionSpec

__all__ = ["RULES", "FlashInferSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashInferSpec(AttentionSpec):
    """What a pool's FlashInfer plans are made for. A field left ``None`` is not compared.

    Where this is the lender's, :meth:`differing` says what forbids a borrower to run on its
    plans, by the kernels that the lender plans for:

    - **all:** ``page_size`` (page lists and slots count by it), ``head_size``, ``q_dtype`` and
      ``kv_dtype`` (compiled into the kernel that the plan's wrapper holds), ``window`` and
      ``softcap`` (so are they, and the wrapper passes its own), ``backend`` (offsets are the
      library's own). The number of layers and the softmax scale may differ.
    - **decode:** at most the lender's query heads. KV heads may differ.
    - **fa2:** at most the lender's query heads for each KV head; at most the lender's query heads
      times that number. The mask may differ.
    - **fa3:** the same number of query heads. KV heads and the mask may differ.
    - **batch_attention:** the same query heads, KV heads and mask.

    Args:
        kernels: What the plans are for. A borrower's is not compared: it runs the lender's.
        softcap: Cap of the attention logits; 0 for none.
        also: Of further models that the lender's owner plans for; a borrower needs one of them.
    """

    kernels: frozenset[Kernel] = frozenset()
    softcap: float | None = None
    also: tuple[FlashInferSpec, ...] = ()

    @override
    def differing(self, other: AttentionSpec) -> tuple[str, ...]:
        if not isinstance(other, FlashInferSpec):
            return AttentionSpec.differing(self, other)  # of another library: all that both state
        found: list[str] = []
        for kernel in sorted(self.kernels):
            plans = [each.forbids(kernel, other) for each in (self, *self.also)]
            if all(plans):
                found.extend(plans[0])
        return tuple(dict.fromkeys(found))

    def forbids(self, kernel: Kernel, other: FlashInferSpec) -> tuple[str, ...]:
        """Return the fields that forbid ``other`` to run on this one's plans for ``kernel``."""
        return _unequal(self, other, _EVERY_KERNEL) + RULES[kernel](self, other)


_EVERY_KERNEL = (
    "page_size",
    "head_size",
    "q_dtype",
    "kv_dtype",
    "window",
    "softcap",
    "backend",
)


def _unequal(
    lender: FlashInferSpec, borrower: FlashInferSpec, names: tuple[str, ...]
) -> tuple[str, ...]:
    pairs = ((name, getattr(lender, name), getattr(borrower, name)) for name in names)
    return tuple(name for name, a, b in pairs if a is not None and b is not None and a != b)


def _heads(spec: FlashInferSpec) -> tuple[int | None, int | None]:
    """Query heads, and query heads for each KV head; None for what is not stated."""
    if spec.num_q_heads is None or spec.num_kv_heads is None:
        return spec.num_q_heads, None
    return spec.num_q_heads, spec.num_q_heads // spec.num_kv_heads


def _decode(lender: FlashInferSpec, borrower: FlashInferSpec) -> tuple[str, ...]:
    # The grid is (padded_batch_size, the launch's KV heads), and the plan's indices name no head
    # (decode.cuh:391-410). But partial sums start at an offset after the planned heads' partial
    # outputs, and end the workspace (scheduler.cuh:486): more heads run over both.
    mine, theirs = lender.num_q_heads, borrower.num_q_heads
    if mine is None or theirs is None or theirs <= mine:
        return ()
    return ("num_q_heads",)


def _fa2(lender: FlashInferSpec, borrower: FlashInferSpec) -> tuple[str, ...]:
    # The plan lists tiles of rows times group (scheduler.cuh:555-610). A smaller group fills
    # fewer of them and the rest write nothing (prefill.cuh, qo_upper_bound); a larger one has
    # rows for which there is no tile. Partial outputs are sized for heads times packed rows of
    # all tiles (scheduler.cuh:790-800), a launch uses heads times plain rows: room for group times
    # the heads. The mask is a launch's, not the plan's.
    found: tuple[str, ...] = ()
    (mine, group), (theirs, their_group) = _heads(lender), _heads(borrower)
    if group is not None and their_group is not None and their_group > group:
        found += ("num_kv_heads",)
    if mine is not None and theirs is not None and theirs > mine * (group or 1):
        found += ("num_q_heads",)
    return found


def _fa3(lender: FlashInferSpec, borrower: FlashInferSpec) -> tuple[str, ...]:
    # Each work names its query head (scheduler.cuh:925-950): of more heads the rest is never
    # computed, of fewer some are outside the output. The KV head follows from the launch's own
    # ratio (batch_prefill_sm90.cu:225-230), and the mask is the launch's too: in the plan it only
    # shares out work.
    return _unequal(lender, borrower, ("num_q_heads",))


def _batch_attention(lender: FlashInferSpec, borrower: FlashInferSpec) -> tuple[str, ...]:
    # Works name KV heads, tiles are rows times group, and the end of each causal chunk is in the
    # plan (scheduler.cuh:1225-1290).
    return _unequal(lender, borrower, ("causal", "num_q_heads", "num_kv_heads"))


RULES: Mapping[Kernel, Callable[[FlashInferSpec, FlashInferSpec], tuple[str, ...]]] = (
    MappingProxyType(
        {"decode": _decode, "fa2": _fa2, "fa3": _fa3, "batch_attention": _batch_attention}
    )
)
"""By kernel: ``rule(lender, borrower)``, the names of fields that forbid to borrow."""
