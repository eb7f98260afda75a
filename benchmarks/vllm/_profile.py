"""Where the host time of a speculative step goes in a real vLLM."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.vllm import _engine
from graphshare.adapters.vllm import sessions

_PREFILL = "propose / metadata build of the prefill"
_DECODES = "propose / metadata builds of the decodes"


def profile(llm: Any, options: Any) -> dict[str, Any]:
    """Medians over steps with a draft prefill on a full graph, in microseconds.

    Where graphshare takes part, also with its hooks taken off: vLLM on the same graphs.
    """
    found: dict[str, Any] = {}
    session = next(iter(sessions()), None)
    for concurrency in options.concurrency:
        if session is None:
            found[str(concurrency)] = {"vllm alone": _steps(llm, concurrency)}
            continue
        session.pause()
        alone = _steps(llm, concurrency)
        session.resume()
        found[str(concurrency)] = {"hooks off": alone, "hooks on": _steps(llm, concurrency)}
    return found


def _steps(llm: Any, concurrency: int) -> dict[str, Any]:
    steps: list[dict[str, float]] = []
    with _timed(llm, steps):
        _engine.serve(llm, _engine.prompts(concurrency, seed=8), new=64, every=1, name="profile")
    whole = [each for each in steps if each.get("propose / prefill launch")]
    labels = sorted({label for each in whole for label in each})
    return {
        "steps": len(whole),
        "median_us": {
            label: round(statistics.median(each.get(label, 0.0) for each in whole) * 1e6, 1)
            for label in labels
        },
    }


@contextmanager
def _timed(llm: Any, steps: list[dict[str, float]]) -> Iterator[None]:
    """Note in ``steps`` what each step of the engine spent on which part, in seconds."""
    runner = _engine.runner()
    speculator = runner.speculator
    parts: list[tuple[Any, str, str]] = [
        (runner, "execute_model", "execute_model"),
        (runner, "prepare_inputs", "execute_model / prepare_inputs"),
        (runner, "prepare_attn", "execute_model / block tables and slots"),
        (runner.model_state, "prepare_attn", "execute_model / metadata build"),
        (runner.cudagraph_manager, "run_fullgraph", "execute_model / graph launch"),
        (runner, "sample_tokens", "sample_tokens"),
        (runner, "sample", "sample_tokens / sample"),
        (speculator, "propose", "sample_tokens / propose"),
        (speculator, "_build_draft_attn_metadata", _DECODES),
        (speculator.prefill_cudagraph_manager, "run_fullgraph", "propose / prefill launch"),
        (speculator.decode_cudagraph_manager, "run_fullgraph", "propose / decode launches"),
        (runner.block_tables, "compute_slot_mappings", "slot mappings, target and draft"),
    ]
    spent: dict[str, float] = defaultdict(float)
    undo: list[tuple[Any, str, Any]] = []

    def time_part(target: Any, name: str, label: str) -> None:
        inner = getattr(target, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                # 0.20.2 builds by the same method for both.
                several = kwargs.get("max_query_len", 1) > 1
                spent[_PREFILL if label == _DECODES and several else label] += took

        undo.append((target, name, vars(target).get(name)))
        setattr(target, name, run)

    for part in parts:
        time_part(*part)
    engine = llm.llm_engine
    inner_step = engine.step

    def step() -> Any:
        spent.clear()
        start = time.perf_counter()
        result = inner_step()
        spent["step of the engine"] = time.perf_counter() - start
        steps.append(dict(spent))
        return result

    engine.step = step
    try:
        yield
    finally:
        del engine.step
        for target, name, before in reversed(undo):
            if before is None:
                delattr(target, name)
            else:
                setattr(target, name, before)
