"""One vLLM process and what is to be seen of it: ``python -m benchmarks.vllm.scenario --help``.

``GRAPHSHARE_VLLM`` says whether graphshare takes part, as in any vLLM process. What each task found
is in the JSON, its traceback where it failed.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import logging
import os
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks._measure import machine
from benchmarks.vllm import _engine, _faults, _models, _profile, _time
from graphshare.adapters.vllm import sessions, statistics
from graphshare.adapters.vllm.switch import mode_from


def digest(value: Any) -> str:
    """Of anything that JSON holds."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def tokens(llm: Any, options: Any) -> dict[str, Any]:
    """Tokens and drafts of requests that arrive by steps, at each concurrency.

    Few of them one every two steps, so that they differ in how far they are; many one a step, or
    the first would end before the last begins.
    """
    found: dict[str, Any] = {}
    runner = _engine.runner()
    for concurrency in options.concurrency:
        with _engine.Recorder(runner) as seen:
            requests = _engine.prompts(concurrency, seed=concurrency)
            texts, steps = _engine.serve(
                llm, requests, every=2 if concurrency <= 8 else 1, name=f"t{concurrency}"
            )
        drafts = seen.drafts()
        found[str(concurrency)] = {
            "tokens": texts,
            "digest": digest(texts),
            "drafts_digest": digest(drafts),
            "drafts": drafts if concurrency == 1 else None,
            "steps": steps,
            "most_at_once": seen.most_at_once(),
            "distinct": [len(set(text)) for text in texts],
            "target_ran": dict(collections.Counter(mode for mode, _, _ in seen.steps)),
            "draft_ran": dict(collections.Counter(mode for mode, _, _ in seen.prefills)),
            "keys_of_target": dict(collections.Counter(map(str, seen.steps))),
        }
    return found


def short_prompts(llm: Any, options: Any) -> dict[str, Any]:
    """Prompts of fewer tokens than a step of decoding has, arriving among requests that decode.

    On vLLM 0.20.2 with ``FULL_AND_PIECEWISE`` such a batch is not uniform to the target, which
    looks at its tokens (``model_runner.py`` 979), but is to the draft, which looks at the padded
    ones (``eagle/speculator.py`` 471), where they fill a graph: of 2, 4 or 8 requests, with three
    drafts each. Later versions look at the tokens both times.
    """
    del options
    runner = _engine.runner()
    before = statistics().steered
    first, *others = [40, 3, 2, 1, 3, 2, 1, 2]
    requests = [
        [100 * number + place + 10 for place in range(length)]
        for number, length in enumerate((first, *others))
    ]
    with _engine.Recorder(runner) as seen:
        texts, steps = _engine.serve(llm, requests, new=64, every=4, name="short")
    return {
        "tokens": texts,
        "digest": digest(texts),
        "drafts_digest": digest(seen.drafts()),
        "steps": steps,
        "target_and_draft_ran": dict(
            collections.Counter(
                f"{target} and {draft}"
                for (target, *_), (draft, *_) in zip(seen.steps, seen.prefills, strict=True)
            )
        ),
        "steered": statistics().steered - before,
    }


def builds(llm: Any, options: Any) -> dict[str, Any]:
    """Calls of the draft's own builders while serving, by query length."""
    del options
    runner = _engine.runner()
    counted: collections.Counter[str] = collections.Counter()
    undo: list[tuple[Any, Any]] = []
    for whose, groups in (("draft", runner.speculator.attn_groups), ("target", runner.attn_groups)):
        for group in (each for within in groups for each in within):
            builder = group.get_metadata_builder(0)
            inner = builder.build

            def build(*args: Any, inner: Any = inner, whose: str = whose, **kwargs: Any) -> Any:
                metadata = inner(*args, **kwargs)
                counted[f"{whose}, query length {metadata.max_query_len}"] += 1
                return metadata

            builder.build = build
            undo.append((builder, inner))
    requests = _engine.prompts(4, seed=99)
    with _engine.Recorder(runner) as seen:
        _engine.serve(llm, requests, new=32, name="b")
    for builder, _ in undo:
        del builder.build
    prefills = collections.Counter(mode for mode, _, _ in seen.prefills)
    return {"builds": dict(counted), "draft_prefills": dict(prefills), "steps": len(seen.steps)}


