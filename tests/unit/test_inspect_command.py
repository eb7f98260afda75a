"""``graphshare inspect``: what it prints, draws and refuses."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import html.parser
import io
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("rich")

from graphshare.cli import main
from graphshare.commands.inspect_drawing import COLOURS, MEANINGS, dot, short_name
from graphshare.commands.inspect_page import page
from graphshare.commands.inspect_table import show
from graphshare.provenance import Address, Certainty, NodeReport, Place, Provenance, Use
from tests.package import ROOT

HOSTILE = '<b>"&\\'


def report_of(*uses: Use, opaque: tuple[str, ...] = ()) -> Provenance:
    addresses = tuple(
        Address(0x1000 * (i + 1), f"parameter {i}", use, f"{use.value}{HOSTILE}", 0, "")
        for i, use in enumerate(uses)
    )
    nodes = (
        NodeReport(0, "child graph", "child graph"),
        NodeReport(1, "kernel", "void at::add<int, (anonymous namespace)::F>(int*)", addresses,
                   opaque, 0),
        NodeReport(2, "memset", "memset"),
    )  # fmt: skip
    return Provenance(
        "pool", HOSTILE, "cuda", "cuda:0", nodes, notes=("a note",), facts={"driver": "13000"}
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "report.json"
    report_of(*Use, opaque=("its body",)).save(path)
    return path


def test_the_tables_name_every_use_and_every_node(saved, capsys):
    assert main(["inspect", str(saved)]) == 0
    out = capsys.readouterr().out
    for use in Use:
        assert MEANINGS[use] in out
        if use is not Use.GRAPH:
            assert use.value in out
    assert "0 > 1" in out
    assert "memset" in out
    assert "opaque: 1" in out
    assert "a note" in out


def test_only_nodes_of_a_use_are_shown_when_asked(saved, capsys):
    assert main(["inspect", str(saved), "--use", "dangling", "--use", "state"]) == 0
    assert "memset" not in capsys.readouterr().out


def test_a_report_does_not_steer_the_terminal(tmp_path, capsys):
    """Nor is what looks like rich's markup taken for it."""
    evil = "\x1b[2J[/red]\u202ex"
    nodes = (NodeReport(0, evil, evil, (Address(64, evil, Use.DANGLING, evil, 0, evil),), (evil,)),)
    Provenance(evil, evil, evil, evil, nodes, (), (evil,), {evil: evil}).save(tmp_path / "r.json")
    assert main(["inspect", str(tmp_path / "r.json")]) == 0
    printed = capsys.readouterr().out
    assert not {"\x1b", "\u202e"} & set(printed)
    assert "[/red]" in printed


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_an_encoding_that_lacks_a_character_does_not_end_a_command(encoding, tmp_path):
    trace, plan, report = (
        tmp_path / name for name in ("\u00fc.jsonl", "\u00f6.json", "\u00e4.json")
    )
    trace.write_text('{"tokens": 4, "requests": 4}\n')
    report_of(Use.STATE).save(report)
    for call in (
        ["plan", str(trace), "--graphs", "1", "--output", str(plan)],
        ["inspect", str(report)],
        ["inspect", str(tmp_path / "\u00e9")],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "graphshare", *call],
            capture_output=True,
            check=False,
            cwd=ROOT,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
        )
        assert b"Traceback" not in done.stderr
        assert done.returncode == (2 if done.stderr else 0)
    assert plan.exists()


@pytest.mark.parametrize(("use", "code"), [(Use.DANGLING, 1), (Use.STATE, 0)])
def test_check_fails_on_what_dangles(use, code, tmp_path, capsys):
    report_of(use).save(tmp_path / "r.json")
    assert main(["inspect", str(tmp_path / "r.json")]) == 0
    assert main(["inspect", str(tmp_path / "r.json"), "--check"]) == code


