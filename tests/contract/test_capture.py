"""What a capture freezes, and what a replay does."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from graphshare.capture import CaptureBackend, make_backend
from graphshare.errors import CaptureError, GraphShareError, ReleasedStateError


def test_a_replay_reads_what_the_captured_addresses_hold(backend, device):
    x = torch.zeros(4, device=device)
    graph = backend.capture(lambda: x + 1)
    for value in (3.0, -7.0):
        x.fill_(value)
        graph.replay()
        torch.testing.assert_close(graph.outputs, torch.full_like(x, value + 1))


def test_a_variable_bound_anew_has_no_effect(backend, device):
    box = {"x": torch.full((4,), 1.0, device=device)}
    captured = box["x"]
    graph = backend.capture(lambda: box["x"] * 2)
    box["x"] = torch.full((4,), 50.0, device=device)
    graph.replay()
    torch.testing.assert_close(graph.outputs, captured * 2)


def test_a_tensor_moved_after_the_capture_is_read_where_it_was(backend, device):
    x = torch.full((4,), 1.0, device=device)
    old = x.detach()
    graph = backend.capture(lambda: x * 2)
    x.data = torch.full((4,), 50.0, device=device)
    old.fill_(3.0)
    graph.replay()
    torch.testing.assert_close(graph.outputs, torch.full_like(old, 6.0))


def test_host_values_are_frozen(backend, device):
    scale = [2.0]
    x = torch.ones(4, device=device)
    graph = backend.capture(lambda: x * scale[0])
    scale[0] = 100.0
    graph.replay()
    torch.testing.assert_close(graph.outputs, torch.full_like(x, 2.0))


def test_python_is_not_run_again(backend, device):
    calls = []
    x = torch.ones(4, device=device)

    def forward():
        calls.append(1)
        return x + len(calls)

    graph = backend.capture(forward)
    graph.replay()
    graph.replay()
    assert calls == [1]
    torch.testing.assert_close(graph.outputs, torch.full_like(x, 2.0))


def test_python_kernels_of_custom_operators_are_not_run_again(backend, device):
    calls = []
    name = f"graphshare_contract::double_{backend.name}"

    @torch.library.custom_op(name, mutates_args=("out",))
    def double(x: torch.Tensor, out: torch.Tensor) -> None:
        calls.append(1)
        out.copy_(x * 2)

    x, out = torch.ones(4, device=device), torch.zeros(4, device=device)
    graph = backend.capture(lambda: double(x, out))
    backend.synchronize()
    assert not out.any()
    x.fill_(4.0)
    graph.replay()
    torch.testing.assert_close(out, torch.full_like(out, 8.0))
    assert calls == [1]


def test_outputs_stay_where_they_are(backend, device):
    x = torch.ones(4, 4, device=device)
    graph = backend.capture(lambda: (x @ x, x.sum(0)))
    addresses = [t.data_ptr() for t in graph.outputs]
    for _ in range(3):
        graph.replay()
        assert [t.data_ptr() for t in graph.outputs] == addresses


def test_a_capture_computes_nothing(backend, device):
    x = torch.arange(6.0, device=device)
    cache = torch.zeros(6, device=device)

    def forward():
        cache[1:4] = x[1:4]
        cache.add_(1)
        torch.mul(x, 2, out=x)
        return cache.sum()

    before = cache.clone(), x.clone()
    graph = backend.capture(forward)
    backend.synchronize()
    assert torch.equal(cache, before[0])
    assert torch.equal(x, before[1])
    graph.replay()
    torch.testing.assert_close(cache, torch.tensor([1.0, 2.0, 3.0, 4.0, 1.0, 1.0], device=device))
    torch.testing.assert_close(x, before[1] * 2)


def test_every_replay_writes_in_place_once(backend, device):
    count = torch.zeros((), dtype=torch.int64, device=device)
    graph = backend.capture(lambda: count.add_(1))
    for n in (1, 2, 3):
        graph.replay()
        assert count.item() == n


def test_outputs_may_be_any_nest(backend, device):
    @dataclasses.dataclass
    class Result:
        hidden: torch.Tensor
        nothing: None
        name: str

    x = torch.ones(2, 3, device=device)

    def forward():
        y = x + 1
        return {"r": Result(y, None, "n"), "views": [y[0], x.t()], "input": x, "pair": (y, 7)}

    graph = backend.capture(forward)
    graph.replay()
    out = graph.outputs
    assert out["input"] is x
    assert out["r"].nothing is None
    assert (out["r"].name, out["pair"][1]) == ("n", 7)
    assert out["views"][1].data_ptr() == x.data_ptr()
    torch.testing.assert_close(out["r"].hidden, x + 1)
    torch.testing.assert_close(out["views"][0], (x + 1)[0])


def test_a_warmup_runs_the_forward(backend, device):
    x = torch.zeros(4, device=device)

    def forward():
        x.add_(1)
        return x.sum()

    with backend.session():
        result = backend.warmup(forward)
    assert result.item() == 4.0
    assert x.tolist() == [1.0] * 4


def test_a_failing_warmup_is_a_capture_error(backend):
    def forward():
        raise LookupError("no such layer")

    with pytest.raises(CaptureError) as caught:
        backend.warmup(forward)
    assert isinstance(caught.value.__cause__, LookupError)


def test_a_session_passes_exceptions_through(backend):
    with pytest.raises(LookupError), backend.session(), backend.session():
        raise LookupError
    with backend.session():
        pass


def test_work_on_the_current_stream_is_seen_by_warmup_and_capture(backend, device):
    x = torch.zeros(1 << 20, device=device)
    with backend.session():
        for value in (1.0, 2.0, 3.0):
            x.fill_(value)  # as a state's owner does, on the caller's stream
            assert backend.warmup(lambda: x.clone()).eq(value).all().item()
        graph = backend.capture(lambda: x.clone())
    x.fill_(5.0)
    graph.replay()
    assert graph.outputs.eq(5.0).all().item()


def test_many_graphs_replay_in_any_order(backend, device):
    x = torch.zeros(64, 8, device=device)
    w = torch.randn(8, 8, device=device)
    with backend.session():
        graphs = {n: backend.capture(lambda n=n: torch.relu(x[:n] @ w)) for n in range(64, 0, -7)}
    for n in (*graphs, *reversed(graphs)):
        x.normal_()
        graphs[n].replay()
        torch.testing.assert_close(graphs[n].outputs, torch.relu(x[:n] @ w))
        assert isinstance(graphs[n].nbytes, int)
        assert graphs[n].nbytes >= 0


def test_releasing_one_graph_leaves_the_others_good(backend, device):
    """PyTorch issue 193402: destroying a graph freed a workspace that others of its stream use."""
    x = torch.randn(64, 256, device=device)
    w = torch.randn(256, 256, device=device)
    with backend.session():
        kept = backend.capture(lambda: x @ w @ w @ w)
        dropped = backend.capture(lambda: x @ w @ w)
    dropped.release()
    others = [torch.full((1 << 20,), float("nan"), device=device) for _ in range(16)]
    with backend.session():
        again = backend.capture(lambda: x @ w)
    for _ in range(3):
        x.normal_()
        kept.replay()
        torch.testing.assert_close(kept.outputs, x @ w @ w @ w)
        again.replay()
        torch.testing.assert_close(again.outputs, x @ w)
    assert all(other.isnan().all().item() for other in others)


def test_release_is_idempotent_and_replay_says_so(backend, device):
    x = torch.ones(4, device=device)
    graph = backend.capture(lambda: x + 1)
    graph.replay()
    graph.release()
    graph.release()
    assert graph.outputs is None
    with pytest.raises(ReleasedStateError):
        graph.replay()
    graph = backend.capture(lambda: x + 2)
    graph.replay()
    torch.testing.assert_close(graph.outputs, x + 2)


def test_capture_inside_a_capture_is_refused(backend, device):
    x = torch.ones(4, device=device)

    def forward():
        y = x + 1
        backend.capture(lambda: x + 2)
        return y

    with pytest.raises(CaptureError):
        backend.capture(forward)
    backend.capture(lambda: x + 1).replay()


def test_replay_inside_a_capture_is_refused(backend, device):
    x = torch.ones(4, device=device)
    inner = backend.capture(lambda: x + 1)

    def forward():
        y = x * 2
        inner.replay()
        return y

    with pytest.raises(CaptureError):
        backend.capture(forward)
    inner.replay()
    torch.testing.assert_close(inner.outputs, x + 1)


def test_replays_draw_new_random_numbers(backend, device):
    graph = backend.capture(lambda: torch.rand(64, device=device))
    drawn = []
    for _ in range(3):
        graph.replay()
        drawn.append(graph.outputs.clone())
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])


def test_a_replay_draws_from_where_the_generator_stands(backend, device, generator):
    graph = backend.capture(lambda: torch.rand(64, device=device))
    drawn = []
    for seed in (7, 7, 8):
        generator.manual_seed(seed)
        graph.replay()
        drawn.append(graph.outputs.clone())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])


def test_a_capture_draws_nothing(backend, device, generator):
    generator.manual_seed(3)
    state = generator.get_state()
    backend.capture(lambda: torch.rand(64, device=device))
    assert torch.equal(generator.get_state(), state)


def test_a_registered_generator_advances_at_each_replay(kind, device):
    own = torch.Generator(device=device).manual_seed(1)
    backend: CaptureBackend = make_backend(kind, generators=[own])
    state = own.get_state()
    graph = backend.capture(lambda: torch.rand(64, device=device, generator=own))
    assert torch.equal(own.get_state(), state)
    graph.replay()
    first = graph.outputs.clone()
    graph.replay()
    assert not torch.equal(first, graph.outputs)
    own.manual_seed(1)
    graph.replay()
    assert torch.equal(first, graph.outputs)


def test_a_generator_that_is_not_registered_is_refused(backend, device):
    own = torch.Generator(device=device)
    with pytest.raises(CaptureError):
        backend.capture(lambda: torch.rand(64, device=device, generator=own))


def test_gradients_on_or_off_the_replay_is_the_same(backend, device):
    layer = torch.nn.Linear(8, 8, device=device)
    x = torch.randn(4, 8, device=device)
    with torch.inference_mode():
        cache = torch.zeros(4, 8, device=device)

    def forward():
        return layer(x).relu()

    graphs = [backend.capture(forward)]
    with torch.no_grad():
        graphs.append(backend.capture(forward))
    with torch.inference_mode():
        graphs.append(backend.capture(lambda: cache.copy_(forward())))
    x.normal_()
    for graph in graphs:
        graph.replay()
        torch.testing.assert_close(graph.outputs.detach(), forward().detach())


def test_autocast_is_captured_and_not_applied_again(backend, device):
    a, b = torch.randn(8, 8, device=device), torch.randn(8, 8, device=device)
    # A cached cast would be made in the capture and outlive it.
    with torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False), torch.no_grad():
        low = backend.capture(lambda: a @ b)
        expected = a @ b
    full = backend.capture(lambda: a @ b)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        full.replay()
    assert (low.outputs.dtype, full.outputs.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(full.outputs, a @ b)
    low.replay()  # from here on its outputs are valid, and those of the other are not
    torch.testing.assert_close(low.outputs, expected)


def test_errors_are_graphshare_errors():
    assert issubclass(CaptureError, GraphShareError)