def facts(llm: Any, options: Any) -> dict[str, Any]:
    """What the adapter assumes, as it is."""
    del llm, options
    runner = _engine.runner()
    speculator = runner.speculator
    groups = {
        whose: [
            {
                "backend": group.backend.get_name(),
                "layers": list(group.layer_names),
                "spec": repr(group.kv_cache_spec),
                "builder": type(group.get_metadata_builder(0)).__name__,
                "buffers": {
                    name: [list(value.shape), str(value.dtype)]
                    for name, value in vars(group.get_metadata_builder(0)).items()
                    if isinstance(value, torch.Tensor)
                },
            }
            for within in all_groups
            for group in within
        ]
        for whose, all_groups in (
            ("target", runner.attn_groups),
            ("draft", speculator.attn_groups),
        )
    }
    managers = {
        "target": runner.cudagraph_manager,
        "prefill": speculator.prefill_cudagraph_manager,
        "decode": speculator.decode_cudagraph_manager,
    }
    return {
        "runner": f"{type(runner).__module__}.{type(runner).__qualname__}",
        "speculator": f"{type(speculator).__module__}.{type(speculator).__qualname__}",
        "model_state": type(runner.model_state).__qualname__,
        "groups": groups,
        "graphs": {
            name: {str(desc): type(graph).__name__ for desc, graph in manager.graphs.items()}
            for name, manager in managers.items()
        },
        "descs": {
            name: {str(mode): len(descs) for mode, descs in manager._capture_descs.items()}
            for name, manager in managers.items()
        },
        "instance_attributes": {
            name: sorted(set(vars(each)) & _HOOKED)
            for name, each in (*managers.items(), ("model_state", runner.model_state))
        },
    }


_HOOKED = {"capture_model", "dispatch", "graphs", "prepare_attn", "run_fullgraph"}

TASKS: dict[str, Callable[[Any, Any], Any]] = {
    "facts": facts,
    "tokens": tokens,
    "short_prompts": short_prompts,
    "builds": builds,
    "faults": _faults.plant,
    "profile": _profile.profile,
    "endtoend": _time.end_to_end,
    "die": _faults.die,
}

TAKE_TIMES = ("profile", "endtoend")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one scenario, the only one of this process: a second engine would not start in it."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO)
    mode_from(os.environ)  # refuses a switch that is misspelt, before vLLM starts
    result: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items()}}
    result["switch"] = os.environ.get("GRAPHSHARE_VLLM")
    began = time.perf_counter()

    def save(**so_far: Any) -> None:
        # Whole or not at all: it may be read, or this process ended, at any time.
        draft = options.json.with_suffix(".part")
        draft.write_text(json.dumps({**result, **so_far}, indent=1, default=str))
        draft.replace(options.json)

    def guarded(name: str, task: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        try:
            result[name] = task()
        except BaseException as error:  # noqa: BLE001
            result[name] = {"failed": repr(error), "traceback": traceback.format_exc()[-6000:]}
            print(f"{options.json.stem}: {name} FAILED: {error!r}", flush=True)
        result.setdefault("seconds", {})[name] = time.perf_counter() - started
        save()

    upstream = _faults.Upstream()
    kept: list[Any] = []

    def begin() -> dict[str, Any]:
        llm = _engine.start(
            options.pair,
            method=options.method,
            cudagraph_mode=options.cudagraph_mode,
            backend=options.backend,
            liveliness=options.liveliness,
            cache_gib=4.0 if options.pair == "8b" else 0.5,
            before=upstream.watch,
        )
        kept.append(llm)
        import vllm

        return {"vllm": vllm.__version__, "torch": torch.__version__, "sessions": len(sessions())}

    def seen() -> dict[str, Any]:
        return {name: _plain(value) for name, value in _fields(statistics()).items()}

    guarded("start", begin)
    guarded("machine", machine)
    guarded("draft_saw", upstream.found)
    upstream.unwatch()
    for name in options.tasks:
        if name in TAKE_TIMES and options.wait_for is not None:
            guarded("statistics", seen)
            go = options.wait_for.with_name(f"{options.wait_for.name}-{name}")
            while not go.exists():
                time.sleep(0.2)
        if kept:
            options.so_far = lambda found, name=name: save(**{name: found})
            guarded(name, lambda name=name: TASKS[name](kept[0], options))
    guarded("statistics", seen)
    print(f"{options.json.stem}: done in {time.perf_counter() - began:.0f} s", flush=True)
    os._exit(0)  # an engine whose step was refused does not end well


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="+", choices=TASKS)
    parser.add_argument("--pair", choices=_models.PAIRS, default="small")
    parser.add_argument("--method", choices=("eagle", "eagle3"), default="eagle")
    parser.add_argument("--cudagraph-mode", default="FULL")
    parser.add_argument("--backend")
    parser.add_argument("--liveliness", type=float, default=0.35)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of the end-to-end times, in all"
    )
    parser.add_argument(
        "--turns",
        type=int,
        nargs="+",
        default=[600, 300],
        help="of a profile's variants, by concurrency; the last goes on",
    )
    parser.add_argument(
        "--profile-seconds", type=float, default=60.0, help="in all; then fewer turns"
    )
    parser.add_argument(
        "--wait-for", type=Path, help="take times when this file is there, with -TASK at its end"
    )
    parser.add_argument("--json", type=Path, required=True)
    return parser


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(each) for name, each in _fields(value).items()}
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(name): _plain(each) for name, each in value.items()}
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)


if __name__ == "__main__":
    main()
