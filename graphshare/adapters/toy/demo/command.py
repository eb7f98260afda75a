"""``graphshare demo``: the command."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from graphshare import __version__
from graphshare.adapters.toy.demo.arguments import (
    InputError,
    Options,
    add_arguments,
    engine_config,
    read_options,
)
from graphshare.adapters.toy.kernel import kernel_named

if TYPE_CHECKING:
    from rich.console import Console

    from graphshare.adapters.toy.demo.runs import Bench, RunReport
    from graphshare.adapters.toy.demo.screen import Screen
    from graphshare.adapters.toy.demo.workload import Workload

__all__ = ["add_arguments", "run"]

Refuse = Callable[[str], NoReturn]


def run(given: argparse.Namespace, refuse: Refuse) -> int:
    """Run the demo.

    Args:
        given: The parsed options.
        refuse: Called with a line for what the user got wrong; does not return.

    Returns:
        The exit code: 1 when the runs did not give the same tokens, or a planted fault was not
        refused.
    """
    try:
        options = read_options(given)
        device = _device(options.device)
        if options.attention != "torch" and device.type != "cuda":
            raise InputError(
                f"--attention {options.attention}: expected a CUDA device, and torch finds none"
            )
    except InputError as error:
        refuse(str(error))
    try:
        # What the extra brings is imported here, when it is known that there is something to do.
        from graphshare.adapters.toy.demo.runs import Bench
        from graphshare.adapters.toy.demo.screen import make_console, screen_for
        from graphshare.adapters.toy.demo.workload import Workload

        with _threads(options.threads):
            config = engine_config(options.num_draft_tokens, options.attention)
            bench = Bench(config, device, kernel_named(options.attention))
            workload = Workload.of(
                options.prompts,
                options.max_new_tokens,
                mean_gap=options.arrivals,
                seed=options.seed,
            )
            console = make_console()
            screen = screen_for(console, silent=options.json or options.quiet)
            show = _compare if options.fault is None else _plant
            return show(options, bench, workload, console, screen)
    except ImportError as error:
        refuse(f"the demo needs more than the core: {error} (pip install 'graphshare[cli]')")


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: expected a CUDA device, and torch finds none")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return (
        torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)
    )


@contextlib.contextmanager
def _threads(count: int) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _facts(options: Options, bench: Bench) -> dict[str, Any]:
    return {
        "graphshare": __version__,
        "torch": torch.__version__,
        "device": str(bench.device),
        "attention": options.attention,
        "threads": options.threads,
        "num_draft_tokens": options.num_draft_tokens,
        "max_new_tokens": options.max_new_tokens,
        "arrivals": options.arrivals,
        "seed": options.seed,
    }


def _write_json(console: Console, facts: dict[str, Any]) -> None:
    console.file.write(json.dumps(facts, indent=2) + "\n")


def _compare(
    options: Options, bench: Bench, workload: Workload, console: Console, screen: Screen
) -> int:
    from graphshare.adapters.toy.demo.tables import comparison, run_facts, same_tokens_shown

    runs: dict[str, RunReport] = {}
    with screen.running(
        f"On graphs, draft prefills on the target's states ({bench.device}):", texts=True
    ) as feed:
        runs["sharing"] = bench.run("sharing", workload, feed)
    with screen.running("The same, each on states of its own ...", texts=False) as feed:
        runs["graphs"] = bench.run("graphs", workload, feed)
    with screen.running("Without graphs ...", texts=False) as feed:
        runs["eager"] = bench.run("eager", workload, feed)
    screen.say("Without graphs and without a draft, one request after the other ...")
    runs["plain"] = bench.run_plain(workload)
    same = len({report.outputs for report in runs.values()}) == 1
    if options.json:
        facts = _facts(options, bench)
        facts["requests"] = _texts(workload, runs["sharing"].outputs)
        facts["runs"] = {name: run_facts(report) for name, report in runs.items()}
        facts["same_tokens"] = same
        _write_json(console, facts)
    else:
        console.print(comparison(runs, bench.engine.max_num_reqs))
        console.print(same_tokens_shown(runs))
    return 0 if same else 1


def _plant(
    options: Options, bench: Bench, workload: Workload, console: Console, screen: Screen
) -> int:
    from graphshare.adapters.toy.demo.faults import ABOUT
    from graphshare.adapters.toy.demo.tables import (
        error_facts,
        harm_facts,
        harm_shown,
        not_as_expected_shown,
        planted_shown,
        refusal_shown,
        run_facts,
    )
    from graphshare.adapters.toy.demo.trials import Refusal, plant

    name = options.fault or ""
    about = ABOUT[name]
    if not options.json:
        console.print(planted_shown(name, about, unsafe=options.unsafe))
    with screen.running("Decoding without the fault ...", texts=False) as feed:
        healthy = bench.run("sharing", workload, feed)
    with screen.running("Decoding with the fault ...", texts=False) as feed:
        found = plant(name, bench, workload, healthy, unsafe=options.unsafe, feed=feed)
    refused = isinstance(found, Refusal)
    as_expected = refused is not options.unsafe
    if options.json:
        facts = _facts(options, bench)
        facts |= {"fault": name, "unsafe": options.unsafe, "planted": about.planted}
        facts |= {"rule": about.rule, "healthy": run_facts(healthy)}
        if refused:
            facts["refused"] = {
                "during": found.during,
                "steps": found.steps,
                **error_facts(found.error),
            }
        else:
            facts["let_through"] = about.let_through
            facts["harm"] = harm_facts(healthy, found)
        _write_json(console, facts)
    else:
        shown = refusal_shown(found, about) if refused else harm_shown(healthy, found, workload)
        console.print(shown)
        if not as_expected:
            console.print(not_as_expected_shown(refused))
    return 0 if as_expected else 1


def _texts(workload: Workload, outputs: tuple[tuple[int, ...], ...]) -> list[dict[str, Any]]:
    from graphshare.adapters.toy.demo.workload import decoded

    return [
        {"prompt": prompt, "arrival": arrival, "text": decoded(output), "tokens": list(output)}
        for prompt, arrival, output in zip(
            workload.prompts, workload.arrivals, outputs, strict=True
        )
    ]
