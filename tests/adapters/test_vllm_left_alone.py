"""Where graphshare takes no part in vLLM, says why, or takes back what it did."""

from __future__ import annotations

import functools
import logging
import sys
from dataclasses import replace

import pytest

from graphshare.adapters.vllm import activate, deactivate, sessions, statistics
from graphshare.adapters.vllm.signatures import first_difference
from tests.vllm_standin import parts
from tests.vllm_standin.engine import Request, requests, serve
from tests.vllm_standin.installed import module


def left_alone(vllm, caplog, **options):
    """The reason that is logged for a runner that graphshare leaves alone, after some checks."""
    with caplog.at_level(logging.INFO, "vllm.graphshare"):
        runner = vllm.start(**options)
    (record,) = [each for each in caplog.records if each.name == "vllm.graphshare"]
    assert record.levelno == logging.WARNING
    caplog.clear()
    managed = [runner.cudagraph_manager]
    if runner.speculator is not None:
        managed.append(runner.speculator.prefill_cudagraph_manager)
    for manager in managed:
        assert "dispatch" not in vars(manager)
        assert all(type(graph).__name__ == "TapeGraph" for graph in manager.graphs.values())
    assert not {"capture_model", "_graphshare_session"} & set(vars(runner))
    seen = statistics()
    assert not seen.active
    assert seen.reason in record.getMessage()
    assert sessions() == ()
    return seen.reason


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"speculative": False}, "no speculative decoding"),
        ({"method": "mtp"}, "mtp"),
        ({"parallel": {"data_parallel_size": 2}}, "data_parallel_size"),
        ({"parallel": {"prefill_context_parallel_size": 2}}, "prefill_context_parallel_size"),
        ({"capture_sizes": ()}, "cudagraph_mode"),
        ({"head_size": 64}, "causal mask at head size 64"),
        ({"backend": type("Other", (), {"get_name": staticmethod(lambda: "FLEX")})}, "FLEX"),
    ],
)
def test_what_is_not_supported_is_left_alone_and_named(vllm, caplog, options, reason) -> None:
    activate()
    assert reason in left_alone(vllm, caplog, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"head_size": 64, "cudagraph_mode": "FULL_AND_PIECEWISE"},
        {"head_size": 64, "cudagraph_mode": "FULL_DECODE_ONLY"},
        {"head_size": 64, "backend": parts.TritonAttentionBackend},
    ],
)
def test_graphs_that_keep_their_mask_are_served(vllm, options) -> None:
    activate()
    vllm.start(**options)
    assert statistics().active


def test_another_flash_attention_is_left_alone(vllm, caplog, monkeypatch) -> None:
    def get_flash_attn_version(
        requires_alibi=False, head_size=None, head_size_v=None, has_sinks=False
    ):
        return 2

    fa_utils = sys.modules["vllm.v1.attention.backends.fa_utils"]
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", get_flash_attn_version)
    activate()
    assert "FlashAttention 2" in left_alone(vllm, caplog)


def test_the_other_model_runner_is_left_alone(vllm, caplog, monkeypatch) -> None:
    monkeypatch.setattr(
        module("gpu.model_runner").GPUModelRunner, "__module__", "vllm.v1.worker.gpu_model_runner"
    )
    activate()
    assert "VLLM_USE_V2_MODEL_RUNNER" in left_alone(vllm, caplog)


def test_another_version_is_left_alone(vllm, caplog) -> None:
    """Nothing of it is asked for: the next version may have no such method."""
    worker = module("gpu_worker").Worker
    before = dict(vars(worker))
    vllm.pretend("0.33.0")
    with caplog.at_level(logging.INFO, "vllm.graphshare"):
        activate()
        vllm.start()
    (record,) = [each for each in caplog.records if each.name == "vllm.graphshare"]
    assert "0.33.0" in record.getMessage()
    assert statistics().reason in record.getMessage()
    assert dict(vars(worker)) == before
    assert sessions() == ()


