"""Faults planted in a real vLLM, and the one that was there."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from benchmarks.vllm import _engine
from graphshare.adapters.vllm import sessions


class Upstream:
    """What the buffers hold when the draft's prefill warms up for a descriptor.

    vLLM builds dummy requests of equal lengths for a descriptor; what is read beside that says
    whose contents the draft's kernels ran on.
    """

    def __init__(self) -> None:
        self._seen: list[dict[str, Any]] = []
        self._unwatch: list[Callable[[], object]] = []

    def watch(self) -> None:
        """Look at each forward of a draft's prefill from now on, outside of captures."""
        module: Any = importlib.import_module("vllm.v1.worker.gpu.spec_decode.eagle.speculator")
        kind = module.EagleSpeculator
        name = "capture" if hasattr(kind, "capture") else "capture_model"
        original = getattr(kind, name)
        seen = self._seen

        @functools.wraps(original)
        def capture(speculator: Any, *args: Any, **kwargs: Any) -> Any:
            prefill = "_prefill" if hasattr(speculator, "_prefill") else "prefill"
            inner = getattr(speculator, prefill)

            def looked(
                num_reqs: int, num_tokens: int, metadata: Any, *rest: Any, **named: Any
            ) -> Any:
                if metadata is not None and not torch.cuda.is_current_stream_capturing():
                    layer = next(iter(sorted(speculator.draft_attn_layer_names)))
                    seen.append(_look(metadata[layer], num_reqs, num_tokens))
                return inner(num_reqs, num_tokens, metadata, *rest, **named)

            setattr(speculator, prefill, looked)
            try:
                return original(speculator, *args, **kwargs)
            finally:
                delattr(speculator, prefill)

        setattr(kind, name, capture)
        self._unwatch.append(lambda: setattr(kind, name, original))

    def unwatch(self) -> None:
        """Look no more."""
        while self._unwatch:
            self._unwatch.pop()()

    def found(self) -> list[dict[str, Any]]:
        """One entry a descriptor."""
        return self._seen


def _look(metadata: Any, num_reqs: int, num_tokens: int) -> dict[str, Any]:
    starts = metadata.query_start_loc.tolist()
    lengths = metadata.seq_lens.tolist()
    each = num_tokens // num_reqs
    wanted = [each] * (num_reqs - 1) + [num_tokens - each * (num_reqs - 1)]
    queries = [b - a for a, b in pairwise(starts)]
    plan = getattr(metadata, "scheduler_metadata", None)
    return {
        "num_reqs": num_reqs,
        "num_tokens": num_tokens,
        "query_lens_right": queries == wanted,
        "query_lens": queries[:6],
        "seq_lens_right": lengths in (wanted, [1] * num_reqs),
        "seq_lens": lengths[:6],
        "tokens_in_buffers": starts[-1],
        "plan": None if plan is None else [list(plan.shape), plan.tolist()[:12]],
    }


def plant(llm: Any, options: Any) -> dict[str, Any]:
    """Plant faults in steps that are otherwise healthy; what each was answered with.

    The step goes on after each refusal, so the tokens must be those of healthy steps.
    """
    del options
    runner = _engine.runner()
    (session,) = sessions()
    requests = _engine.prompts(4, seed=5, longest=128)
    healthy, _ = _engine.serve(llm, requests, new=24, every=1, name="healthy")
    answers: dict[str, Any] = {}

    def tried(name: str, fault: Callable[[], object]) -> None:
        if name in answers:
            return
        try:
            fault()
        except Exception as error:  # noqa: BLE001
            answers[name] = {
                "error": type(error).__name__,
                "rule": str(getattr(error, "rule", "")),
                "message": str(error),
            }
        else:
            answers[name] = {"error": None}

    manager = runner.cudagraph_manager
    draft_manager = runner.speculator.prefill_cudagraph_manager
    state = runner.model_state
    target_run, draft_run = manager.run_fullgraph, draft_manager.run_fullgraph
    prepare = state.prepare_attn
    last: dict[str, Any] = {}

    def target_runs(desc: Any) -> Any:
        result = target_run(desc)
        tried("a second replay of the target on one refresh", lambda: target_run(desc))
        last["desc"] = desc
        return result

    def draft_runs(desc: Any) -> Any:
        others = [key for key in session.prefill.states if key != desc]
        tried("the draft picks another key", lambda: draft_run(others[0]))
        if "an eager step in between" not in answers and "args" in last:
            prepare(*_eagerly(*last["args"]))
            tried("an eager step in between", lambda: draft_run(desc))
            prepare(*last["args"])  # the step's own build again, and its replay
            target_run(desc)
        return draft_run(desc)

    def prepared(*args: Any, **kwargs: Any) -> Any:
        if args[1].name == "FULL":
            if "desc" in last:
                tried("a replay without the target's refresh", lambda: target_run(last["desc"]))
            group = runner.attn_groups[0][0]
            own = group.metadata_builders
            if hasattr(own[0], "scheduler_metadata") or hasattr(own[0], "softmax_segm_max"):
                group.metadata_builders = [_again(own[0], group)]
                tried("a builder re-created after capture", lambda: prepare(*args, **kwargs))
                group.metadata_builders = own
            last["args"] = args
        return prepare(*args, **kwargs)

    undo = [
        (manager, "run_fullgraph", vars(manager).get("run_fullgraph")),
        (draft_manager, "run_fullgraph", vars(draft_manager).get("run_fullgraph")),
        (state, "prepare_attn", vars(state).get("prepare_attn")),
    ]
    manager.run_fullgraph, draft_manager.run_fullgraph = target_runs, draft_runs
    state.prepare_attn = prepared
    try:
        again, _ = _engine.serve(llm, requests, new=24, every=1, name="faulty")
    finally:
        for owner, name, before in undo:
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
    return {"answers": answers, "tokens_as_healthy": again == healthy}


def _eagerly(batch: Any, mode: Any, tables: Any, *rest: Any) -> tuple[Any, ...]:
    """Return the arguments that the same batch has in an eager step: without padded requests."""
    count = batch.num_reqs
    batch = copy.copy(batch)
    batch.num_reqs_after_padding = count
    for name in ("query_start_loc", "query_start_loc_np"):
        setattr(batch, name, getattr(batch, name)[: count + 1])
    batch.seq_lens = batch.seq_lens[:count]
    return batch, type(mode)["NONE"], tuple(each[:count] for each in tables), *rest


def _again(builder: Any, group: Any) -> Any:
    return type(builder)(
        builder.kv_cache_spec, group.layer_names, builder.vllm_config, builder.device
    )


def die(llm: Any, options: Any) -> dict[str, Any]:
    """Let the draft pick another key and go on: what the engine's step raises."""
    del options
    (session,) = sessions()
    manager = _engine.runner().speculator.prefill_cudagraph_manager
    inner = manager.dispatch

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        desc = inner(*args, **kwargs)
        others = [key for key in session.prefill.states if key != desc]
        return others[0] if desc in session.prefill else desc

    manager.dispatch = dispatch
    try:
        _engine.serve(llm, _engine.prompts(1), new=16, name="die")
    except Exception as error:  # noqa: BLE001
        return {"error": type(error).__name__, "message": str(error)}
    finally:
        manager.dispatch = inner
    return {"error": None}
