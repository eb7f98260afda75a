"""The faults by name: what is planted, which rule refuses it, what lets it through."""

from __future__ import annotations

from dataclasses import dataclass

from graphshare.adapters.toy.demo.arguments import FAULTS

__all__ = ["ABOUT", "FaultFacts"]


@dataclass(frozen=True, slots=True)
class FaultFacts:
    """What is said about one fault.

    Args:
        planted: What the engine does wrong.
        rule: What graphshare asks for, and the fault breaks.
        let_through: What ``--unsafe`` does so that nothing refuses it.
    """

    planted: str
    rule: str
    let_through: str


_CHECKS_OFF = 'the pools are made with checks="off"'
_NO_LOAN = 'the two pools share one builder\'s memory without a loan, with checks="off"'

ABOUT: dict[str, FaultFacts] = dict(
    zip(
        FAULTS,
        (
            FaultFacts(
                "The draft's first decode is prepared before its prefill has run, through the "
                "builder that both models use.",
                "A build makes stale every other state whose memory it may write (freshness, "
                "rule 2).",
                _CHECKS_OFF,
            ),
            FaultFacts(
                "In the middle of the run the target's builder allocates its buffers anew, as a "
                "workspace does that grows.",
                "A rebuild returns every tensor at the address that the graphs bake in.",
                _CHECKS_OFF,
            ),
            FaultFacts(
                "The target's attention plans on first use and marks its state as planned; the "
                "builder hands out one state for the warmup and for the capture.",
                "What a warmup's forward left behind does not come back for the capture.",
                "the builder declares the mark as 'any', a value that no kernel depends on",
            ),
            FaultFacts(
                "The target is captured with the max_seq_len of a short batch; requests then grow "
                "past it.",
                "A host value that the graph bakes in is captured at capacity ('at_most').",
                _CHECKS_OFF,
            ),
            FaultFacts(
                "The draft counts one row too many for each request, captures shapes of its own "
                "and dispatches by itself.",
                "Every key of a borrower has a state at its lender; this is checked before "
                "anything is captured.",
                _NO_LOAN,
            ),
            FaultFacts(
                "In the middle of the run the engine releases the target's graphs to save memory "
                "and runs the target eagerly; the draft goes on replaying.",
                "A release ends what was lent: a borrower is captured anew.",
                _NO_LOAN,
            ),
            FaultFacts(
                "The draft's kernel is built for pages of half the size.",
                "A lender and its borrower agree in every field that the kernel bakes in.",
                "the draft's pool states no spec, so there is nothing to compare",
            ),
        ),
        strict=True,
    )
)
"""By name."""
