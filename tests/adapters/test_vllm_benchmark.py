"""Variants that take turns within one run: vLLM's answers stay the same, and hooks go back on."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks.vllm import _engine, _steps, _time
from benchmarks.vllm._profile import compared, profile, timed_parts
from benchmarks.vllm._steps import WHOLE, in_turns
from benchmarks.vllm._variants import AGAIN, FEWEST, OF_ALL, ON_AGAIN, SECONDS, SHARE, Switch, names
from benchmarks.vllm.collect import _of_a_step
from graphshare.adapters.vllm import activate, sessions, statistics
from tests.vllm_standin import engine
from tests.vllm_standin.parts import PAGE


class Engine:
    """What the benchmark asks of vLLM's engine, on a small runner."""

    def __init__(self, runner):
        self._runner = runner
        self.begun = []
        self.running = []

    def begin(self, llm, prompts, new):
        del llm
        blocks, rows = self._runner.config.max_model_len // PAGE, self._runner.config.max_num_reqs
        for row, prompt in enumerate(prompts):
            known = [token % 7 for token in prompt[:4]]
            request = engine.Request(prompt=known, new=new, row=row, tokens=list(known))
            pages = [1 + row + i * rows for i in range(blocks)][::-1]
            self._runner.block_tables.rows[row] = torch.tensor(pages, dtype=torch.int32)
            self.running.append(request)
            self.begun.append(request)
        return [f"{row}" for row in range(len(prompts))]

    def step(self):
        engine._step(self._runner, self.running)
        done = [each for each in self.running if each.finished]
        self.running = [each for each in self.running if not each.finished]
        return [SimpleNamespace(finished=True) for _ in done]

    def abort_request(self, names):
        del names
        self.running = []

    def has_unfinished_requests(self):
        return bool(self.running)

    def tokens(self):
        return [each.tokens for each in self.begun]


@pytest.fixture
def start(vllm, monkeypatch):
    """A small vLLM as the benchmark takes it, with its requests."""

    def started():
        runner = vllm.start(max_model_len=96, num_blocks=128)
        for name in ("prepare_inputs", "prepare_attn", "sample_tokens", "sample"):
            setattr(runner, name, lambda: None)
        monkeypatch.setattr(_engine, "_runners", [runner])
        served = Engine(runner)
        monkeypatch.setattr(_engine, "begin", served.begin)
        return SimpleNamespace(llm_engine=served)

    return started


@pytest.fixture
def turns(start):
    """The tokens of some turns, the turns, and what is on afterwards; of variants by name."""

    def run(variants=None, parts=False, wanted=16, block=1):
        llm, session = start(), sessions()[-1]
        runner = _engine.runner()
        switch = Switch(session, runner)
        options = {"concurrency": 2, "turns": wanted, "block": block, "seconds": 9.0, "new": 80}
        variants = variants or names(session)
        if parts:
            with timed_parts(switch) as spent:
                found = in_turns(llm, switch, variants, parts=spent, **options)
        else:
            found = in_turns(llm, switch, variants, **options)
        return llm.llm_engine.tokens(), found, runner

    return run


def test_tokens_do_not_hang_on_the_turns(vllm, turns) -> None:
    activate()
    tokens, found, _ = turns()
    seen = statistics()
    alone, _, _ = turns(["off"], wanted=48)
    for one, other in zip(tokens, alone, strict=True):
        count = min(len(one), len(other))  # a run ends with the last turn that is wanted
        assert count > 20
        assert one[:count] == other[:count]
    assert len({tuple(turn) for turn in found}) > 1
    assert seen.refusals == {}
    assert seen.builds_avoided > 0
    assert all(set(turn) >= {"on", "off"} for turn in found)
    assert ("skipped" in found[0]) == (vllm.version == "0.20.2")
    assert ({AGAIN, ON_AGAIN} <= set(found[0])) == (vllm.version != "0.20.2")


def test_a_variant_without_hooks_has_none_of_them(start) -> None:
    activate()
    start()
    session, runner = sessions()[-1], _engine.runner()
    speculator = runner.speculator
    objects = [
        runner.model_state,
        speculator,
        runner.cudagraph_manager,
        speculator.prefill_cudagraph_manager,
        speculator.decode_cudagraph_manager,
    ]

    def found():
        return [(name, id(value)) for each in objects for name, value in sorted(vars(each).items())]

    with_hooks = found()
    session.pause()
    alone = found()
    session.resume()
    switch = Switch(session, runner)
    found_on = found()
    assert found_on != alone
    for name in names(session):
        switch.to(name)
        seen = found()
        if name == "skipped":
            seen = [pair for pair in seen if pair[0] != "_build_draft_attn_metadata"]
        assert (seen == alone) is (name not in ("on", ON_AGAIN)), name
        assert (seen == found_on) is (name in ("on", ON_AGAIN)), name
    assert [name for name, _ in with_hooks] != [name for name, _ in alone]


