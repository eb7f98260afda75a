"""``graphshare demo``: what it shows, what it refuses, and with which exit code."""

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")

from rich.console import Console

import graphshare
from graphshare.adapters.toy.demo import planting
from graphshare.adapters.toy.demo.arguments import FAULTS, engine_config
from graphshare.adapters.toy.demo.faults import ABOUT
from graphshare.adapters.toy.demo.planting import PLANTED, Planted, Site
from graphshare.adapters.toy.demo.runs import Bench, Feed, serve
from graphshare.adapters.toy.demo.tables import refusal_shown
from graphshare.adapters.toy.demo.trials import Harm, Refusal, plant
from graphshare.adapters.toy.demo.workload import Workload, decoded
from graphshare.adapters.toy.graphs import GraphRunner
from graphshare.cli import main
from graphshare.printing import printable

ROOT = Path(__file__).parents[2]
TINY = ("demo", "--max-new-tokens", "6", "--prompt", "Copy the file and", "--prompt", "A list")

REFUSED = {
    "stale": (graphshare.StaleStateError, "decoding"),
    "moved": (graphshare.AddressChangedError, "decoding"),
    "lazy": (graphshare.LazyStateError, "capture"),
    "baked": (graphshare.BakedValueChangedError, "decoding"),
    "key": (graphshare.KeyMismatchError, "capture"),
    "released": (graphshare.ReleasedStateError, "decoding"),
    "spec": (graphshare.SpecMismatchError, "setup"),
}
HARM = {
    "stale": "acceptance fell",
    "moved": "tokens changed",
    "lazy": "tokens changed",
    "baked": "tokens changed",
    "key": "acceptance fell",
    "released": "acceptance fell",
    "spec": "acceptance fell",
}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def bench(request):
    return Bench(engine_config(3), torch.device(request.param))


@pytest.fixture(scope="module")
def workload():
    prompts = ("Note that the file must be", "The class has a method that", "A dictionary maps")
    return Workload.of(prompts, 48, mean_gap=2, seed=0)


@pytest.fixture(scope="module")
def healthy(bench, workload):
    return bench.run("sharing", workload)


# The comparison.


def test_all_ways_of_running_give_the_same_tokens(bench, workload, healthy):
    """Borrowing avoids one build a step, and changes nothing else that can be counted."""
    own, eager = bench.run("graphs", workload), bench.run("eager", workload)
    plain = bench.run_plain(workload)
    assert healthy.outputs == own.outputs == eager.outputs == plain.outputs
    assert healthy.steps == own.steps == eager.steps < plain.steps
    assert healthy.tokens_per_step == own.tokens_per_step == eager.tokens_per_step > 2
    assert own.builds == eager.builds
    assert own.builds["draft.prefill"] == own.steps
    assert healthy.builds == {**own.builds, "draft.prefill": 0}
    assert healthy.builds_avoided == healthy.steps
    assert own.builds_avoided == eager.builds_avoided == 0
    assert healthy.replays == own.replays == 2 * own.steps + own.builds["draft.decode"]
    assert eager.replays == eager.graphs == 0
    assert all(report.forward_seconds > 0 for report in (healthy, own, eager))


def test_the_demo_shows_texts_and_a_table(capsys):
    assert main(TINY) == 0
    shown, said = capsys.readouterr()
    assert said == ""
    assert "1 Copy the file and" in shown
    assert "2 A list" in shown
    assert re.search(r"^ *builds: draft\.prefill +0 +(\d+) +\1 +- *$", shown, re.MULTILINE)
    assert "All 4 runs gave the same 12 tokens." in shown
    assert "\x1b" not in shown


