"""What scenarios of vLLM found goes into one file, compared with vLLM alone."""

from __future__ import annotations

import json

import pytest

from benchmarks.vllm import collect


def _scenario(switch, **tokens):
    return {
        "start": {"vllm": "0.26.0"},
        "options": {
            "backend": "None", "pair": "small", "method": "eagle", "cudagraph_mode": "FULL",
        },
        "switch": switch,
        "machine": {"commit": "c", "when": "2026-01-01T00:00:00Z", "load": 1.0},
        "statistics": dict.fromkeys(collect._KEPT_OF_STATISTICS, 0),
        "tokens": tokens,
    }  # fmt: skip


def _ran(text, at_once=None):
    found = {
        "digest": text, "drafts_digest": text, "tokens": [[text]], "steps": 3, "target_ran": {},
        "draft_ran": {}, "distinct": [20],
    }  # fmt: skip
    return found if at_once is None else {**found, "most_at_once": at_once}


def _collected(folder, *scenarios):
    paths = [folder / f"{number}.json" for number in range(len(scenarios))]
    for path, each in zip(paths, scenarios, strict=True):
        path.write_text(json.dumps(each))
    collect.main([*map(str, paths), "--json", str(folder / "all.json")])
    (found,) = json.loads((folder / "all.json").read_text())["results"]["tokens"].values()
    return found


@pytest.mark.parametrize("at_once", [None, 32])
@pytest.mark.parametrize("same", [True, False])
def test_tokens_are_compared_with_those_of_vllm_alone(tmp_path, at_once, same) -> None:
    alone = _scenario(None, **{"32": _ran("a", at_once)})
    found = _collected(tmp_path, alone, _scenario("on", **{"32": _ran("a" if same else "b")}))
    assert found["GRAPHSHARE_VLLM=on"]["tokens_and_drafts_equal"] is same
    assert found["vllm alone"]["32"].get("most_at_once") == at_once


@pytest.mark.parametrize("other", [{"32": _ran("b")}, {"failed": "ValueError()"}])
def test_nothing_is_collected_where_vllm_alone_does_not_agree(tmp_path, other) -> None:
    alone = _scenario(None, **{"32": _ran("a")})
    with pytest.raises(SystemExit, match="vLLM alone"):
        _collected(tmp_path, alone, _scenario(None, **other))
    assert not (tmp_path / "all.json").exists()
