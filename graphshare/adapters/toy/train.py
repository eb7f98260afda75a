"""Train the target, then the draft: ``python -m graphshare.adapters.toy.train --out FILE``.

The text is what comes with the running Python (see :mod:`graphshare.adapters.toy.text`; PSF
licence). The target learns to predict bytes. The draft learns what the *target* would say: on the
text and on the target's own greedy continuations it predicts the target's next hidden state and
its next token, for K steps of which only the first sees true hidden states (EAGLE; training on
self-fed steps as in HASS, Zhang et al., 2024). A run ends by the clock; its report is made from
the file that it wrote, through the engine itself.
"""

from __future__ import annotations

import argparse
import logging
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from graphshare.adapters.toy.batch import Request
from graphshare.adapters.toy.checkpoint import load_models, new_models, save_models
from graphshare.adapters.toy.config import BOS, EOS, EngineConfig, ToyConfig
from graphshare.adapters.toy.dense import draft_hidden, generate, target_hidden
from graphshare.adapters.toy.draft import DraftModel
from graphshare.adapters.toy.forwards import Forwards
from graphshare.adapters.toy.model import TargetModel
from graphshare.adapters.toy.owner import PagedOwner
from graphshare.adapters.toy.speculation import EagerRunner, SpeculativeEngine, StepCounts
from graphshare.adapters.toy.text import load_corpus, shipped_passages

__all__ = ["main"]

_log = logging.getLogger("graphshare.adapters.toy.train")

_TARGET_SHARE = 0.55  # of the time; the draft gets the rest
_LENGTH = 256
_PROMPT = 64
_STEP_WEIGHTS = (1.0, 0.9, 0.8)
_CLIP = 1.0


def encode(text: str) -> list[int]:
    """Turn a text into tokens, special ones around it."""
    return [BOS, *text.encode(), EOS]