def test_what_is_no_report_is_refused(tmp_path, capsys):
    texts = ("", "{}", "[]", '{"format": 99}', '{"format": true}', "3", "[" * 100_000)
    for text in texts:
        (tmp_path / "r.json").write_text(text)
        assert main(["inspect", str(tmp_path / "r.json")]) == 2
    assert main(["inspect", str(tmp_path / "none.json")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == len(texts) + 1


def _places(value, before=()):
    """Every place in a JSON value."""
    yield before
    if isinstance(value, (dict, list)):
        for at, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(inner, (*before, at))


REPORT = json.loads(
    dataclasses.replace(
        report_of(*Use, opaque=("its body",)),
        places=(Place(Use.STATE, "leaf", 64, 32, "pool", ("also",), ((4, 8),), 4),),
    ).to_json()
)


@given(
    st.sampled_from([place for place in _places(REPORT) if place]),
    st.sampled_from([None, True, -1, 1.5, 1 << 70, "", "[/red]", "state", [], {}, [1], {"a": 1}]),
)
def test_a_report_that_is_changed_anywhere_is_shown_or_refused(place, value):
    """In a line that names the place, and not by whatever the drawing makes of it."""
    changed = copy.deepcopy(REPORT)
    inner = changed
    for at in place[:-1]:
        inner = inner[at]
    inner[place[-1]] = value
    report, said = None, ""
    try:
        report = Provenance.from_json(json.dumps(changed))
    except ValueError as error:
        said = str(error)
    if report is None:
        assert "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in place)[1:] in said
        return
    page(report)
    dot(report)
    with contextlib.redirect_stdout(io.StringIO()):
        show(report, frozenset())


@pytest.mark.parametrize("name", [name for name in REPORT if name != "format"])
def test_what_a_report_lacks_is_named(name):
    lacking = {key: value for key, value in REPORT.items() if key != name}
    if name in ("places", "notes", "facts"):  # which may be left out
        assert Provenance.from_json(json.dumps(lacking)).pool == "pool"
    else:
        with pytest.raises(ValueError, match=rf"{name}: missing"):
            Provenance.from_json(json.dumps(lacking))
    with pytest.raises(ValueError, match="no such field: more"):
        Provenance.from_json(json.dumps({**REPORT, "more": 1}))


def test_a_page_that_cannot_be_written_is_refused(saved, tmp_path, capsys):
    for option in ("--html", "--dot"):
        assert main(["inspect", str(saved), option, str(tmp_path / "none" / "x")]) == 2
    assert "none" in capsys.readouterr().err


class _Checker(html.parser.HTMLParser):
    """Every tag that opens is closed, in order, and nothing is loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag, attrs):
        assert not {name for name, _ in attrs} & {"src", "href", "xlink:href"}
        if tag not in ("meta", "br"):
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_the_page_stands_alone_and_shows_each_use_in_its_colour(saved, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert main(["inspect", str(saved), "--html", str(out)]) == 0
    text = out.read_text("utf-8")
    checker = _Checker()
    checker.feed(text)
    assert checker.stack == []
    assert "http" not in text
    assert not re.search(r"<b>\"", text)
    (drawing,) = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    ET.fromstring(drawing)
    for use in Use:
        assert (COLOURS[use] in drawing) is (use is not Use.GRAPH)
    assert len(set(COLOURS.values())) >= len(Use) - 1  # those not on the device may look alike
    assert any(f"{HOSTILE}" in each for each in checker.texts)


def test_an_empty_graph_has_a_page_too():
    empty = Provenance("pool", "key", "tape", "cpu", ())
    checker = _Checker()
    checker.feed(page(empty))
    assert checker.stack == []
    assert dot(empty).startswith("digraph")


def test_dot_quotes_what_it_is_given(saved, tmp_path, capsys):
    out = tmp_path / "graph.dot"
    assert main(["inspect", str(saved), "--dot", str(out)]) == 0
    for line in out.read_text().splitlines():
        unescaped = line.replace("\\\\", "").replace('\\"', "")
        assert unescaped.count('"') % 2 == 0
    assert out.read_text().count("  n1 [shape") == 1


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::add<4, Func<int, 3>>(int, Func<int>)", "add"),
        ("flash_fwd_kernel", "flash_fwd_kernel"),
        ("(anonymous namespace)::gather<long>(long*)", "gather"),
        ("aten.index_copy_.default", "aten.index_copy_.default"),
        ("child graph", "graph"),
    ],
)
def test_short_names(name, short):
    assert short_name(name) == short
    assert len(short_name("x" * 500, 20)) == 20


def test_a_report_comes_back_from_json_as_it_was():
    report = report_of(*Use, opaque=("why",))
    report = dataclasses.replace(report, notes=())
    assert Provenance.from_json(report.to_json()) == report
    assert {each.certainty for each in report.of("state")} == {Certainty.READ}
    assert report.counts()["dangling"] == 1
    assert len(report.opaque) == 1
    assert str(report).startswith("pool[")