def test_the_table_fits_a_narrow_terminal_without_colour(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    assert main((*TINY, "--quiet")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert "…" not in "".join(lines)
    assert not any("Copy" in line for line in lines)


def test_runs_that_differ_are_told_apart(capsys, monkeypatch):
    """A wrong token is a line that says where, and exit code 1."""
    right = Bench.run_plain

    def wrong(self, workload):
        report = right(self, workload)
        first, second = report.outputs
        return replace(report, outputs=(first, (*second[:3], second[3] ^ 1, *second[4:])))

    monkeypatch.setattr(Bench, "run_plain", wrong)
    assert main((*TINY, "--quiet")) == 1
    assert "differs first in text 2, token 4." in " ".join(capsys.readouterr().out.split())
    assert main((*TINY, "--json")) == 1
    assert json.loads(capsys.readouterr().out)["same_tokens"] is False


def test_json_is_one_object_and_nothing_else():
    """As a process of its own, with its own interpreter and its own standard streams."""
    done = subprocess.run(
        [sys.executable, "-m", "graphshare", *TINY, "--json", "--seed", "7"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert facts["same_tokens"] is True
    assert facts["graphshare"] == graphshare.__version__
    assert (facts["seed"], facts["max_new_tokens"], facts["num_draft_tokens"]) == (7, 6, 3)
    assert [each["prompt"] for each in facts["requests"]] == ["Copy the file and", "A list"]
    for each in facts["requests"]:
        assert each["text"] == decoded(each["tokens"])
        assert 1 <= len(each["tokens"]) <= 6
    assert list(facts["runs"]) == ["sharing", "graphs", "eager", "plain"]
    fields = {
        "steps", "tokens", "tokens_per_step", "builds", "builds_avoided", "graphs", "replays",
        "capture_seconds", "build_seconds", "forward_seconds", "seconds",
    }  # fmt: skip
    assert all(set(report) == fields for report in facts["runs"].values())
    assert facts["runs"]["sharing"]["builds"]["draft.prefill"] == 0
    assert facts["runs"]["sharing"]["builds_avoided"] == facts["runs"]["sharing"]["steps"]


# Faults.


def test_every_fault_is_known_everywhere():
    assert list(FAULTS) == list(PLANTED) == list(ABOUT) == list(REFUSED) == list(HARM)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_refused(name, bench, workload, healthy):
    """By its own error, before a single wrong token."""
    texts = []

    def watch(requests):
        texts[:] = [tuple(request.output) for request in requests]

    found = plant(name, bench, workload, healthy, unsafe=False, feed=Feed(watcher=watch))
    assert isinstance(found, Refusal)
    for text, right in zip(texts, healthy.outputs, strict=bool(texts)):
        assert text == right[: len(text)]
    error, during = REFUSED[name]
    assert type(found.error) is error
    assert found.during == during
    assert found.tokens == sum(map(len, texts))
    assert all((found.error.what, found.error.expected, found.error.got))
    assert all((found.error.consequence, found.error.remedy))
    if name == "stale":
        assert found.error.rule == graphshare.Staleness.OVERWRITTEN
        assert found.error.written_by[0] == "draft.decode"
    if name in ("moved", "released"):
        assert 0 < found.steps < healthy.steps  # in the middle of the run
    if name == "moved":
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(refusal_shown(found, ABOUT[name]))
        assert hex(found.error.expected) in console.export_text()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_is_let_through_does_harm(name, bench, workload, healthy):
    """Measured, not asserted: what the engine does with the fault, beside what it does without."""
    found = plant(name, bench, workload, healthy, unsafe=True)
    assert isinstance(found, Harm)
    assert found.outcome == HARM[name]
    assert bool(found.changed) == (found.outcome == "tokens changed")
    if found.outcome == "acceptance fell":
        assert found.outputs == healthy.outputs
        assert found.tokens_per_step < healthy.tokens_per_step - 0.1


def _as_it_should_be(name, bench, workload, monkeypatch):
    """The engine of a fault that is let through, but for the fault."""
    site = Site(bench, unsafe=True, step=1 << 30, longest_prompt=1 << 20)
    if name == "stale":
        monkeypatch.setattr(
            planting._EarlyDecode, "run_draft_prefill", GraphRunner.run_draft_prefill
        )
    if name == "lazy":
        monkeypatch.setattr(planting, "_keep", lambda kept, key, state: state)
    if name == "key":
        monkeypatch.setattr(planting, "_ONE_TOO_MANY", 0)
    planted = PLANTED[name](site)
    if name == "spec":
        halved = planting._HalvedOwner
        runner = GraphRunner(
            planted.forwards,
            sharing=False,
            device=bench.device,
            prefill_owner=halved(site),
            decode_owner=halved(site),
        )
        planted = Planted(planted.forwards, runner)
    return planted


@pytest.mark.parametrize("name", FAULTS)
def test_it_is_the_fault_that_does_the_harm(name, bench, workload, healthy, monkeypatch):
    """The same engine, as unguarded as with the fault but without it, is as good as the healthy."""
    planted = _as_it_should_be(name, bench, workload, monkeypatch)
    with planted.runner as runner:
        runner.capture()
        engine, requests, _ = serve(planted.forwards, runner, workload)
    assert tuple(tuple(request.output) for request in requests) == healthy.outputs
    assert engine.counts.steps == healthy.steps
    assert engine.counts.tokens_per_step == healthy.tokens_per_step


def test_a_refusal_is_shown_with_its_parts(capsys):
    assert main((*TINY, "--fault", "released")) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^ReleasedStateError +draft\.prefill: ", shown, re.MULTILINE)
    for part in ("expected", "got", "key", "otherwise", "remedy", "rule"):
        assert re.search(rf"^{part} +\S", shown, re.MULTILINE)


def test_harm_is_shown_beside_the_healthy_run(capsys):
    assert main((*TINY, "--fault", "lazy", "--unsafe")) == 0
    shown = capsys.readouterr().out
    assert re.search(
        r"^ *tokens a request +\d\.\d\d +\d\.\d\d *\n *and step *$", shown, re.MULTILINE
    )
    assert re.search(r"^without +\S.*\n(?:.*\n)*?with +\S", shown, re.MULTILINE)
    assert "Wrong tokens, and no error." in shown


def test_a_fault_as_json(capsys):
    assert main((*TINY, "--fault", "key", "--json")) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["fault"], facts["unsafe"]) == ("key", False)
    assert facts["refused"]["error"] == "KeyMismatchError"
    assert facts["refused"]["during"] == "capture"
    assert len(facts["refused"]["missing"]) == 3
    assert facts["rule"] == ABOUT["key"].rule
    assert main((*TINY, "--fault", "baked", "--unsafe", "--json")) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["harm"]["outcome"] == "tokens changed"
    assert facts["harm"]["first_difference"]["request"] in facts["harm"]["changed"]
    assert facts["healthy"]["tokens_per_step"] >= 1
    assert "refused" not in facts


@pytest.mark.parametrize("unsafe", [False, True])
def test_a_fault_that_does_not_go_as_asked_is_exit_code_1(unsafe, capsys, monkeypatch):
    def refused_when_unsafe(site):
        if site.unsafe:
            raise graphshare.OwnershipError("so")
        return Planted(site.bench.forwards, GraphRunner(site.bench.forwards, device="cpu"))

    monkeypatch.setitem(PLANTED, "stale", refused_when_unsafe)
    arguments = (*TINY, "--device", "cpu", "--fault", "stale", *(["--unsafe"] if unsafe else []))
    assert main(arguments) == 1
    assert "REFUSED" in capsys.readouterr().out


def test_a_crash_of_the_unsafe_run_is_an_outcome(capsys, monkeypatch):
    def crash(site):
        raise RuntimeError("device-side assert")

    monkeypatch.setitem(PLANTED, "stale", crash)
    assert main((*TINY, "--fault", "stale", "--unsafe")) == 0
    assert "device-side assert" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="device-side"):
        main((*TINY, "--fault", "stale"))


# What the user got wrong.


def _files(folder):
    (folder / "latin1.txt").write_bytes(b"caf\xe9")
    (folder / "empty.txt").write_bytes(b"\n \n")
    (folder / "long.txt").write_bytes(b"short\n" + b"x" * 600)
    (folder / "huge.txt").write_bytes(b"x" * (1 << 20) + b"xx")
    (folder / "many.txt").write_bytes(b"line\n" * 65)


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "dmeo",
        "demo stray",
        "demo --nonsense",
        "demo --prom x",
        "demo --fault other",
        "demo --unsafe",
        "demo --attention other",
        "demo --attention flash_attn3 --device cpu",
        "demo --attention flashinfer --fault stale",
        "demo --max-new-tokens 0",
        "demo --max-new-tokens many",
        "demo --max-new-tokens 509",
        "demo --num-draft-tokens 0",
        "demo --num-draft-tokens 8",
        "demo --threads 0",
        "demo --threads 100000",
        "demo --arrivals -1",
        "demo --seed -1",
        "demo --device tpu",
        "demo --prompt-file",
        "demo --prompt-file nothing.txt",
        "demo --prompt-file .",
        "demo --prompt-file latin1.txt",
        "demo --prompt-file empty.txt",
        "demo --prompt-file long.txt",
        "demo --prompt-file huge.txt",
        "demo --prompt-file many.txt",
        "demo --prompt-file no\0thing",
        "demo --prompt=",
        "demo --prompt=\n",
        "demo --prompt=\udcff",
        "demo --new\nline",
        f"demo --prompt={'y' * 512}",
        "demo --json --fault stale --prompt=",
    ],
)
def test_what_the_user_got_wrong_is_one_line(arguments, tmp_path, monkeypatch, capsys):
    """On the standard error, exit code 2, and nothing else anywhere."""
    _files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split(" ") if arguments else []) == 2
    shown, said = capsys.readouterr()
    assert shown == ""
    assert said.startswith("graphshare")
    assert said.count("\n") == 1
    assert len(said) < 200


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said_so(capsys):
    assert main((*TINY, "--device", "cuda")) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_the_extra_one_line_says_what_to_install(capsys, monkeypatch):
    for name in [n for n in sys.modules if n.startswith("graphshare.adapters.toy.demo.")]:
        if name.rpartition(".")[2] in ("screen", "tables"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(TINY) == 2
    shown, said = capsys.readouterr()
    assert shown == ""
    assert said.count("\n") == 1
    assert "graphshare[cli]" in said


def test_prompts_of_a_file_are_its_lines(tmp_path, capsys):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffCopy the file\r\n\r\nA list\n".encode())
    given = ("--prompt-file", str(path), "--prompt", "Gr\u00fc\u00dfe", "--max-new-tokens", "2")
    assert main(("demo", *given, "--json")) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [each["prompt"] for each in facts["requests"]] == [
        "Gr\u00fc\u00dfe",
        "Copy the file",
        "A list",
    ]


# Ends before the end.


def test_an_interrupt_is_one_line_and_code_130(capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "run", interrupted)
    assert main(TINY) == 130
    assert capsys.readouterr().err == "graphshare: interrupted\n"


def test_a_reader_that_goes_away_ends_the_demo_quietly():
    with subprocess.Popen(
        [sys.executable, "-m", "graphshare", "demo", "--max-new-tokens", "1", "--prompt", "A"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    ) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (141, b"")


# Words.


def test_help_asks_for_nothing_heavy():
    """Help and mistakes are answered without what only the demo needs."""
    probe = (
        "import sys; from graphshare.cli import main; code = main(sys.argv[1:]);"
        "print(code, *({'rich', 'safetensors'} & set(sys.modules)), file=sys.stderr)"
    )
    for arguments in ("--help", "demo --help", "demo --seed -1"):
        done = subprocess.run(
            [sys.executable, "-c", probe, *arguments.split()],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
        assert done.stderr.splitlines()[-1] in ("0", "2")


def test_text_cannot_steer_the_terminal():
    assert printable("a\x1b[2Jb\u202ec\n\td") == "a\ufffd[2Jb\ufffdc d"
    assert printable("plain, Gr\u00fc\u00dfe \u65e5") == "plain, Gr\u00fc\u00dfe \u65e5"
    assert decoded([256, 0x66, 0xC3, 257]) == "f\ufffd"


def test_arrivals_follow_the_seed():
    one, same, other = (
        Workload.of(("a",) * 9, 1, mean_gap=3, seed=seed).arrivals for seed in (1, 1, 2)
    )
    assert one == same != other
    assert one[0] == 0
    assert list(one) == sorted(one)
    assert set(Workload.of(("a",) * 9, 1, mean_gap=0, seed=1).arrivals) == {0}


def _shown_in_readme(command):
    text = (ROOT / "README.md").read_text("utf-8")
    (block,) = re.findall(
        rf"^```text\n\$ graphshare {command}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE
    )
    return block.splitlines()


def _without_numbers(lines):
    """Other processors may round otherwise, and give other texts; the words stay."""
    return {re.sub(r"[-\d.]+", "#", " ".join(line.split())) for line in lines}


@pytest.mark.parametrize("command", ["demo", "demo --fault stale"])
def test_the_readme_shows_what_the_demo_shows(command, capsys):
    """The lines of the README are those of a run today, but for numbers and texts."""
    assert main((*command.split(), "--device", "cpu")) == 0
    ran = _without_numbers(capsys.readouterr().out.splitlines())
    shown = [line for line in _shown_in_readme(command) if not re.match(r"[1-6] |  \w|\[", line)]
    assert len(shown) > 10
    assert _without_numbers(shown) <= ran


def test_threads_are_as_before(capsys):
    before = torch.get_num_threads()
    assert main((*TINY, "--quiet", "--threads", "1")) == 0
    capsys.readouterr()
    assert torch.get_num_threads() == before
