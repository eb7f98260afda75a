"""Times of ``generate`` in a real vLLM, with and without graphshare's hooks."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks._measure import bootstrap
from benchmarks.vllm import _engine
from benchmarks.vllm._variants import SHARE, as_variant, names, share_of_skipping
from graphshare.adapters.vllm import sessions

_FEWEST = 4


def end_to_end(llm: Any, options: Any) -> dict[str, Any]:
    """Hooks on against hooks off, from one call to the next: paired ratios with 95% intervals.

    Where vLLM rebuilds before the draft's prefill (0.20.2), a third variant skips the rebuild.
    """
    import vllm

    (session,) = sessions()
    speculator = _engine.runner().speculator
    variants = names(session)
    found: dict[str, Any] = {}
    rng = random.Random(0)

    def seconds(variant: str, requests: list[dict[str, list[int]]], new: int) -> float:
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False
        )
        with as_variant(variant, session, speculator):
            torch.cuda.synchronize()
            start = time.perf_counter()
            llm.generate(requests, params, use_tqdm=False)
            return time.perf_counter() - start

    deadline = time.perf_counter() + options.seconds
    for concurrency, count in zip(options.concurrency, _forever(options.pairs), strict=False):
        requests = [
            {"prompt_token_ids": [rng.randrange(10, 30000) for _ in range(128)]}
            for _ in range(concurrency)
        ]
        for new, rounds in ((64, count), (1, count * 2)):
            for variant in variants:
                seconds(variant, requests, new)
            times: dict[str, list[float]] = {variant: [] for variant in variants}
            for done in range(rounds):
                if done >= _FEWEST and time.perf_counter() > deadline:
                    break
                for variant in rng.sample(variants, len(variants)):
                    times[variant].append(seconds(variant, requests, new))
            found[f"concurrency {concurrency}, {new} tokens"] = {
                "rounds": len(times["off"]),
                "median_ms": {name: statistics.median(t) * 1e3 for name, t in times.items()},
                "to_off": {
                    name: bootstrap(
                        [one / off for one, off in zip(t, times["off"], strict=True)]
                    )._asdict()
                    for name, t in times.items()
                    if name != "off"
                },
            }
            if "skipped" in times:
                rows = list(zip(times["on"], times["off"], times["skipped"], strict=True))
                found[f"concurrency {concurrency}, {new} tokens"][SHARE] = share_of_skipping(
                    rows
                )._asdict()
    session.resume()
    return found


def _forever(counts: Sequence[int]) -> Iterator[int]:
    yield from counts
    yield from itertools.repeat(counts[-1])
