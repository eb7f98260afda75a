"""What the demo decodes, and how its text is shown."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from graphshare.adapters.toy.batch import Request
from graphshare.adapters.toy.config import BOS

__all__ = ["Workload", "decoded"]


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts with the steps in which they arrive.

    Args:
        prompts: Texts.
        arrivals: Step of each, not decreasing.
        max_new_tokens: For each.
    """

    prompts: tuple[str, ...]
    arrivals: tuple[int, ...]
    max_new_tokens: int

    @classmethod
    def of(
        cls, prompts: Sequence[str], max_new_tokens: int, *, mean_gap: int, seed: int
    ) -> Workload:
        """Draw arrivals: the first at once, then gaps of ``mean_gap`` steps on average."""
        draw = random.Random(seed)
        arrivals = [0]
        for _ in prompts[1:]:
            arrivals.append(arrivals[-1] + draw.randint(0, 2 * mean_gap))
        return cls(tuple(prompts), tuple(arrivals), max_new_tokens)

    @property
    def prompt_tokens(self) -> list[tuple[int, ...]]:
        """The prompts as the models take them: the beginning of a text, then its bytes."""
        return [(BOS, *prompt.encode()) for prompt in self.prompts]

    def requests(self) -> list[Request]:
        """Return requests that have not run yet; new ones for each call."""
        return [
            Request(number, tokens, self.max_new_tokens, arrival)
            for number, (tokens, arrival) in enumerate(
                zip(self.prompt_tokens, self.arrivals, strict=True)
            )
        ]


def decoded(tokens: Sequence[int]) -> str:
    """Return the text of tokens; special ones are left out, broken UTF-8 is replaced."""
    return bytes(token for token in tokens if token < BOS).decode("utf-8", errors="replace")
