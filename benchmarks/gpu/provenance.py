"""What is found of what a forward is given, and how long a graph takes to read.

*Found*: forwards of kernel libraries and the operators of PyTorch are captured with tensors whose
names are known, beside live tensors that they are not given. Recall is the share of the given
tensors that the report names; precision the share of the named ones that were given. A workspace
that was freed after the capture, and a borrower that runs on buffers of its own, are planted; both
have to be caught. A library that is not installed is left out, by name.

*Time*: `pool.provenance` of a graph of some number of kernels, right after its capture (`first`)
and once more (`again`).

    python -m benchmarks.gpu.provenance [--json PATH] [--rounds N] [--device cpu] [--nodes N ...]
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns as now
from typing import Any

import torch

from benchmarks._layered import LayeredModel, LayeredOwner, gathered, key_of
from benchmarks._measure import Timing
from benchmarks._states import device_of
from benchmarks._turns import Figure, arguments, report
from graphshare import GraphPool, Phase, ProvenanceError, share_states
from graphshare.provenance import Provenance

KEY = key_of(4)
SECONDS = 0.5


def pool_for(name: str, device: torch.device, forward: Any, owner: Any = None) -> GraphPool[Any]:
    owner = owner or LayeredOwner(1, 4, device)
    pool: GraphPool[Any] = GraphPool(name, owner=owner, device=device, inspectable=True)
    pool.capture([KEY], forward, progress=False)
    return pool


def found_in(report: Provenance, given: Any, strangers: Any) -> dict[str, Any]:
    """Compare what a report names with what a forward was given."""
    named = {each.name for each in report.of("input", "buffer")}
    right = named & set(given)
    return {
        "given": sorted(given),
        "missed": sorted(set(given) - named),
        "named_but_not_given": sorted(named & set(strangers)),
        "recall": len(right) / len(given),
        "precision": len(right) / len(named) if named else 0.0,
        "nodes": [f"{node.kind} {node.name[:80]}" for node in report.nodes],
        "addresses": report.counts(),
        "certainty": sorted({each.certainty.value for n in report.nodes for each in n.addresses}),
        "opaque": len(report.opaque),
    }


def libraries(device: torch.device) -> dict[str, Any]:
    """What is found, by library."""
    found: dict[str, Any] = {}
    if device.type == "cuda":
        from tests.gpu.library_forwards import CASES

        for name, make in CASES.items():
            try:
                case = make()
            except ModuleNotFoundError as error:
                found[name] = {"left_out": str(error)}
                continue
            forward = case.make(case.given)
            pool = pool_for(name, device, lambda *_, forward=forward: forward())
            strangers = {f"stranger{i}": torch.zeros(1 << i, device=device) for i in range(26)}
            read = pool.provenance(KEY, inputs=case.given, weights=case.inner, buffers=strangers)
            found[name] = found_in(read, case.given, strangers)
            pool.close()
    owner, model = LayeredOwner(2, 4, device), LayeredModel(2, 4, 64, device, gathered)
    pool = pool_for("layered", device, model.forward, owner)
    given: dict[str, torch.Tensor] = {"x": model.x, "cos": model.cos, "sin": model.sin}
    for number, (weights, cache) in enumerate(zip(model.layers, model.caches, strict=True)):
        given |= {f"{number}.{name}": each for name, each in weights.items()}
        given |= {f"{number}.keys": cache[0], f"{number}.values": cache[1]}
    strangers = {f"stranger{i}": torch.zeros(1 << i, device=device) for i in range(20)}
    read = pool.provenance(KEY, inputs=given, buffers=strangers)
    found["layered model"] = found_in(read, given, strangers)
    found["toy engine"] = toy(device)
    return found


def toy(device: torch.device) -> dict[str, Any]:
    """What is found in the toy engine's target, and a proof of its loan."""
    from graphshare.adapters.toy.checkpoint import new_models
    from graphshare.adapters.toy.config import EngineConfig, ToyConfig
    from graphshare.adapters.toy.forwards import Forwards
    from graphshare.adapters.toy.graphs import target_keys

    engine = EngineConfig(max_num_reqs=4)
    forwards = Forwards(*(each.to(device) for each in new_models(ToyConfig(), 0)), engine, device)
    target, prefill = (
        GraphPool(name, owner=forwards.make_owner(), device=device, inspectable=True)
        for name in ("target", "prefill")
    )
    shared = share_states(target, prefill)
    keys = target_keys(engine)[-4:]  # all do the same
    with torch.no_grad():
        target.capture(keys, forwards.target, progress=False)
        prefill.capture(keys, forwards.draft_prefill, progress=False)
    proven = shared.prove()
    given = dict(forwards.target_model.named_parameters())
    for number, cache in enumerate(forwards.target_caches):
        given |= {f"keys.{number}": cache.keys, f"values.{number}": cache.values}
    strangers = {f"draft.{n}": each for n, each in forwards.draft_model.named_parameters()}
    strangers |= {"draft.keys": forwards.draft_cache.keys}
    read = target.provenance(keys[0], inputs=given, buffers=strangers)
    result = found_in(read, given, strangers)
    result["loan_proven_for_keys"] = len(proven)
    prefill.close()
    target.close()
    return result


