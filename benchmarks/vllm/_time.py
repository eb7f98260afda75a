"""Times of ``generate`` in a real vLLM, with and without graphshare's hooks."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import torch

from benchmarks.vllm import _engine
from benchmarks.vllm._variants import (
    FEWEST,
    SECONDS,
    SHARE,
    Switch,
    names,
    share_of_skipping,
    to_off,
)
from graphshare.adapters.vllm import sessions

# New tokens, and which share of the time is for them: a first token takes little, and varies less.
_CASES = ((64, 0.7), (1, 0.3))

_Answer = tuple[tuple[int, ...], ...]


def end_to_end(llm: Any, options: Any) -> dict[str, Any]:
    """Hooks on against hooks off, from one call to the next: paired ratios with 95% intervals.

    Where vLLM rebuilds before the draft's prefill (0.20.2), a third variant skips the rebuild;
    elsewhere both have two turns a round. A call of 64 tokens takes 0.1 to 0.6 s, in which a
    machine drifts by some per cent; the ``profile`` compares steps that follow each other.

    Of one token, a call is one step of the model. In a process that serves, the step before has run
    the same way, and what it touched may still be in the processor's caches; so a call of the same
    variant goes before each that counts. What that one took, which mostly follows another kind, is
    kept beside it.

    Every call of a case is asked the same, and the answers are compared.
    """
    import vllm

    (session,) = sessions()
    variants = names(session)
    found: dict[str, Any] = {}
    rng = random.Random(0)
    answers: dict[str, set[_Answer]] = {}

    def seconds(
        switch: Switch, variant: str, requests: list[dict[str, list[int]]], new: int
    ) -> float:
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False
        )
        switch.to(variant)
        torch.cuda.synchronize()
        start = time.perf_counter()
        outputs = llm.generate(requests, params, use_tqdm=False)
        took = time.perf_counter() - start
        answer = tuple(tuple(each.outputs[0].token_ids) for each in outputs)
        answers.setdefault(variant, set()).add(answer)
        return took

    with Switch(session, _engine.runner()) as switch:
        for concurrency in options.concurrency:
            requests = [
                {"prompt_token_ids": [rng.randrange(10, 30000) for _ in range(128)]}
                for _ in range(concurrency)
            ]
            for new, share in _CASES:
                answers.clear()
                for variant in variants:
                    seconds(switch, variant, requests, new)
                times: dict[str, list[float]] = {variant: [] for variant in variants}
                before: dict[str, list[float]] = {variant: [] for variant in variants}
                deadline = time.perf_counter() + options.seconds * share / len(options.concurrency)
                while len(times["off"]) < FEWEST or time.perf_counter() < deadline:
                    for variant in rng.sample(variants, len(variants)):
                        if new == 1:
                            before[variant].append(seconds(switch, variant, requests, new))
                        times[variant].append(seconds(switch, variant, requests, new))
                case = found[f"concurrency {concurrency}, {new} tokens"] = {
                    "rounds": len(times["off"]),
                    "answers_are_those_of_vllm_alone": {
                        name: each == answers["off"] for name, each in answers.items()
                    },
                    SECONDS: {"counted": times, "before": before},
                    "median_ms": {name: statistics.median(t) * 1e3 for name, t in times.items()},
                    "to_off": to_off(times),
                }
                if new == 1:
                    case["to_off_of_the_calls_before"] = to_off(before)
                if "skipped" in times:
                    rows = list(zip(times["on"], times["off"], times["skipped"], strict=True))
                    case[SHARE] = share_of_skipping(rows)._asdict()
            options.so_far(found)
    return found
