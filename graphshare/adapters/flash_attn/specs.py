"""What two pools must have in common for one to run on the other's FlashAttention state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from graphshare.adapters.flash_attn.schedule import Layout, Resolved, resolve
from graphshare.owner import AttentionSpec

__all__ = ["FlashAttention2Spec", "FlashAttention3Spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttention2Spec(AttentionSpec):
    """FlashAttention 2 has no plan: its states are page tables and lengths, for any model to read.

    Compared are ``page_size``, because a block table counts pages of the lender's size, and
    ``backend``, because other kernels read other states. Heads, head size, mask and dtype of a
    borrower are its own launch's affair.
    """

    def differing(self, other: AttentionSpec) -> tuple[str, ...]:
        """Return which of ``page_size`` and ``backend`` differ, where both are stated."""
        return _stated(self, other, ("page_size", "backend"))


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttention3Spec(AttentionSpec):
    """FlashAttention 3 plans a launch: the plan must be one that the borrower's launch can read.

    Compared are:

    - ``page_size`` and ``backend``, as for FlashAttention 2; builds lay the plan out differently
      (``mha_fwd_get_scheduler_metadata`` in ``hopper/flash_api.cpp`` of each).
    - ``num_q_heads`` and ``num_kv_heads``, if their ratio differs and a launch packs the query
      heads of a KV head into tiles: the plan counts rows of such tiles
      (``flash_prepare_scheduler.cu``, ``seqlen *= qhead_per_khead``). With as many query heads for
      each KV head, the numbers of heads may differ.
    - ``causal``, ``window`` and ``head_size``, if the plan has other vectors for them: see
      :func:`~graphshare.adapters.flash_attn.resolve`. A causal launch of one row is not masked for
      some head sizes, so that head size alone may forbid a loan. In the original's builds the plan
      counts tiles, whose rows depend on the head size.
    - ``num_splits``, where both state it. ``run`` of this adapter launches with the number that the
      state was planned for, and leaves it out; state it for launches of your own
      (``dataclasses.replace(kernel.spec, num_splits=32)``): a plan for more splits than the launch
      has room for makes it write out of bounds.

    Args:
        layout: Whose build.
        packs_always: Whether the build has no kernels that do not pack.
        max_seq_len: Most tokens of a request, as launches are told: pages of a request times their
            size.
        max_query_len: Most rows of a request in any key.
        least_query_len: The least ``max_query_len`` of the keys that are shared. Above 1 if
            ``share_states(when=...)`` leaves out keys of one row a request.
        num_splits: Of the launches; ``None`` where they take it from the state.
    """

    layout: Layout = "vllm"
    packs_always: bool = True
    max_seq_len: int | None = None
    max_query_len: int = 1
    least_query_len: int = 1
    num_splits: int | None = None

    def differing(self, other: AttentionSpec) -> tuple[str, ...]:
        """Return the names of the fields that forbid a loan from ``self`` to ``other``."""
        names = [*_stated(self, other, ("page_size", "backend"))]
        if isinstance(other, FlashAttention3Spec):
            names += _stated(self, other, ("num_splits",))
        mine, theirs = _ratio(self), _ratio(other)
        if mine is not None and theirs is not None and mine != theirs and self._packs():
            names += _stated(self, other, ("num_q_heads", "num_kv_heads"))
        if self._plans_differ(other):
            names += _stated(self, other, ("causal", "window", "head_size"))
        return tuple(names)

    def _packs(self) -> bool:
        return any(each.packed for each in _resolved(self, self))

    def _plans_differ(self, other: AttentionSpec) -> bool:
        mine, theirs = _resolved(self, self), _resolved(self, other)
        return any(
            one.vectors != two.vectors
            or one.packed != two.packed
            or (self.layout == "upstream" and one.rows != two.rows)
            for one, two in zip(mine, theirs, strict=True)
        )


def _stated(one: AttentionSpec, other: AttentionSpec, names: Iterable[str]) -> tuple[str, ...]:
    pairs = ((name, getattr(one, name), getattr(other, name)) for name in names)
    return tuple(
        name
        for name, mine, theirs in pairs
        if mine is not None and theirs is not None and mine != theirs
    )


def _ratio(spec: AttentionSpec) -> int | None:
    if spec.num_q_heads is None or spec.num_kv_heads is None:
        return None
    return spec.num_q_heads // spec.num_kv_heads


def _resolved(lender: FlashAttention3Spec, spec: AttentionSpec) -> tuple[Resolved, ...]:
    """What launches of ``spec`` on the lender's states make of their arguments.

    What ``spec`` does not state is as the lender has it.
    """

    def stated(name: str) -> object:
        value = getattr(spec, name)
        return getattr(lender, name) if value is None else value

    least = spec.least_query_len if isinstance(spec, FlashAttention3Spec) else 1
    return _launches(
        lender.layout,
        lender.packs_always,
        max(lender.least_query_len, least),
        lender.max_query_len,
        lender.max_seq_len or (1 << 31),
        _ratio(spec) or _ratio(lender) or 1,
        stated("head_size") or 128,
        lender.page_size or 1,
        bool(stated("causal")),
        -1 if (window := stated("window")) is None else window,
    )


@lru_cache(maxsize=256)
def _launches(
    layout: Layout,
    packs_always: bool,
    least_query_len: int,
    max_query_len: int,
    max_seq_len: int,
    gqa_ratio: int,
    head_size: int,
    page_size: int,
    causal: bool,
    window: int,
) -> tuple[Resolved, ...]:
    lens = range(least_query_len, max(max_query_len, least_query_len) + 1)
    if packs_always:
        lens = lens[:2]  # longer ones come out as the second does
    return tuple(
        resolve(
            layout,
            num_reqs=1,
            max_query_len=query_len,
            max_seq_len=max_seq_len,
            gqa_ratio=gqa_ratio,
            head_size=head_size,
            page_size=page_size,
            causal=causal,
            window=window,
            num_splits=num_splits,
            packs_always=packs_always,
        )
        for query_len in lens
        for num_splits in (1, 2)
    )
