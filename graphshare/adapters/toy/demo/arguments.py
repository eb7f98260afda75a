"""The options of ``graphshare demo``, and what may be wrong with them."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from graphshare.adapters.toy.config import EngineConfig
from graphshare.adapters.toy.kernel import ATTENTION

__all__ = ["FAULTS", "InputError", "Options", "add_arguments", "engine_config", "read_options"]

FAULTS = ("stale", "moved", "lazy", "baked", "key", "released", "spec")
"""Names of the faults that the demo can plant."""

_MAX_NUM_REQS = 4
_MAX_NUM_TOKENS = 32
_MAX_DRAFT_TOKENS = _MAX_NUM_TOKENS // _MAX_NUM_REQS - 1
_MAX_PROMPTS = 64
_MAX_FILE_BYTES = 1 << 20

# Begun in the manner of what the models were trained on, not taken from it.
_OWN_PROMPTS = (
    "When an exception is not handled at all, the interpreter terminates",
    "Note that the file must be",
    "A function definition is an executable statement.",
    "The class has a method that",
    "Copy the file and",
    "A dictionary maps",
)


class InputError(ValueError):
    """The user asked for something that cannot be; the message is one line."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for.

    Args:
        prompts: Texts to continue.
        max_new_tokens: Tokens to produce for each.
        num_draft_tokens: Draft tokens for each request and step (K).
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        attention: The kernel that attends.
        threads: Of torch on the CPU.
        seed: Of the arrivals.
        arrivals: Mean steps between two requests.
        json: Whether to write JSON alone.
        quiet: Whether to leave out text and progress.
        fault: Which one to plant.
        unsafe: Whether to let it through.
    """

    prompts: tuple[str, ...]
    max_new_tokens: int
    num_draft_tokens: int
    device: str
    attention: str
    threads: int
    seed: int
    arrivals: int
    json: bool
    quiet: bool
    fault: str | None
    unsafe: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        "A small language model decodes speculatively on captured graphs; its draft's prefill "
        "borrows the attention state that the target builds. The same prompts are decoded again "
        "without sharing, without graphs, and without a draft, and all must give the same tokens. "
        "The run without a draft is the reference for the tokens alone: it serves the requests one "
        "after the other, where the others batch them, so its steps and times do not compare."
    )
    text = parser.add_argument_group("what to decode")
    text.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a text to continue; may be given again"
    )
    text.add_argument(
        "--prompt-file", type=Path, metavar="FILE", help="a UTF-8 file with a prompt on each line"
    )
    text.add_argument(
        "--max-new-tokens", type=int, default=96, metavar="N", help="bytes to add (default: 96)"
    )
    text.add_argument(
        "--arrivals",
        type=int,
        default=3,
        metavar="STEPS",
        help="mean number of steps between two requests (default: 3; 0: all at once)",
    )
    text.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the arrivals (default: 0)"
    )
    engine = parser.add_argument_group("how")
    engine.add_argument(
        "--num-draft-tokens",
        type=int,
        default=3,
        metavar="K",
        help="tokens that the draft proposes for each request and step, "
        f"1 to {_MAX_DRAFT_TOKENS} (default: 3)",
    )
    engine.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to run; auto takes a GPU if there is one",
    )
    engine.add_argument(
        "--attention",
        choices=ATTENTION,
        default="torch",
        help="the kernel that attends (default: torch); the others need a GPU and their library",
    )
    engine.add_argument(
        "--threads",
        type=int,
        default=1,
        metavar="N",
        help="threads of torch on the CPU (default: 1, the fastest for models this small)",
    )
    faults = parser.add_argument_group("faults")
    faults.add_argument(
        "--fault",
        choices=FAULTS,
        help="plant this fault in the running engine, and show the error that refuses it",
    )
    faults.add_argument(
        "--unsafe",
        action="store_true",
        help="with --fault: let it through, and show what then happens to tokens and acceptance",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="write one JSON object, nothing else")
    output.add_argument("--quiet", action="store_true", help="only what is shown at the end")


def engine_config(num_draft_tokens: int, attention: str = "torch") -> EngineConfig:
    """Return the engine's sizes: few enough keys that a CPU captures them in a second."""
    # FlashAttention 2 takes pages of a multiple of 256 tokens only.
    pages = {"page_size": 256, "num_pages": 17} if attention == "flash_attn2" else {}
    return EngineConfig(
        max_num_reqs=_MAX_NUM_REQS,
        max_num_tokens=_MAX_NUM_TOKENS,
        num_draft_tokens=num_draft_tokens,
        **pages,
    )


