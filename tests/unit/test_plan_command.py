"""``graphshare plan``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphshare import capture_descriptors
from graphshare.cli import main
from graphshare.planning import Batch, Limit, count_batches, plan_captures
from tests.package import ROOT

BATCHES = [Batch(4 * reqs, reqs, 4, steps=200 // reqs) for reqs in range(1, 120)]
BATCHES += [Batch(size, 3, None, steps=2) for size in range(100, 700, 7)]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        "".join(
            json.dumps(
                {
                    "tokens": batch.num_tokens,
                    "requests": batch.num_reqs,
                    "query_len": batch.query_len,
                    "count": batch.steps,
                }
            )
            + "\n"
            for batch in BATCHES
        )
    )
    return file


def _json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    assert main(["plan", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_prints_the_best_plan(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = _json(capsys, trace, "--graphs", "12")
    best = plan_captures(count_batches(BATCHES), 12)
    assert [key["num_tokens"] for key in facts["plan"]["keys"]] == [
        key.num_tokens for key in best.keys
    ]
    assert facts["plan"]["padded_tokens"] == best.outcome.padded_tokens
    assert facts["plan"]["eager"] == {"num_tokens": sum(b.steps for b in BATCHES if b[0] > 512)}
    for ladder in facts["ladders"].values():
        assert ladder["best_work"] <= ladder["work"]
        assert ladder["matched_by"] <= ladder["graphs"]


def test_the_table_has_a_row_for_each_ladder(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(trace), "--graphs", "12"]) == 0
    printed = capsys.readouterr().out
    for word in ("plan", "powers of two", "vLLM", "SGLang", "eager", "matched by"):
        assert word in printed


def test_uniform_keys_come_where_mixed_steps_cost_more(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--graphs", "6", "--uniform-query-lens", "4", "--mixed-step-tokens", "40"]
    facts = _json(capsys, trace, *options)
    assert {key["uniform_query_len"] for key in facts["plan"]["keys"]} == {4, None}
    assert main(["plan", str(trace), *options]) == 0
    assert "query length 4" in capsys.readouterr().out
    only = _json(capsys, trace, "--graphs", "6", "--uniform-query-lens", "4", "--only-uniform")
    assert {key["uniform_query_len"] for key in only["plan"]["keys"]} == {4}
    assert only["plan"]["eager"]["not_covered"] > 0


@pytest.mark.parametrize("limit", ["--memory-mib", "--capture-seconds"])
def test_memory_and_time_limit(limit: str, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = _json(
        capsys, trace, limit, "90", "--per-graph", "8", "--per-token", ".01", "--once", "5"
    )
    best = plan_captures(
        count_batches(BATCHES), Limit(total=90, per_graph=8, per_token=0.01, once=5)
    )
    assert facts["plan"]["work"] == best.outcome.all_work
    assert facts["plan"]["taken"] == pytest.approx(best.taken)
    assert main(["plan", str(trace), limit, "90", "--per-graph", "8"]) == 0


def test_the_written_plan_is_read_back(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", str(trace), "--graphs", "5", "--output", str(out)]) == 0
    assert capture_descriptors(plan=out) == list(plan_captures(count_batches(BATCHES), 5).keys)


@pytest.mark.parametrize(("suffix", "begin"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
@pytest.mark.parametrize("more", [[], ["--uniform-query-lens", "4", "--mixed-step-tokens", "9"]])
def test_the_plot_is_a_picture_and_the_same_each_time(
    suffix: str, begin: bytes, more: list[str], trace: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    contents: list[bytes] = []
    for number in range(2):
        out = tmp_path / f"plan{number}{suffix}"
        assert main(["plan", str(trace), "--graphs", "5", "--plot", str(out), *more]) == 0
        contents.append(out.read_bytes())
    assert contents[0].startswith(begin)
    assert contents[0] == contents[1]


def test_a_plot_of_a_trace_of_one_batch(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace, out = tmp_path / "t.csv", tmp_path / "t.svg"
    trace.write_text("tokens,requests\n1,1\n")
    assert main(["plan", str(trace), "--graphs", "5", "--plot", str(out)]) == 0
    assert out.stat().st_size


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--graphs", "0"],
        ["--graphs", "x"],
        ["--graphs", "3", "--memory-mib", "5"],
        ["--graphs", "3", "--per-graph", "5"],
        ["--memory-mib", "5"],
        ["--memory-mib", "nan", "--per-graph", "1"],
        ["--memory-mib", "5", "--per-graph", "9"],
        ["--graphs", "3", "--uniform-query-lens", "1,,2"],
        ["--graphs", "3", "--uniform-query-lens", "0"],
        ["--graphs", "3", "--only-uniform"],
        ["--graphs", "3", "--plot", "plan.gif"],
        ["--graphs", "3", "--plot", "nowhere/plan.png"],
        ["--graphs", "3", "--output", "nowhere/plan.json"],
        ["--graphs", "3", "--output", "."],
        ["--graphs", "3", "--format", "csv"],
        ["--graphs", "3", "--max-tokens", "-1"],
        ["--graphs", "3", "--max-tokens", "1000000000000"],
        ["--graphs", "3", "--max-tokens", "1", "--output", "plan.json"],
        ["--graphs", "3", "--step-tokens", "1e308"],
        ["--graphs", "3", "--mixed-step-tokens", "1e308", "--uniform-query-lens", "4"],
        ["--memory-mib", "1e308", "--per-graph", "1e308"],
        ["--memory-mib", "2.5e-300", "--per-graph", "1e-300"],
    ],
    ids=" ".join,
)
def test_what_is_wrong_is_refused_in_a_line(
    options: list[str],
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", str(trace), *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == [trace.name]


@pytest.mark.parametrize("line", ['{"tokens": 4}', "nothing", '{"tokens": 4, "requests": 9}'])
def test_a_bad_line_is_named_and_nothing_is_written(
    line: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with trace.open("a") as file:
        file.write(line + "\n")
    out = ["--output", str(tmp_path / "plan.json"), "--plot", str(tmp_path / "plan.svg")]
    assert main(["plan", str(trace), "--graphs", "5", *out]) == 2
    printed = capsys.readouterr()
    assert f"{trace}:{len(BATCHES) + 1}: " in printed.err
    assert printed.out == ""
    assert [path.name for path in tmp_path.iterdir()] == [trace.name]


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_trace_without_a_batch_is_no_plan(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = tmp_path / "empty.jsonl", tmp_path / "plan.json"
    trace.write_text(content)
    assert main(["plan", str(trace), "--graphs", "5", "--output", str(out)]) == 2
    assert "expected a batch" in capsys.readouterr().err
    assert not out.exists()


def test_a_plot_without_matplotlib_names_the_extra(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "graphshare.commands.plan_chart", raising=False)
    plot = str(trace.with_suffix(".png"))
    assert main(["plan", str(trace), "--graphs", "5", "--plot", plot]) == 2
    assert "graphshare[plot]" in capsys.readouterr().err


def test_a_plan_needs_no_torch(trace: Path) -> None:
    """It is made in less time than torch takes to load."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from graphshare.cli import main; "
        "code = main(sys.argv[2:]); sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(ROOT), "plan", str(trace), "--graphs", "5"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