def test_a_vllm_that_is_not_as_released_is_left_alone(vllm, caplog, monkeypatch) -> None:
    def dispatch(self, num_reqs, num_tokens, uniform_token_count, num_active_loras=0, extra=1):
        return self._dispatch(num_reqs, num_tokens, uniform_token_count, num_active_loras)

    assert first_difference(vllm.version) is None
    monkeypatch.setattr(module("gpu.cudagraph_utils").CudaGraphManager, "dispatch", dispatch)
    activate()
    reason = left_alone(vllm, caplog)
    assert "CudaGraphManager.dispatch" in reason
    assert "extra" in reason


def test_a_local_build_of_a_version_is_that_version(vllm) -> None:
    vllm.pretend(vllm.version + "+cu130")
    activate()
    vllm.start()
    assert statistics().version == vllm.version


@pytest.mark.parametrize("mode", ["on", "strict"])
def test_deactivate_leaves_vllm_as_it_was(vllm, mode) -> None:
    stock = vllm.start()
    before = {
        "capture": module("gpu.cudagraph_utils").CudaGraphManager.capture,
        "inputs": module("gpu.cudagraph_utils").prepare_inputs_to_capture,
        "worker": module("gpu_worker").Worker.compile_or_warm_up_model,
    }
    activate(mode)
    runner = vllm.start()
    # After the capture only the worker's method is not vLLM's own.
    assert module("gpu.cudagraph_utils").CudaGraphManager.capture is before["capture"]
    assert module("gpu.cudagraph_utils").prepare_inputs_to_capture is before["inputs"]
    alone = serve(stock, requests(1))
    assert serve(runner, requests(1)) == alone
    deactivate()
    assert module("gpu_worker").Worker.compile_or_warm_up_model is before["worker"]
    assert not statistics().active
    for mine, theirs in (
        (runner, stock),
        (runner.model_state, stock.model_state),
        (runner.cudagraph_manager, stock.cudagraph_manager),
        (runner.speculator, stock.speculator),
        (
            runner.speculator.prefill_cudagraph_manager,
            stock.speculator.prefill_cudagraph_manager,
        ),
        (runner.speculator.decode_cudagraph_manager, stock.speculator.decode_cudagraph_manager),
    ):
        assert set(vars(mine)) - {"_graphshare_session"} == set(vars(theirs))
    for graph in runner.cudagraph_manager.graphs.values():
        assert type(graph).__name__ == "TapeGraph"
    assert serve(runner, requests(1)) == alone


def test_hooks_are_taken_off_and_put_on_between_steps(vllm) -> None:
    alone = serve(vllm.start(), requests(1))
    activate()
    runner = vllm.start()
    (session,) = sessions()
    assert serve(runner, requests(1)) == alone
    avoided = statistics().builds_avoided
    session.pause()
    session.pause()
    assert serve(runner, requests(1)) == alone
    assert statistics().builds_avoided == avoided
    assert not statistics().active
    session.resume()
    session.resume()
    assert serve(runner, requests(1)) == alone
    assert statistics().builds_avoided == 2 * avoided


def wrap(target, name):
    """Put a method of somebody else's on top, as profilers do."""
    inner = getattr(target, name)

    @functools.wraps(inner)
    def theirs(*args, **kwargs):
        return inner(*args, **kwargs)

    setattr(target, name, theirs)


@pytest.mark.parametrize("mode", ["on", "strict"])
@pytest.mark.parametrize("cudagraph_mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_hooks_that_others_wrapped_do_nothing_once_taken_off(
    vllm, mode, cudagraph_mode, caplog
) -> None:
    alone = serve(vllm.start(cudagraph_mode=cudagraph_mode), requests(1))
    activate(mode)
    runner = vllm.start(cudagraph_mode=cudagraph_mode)
    (session,) = sessions()
    speculator = runner.speculator
    for target in (
        runner.cudagraph_manager,
        speculator.prefill_cudagraph_manager,
        speculator.decode_cudagraph_manager,
    ):
        wrap(target, "dispatch")
    wrap(runner.model_state, "prepare_attn")
    wrap(speculator, "_build_draft_attn_metadata")
    assert serve(runner, requests(1)) == alone
    seen = statistics()
    # On again, below and on top of theirs: a step is refreshed once.
    session.pause()
    assert serve(runner, requests(1)) == alone
    assert statistics().builds == seen.builds
    session.resume()
    assert serve(runner, requests(1)) == alone
    assert statistics().builds == {name: 2 * count for name, count in seen.builds.items()}
    assert statistics().refusals == {}
    deactivate()  # the pools are closed: any call of one would be refused
    assert "stays as it is" in caplog.text
    assert serve(runner, requests(1)) == alone


