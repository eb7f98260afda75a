"""What the graphs of each attention backend freeze, write and leave alone.

Read from vLLM's sources; the lines are those of 0.25.1, in ``vllm/v1/attention/backends``.

* ``max_seq_len``, ``at_most``. Captured at the model's maximum (``model_states/default.py`` 155),
  smaller at replay: an upper bound (``flash_attn.py`` 844, ``triton_attn.py`` 657); kernels take
  the lengths from ``seq_lens``. Up to 0.21.0, ``any``: there the bound comes of a count that
  rejected drafts are never taken off (0.20.2, ``model_runner.py`` 813 to 819 and 950), so that it
  passes the model's maximum, which no request does: the scheduler ends it (``sched/utils.py`` 113).
* ``max_query_len``, ``any``. Captured on dummy requests of equal lengths, and kept by the graph
  (``flash_attn.py`` 843, ``triton_attn.py`` 656); kernels take the lengths from
  ``query_start_loc``. Both backends declare full graphs right for any batch (323, 102).
* All others, ``equal``: sizes, flags and buffers that are baked in (``flash_attn.py`` 782 to 976,
  ``triton_attn.py`` 594 to 696).

An attribute of the metadata that is none of its fields is not looked at. Nothing in the runner,
these backends or the attention layers sets one that a graph could read; the builder of chunked
local attention, which captures no graphs, sets a function
(``scripts/extract_vllm_signatures.py`` reads that off the wheels).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from graphshare.adapters.flash_attn.schedule import padded
from graphshare.adapters.vllm.signatures import find
from graphshare.state import declared_only

__all__ = [
    "BACKENDS",
    "Backend",
    "drops_mask",
    "host_values",
    "look_at_fields",
    "same_unused",
    "written_by_builders",
]


@dataclass(frozen=True, slots=True)
class Backend:
    """An attention backend of vLLM, by what its builder's ``build`` does to memory.

    Attributes:
        name: As the backend's ``get_name()`` says.
        metadata: The class of its metadata, as in ``signatures.json``.
        host_values: Fields of the metadata, by their rule as in ``StateOwner.host_values``.
        written: Attributes of a builder: buffers that ``build`` writes.
        scratch: Fields of the metadata that only the forward writes, for itself.
    """

    name: str
    metadata: str
    host_values: dict[str, str]
    written: tuple[str, ...]
    scratch: tuple[str, ...]


_LENGTHS = {"max_seq_len": "at_most", "max_query_len": "any"}

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        # [:n] is written and the rest zeroed, by each build (588 to 595).
        Backend(
            "FLASH_ATTN",
            "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadata",
            _LENGTHS,
            ("scheduler_metadata",),
            (),
        ),
        # Nothing of its own is written by a build; segments of the softmax are the kernel's.
        Backend(
            "TRITON_ATTN",
            "vllm.v1.attention.backends.triton_attn:TritonAttentionMetadata",
            _LENGTHS,
            (),
            ("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum"),
        ),
    )
}


def host_values(*, lengths_bounded: bool) -> dict[str, str]:
    """Return the rules for a state that may hold metadata of any of the backends.

    Args:
        lengths_bounded: Whether ``max_seq_len`` stays within the model's maximum.
    """
    fields = {name: rule for each in BACKENDS.values() for name, rule in each.host_values.items()}
    if not lengths_bounded:
        fields["max_seq_len"] = "any"
    # A state is one metadata object, or holds some.
    return fields | {f"*.{name}": rule for name, rule in fields.items()}


def look_at_fields() -> None:
    """Take the metadata of each backend for its fields, which a check finds sooner than all."""
    for each in BACKENDS.values():
        with contextlib.suppress(TypeError):  # somebody changed the class: look at all of it
            declared_only(find(each.metadata))


def drops_mask(head_size: int) -> bool:
    """Whether FlashAttention 3 makes a launch with one query row a request an unmasked one.

    A graph of it is wrong for more rows, and the plan of such a batch has another size. With a
    paged cache these head sizes keep the mask for the sake of their tiles (``flash_api.cpp`` of
    vllm-project/flash-attention 617264c; seen on an H200 with head size 64).
    """
    return not 64 < head_size <= 128


def same_unused(own: Any, borrowed: Any) -> None:
    """Make what no kernel reads in two plans of FlashAttention 3 equal, for a comparison.

    The vectors of a plan are padded to a multiple of four requests, and the padding is memory that
    nobody has written.

    Args:
        own: Metadata whose plan takes the other's padding; any backend's.
        borrowed: The other metadata, for the same requests.
    """
    mine, theirs = (getattr(each, "scheduler_metadata", None) for each in (own, borrowed))
    if mine is None or theirs is None or mine.shape != theirs.shape:
        return
    num_reqs = len(own.seq_lens)
    stride = padded(num_reqs)
    for start in range(0, len(mine) - 1, stride):
        unused = slice(start + num_reqs, start + stride)
        mine[unused] = theirs[unused]


def written_by_builders(groups: list[list[Any]]) -> Iterator[torch.Tensor]:
    """Yield the buffers that builds through these attention groups write, whole."""
    for group in (each for within in groups for each in within):
        backend = BACKENDS[group.backend.get_name()]
        builder = group.get_metadata_builder(0)
        for name in backend.written:
            buffer = getattr(builder, name, None)
            if isinstance(buffer, torch.Tensor):
                yield buffer