def _stream(texts: Sequence[str], device: torch.device) -> torch.Tensor:
    """Join texts to one row of tokens, ``[length]`` int64, repeated if it is very short."""
    tokens = torch.tensor([token for text in texts for token in encode(text)])
    return tokens.repeat(-(-4 * _LENGTH // len(tokens))).to(device)


def _sample(stream: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """Cut ``[count, length]`` windows at random places."""
    starts = torch.randint(len(stream) - length, (count, 1), device=stream.device)
    return stream[starts + torch.arange(length, device=stream.device)]


class _Schedule:
    """Steps until the clock or the step limit says stop; sets the rate: warmup, then a cosine.

    Args:
        optimizer: Whose rate is set.
        rate: The highest.
        seconds: Time for all steps.
        max_steps: Most steps.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, rate: float, seconds: float, max_steps: int
    ) -> None:
        self._optimizer = optimizer
        self._rate = rate
        self._seconds = seconds
        self._max_steps = max_steps

    def __iter__(self) -> Iterator[tuple[int, float]]:
        """Yield the step and how much of the training is done, 0 to 1."""
        start = time.monotonic()
        for step in range(self._max_steps):
            done = max(step / self._max_steps, (time.monotonic() - start) / self._seconds)
            if done >= 1:
                return
            cosine = 0.02 + 0.49 * (1 + math.cos(math.pi * done))
            rate = self._rate * min(1.0, (step + 1) / 50) * cosine
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            yield step, done


def _optimizer(model: torch.nn.Module, rate: float, decay: float) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": decay},
        {"params": others, "weight_decay": 0.0},
    ]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=fused)


def _copy(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def _bits_per_byte(model: TargetModel, stream: torch.Tensor, autocast: _Autocast) -> float:
    """Measure on consecutive windows, at most 64 of them."""
    count = min(64, (len(stream) - 1) // _LENGTH)
    windows = stream[: count * _LENGTH + 1]
    inputs = windows[:-1].view(count, _LENGTH)
    labels = windows[1:].view(count, _LENGTH)
    total = 0.0
    for i in range(0, count, 16):
        with autocast():
            logits = model.logits(target_hidden(model, inputs[i : i + 16]))
        wanted = labels[i : i + 16].flatten()
        total += functional.cross_entropy(
            logits.float().flatten(0, 1), wanted, reduction="sum"
        ).item()
    return total / labels.numel() / math.log(2)


_Autocast = Callable[[], AbstractContextManager[Any]]


def train_target(
    model: TargetModel,
    train: torch.Tensor,
    validation: torch.Tensor,
    seconds: float,
    options: argparse.Namespace,
    autocast: _Autocast,
) -> None:
    """Train the target; keep the weights that did best on the validation text."""
    steps_per_epoch = max(1, len(train) // (options.batch_size * _LENGTH))
    optimizer = _optimizer(model, options.rate, 0.1)
    best, kept = math.inf, _copy(model)
    looked = 0.0
    schedule = _Schedule(optimizer, options.rate, seconds, options.epochs * steps_per_epoch)
    for step, done in schedule:
        window = _sample(train, options.batch_size, _LENGTH + 1)
        with autocast():
            hidden = target_hidden(model, window[:, :-1], dropout=options.dropout)
            logits = model.logits(hidden).float().flatten(0, 1)
            loss = functional.cross_entropy(logits, window[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        if done - looked > 0.05:
            looked = done
            bits = _bits_per_byte(model, validation, autocast)
            if bits < best:
                best, kept = bits, _copy(model)
            _log.info(
                "target %3.0f%% step %d (epoch %.1f): loss %.3f bits, validation %.3f bits/byte",
                100 * done, step, step / steps_per_epoch, loss.item() / math.log(2), bits,
            )  # fmt: skip
    if _bits_per_byte(model, validation, autocast) > best:
        model.load_state_dict(kept)


def _draft_loss(
    draft: DraftModel,
    target: TargetModel,
    window: torch.Tensor,
    num_steps: int,
    autocast: _Autocast,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare the draft with the target.

    Returns:
        The loss, and ``[num_steps]``: how often the draft's token is the target's.
    """
    length = window.shape[1] - num_steps
    with torch.no_grad(), autocast():
        hidden = target_hidden(target, window)
        logits = target.logits(hidden).float()
    with autocast():
        predicted = draft_hidden(draft, target, hidden, window, num_steps)
    loss = torch.zeros((), device=window.device)
    agreement: list[torch.Tensor] = []
    for step, output in enumerate(predicted):
        ahead = slice(step + 1, step + 1 + length)
        with autocast():
            own = target.logits(output)
        own = own.float().flatten(0, 1)
        wanted = logits[:, ahead].flatten(0, 1)
        tokens = wanted.argmax(-1)
        agreement.append((own.argmax(-1) == tokens).float().mean())
        soft = functional.cross_entropy(own, wanted.softmax(-1))
        hard = functional.cross_entropy(own, tokens)
        regression = functional.smooth_l1_loss(output.float(), hidden[:, ahead].float())
        weight = _STEP_WEIGHTS[min(step, len(_STEP_WEIGHTS) - 1)]
        loss = loss + weight * (0.5 * soft + 0.5 * hard + 0.2 * regression)
    return loss, torch.stack(agreement).detach()


def train_draft(
    draft: DraftModel,
    target: TargetModel,
    train: torch.Tensor,
    validation: torch.Tensor,
    seconds: float,
    options: argparse.Namespace,
    autocast: _Autocast,
) -> None:
    """Train the draft on the text and on what the target makes of beginnings of it."""
    begun = time.monotonic()
    target.requires_grad_(False)
    draft.fc.weight.data.mul_(0.5)
    num_new = _LENGTH - _PROMPT
    own: list[torch.Tensor] = []
    for _ in range(options.generated):
        own.append(generate(target, _sample(train, options.batch_size, _PROMPT), num_new))
        if time.monotonic() - begun > seconds / 4:
            break
    continued = torch.cat(own)
    # For validation: what the draft will meet, from text that nobody learned.
    unseen = generate(target, _sample(validation, options.batch_size, _PROMPT), num_new)
    _log.info("draft: %d continuations in %.0f s", len(continued), time.monotonic() - begun)
    optimizer = _optimizer(draft, options.draft_rate, 0.05)
    best, kept = 0.0, _copy(draft)
    looked = 0.0
    left = max(1.0, seconds - (time.monotonic() - begun))

    def agreement() -> torch.Tensor:
        with torch.no_grad():
            return _draft_loss(draft, target, unseen, options.draft_tokens, autocast)[1].cpu()

    for step, done in _Schedule(optimizer, options.draft_rate, left, options.draft_steps):
        text = _sample(train, options.batch_size // 2, _LENGTH)
        rows = torch.randint(len(continued), (options.batch_size // 2,), device=train.device)
        window = torch.cat((text, continued[rows]))
        loss, _ = _draft_loss(draft, target, window, options.draft_tokens, autocast)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), _CLIP)
        optimizer.step()
        if done - looked > 0.05:
            looked = done
            agreed = agreement()
            expected = 1 + agreed.cumprod(0).sum().item()
            if expected > best:
                best, kept = expected, _copy(draft)
            _log.info(
                "draft %3.0f%% step %d: loss %.3f, agrees %s, about %.2f tokens a step",
                100 * done, step, loss.item(), [f"{a:.2f}" for a in agreed.tolist()], expected,
            )  # fmt: skip
    if 1 + agreement().cumprod(0).sum().item() < best:
        draft.load_state_dict(kept)


def measure(
    target: TargetModel,
    draft: DraftModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    device: torch.device,
    num_draft_tokens: int,
) -> tuple[StepCounts, list[list[int]]]:
    """Serve prompts with the engine and count the tokens of each step."""
    engine = EngineConfig(num_draft_tokens=num_draft_tokens)
    runner_owners = PagedOwner(engine, device), PagedOwner(engine, device)
    forwards = Forwards(target, draft, engine, device)
    serving = SpeculativeEngine(forwards, EagerRunner(forwards, *runner_owners))
    requests = [
        Request(index, tuple(prompt), max_new_tokens) for index, prompt in enumerate(prompts)
    ]
    serving.run(requests)
    return serving.counts, [request.output for request in requests]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m graphshare.adapters.toy.train")
    parser.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=180.0, help="for both trainings together")
    parser.add_argument("--epochs", type=int, default=60, help="of the target, at most")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--draft-rate", type=float, default=2e-3)
    parser.add_argument("--draft-steps", type=int, default=20_000, help="at most")
    parser.add_argument("--draft-tokens", type=int, default=3, help="K")
    parser.add_argument("--generated", type=int, default=48, help="batches of continuations")
    parser.add_argument("--eval-prompts", type=int, default=24)
    parser.add_argument("--eval-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train both models, write them, and report on the held-out text."""
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)7.0f ms  %(message)s")
    options = _parse(arguments)
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    autocast: _Autocast = nullcontext
    if device.type == "cuda":
        autocast = lambda: torch.autocast("cuda", torch.bfloat16)  # noqa: E731
    corpus = load_corpus()
    train, validation, held_out = (
        _stream(texts, device) for texts in (corpus.train, corpus.validation, corpus.held_out)
    )
    target, draft = new_models(ToyConfig(), options.seed)
    size = sum(p.numel() for model in (target, draft) for p in model.parameters())
    _log.info(
        "%d training tokens, %d validation, %d held out; %d parameters, %.2f MB",
        len(train), len(validation), len(held_out), size, size * 2 / 1e6,
    )  # fmt: skip
    target, draft = target.to(device), draft.to(device)
    target_seconds = options.seconds * _TARGET_SHARE
    begun = time.monotonic()
    train_target(target, train, validation, target_seconds, options, autocast)
    left = max(1.0, options.seconds - (time.monotonic() - begun))
    train_draft(draft, target, train, validation, left, options, autocast)

    def write(facts: dict[str, Any]) -> None:
        save_models(options.out, target, draft, facts)

    write({})  # first of all: the report below may be interrupted
    stored_target, stored_draft = load_models(options.out, device)
    prompts = [encode(text)[:_PROMPT] for text in shipped_passages()][: options.eval_prompts]
    counts, outputs = measure(
        stored_target, stored_draft, prompts, options.eval_tokens, device, options.draft_tokens
    )
    for prompt, output in list(zip(prompts, outputs, strict=True))[:4]:
        shown = [bytes(token for token in part if token < BOS) for part in (prompt, output)]
        _log.info("%r -> %r", *(part.decode(errors="replace") for part in shown))
    python = platform.python_version()
    facts = {
        "held_out_bits_per_byte": round(_bits_per_byte(stored_target, held_out, nullcontext), 4),
        "held_out_tokens_per_step": round(counts.tokens_per_step, 4),
        "num_draft_tokens": options.draft_tokens,
        "text": f"documentation and docstrings of CPython {python} (PSF licence)",
        "torch": str(torch.__version__),
        "seconds": round(time.monotonic() - begun),
    }
    write(facts)
    _log.info("%s (%d bytes): %s", options.out, options.out.stat().st_size, facts)


if __name__ == "__main__":
    main()