@pytest.mark.parametrize("taken_off", [deactivate, lambda: sessions()[-1].pause()])
@pytest.mark.parametrize("backend", [parts.FlashAttentionBackend, parts.TritonAttentionBackend])
def test_graphs_that_were_captured_serve_on_once_the_hooks_are_off(
    vllm, backend, taken_off
) -> None:
    """On 0.20.2 the draft's read the target's buffers, where the target ran no graph, too."""

    def served(runner):
        first = [Request(prompt=[3, 1, 4, 1, 5, 9, 2, 6, 5], new=12), Request([2, 7, 1], new=9)]
        mixed = [Request(prompt=[1, 2, 3, 4], new=5), Request(prompt=[5, 6, 7], new=6)]
        return [serve(runner, [replace(each) for each in some]) for some in (first, mixed) * 2]

    options = {"cudagraph_mode": "FULL_AND_PIECEWISE", "backend": backend}
    alone = vllm.start(**options)
    texts = served(alone)
    activate()
    runner = vllm.start(**options)
    taken_off()
    assert served(runner) == texts
    ran = [desc.cg_mode.name for desc in runner.ran]
    assert {"FULL", "PIECEWISE"} <= set(ran)
    if vllm.version == "0.20.2":
        # The draft has found a graph where the target had none.
        assert runner.speculator.eager_prefills < sum(mode != "FULL" for mode in ran)


def test_a_worker_that_others_wrapped_is_left_alone_once_it_is_over(vllm, monkeypatch) -> None:
    worker = module("gpu_worker").Worker
    own = worker.compile_or_warm_up_model
    monkeypatch.setattr(worker, "compile_or_warm_up_model", own)  # to be put back at the end
    activate()
    wrap(worker, "compile_or_warm_up_model")
    deactivate()
    runner = vllm.start()
    assert not {"capture_model", "_graphshare_session"} & set(vars(runner))
    assert sessions() == ()
    activate()
    runner = vllm.start()
    assert len(sessions()) == 1


def test_a_failed_capture_takes_everything_back(vllm, monkeypatch) -> None:
    class BrokenError(RuntimeError):
        pass

    def fail(self, forward):
        raise BrokenError

    activate()
    runner = vllm.make()
    capture = module("gpu.cudagraph_utils").CudaGraphManager.capture
    monkeypatch.setattr(type(runner.speculator.decode_cudagraph_manager), "_loop", fail)
    with pytest.raises(BrokenError):
        vllm.warm_up(runner)
    assert module("gpu.cudagraph_utils").CudaGraphManager.capture is capture
    assert "capture_model" not in vars(runner)
    assert "dispatch" not in vars(runner.cudagraph_manager)
    assert sessions() == ()


def test_a_second_call_of_the_plug_in_does_nothing_and_another_mode_is_refused(vllm) -> None:
    activate("verify")
    activate("verify")
    with pytest.raises(RuntimeError, match="verify"):
        activate("on")
    with pytest.raises(ValueError, match="maybe"):
        activate("maybe")
    deactivate()
    activate("off")
    vllm.start()
    assert not statistics().active


def test_a_log_line_says_what_was_captured(vllm, caplog) -> None:
    activate()
    with caplog.at_level(logging.INFO, "vllm.graphshare"):
        vllm.start()
    (record,) = [each for each in caplog.records if each.name == "vllm.graphshare"]
    assert vllm.version in record.getMessage()
    seen = statistics()
    assert dict(seen.graphs) == {"target": 3, "draft_prefill": 3, "draft_decode": 1}
    assert seen.borrowed == 3


def test_a_second_runner_has_pools_of_its_own(vllm) -> None:
    alone = serve(vllm.start(), requests(1))
    activate()
    first, second = vllm.start(), vllm.start()
    assert len(sessions()) == 2
    assert serve(first, requests(1)) == alone
    assert serve(second, requests(1)) == alone
    del first
    assert len(sessions()) >= 1