def test_hooks_count_in_their_own_blocks_only(turns) -> None:
    activate()
    turns(["off"])
    assert statistics().builds_avoided == 0
    turns(["on"])
    assert statistics().builds_avoided > 0


def test_a_block_is_one_variant_in_a_row_and_follows_another(turns) -> None:
    activate()
    _, found, _ = turns(block=3, wanted=4)
    assert {tuple(turn) for turn in found} == {tuple(names(sessions()[-1]))}
    assert all(len(steps) == 3 for turn in found for steps in turn.values())
    kinds = [{step.kind for steps in turn.values() for step in steps} for turn in found]
    assert all(len(each) == 1 for each in kinds)


@pytest.mark.parametrize("parts", [False, True])
def test_hooks_are_on_again_and_can_be_taken_off(turns, parts) -> None:
    activate()
    _, found, runner = turns(parts=parts)
    assert "prepare_attn" in vars(runner.model_state)
    steps = [step for turn in found for each in turn.values() for step in each]
    assert all(step.parts[WHOLE] > 0 for step in steps)
    assert all((len(step.parts) > 1) == parts for step in steps)
    (session,) = sessions()
    session.pause()
    assert "prepare_attn" not in vars(runner.model_state)
    assert "dispatch" not in vars(runner.speculator.prefill_cudagraph_manager)
    assert "dispatch" not in vars(runner.cudagraph_manager)


def test_a_profile_and_what_is_collected_of_it(vllm, start, monkeypatch) -> None:
    activate()
    monkeypatch.setattr(_engine, "prompts", lambda count, seed, longest: [[1, 2, 3, 4]] * count)
    so_far = []
    options = SimpleNamespace(
        concurrency=[1, 2], turns=[20, 16], profile_seconds=20.0, so_far=so_far.append
    )
    llm = start()
    begin = _engine.begin
    monkeypatch.setattr(_engine, "begin", lambda llm, prompts, new: begin(llm, prompts, 80))
    found = profile(llm, options)
    assert set(found) == {"1", "2"}
    assert so_far == [found, found]
    assert [each["turns"]["whole"] for each in found.values()] == [20, 16]
    for each in found.values():
        assert each["off"]["steps"] == each["turns"]["apart"] == each["turns"]["whole"] // 2
        assert each["off"]["median_us"]["execute_model / metadata build"] > 0
        figures = list(_of_a_step("here", each))
        assert len([figure for figure in figures if " adds " in figure.name]) == 4
        assert len(each[SECONDS]) == each["turns"]["whole"]
        assert all(set(turn) == set(names(sessions()[-1])) for turn in each[SECONDS])
        limits = {figure.name for figure in figures if figure.target is not None}
        if vllm.version == "0.20.2":
            assert all("not saved" in name for name in limits)
        else:
            assert limits == {"here: on adds where graphshare has hooks"}
    assert found["1"]["steps_since_a_change"]["blocks"] == 2


def test_a_turn_is_compared_with_itself() -> None:
    """A machine that gets slower by half changes no difference."""

    def turn(slow):
        block = {
            "on": {WHOLE: 900e-6 * slow},
            "off": {WHOLE: 1000e-6 * slow},
            "skipped": {WHOLE: 890e-6 * slow},
        }
        return {name: [_steps.Step(None, parts)] for name, parts in block.items()}

    whole = [turn(1.0)] * 9 + [turn(1.5)] * 8
    found = compared(whole, whole)
    assert found["on_adds_us"]["to the step of the engine"]["median"] == pytest.approx(-100)
    assert found["steps_to_off"]["on"]["low"] == pytest.approx(0.9)
    assert found["steps_to_off"]["on"]["high"] == pytest.approx(0.9)
    assert found["steps_to_off"]["on"][OF_ALL] == pytest.approx([0.9, 0.9])
    share = found[SHARE]["to the step of the engine"]
    assert share["median"] == pytest.approx(100 / 110)


