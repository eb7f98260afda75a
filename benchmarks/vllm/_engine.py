"""A vLLM in this process, requests that arrive by its steps, and what the draft did."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Self

from benchmarks.vllm._models import use_in, write_pair

# Read when vLLM is imported.
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SIZES = [4, 8, 16, 32, 64, 128, 256]


def start(
    pair: str = "small",
    *,
    method: str = "eagle",
    cudagraph_mode: str = "FULL",
    backend: str | None = None,
    liveliness: float = 0.35,
    cache_gib: float = 0.5,
    num_draft_tokens: int = 3,
    before: Callable[[], object] | None = None,
) -> Any:
    """Return a ``vllm.LLM`` of this pair.

    Args:
        pair: ``"small"`` or ``"small128"``, bound by the host, or ``"8b"``.
        method: ``"eagle"`` or ``"eagle3"``.
        cudagraph_mode: As vLLM's.
        backend: Attention backend; by default vLLM's choice.
        liveliness: Of the weights.
        cache_gib: For keys and values.
        num_draft_tokens: After each step of the target.
        before: Called when vLLM is imported, before a model is made.
    """
    import vllm

    loader: Any = importlib.import_module("vllm.model_executor.model_loader.dummy_loader")
    use_in(loader, liveliness)
    if before is not None:
        before()
    remember_runner()
    target, draft = write_pair(Path(tempfile.mkdtemp()), pair, method)
    options: dict[str, Any] = {}
    if backend is not None:
        options["attention_config"] = {"backend": backend}
    piecewise = "PIECEWISE" in cudagraph_mode
    return vllm.LLM(
        model=str(target),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=64,
        gpu_memory_utilization=0.02,
        kv_cache_memory_bytes=int(cache_gib * 2**30),
        enable_prefix_caching=False,
        speculative_config={
            "method": method,
            "model": str(draft),
            "num_speculative_tokens": num_draft_tokens,
        },
        compilation_config={
            "mode": 3 if piecewise else 0,
            "cudagraph_mode": cudagraph_mode,
            "cudagraph_capture_sizes": SIZES,
        },
        **options,
    )


_runners: list[Any] = []


@functools.cache
def remember_runner() -> None:
    """Keep hold of the model runner of each engine to come; before graphshare is activated."""
    # vLLM hides it well: behind its engine's clients, and frozen for the garbage collector.
    module: Any = importlib.import_module("vllm.v1.worker.gpu_worker")
    warm_up = module.Worker.compile_or_warm_up_model

    @functools.wraps(warm_up)
    def remembered(worker: Any) -> Any:
        _runners.append(worker.model_runner)
        return warm_up(worker)

    module.Worker.compile_or_warm_up_model = remembered


def runner() -> Any:
    """Return the model runner of this process."""
    if not _runners:
        raise RuntimeError("no model runner has been warmed up in this process")
    return _runners[-1]


def prompts(count: int, seed: int = 0, longest: int = 300) -> list[list[int]]:
    """Random prompts of mixed lengths."""
    rng = random.Random(seed)
    return [
        [rng.randrange(10, 30000) for _ in range(rng.choice((7, 40, 128, longest)))]
        for _ in range(count)
    ]


def serve(
    llm: Any, requests: Sequence[list[int]], *, new: int = 64, every: int = 2, name: str = "r"
) -> tuple[list[list[int]], int]:
    """Run requests that arrive one by one, a new one each ``every`` steps of the engine.

    Returns:
        The new tokens of each, and the number of steps.
    """
    import vllm

    engine = llm.llm_engine
    params = vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
    waiting = list(enumerate(requests))
    done: dict[str, list[int]] = {}
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][0] * every <= step:
            number, prompt = waiting.pop(0)
            engine.add_request(f"{name}-{number}", {"prompt_token_ids": prompt}, params)
        for output in engine.step():
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
        if step > 20000:
            raise RuntimeError(f"{len(done)} of {len(requests)} requests are done")
    return [done[f"{name}-{number}"] for number in range(len(requests))], step


_begun = itertools.count()


def begin(llm: Any, requests: Sequence[list[int]], new: int) -> list[str]:
    """Add requests, all at once; return their ids, which none had before."""
    import vllm

    params = vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
    ids = [f"begun-{next(_begun)}" for _ in requests]
    for name, prompt in zip(ids, requests, strict=True):
        llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
    return ids


class Recorder:
    """What target and draft ran, and what the draft proposed, step by step."""

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner
        self.steps: list[tuple[str, int, int | None]] = []
        self.prefills: list[tuple[str, int, int | None]] = []
        self._drafts: list[tuple[list[str], torch.Tensor]] = []
        self._undo: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Self:
        speculator = self._runner.speculator
        self._watch(self._runner.cudagraph_manager, "dispatch", self._ran(self.steps))
        self._watch(speculator.prefill_cudagraph_manager, "dispatch", self._ran(self.prefills))
        self._watch(speculator, "propose", self._proposed)
        return self

    def __exit__(self, *_: object) -> None:
        for target, name, before in reversed(self._undo):
            if before is None:
                delattr(target, name)
            else:
                setattr(target, name, before)

    def _watch(self, target: Any, name: str, seen: Callable[..., object]) -> None:
        inner = getattr(target, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            seen(result, args, kwargs)
            return result

        self._undo.append((target, name, vars(target).get(name)))
        setattr(target, name, watched)

    @staticmethod
    def _ran(into: list[tuple[str, int, int | None]]) -> Callable[..., object]:
        return lambda desc, *_: into.append((desc.cg_mode.name, desc.num_tokens, desc.num_reqs))

    def _proposed(self, result: torch.Tensor, args: Any, kwargs: Any) -> None:
        batch = args[0] if args else kwargs["input_batch"]
        self._drafts.append((list(batch.req_ids), result.clone()))

    def most_at_once(self) -> int:
        """How many requests the step with most of them had."""
        return max(len(names) for names, _ in self._drafts)

    def drafts(self) -> list[dict[str, list[int]]]:
        """The proposals of each step, by request; ids without what vLLM adds to them."""
        return [
            {
                "-".join(name.split("-")[:2]): row
                for name, row in zip(names, rows.tolist(), strict=False)
            }
            for names, rows in self._drafts
        ]
