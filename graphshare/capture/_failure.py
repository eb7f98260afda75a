"""The error for a forward that raised, the same from every backend."""

from __future__ import annotations

from graphshare.errors import CaptureError, ProvenanceError, RebindError

__all__ = ["forward_raised", "graph_memory_moves", "tape_not_kept"]


def forward_raised(during: str, error: Exception) -> CaptureError:
    """Make the error for a forward that raised ``error`` during a warmup or a capture."""
    return CaptureError(
        f"{during}: the forward raised {type(error).__name__}: {error}",
        consequence="Nothing was captured, and what was captured before is as it was",
        remedy="See its own exception, the cause of this one. "
        + (
            "A warmup runs forward(key, state) eagerly, on the state that the owner built for the "
            "key: call it so by hand"
            if during == "warmup"
            else "Keep out of the forward what needs the host: item(), tolist(), shapes that "
            "depend on data"
        ),
    )


def graph_memory_moves() -> RebindError:
    """Make the error for a move of memory that the graph allocated at its capture."""
    return RebindError(
        "rebind of a graph's own memory",
        expected="memory that was allocated outside of the capture",
        got="memory of the graph, such as an intermediate result or an output",
        consequence="Other results of the same graph may lie there at other times",
        remedy="Have the forward write to a buffer that was allocated before the capture",
    )


def tape_not_kept() -> ProvenanceError:
    """Make the error for a tape that may not be read, where a CUDA graph could not be."""
    return ProvenanceError(
        "reading a tape",
        expected="one that was captured to be read",
        got="one that was not",
        consequence="On a GPU there would be no graph to read, so the tape refuses it too",
        remedy="Capture with GraphPool(..., inspectable=True), or with "
        "make_backend(..., inspectable=True)",
    )
