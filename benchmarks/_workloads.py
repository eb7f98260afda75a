"""Steps of an engine that batches continuously, under workloads of published shape.

Lengths of prompts and answers are drawn from log-normal distributions. Their means or medians are
published; their spread is not, and is 1 here in the logarithm, about what the papers' histograms
show. Requests arrive at random (Poisson), at a rate that swings between a fifth and nearly twice
its mean, as over a day. Requests that decode come first in a step; prompts fill what is left of the
token budget, in chunks. A draft of three tokens makes decode steps uniform of length 4; two of the
three are accepted in the mean.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from graphshare.planning import Batch

Draw = Callable[[random.Random], int]

SWING = 0.8
STEPS_OF_A_DAY = 20_000
ACCEPTED = 2.0


@dataclass(frozen=True)
class Workload:
    """Requests, and the engine that serves them.

    Attributes:
        name: Of the workload.
        source: Where the lengths are published.
        prompt, answer: Draw a number of tokens.
        query_len: Tokens of a request in a decode step.
        token_budget: Most tokens of a step.
        max_num_reqs: Most requests of a step.
        load: Requests that decode, in the mean.
    """

    name: str
    source: str
    prompt: Draw
    answer: Draw
    query_len: int
    token_budget: int
    max_num_reqs: int
    load: float

    @property
    def tokens_of_a_step(self) -> float:
        """Of one request that decodes, in the mean."""
        return 1.0 if self.query_len == 1 else 1 + ACCEPTED


def _lognormal(*, mean: float | None = None, median: float | None = None) -> Draw:
    middle = math.log(median) if median is not None else math.log(mean or 1) - 0.5

    def draw(rng: random.Random) -> int:
        return max(1, round(rng.lognormvariate(middle, 1.0)))

    return draw


def _either(one: Draw, other: Draw) -> Draw:
    def draw(rng: random.Random) -> int:
        return one(rng) if rng.random() < 0.5 else other(rng)

    return draw


WORKLOADS = (
    Workload(
        "chat",
        "ShareGPT: mean 161.31 tokens in, 337.99 out (Kwon et al., PagedAttention, SOSP 2023, "
        "figure 11)",
        _lognormal(mean=161.31),
        _lognormal(mean=337.99),
        query_len=4,
        token_budget=2048,
        max_num_reqs=128,
        load=32,
    ),
    Workload(
        "long-context",
        "Kimi: mean 7,590 tokens in, 182 out (Qin et al., Mooncake, arXiv 2407.00079, section 4.2)",
        _lognormal(mean=7590),
        _lognormal(mean=182),
        query_len=1,
        token_budget=8192,
        max_num_reqs=256,
        load=48,
    ),
    Workload(
        "mixed",
        "Azure: coding, median 1,500 tokens in, 13 out; conversation, 1,020 and 129 (Patel et al., "
        "Splitwise, ISCA 2024, figure 3), half each, in chunks of 512 (Agrawal et al., "
        "Sarathi-Serve, OSDI 2024)",
        _either(_lognormal(median=1500), _lognormal(median=1020)),
        _either(_lognormal(median=13), _lognormal(median=129)),
        query_len=4,
        token_budget=512,
        max_num_reqs=128,
        load=4,
    ),
)


def batches(workload: Workload, steps: int, seed: int = 0) -> Iterator[Batch]:
    """The batches of so many steps.

    Args:
        workload: Requests and engine.
        steps: How many; steps without a request do not count.
        seed: Of all that is drawn.
    """
    rng = random.Random(seed)
    mean_answer = sum(workload.answer(rng) for _ in range(10_000)) / 10_000
    rate = workload.load * workload.tokens_of_a_step / mean_answer
    waiting: deque[list[int]] = deque()  # prompt tokens to go, answer tokens
    decoding: list[int] = []  # the step at which each is done
    done = now = 0
    while done < steps:
        now += 1
        day = 1 + SWING * math.sin(2 * math.pi * now / STEPS_OF_A_DAY)
        for _ in range(_poisson(rng, rate * day)):
            waiting.append([workload.prompt(rng), workload.answer(rng)])
        while decoding and decoding[0] <= now:
            heapq.heappop(decoding)
        count = len(decoding)
        tokens = count * workload.query_len
        prompts = 0
        while waiting and tokens < workload.token_budget:
            if count + prompts == workload.max_num_reqs:
                break
            chunk = min(waiting[0][0], workload.token_budget - tokens)
            tokens += chunk
            prompts += 1
            waiting[0][0] -= chunk
            if waiting[0][0]:
                break
            _, answer = waiting.popleft()
            heapq.heappush(decoding, now + 1 + round(answer / workload.tokens_of_a_step))
        if not tokens:
            continue
        done += 1
        yield Batch(tokens, count + prompts, None if prompts else workload.query_len)


def _poisson(rng: random.Random, mean: float) -> int:
    limit, product, count = math.exp(-mean), rng.random(), 0
    while product > limit:
        product *= rng.random()
        count += 1
    return count
