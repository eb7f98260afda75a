"""Times in a real vLLM: of the adapter alone, and end to end."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks._measure import Ratio, bootstrap
from benchmarks._turns import difference_us, in_turn
from benchmarks.vllm import _engine
from graphshare.adapters.vllm import sessions


class _Step:
    """What vLLM calls in one speculative step, with the arguments that it had."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.decodes = 0

    def record(self, llm: Any, concurrency: int) -> None:
        runner, speculator = self._runner, self._runner.speculator
        undo: list[tuple[Any, str, Any]] = []

        def watch(target: Any, name: str, label: str, wanted: Callable[..., bool]) -> None:
            inner = getattr(target, name)

            def watched(*args: Any, **kwargs: Any) -> Any:
                if wanted(*args, **kwargs):
                    self._calls[label] = args, kwargs
                return inner(*args, **kwargs)

            undo.append((target, name, vars(target).get(name)))
            setattr(target, name, watched)

        def full(*args: Any, **_: Any) -> bool:
            return args[1].name == "FULL"

        def always(*_: Any, **__: Any) -> bool:
            return True

        def one_token(*_: Any, **kwargs: Any) -> bool:
            return kwargs.get("max_query_len", 1) == 1

        def several_tokens(*_: Any, **kwargs: Any) -> bool:
            return kwargs.get("max_query_len", 1) > 1

        watch(runner.model_state, "prepare_attn", "prepare", full)
        watch(runner.cudagraph_manager, "dispatch", "target", always)
        watch(runner.cudagraph_manager, "run_fullgraph", "target_graph", always)
        watch(speculator.prefill_cudagraph_manager, "dispatch", "prefill", always)
        watch(speculator.prefill_cudagraph_manager, "run_fullgraph", "prefill_graph", always)
        watch(speculator.decode_cudagraph_manager, "dispatch", "decode", always)
        watch(speculator.decode_cudagraph_manager, "run_fullgraph", "decode_graph", always)
        watch(speculator, "_build_draft_attn_metadata", "draft", one_token)
        watch(speculator, "_build_draft_attn_metadata", "rebuild", several_tokens)
        _engine.serve(llm, _engine.prompts(concurrency, seed=3), new=16, every=1, name="host")
        for target, name, before in reversed(undo):
            if before is None:
                delattr(target, name)
            else:
                setattr(target, name, before)
        self.decodes = max(1, speculator.num_speculative_steps - 1)
        if self.rebuilds:
            self.decodes = 1  # 0.20.2: one graph for all

    @property
    def rebuilds(self) -> bool:
        """Whether vLLM rebuilds before the draft's prefill, as 0.20.2 does."""
        return "rebuild" in self._calls

    def run(self, *, rebuild: bool = False) -> None:
        """Do what a step does of it.

        Args:
            rebuild: Whether to rebuild before the draft's prefill, where vLLM does.
        """
        runner, speculator, calls = self._runner, self._runner.speculator, self._calls
        managers = (
            runner.cudagraph_manager,
            speculator.prefill_cudagraph_manager,
            speculator.decode_cudagraph_manager,
        )

        def call(function: Callable[..., Any], label: str) -> Any:
            args, kwargs = calls[label]
            return function(*args, **kwargs)

        desc = call(managers[0].dispatch, "target")
        call(runner.model_state.prepare_attn, "prepare")
        managers[0].graphs[desc].replay()
        desc = call(managers[1].dispatch, "prefill")
        if rebuild:
            call(speculator._build_draft_attn_metadata, "rebuild")
        managers[1].graphs[desc].replay()
        desc = call(managers[2].dispatch, "decode")
        for _ in range(self.decodes):
            call(speculator._build_draft_attn_metadata, "draft")
            managers[2].graphs[desc].replay()


