"""Requests on a runner: greedy, with drafts, arrivals by step, prompts in chunks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from tests.vllm_standin.model import VOCABULARY, Model
from tests.vllm_standin.parts import PAGE


@dataclass
class Request:
    prompt: list[int]
    new: int
    arrival: int = 0
    tokens: list[int] = field(default_factory=list)
    done: int = 0  # tokens whose keys and values are final
    drafts: list[int] = field(default_factory=list)
    row: int = -1
    proposed: list[list[int]] = field(default_factory=list)

    @property
    def finished(self):
        return len(self.tokens) >= len(self.prompt) + self.new


def requests(seed, count=6, longest=20):
    """Requests of any lengths, arriving whenever; the same for the same seed."""
    rng = random.Random(seed)
    return [
        Request(
            prompt=[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest))],
            new=rng.randint(1, 12),
            arrival=rng.randint(0, 10),
        )
        for _ in range(count)
    ]


def full_steps(runner):
    """Steps that the target ran on full graphs."""
    return sum(desc.cg_mode.name == "FULL" for desc in runner.ran)


def serve(runner, requests, max_steps=400):
    """Run all requests to their end; return their new tokens and all drafts."""
    free = list(range(runner.config.max_num_reqs))
    blocks = runner.config.max_model_len // PAGE
    waiting, running = list(requests), []
    for each in requests:
        each.tokens = list(each.prompt)
    for step in range(max_steps):
        for each in [r for r in waiting if r.arrival <= step]:
            if free:
                waiting.remove(each)
                each.row = free.pop(0)
                # Pages of its own, in an order that is not that of the rows; 0 is for padding.
                pages = [1 + (each.row + i * runner.config.max_num_reqs) for i in range(blocks)]
                runner.block_tables.rows[each.row] = torch.tensor(pages[::-1], dtype=torch.int32)
                running.append(each)
        if not running and not waiting:
            break
        if running:
            _step(runner, running)
        for each in [r for r in running if r.finished]:
            running.remove(each)
            free.append(each.row)
    return [r.tokens[len(r.prompt) : len(r.prompt) + r.new] for r in requests], [
        r.proposed for r in requests
    ]


def _step(runner, running):
    room = runner.config.max_num_tokens
    scheduled = []
    for each in running:
        known = each.tokens + each.drafts
        tokens = known[each.done : each.done + room]
        if tokens:
            scheduled.append((each, tokens))
            room -= len(tokens)
    # Fewest first, as vLLM orders a batch.
    scheduled.sort(key=lambda pair: len(pair[1]))
    batch = [(each.row, tokens, each.done) for each, tokens in scheduled]
    executed = runner.execute_model(batch)
    hidden = executed[3]
    sampled, rejected, last = [], [], []
    start = 0
    for each, tokens in scheduled:
        choice = [int(t) for t in Model.token(hidden[start : start + len(tokens)])]
        start += len(tokens)
        if each.done + len(tokens) < len(each.tokens):  # a chunk of the prompt
            each.done += len(tokens)
            sampled.append(0)
            rejected.append(0)
            last.append(each.tokens[each.done])
            continue
        drafts, each.drafts = each.drafts, []
        new = [choice[-1 - len(drafts)]]
        for i, draft in enumerate(drafts):
            if draft != new[-1]:
                break
            new.append(choice[len(choice) - len(drafts) + i])
        each.done += len(tokens) - len(drafts) + len(new) - 1
        each.tokens += new
        sampled.append(len(new))
        rejected.append(len(drafts) + 1 - len(new))
        last.append(new[-1])
    if runner.speculator is None:
        return
    proposed = runner.propose(
        executed, torch.tensor(sampled), torch.tensor(rejected), torch.tensor(last)
    )
    for (each, _), count, tokens in zip(scheduled, sampled, proposed.tolist(), strict=True):
        each.proposed.append(tokens)
        room_left = runner.config.max_model_len - len(each.tokens)
        each.drafts = tokens[: max(0, room_left)] if count else []