def planted(device: torch.device) -> dict[str, bool]:
    """Whether planted faults are caught."""
    kept = [torch.ones(1 << 20, device=device)]
    pool = pool_for("workspace", device, lambda _, state: kept[0] * 2 + state.slot_mappings[0])
    before = bool(pool.provenance(KEY).dangling)
    if device.type == "cpu":
        kept[0].untyped_storage().resize_(0)
    kept.clear()
    dangling = bool(pool.provenance(KEY).dangling) and not before
    own = LayeredOwner(2, 4, device)
    model = LayeredModel(2, 4, 64, device, gathered)
    target = GraphPool("target", owner=LayeredOwner(2, 4, device), device=device, inspectable=True)
    draft = GraphPool("draft", owner=own, device=device, inspectable=True)
    shared = share_states(target, draft)
    target.capture([KEY], model.forward, progress=False)
    draft.capture(
        [KEY],
        lambda key, _: model.forward(key, own.build(key, None, Phase.CAPTURE)),
        progress=False,
    )
    try:
        shared.prove()
        borrowed = True
    except ProvenanceError:
        borrowed = False
    return {"freed workspace": dangling, "borrower on its own buffers": not borrowed}


def timed(device: torch.device, nodes: int, rounds: int) -> Timing:
    """Time the report of a graph of ``nodes`` kernels."""
    tensors = [torch.zeros(64, device=device) for _ in range(nodes)]

    def forward(*_: Any) -> None:
        for each in tensors:
            each.add_(1)

    seconds: dict[str, list[float]] = {"first": [], "again": []}
    pool = pool_for("long", device, forward)
    names = {f"t{number}": each for number, each in enumerate(tensors)}
    for turn in range(1 + rounds):
        pool.recapture(progress=False)
        for name in seconds:
            start = now()
            read = pool.provenance(KEY, buffers=names)
            took = (now() - start) * 1e-9
            if len(read.nodes) != nodes or len({each.name for each in read.of("buffer")}) != nodes:
                raise SystemExit(f"{len(read.nodes)} nodes, {read.counts()}")
            if turn:
                seconds[name].append(took)
    pool.close()
    return Timing(1, seconds)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, rounds=11)
    parser.add_argument("--device", default="cuda", help="cpu exercises the code without a GPU")
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 100, 1000], metavar="N")
    options = parser.parse_args(argv)
    device = device_of(options.device)
    found = libraries(device)
    faults = planted(device)
    figures: list[Figure] = []
    for name, facts in found.items():
        if "left_out" not in facts:
            missed, wrong = len(facts["missed"]), len(facts["named_but_not_given"])
            figures.append(Figure(f"{name}: given tensors missed", missed, "", target=0))
            figures.append(Figure(f"{name}: named, but not given", wrong, "", target=0))
    for name, caught in faults.items():
        figures.append(Figure(f"not caught: {name}", float(not caught), "", target=0))
    details: dict[str, Any] = {"found": found, "planted": faults, "times": {}}
    for nodes in options.nodes:
        timing = timed(device, nodes, options.rounds)
        for name in ("first", "again"):
            low, high = timing.quartiles_us(name) if options.rounds > 1 else (None, None)
            figures.append(
                Figure(
                    f"{nodes} nodes, {name}",
                    timing.median_us(name) / 1e3,
                    "ms",
                    None if low is None else low / 1e3,
                    None if high is None else high / 1e3,
                    SECONDS * 1e3 if nodes == 1000 else None,
                )
            )
        details["times"][str(nodes)] = timing.facts() if options.rounds > 1 else {}
    report(options.json, "gpu/provenance", figures, details)


if __name__ == "__main__":
    main()
