"""What the toy engine needs of an attention kernel, and which kernels there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from graphshare.owner import AttentionSpec, Phase

if TYPE_CHECKING:
    import torch

    from graphshare.adapters.toy.batch import AttentionBatch
    from graphshare.adapters.toy.config import EngineConfig, ToyConfig
    from graphshare.descriptor import BatchDescriptor
    from graphshare.state import AttentionState

__all__ = ["ATTENTION", "Attention", "AttentionKernel", "LayerStore", "ToyOwner", "kernel_named"]

Attention = Literal["torch", "flash_attn2", "flash_attn3", "flashinfer"]
"""Names of the kernels."""

ATTENTION: tuple[Attention, ...] = get_args(Attention)


class LayerStore(Protocol):
    """Keys and values of one layer, in whatever form the kernel reads."""

    def write(self, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store one row for each token.

        Args:
            keys: ``[num_tokens, num_kv_heads, head_size]``.
            values: The same shape.
            slot_mapping: ``[num_tokens]`` int64; padded rows name a slot of the scratch page.
        """
        ...


class ToyOwner(Protocol):
    """A :class:`graphshare.StateOwner` of the toy engine's batches, which counts."""

    @property
    def num_builds(self) -> int:
        """Calls of :meth:`build` for a batch."""
        ...

    def build(
        self, key: BatchDescriptor, batch: AttentionBatch | None, phase: Phase, /
    ) -> AttentionState:
        """Write the state for one step; see :class:`graphshare.StateOwner`."""
        ...


class AttentionKernel(Protocol):
    """Attention over a paged cache: who builds its state, and how it runs on it.

    Attributes:
        name: One of :data:`ATTENTION`.
        row_invariant: Whether a row's bits are the same whatever rows come with it.
    """

    name: str
    row_invariant: bool

    def make_cache(
        self, config: ToyConfig, engine: EngineConfig, num_layers: int, device: torch.device | str
    ) -> Sequence[LayerStore]:
        """Make one cache a layer; all layers, the draft's too, are addressed by the same slots."""
        ...

    def owner(
        self, config: ToyConfig, engine: EngineConfig, device: torch.device | str
    ) -> ToyOwner:
        """Make an owner with buffers of its own."""
        ...

    def spec(self, config: ToyConfig, engine: EngineConfig) -> AttentionSpec:
        """Return what the states are planned for; the layer count does not matter."""
        ...

    def views(self, state: AttentionState, num_tokens: int, uniform_query_len: int | None) -> Any:
        """Work out what all layers of a forward need; part of the forward, so captured with it.

        Args:
            state: What the owner built.
            num_tokens: Rows of the key.
            uniform_query_len: Rows of every request, if the key says so.
        """
        ...

    def attend(
        self, queries: Sequence[torch.Tensor], cache: Any, views: Any
    ) -> Sequence[torch.Tensor]:
        """Attend from all rows to the cache of one layer.

        Args:
            queries: Blocks of ``[ROW_BLOCK, num_q_heads, head_size]``.
            cache: Of this layer, written for these rows.
            views: As :meth:`views` gave them.

        Returns:
            Blocks of ``[ROW_BLOCK, num_q_heads * head_size]``.
        """
        ...


def kernel_named(name: str, **options: Any) -> AttentionKernel:
    """Return a kernel; its library is imported when a cache or an owner is made.

    Args:
        name: One of :data:`ATTENTION`.
        options: Of the library's owners and borrowers in graphshare's adapter, e.g. ``module``.

    Raises:
        ValueError: For a name that is not in :data:`ATTENTION`.
    """
    if name == "torch":
        from graphshare.adapters.toy.attention import TorchKernel

        return TorchKernel()
    if name not in ATTENTION:
        raise ValueError(f"attention: expected one of {', '.join(ATTENTION)}, got {name!r}")
    from graphshare.adapters.toy.library_kernels import LIBRARY_KERNELS

    return LIBRARY_KERNELS[name](**options)