def host_time(llm: Any, options: Any) -> dict[str, Any]:
    """Host time that the adapter adds to a step, in microseconds: hooks on against hooks off."""
    runner = _engine.runner()
    (session,) = sessions()
    found: dict[str, Any] = {}
    for concurrency in options.concurrency:
        step = _Step(runner)
        step.record(llm, concurrency)

        def sampler(on: bool, rebuild: bool = False, step: _Step = step) -> Callable[[], int]:
            def sample() -> int:
                (session.resume if on else session.pause)()
                torch.cuda.synchronize()
                start = time.perf_counter_ns()
                step.run(rebuild=rebuild)
                return time.perf_counter_ns() - start

            return sample

        with torch.inference_mode():
            # Where vLLM rebuilds, graphshare's hook is asked to and does not.
            variants = {"on": sampler(True, rebuild=step.rebuilds), "off": sampler(False)}
            if step.rebuilds:
                variants["rebuilt"] = sampler(False, rebuild=True)
            timing = in_turn(variants, turns=4, rounds=100, warmup=5)
        session.resume()
        found[str(concurrency)] = {
            "added_us": difference_us(timing, "on", "off")._asdict(),
            "on_us": timing.median_us("on"),
            "off_us": timing.median_us("off"),
        }
        if step.rebuilds:
            # What vLLM alone takes, and what is left of the rebuild's cost with graphshare.
            found[str(concurrency)]["saved_us"] = difference_us(timing, "rebuilt", "on")._asdict()
            found[str(concurrency)]["rebuild_us"] = difference_us(
                timing, "rebuilt", "off"
            )._asdict()
    return found


def end_to_end(llm: Any, options: Any) -> dict[str, Any]:
    """Hooks on against hooks off, from one call to the next: paired ratios with 95% intervals.

    Where vLLM rebuilds before the draft's prefill (0.20.2), a third variant skips the rebuild and
    checks nothing: what there is to win.
    """
    import vllm

    (session,) = sessions()
    speculator = _engine.runner().speculator
    rebuilds = session.family.rebuilds_prefill
    build = type(speculator)._build_draft_attn_metadata
    variants = ["on", "off"] if rebuilds is None else ["on", "off", "skipped"]
    found: dict[str, Any] = {}
    rng = random.Random(0)

    def skipping(*args: Any, **kwargs: Any) -> Any:
        return None if rebuilds(kwargs) else build(speculator, *args, **kwargs)

    def seconds(variant: str, requests: list[dict[str, list[int]]], new: int) -> float:
        (session.resume if variant == "on" else session.pause)()
        if variant == "skipped":
            speculator._build_draft_attn_metadata = skipping
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False
        )
        torch.cuda.synchronize()
        start = time.perf_counter()
        llm.generate(requests, params, use_tqdm=False)
        took = time.perf_counter() - start
        if variant == "skipped":
            del speculator._build_draft_attn_metadata
        return took

    for concurrency, count in zip(options.concurrency, _forever(options.pairs), strict=False):
        requests = [
            {"prompt_token_ids": [rng.randrange(10, 30000) for _ in range(128)]}
            for _ in range(concurrency)
        ]
        for new, rounds in ((64, count), (1, count * 2)):
            for variant in variants:
                seconds(variant, requests, new)
            times: dict[str, list[float]] = {variant: [] for variant in variants}
            for _ in range(rounds):
                for variant in rng.sample(variants, len(variants)):
                    times[variant].append(seconds(variant, requests, new))
            found[f"concurrency {concurrency}, {new} tokens"] = {
                "rounds": rounds,
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
                found[f"concurrency {concurrency}, {new} tokens"][
                    "share_of_what_skipping_saves"
                ] = _share(times)._asdict()
    session.resume()
    return found


def _forever(counts: Sequence[int]) -> Iterator[int]:
    yield from counts
    yield from itertools.repeat(counts[-1])


def _share(times: dict[str, list[float]]) -> Ratio:
    """How much of what skipping the rebuild saves is saved by borrowing, with a 95% interval."""
    rounds = list(zip(*(times[name] for name in ("on", "off", "skipped")), strict=True))
    rng = random.Random(0)

    def share(sample: list[tuple[float, float, float]]) -> float:
        won = statistics.median(1 - on / off for on, off, _ in sample)
        there = statistics.median(1 - skipped / off for _, off, skipped in sample)
        return won / there if there else math.nan

    resampled = sorted(share(rng.choices(rounds, k=len(rounds))) for _ in range(1000))
    return Ratio(share(rounds), resampled[25], resampled[975])