def read_options(given: argparse.Namespace) -> Options:
    """Check the options and read the prompts.

    Raises:
        InputError: For what the user got wrong.
    """
    if given.unsafe and given.fault is None:
        raise InputError("--unsafe: expected together with --fault, which says what to let through")
    if given.attention != "torch":
        if given.fault is not None:
            raise InputError(
                "--fault: expected with --attention torch, in whose parts it is planted"
            )
        if given.device == "cpu":
            raise InputError(f"--attention {given.attention}: expected a GPU, got --device cpu")
    _in_range("--num-draft-tokens", given.num_draft_tokens, 1, _MAX_DRAFT_TOKENS)
    _in_range("--max-new-tokens", given.max_new_tokens, 1, None)
    _in_range("--threads", given.threads, 1, os.cpu_count() or 1)
    _in_range("--arrivals", given.arrivals, 0, 1000)
    _in_range("--seed", given.seed, 0, None)
    prompts = [(f"--prompt {number}", text) for number, text in enumerate(given.prompt or (), 1)]
    if given.prompt_file is not None:
        prompts += _read_prompts(given.prompt_file)
    if not prompts:
        prompts = [("own prompt", text) for text in _OWN_PROMPTS]
    if len(prompts) > _MAX_PROMPTS:
        raise InputError(f"expected at most {_MAX_PROMPTS} prompts, got {len(prompts)}")
    for where, text in prompts:
        _check_prompt(where, text, given.max_new_tokens, given.num_draft_tokens)
    return Options(
        prompts=tuple(text for _, text in prompts),
        max_new_tokens=given.max_new_tokens,
        num_draft_tokens=given.num_draft_tokens,
        device=given.device,
        attention=given.attention,
        threads=given.threads,
        seed=given.seed,
        arrivals=given.arrivals,
        json=given.json,
        quiet=given.quiet,
        fault=given.fault,
        unsafe=given.unsafe,
    )


def _in_range(option: str, value: int, least: int, most: int | None) -> None:
    if value < least or (most is not None and value > most):
        wanted = f"at least {least}" if most is None else f"{least} to {most}"
        raise InputError(f"{option}: expected {wanted}, got {value}")


def _read_prompts(path: Path) -> list[tuple[str, str]]:
    shown = f"--prompt-file {str(path)!r}"
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{shown}: cannot be read: {reason}") from error
    if len(content) > _MAX_FILE_BYTES:
        raise InputError(f"{shown}: expected at most {_MAX_FILE_BYTES} bytes")
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{shown}: not UTF-8 (byte {error.start})") from error
    found = [(f"{shown} line {n}", line) for n, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise InputError(f"{shown}: no prompt in it, every line is empty")
    return found


def _check_prompt(where: str, text: str, max_new_tokens: int, num_draft_tokens: int) -> None:
    if not text.strip():
        raise InputError(f"{where}: the prompt is empty")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:  # an argument that is not UTF-8 arrives as surrogates
        raise InputError(f"{where}: not UTF-8") from error
    # The mark at the beginning of the text, and the rows of a last step's drafts.
    room = engine_config(num_draft_tokens).max_model_len - 1 - num_draft_tokens
    if size + max_new_tokens > room:
        raise InputError(
            f"{where}: {size} bytes and {max_new_tokens} new ones do not fit the cache: expected "
            f"at most {room} together"
        )
