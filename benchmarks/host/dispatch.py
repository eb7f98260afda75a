"""Dispatch, hit and miss, at 1 and at 500 keys, beside a first-match loop over candidates.

The loop follows vLLM's matching rule (uniform length unset or equal, requests unset or enough,
enough tokens, LoRA count equal) over the candidates of the next captured size, listed beforehand
for each token count, uniform ones first; what none fits gets a new descriptor without a graph. It
neither checks its arguments nor looks at larger sizes. Both get the same plain integers in the same
order, shapes of which few occur twice; the time of the loop over the shapes is part of both.

    python -m benchmarks.host.dispatch [--json PATH] [--rounds N]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks._measure import interleave, print_table, save_results
from graphshare.descriptor import BatchDescriptor, capture_descriptors
from graphshare.dispatch import Dispatcher

CALLS = 1000
MAX_NUM_REQS = 256
QUERY_LEN = 4

Shape = tuple[int, int | None, int | None, int]  # tokens, requests, uniform length, LoRA count


@dataclass(frozen=True)
class Candidate:
    num_tokens: int
    num_reqs: int | None
    uniform_query_len: int | None
    num_active_loras: int
    graph: bool = True


class FirstMatch:
    """The peer: candidates for each token count, and the first that is compatible."""

    def __init__(self, keys: list[BatchDescriptor]) -> None:
        candidates = [
            Candidate(
                key.num_tokens, key.num_reqs, key.uniform_query_len, key.num_active_loras or 0
            )
            for key in sorted(keys, key=BatchDescriptor.cost)
        ]
        self.most = max(key.num_tokens for key in keys)
        sizes = sorted({key.num_tokens for key in keys})
        self.by_tokens: list[list[Candidate]] = []
        for size in sizes:
            fitting = [one for one in candidates if one.num_tokens == size]
            self.by_tokens += [fitting] * (size + 1 - len(self.by_tokens))

    def dispatch(
        self,
        num_tokens: int,
        num_reqs: int | None,
        uniform_query_len: int | None,
        num_active_loras: int,
    ) -> Candidate:
        for candidate in self.by_tokens[num_tokens] if num_tokens <= self.most else ():
            if self.compatible(
                candidate, num_tokens, num_reqs, uniform_query_len, num_active_loras
            ):
                return candidate
        return Candidate(num_tokens, num_reqs, None, 0, graph=False)

    @staticmethod
    def compatible(
        candidate: Candidate,
        num_tokens: int,
        num_reqs: int | None,
        uniform_query_len: int | None,
        num_active_loras: int,
    ) -> bool:
        if (
            candidate.uniform_query_len is not None
            and candidate.uniform_query_len != uniform_query_len
        ):
            return False
        if candidate.num_reqs is not None and (num_reqs is None or candidate.num_reqs < num_reqs):
            return False
        return candidate.num_tokens >= num_tokens and candidate.num_active_loras == num_active_loras


def _keys(count: int) -> list[BatchDescriptor]:
    if count == 1:
        return [BatchDescriptor(1000, MAX_NUM_REQS)]
    sizes = range(QUERY_LEN, 2 * count + 1, QUERY_LEN)
    return capture_descriptors(sizes, MAX_NUM_REQS, [QUERY_LEN])


def _shapes(kind: str, largest: int, rng: random.Random) -> list[Shape]:
    """Shapes of one kind. Few occur twice, so that remembering them would not help."""
    shapes: list[Shape] = []
    while len(shapes) < CALLS:
        num_reqs = rng.randint(1, MAX_NUM_REQS)
        mixed = rng.randint(num_reqs, max(num_reqs, largest))
        if kind == "hit, mixed":
            shapes.append((mixed, num_reqs, None, 0))
        elif kind == "hit, uniform":
            num_reqs = rng.randint(1, min(MAX_NUM_REQS, largest // QUERY_LEN))
            shapes.append((num_reqs * QUERY_LEN, num_reqs, QUERY_LEN, 0))
        elif kind == "miss, too many tokens":
            shapes.append((largest + mixed, num_reqs, None, 0))
        elif kind == "miss, too many requests":
            num_reqs += MAX_NUM_REQS
            shapes.append((rng.randint(num_reqs, largest), num_reqs, None, 0))
        else:
            shapes.append((mixed, num_reqs, None, 1))
    return shapes


KINDS = (
    "hit, mixed",
    "hit, uniform",
    "miss, too many tokens",
    "miss, too many requests",
    "miss, LoRA count",
)


def _graphshare(dispatcher: Dispatcher[BatchDescriptor], shapes: list[Shape]) -> Callable[[], None]:
    dispatch = dispatcher.dispatch

    def run() -> None:
        for num_tokens, num_reqs, uniform_query_len, num_active_loras in shapes:
            dispatch(
                num_tokens=num_tokens,
                num_reqs=num_reqs,
                uniform_query_len=uniform_query_len,
                num_active_loras=num_active_loras,
            )

    return run


def _peer(peer: FirstMatch, shapes: list[Shape]) -> Callable[[], None]:
    dispatch = peer.dispatch

    def run() -> None:
        for num_tokens, num_reqs, uniform_query_len, num_active_loras in shapes:
            dispatch(
                num_tokens=num_tokens,
                num_reqs=num_reqs,
                uniform_query_len=uniform_query_len,
                num_active_loras=num_active_loras,
            )

    return run


def _empty(shapes: list[Shape]) -> Callable[[], None]:
    def run() -> None:
        for _num_tokens, _num_reqs, _uniform_query_len, _num_active_loras in shapes:
            pass

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", metavar="PATH", help="write the results to this file")
    parser.add_argument("--rounds", type=int, default=101)
    options = parser.parse_args()
    rng = random.Random(0)
    results: list[dict[str, object]] = []
    rows: list[list[str]] = []
    for count in (1, 500):
        keys = _keys(count)
        start = time.perf_counter()
        dispatcher = Dispatcher(keys)
        build_ms = (time.perf_counter() - start) * 1e3
        peer = FirstMatch(keys)
        for kind in KINDS:
            shapes = _shapes(kind, keys[0].num_tokens, rng)
            for tokens, reqs, uniform, loras in shapes:  # both agree, or the comparison is void
                found = dispatcher.dispatch(
                    num_tokens=tokens,
                    num_reqs=reqs,
                    uniform_query_len=uniform,
                    num_active_loras=loras,
                )
                other = peer.dispatch(tokens, reqs, uniform, loras)
                if (found.num_tokens if found else None) != (
                    other.num_tokens if other.graph else None
                ):
                    raise RuntimeError(f"{tokens, reqs, uniform, loras}: {found} and {other}")
            timing = interleave(
                {
                    "graphshare": _graphshare(dispatcher, shapes),
                    "first match": _peer(peer, shapes),
                    "empty loop": _empty(shapes),
                },
                calls=CALLS,
                rounds=options.rounds,
            )
            ratio = timing.ratio("graphshare", "first match")
            results.append(
                {
                    "keys": len(keys),
                    "case": kind,
                    "build_ms": build_ms,
                    "variants": timing.facts(to="first match"),
                }
            )
            low, high = timing.quartiles_us("graphshare")
            rows.append(
                [
                    f"{len(keys)} keys: {kind}",
                    f"{timing.median_us('graphshare'):.3f}",
                    f"{low:.3f}..{high:.3f}",
                    f"{timing.median_us('first match'):.3f}",
                    f"{timing.median_us('empty loop'):.3f}",
                    f"{ratio.median:.3f}",
                    f"{ratio.low:.3f}..{ratio.high:.3f}",
                ]
            )
    print_table(
        ["", "graphshare us", "quartiles", "first match us", "empty loop us", "ratio", "95%"], rows
    )
    if options.json:
        save_results(options.json, "host/dispatch", results)


if __name__ == "__main__":
    main()
