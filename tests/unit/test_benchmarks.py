"""Each benchmark still runs, in its smallest configuration. What it measures is not looked at."""

from __future__ import annotations

import importlib
import json
import math
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import run
from benchmarks._measure import Timing, among
from benchmarks._turns import Figure, clock, difference_us, in_turn

DEVICE = ("--device=cpu",)


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()  # a benchmark may set them
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", run.QUICK)
def test_runs_and_writes_its_results(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"{name}.json"
    on_tape = DEVICE if name.startswith("gpu/") else ()
    monkeypatch.setattr(sys, "argv", [name, f"--json={path}", *run.QUICK[name], *on_tape])
    importlib.import_module(f"benchmarks.{name.replace('/', '.')}").main()
    content = json.loads(path.read_text())
    assert {"python", "torch", "processor", "gpu", "driver", "commit"} <= set(content["machine"])
    assert not any(str(tmp_path) in part for part in content["command"])
    figures = run.figures_of(content["results"])
    assert figures
    assert all(figure["value"] == figure["value"] for figure in figures)


def test_every_benchmark_is_in_a_group() -> None:
    folder = Path(run.__file__).parent
    found = {f"{path.parent.name}/{path.stem}" for path in folder.glob("*/*.py")}
    named = {*run.QUICK, *run.NEED_KERNELS}
    assert {name for name in found if name.startswith(("host/", "gpu/"))} == named


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it would run")
@pytest.mark.parametrize("name", run.NEED_KERNELS)
def test_without_a_gpu_a_benchmark_of_kernels_says_so(name: str) -> None:
    with pytest.raises(SystemExit, match="CUDA device"):
        importlib.import_module(f"benchmarks.{name.replace('/', '.')}").main([])


def test_driver_runs_a_group_and_says_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["host", "--quick", "--only", "replay", "--out", str(tmp_path)]
    assert run.main(command) == 0
    assert (tmp_path / "host" / "replay.json").exists()
    assert "replay by bind" in capsys.readouterr().out
    monkeypatch.setitem(run.QUICK, "host/replay", ("--no-such-option",))
    assert run.main(command) == 1
    assert "failed: host/replay" in capsys.readouterr().out


def test_variants_take_turns_and_differences_are_paired() -> None:
    order: list[str] = []

    def sampler(name: str, ns: int) -> Any:
        def sample() -> int:
            order.append(name)
            return ns

        return sample

    timing = in_turn({"a": sampler("a", 100), "b": sampler("b", 350)}, turns=4, rounds=3, warmup=0)
    assert len(order) == 24
    assert all(set(order[i : i + 2]) == {"a", "b"} for i in range(0, 24, 2))
    assert difference_us(timing, "b", "a") == pytest.approx((0.25, 0.25, 0.25))
    drifting = Timing(1, {"one": [1e-6, 3e-6, 9e-6], "two": [2e-6, 4e-6, 10e-6]})
    assert difference_us(drifting, "two", "one").median == pytest.approx(1.0)
    assert clock() >= 0


def test_a_figure_says_whether_its_target_is_met() -> None:
    assert Figure("n", 1.0, "us", target=1.0).facts()["met"] is True
    assert Figure("n", 1.1, "us", target=1.0).facts()["met"] is False
    assert "met" not in Figure("n", 1.1, "us").facts()


values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


@given(values, st.integers(1, 200), st.randoms())
def test_an_interval_among_others_reaches_from_a_value_to_another(found, count, rng) -> None:
    median, low, high = among(found, count)
    assert median == statistics.median(found)
    assert low <= median <= high
    assert low == -math.inf or low in found
    assert high == math.inf or high in found
    shuffled = rng.sample(found, len(found))
    assert among(shuffled, count) == (median, low, high)
    _, wider, wide = among(found, count + 1)
    assert wider <= low
    assert wide >= high


@pytest.mark.parametrize("count", [12, 13, 40, 300])
@pytest.mark.parametrize("comparisons", [1, 54])
def test_all_intervals_hold_what_was_drawn_from(count, comparisons) -> None:
    """As often as they say, and hardly more: of a median, whatever the distribution."""
    low, high = among(range(count), comparisons)[1:]
    # The true median lies beyond the k-th value if fewer than k of the values lie below it.
    beyond = 2 * sum(math.comb(count, k) for k in range(int(low) + 1)) / 2**count
    closer = beyond + 2 * math.comb(count, int(low) + 1) / 2**count
    assert beyond <= 0.05 / comparisons < closer
    assert high == count - 1 - low


def test_too_few_values_say_nothing_about_many_comparisons() -> None:
    assert among([1.0] * 11, 54)[1:] == (-math.inf, math.inf)
    assert among([1.0] * 12, 54)[1:] == (1.0, 1.0)


def test_intervals_hold_one_where_there_is_no_difference() -> None:
    rng = random.Random(0)
    families = 0
    for _ in range(200):
        found = [among([rng.lognormvariate(0, 0.1) for _ in range(30)], 54) for _ in range(54)]
        families += all(low <= 1 <= high for _, low, high in found)
    assert families >= 185  # 190 of 200, or more