def test_where_both_have_two_turns_each_counts_with_both() -> None:
    """Whatever turns of one kind differ by, they count alike; by chance the second turns differ."""

    def turn(slow):
        seconds = {"on": 1100e-6, ON_AGAIN: 900e-6, "off": 1300e-6, AGAIN: 700e-6}
        return {name: [_steps.Step(None, {WHOLE: each * slow})] for name, each in seconds.items()}

    whole = [turn(1.0)] * 30 + [turn(1.5)] * 31
    found = compared(whole, whole)
    assert set(found["steps_to_off"]) == {"on", AGAIN}
    assert found["steps_to_off"]["on"]["median"] == pytest.approx(1)
    assert found["steps_to_off"]["on"][OF_ALL] == pytest.approx([1, 1])
    assert found["steps_to_off"][AGAIN]["median"] == pytest.approx(16 / 24)
    added = {name: found[f"{name}_adds_us"]["to the step of the engine"] for name in ("on", AGAIN)}
    assert added["on"]["low"] == added["on"]["high"] == pytest.approx(0)
    assert (added[AGAIN]["low"], added[AGAIN]["high"]) == pytest.approx((-600, -400))


@pytest.fixture
def asked(vllm, monkeypatch):
    """What a request is to give, as vLLM is told."""
    monkeypatch.setattr(sys.modules["vllm"], "SamplingParams", SimpleNamespace, raising=False)


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("wrong", [None, "on"])
def test_calls_of_generate_in_turns(vllm, start, monkeypatch, wrong) -> None:
    """Of as few rounds as there may be; an answer that is another one is seen, and whose."""
    activate()
    llm, runner = start(), _engine.runner()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def generate(asked, params, use_tqdm):
        assert not use_tqdm
        run = [
            engine.Request(
                prompt=[token % 7 for token in each["prompt_token_ids"][:4]], new=params.max_tokens
            )
            for each in asked
        ]
        tokens, _ = engine.serve(runner, run)
        if wrong and params.max_tokens == 1 and "prepare_attn" in vars(runner.model_state):
            tokens[0] = [-1]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=each)]) for each in tokens]

    llm.generate = generate
    monkeypatch.setattr(_time, "_CASES", ((5, 0.8), (1, 0.2)))
    so_far = []
    options = SimpleNamespace(concurrency=[1], seconds=0.0, so_far=so_far.append)
    found = _time.end_to_end(llm, options)
    assert so_far == [found]
    assert list(found) == ["concurrency 1, 5 tokens", "concurrency 1, 1 tokens"]
    variants = names(sessions()[-1])
    for case, each in found.items():
        assert each["rounds"] == FEWEST
        compared = {"on", "skipped" if vllm.version == "0.20.2" else AGAIN}
        assert set(each["to_off"]) == compared
        one = "1 tokens" in case
        assert ("to_off_of_the_calls_before" in each) is one
        if one:
            assert set(each["to_off_of_the_calls_before"]) == compared
        for name, rounds in (("counted", FEWEST), ("before", FEWEST if one else 0)):
            times = each[SECONDS][name]
            assert [len(times[variant]) for variant in variants] == [rounds] * len(variants)
        assert all(math.isfinite(end) for ratio in each["to_off"].values() for end in ratio[OF_ALL])
        assert each["answers_are_those_of_vllm_alone"] == {
            name: not (wrong and "1 tokens" in case and name in ("on", ON_AGAIN))
            for name in variants
        }
    assert "prepare_attn" in vars(runner.model_state)
    assert statistics().refusals == {}


class _Requests:
    """As an engine: each request has a token a step."""

    def __init__(self, new):
        self._left = new
        self.running = {}
        self.seen = []

    def add_request(self, name, prompt, params):
        self.running[name] = [*prompt["prompt_token_ids"]]

    def has_unfinished_requests(self):
        return bool(self.running)

    def step(self):
        self.seen.append(len(self.running))
        done = []
        for name, tokens in list(self.running.items()):
            tokens.append(len(tokens))
            if len(tokens) > self._left:
                del self.running[name]
                out = SimpleNamespace(token_ids=tokens)
                done.append(SimpleNamespace(finished=True, request_id=name, outputs=[out]))
        return done


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("every", [1, 3])
def test_requests_arrive_by_steps(every) -> None:
    served = _Requests(new=6)
    llm = SimpleNamespace(llm_engine=served)
    texts, steps = _engine.serve(llm, [[9], [8], [7]], every=every)
    assert texts == [[first, 1, 2, 3, 4, 5, 6] for first in (9, 8, 7)]
    assert steps == len(served.seen) == 6 + 2 * every
    assert (
        served.seen == {1: [1, 2, 3, 3, 3, 3, 2, 1], 3: [1, 1, 1, 2, 2, 2, 2, 2, 2, 1, 1, 1]}[every]
    )
