"""What a capture refuses, and that a failed one leaves nothing behind."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphshare.capture import CudaBackend, make_backend
from graphshare.errors import CaptureError

REFUSED = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x.sum() > 0),
    "int": lambda x: int(x.sum()),
    "float": lambda x: float(x.sum()),
    "if": lambda x: x + 1 if x[0] > 0 else x,
    "index": lambda x: range(x.to(torch.int64)[1]),
    "in": lambda x: 3.0 in x,
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "repr": lambda x: repr(x),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "boolean mask": lambda x: x[x > 0],
    "boolean mask assigned": lambda x: x.__setitem__(x > 0, x[:1].expand(3)),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x + 1),
    "torch.tensor": lambda x: torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device) + x,
    "number assigned": lambda x: x.__setitem__(0, 5.0),
    "list as an index": lambda x: x[[0, 2]],
    "repeats on the device": lambda x: x.repeat_interleave(x.to(torch.int64)),
}

ALLOWED = {
    "index tensor": lambda x, i: x[i],
    "index tensor assigned": lambda x, i: x.index_put((i,), x[i] * 2),
    "number assigned to a slice": lambda x, i: x.clone().__setitem__(slice(1, 3), 5.0),
    "number assigned to a row": lambda x, i: x.expand(3, -1).clone().__setitem__(1, 5.0),
    "number filled in": lambda x, i: x.clone()[:2].fill_(5.0),
    "number assigned to a mask": lambda x, i: x.clone().__setitem__(x > 0, 5.0),
    "masked_fill": lambda x, i: x.masked_fill(x > 0, 5.0),
    "where": lambda x, i: torch.where(x > 0, x, -x),
    "known repeats": lambda x, i: x.repeat_interleave(2),
    "repeats of known length": lambda x, i: x.repeat_interleave(i, output_size=6),
    "arange, full": lambda x, i: torch.arange(4, device=x.device) + torch.full_like(x, 3.0),
    "topk, sort": lambda x, i: (x.topk(2), x.sort()),
    "len, shape": lambda x, i: x * len(x) * x.shape[0],
    "iteration": lambda x, i: sum(x),
}


def refused(backend, forward) -> None:
    """Capture, expect the error, and keep nothing of it: its traceback holds tensors."""
    try:
        backend.capture(forward)
    except CaptureError:
        return
    pytest.fail("the capture was not refused")


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_host_is_refused(backend, device, name):
    x = torch.arange(4.0, device=device)
    before = x.clone()

    def forward():
        x.add_(1)
        return REFUSED[name](x)

    with pytest.raises(CaptureError):
        backend.capture(forward)
    backend.synchronize()
    assert torch.equal(x, before)
    graph = backend.capture(lambda: x + 1)
    graph.replay()
    torch.testing.assert_close(graph.outputs, x + 1)


@pytest.mark.parametrize("name", ALLOWED)
def test_what_stays_on_the_device_is_not_refused(backend, device, name):
    x = torch.arange(4.0, device=device)
    i = torch.tensor([2, 0, 1, 3], device=device)
    forward = ALLOWED[name]
    backend.warmup(lambda: forward(x, i))
    graph = backend.capture(lambda: forward(x, i))
    x.copy_(-x.flip(0))
    graph.replay()
    torch.testing.assert_close(graph.outputs, forward(x, i))


def test_a_swallowed_refusal_is_one_still(backend, device):
    x = torch.ones(4, device=device)

    def forward():
        try:
            return x * x.sum().item()
        except Exception:  # noqa: BLE001
            return x * 2

    with pytest.raises(CaptureError):
        backend.capture(forward)


def test_the_cause_is_the_forwards_own_error(backend, device):
    x = torch.ones(4, device=device)

    def forward():
        raise LookupError(f"no layer {len(x)}")

    with pytest.raises(CaptureError) as caught:
        backend.capture(forward)
    assert isinstance(caught.value.__cause__, LookupError)


def test_an_interrupt_passes_through_and_is_undone(backend, device):
    x = torch.ones(4, device=device)

    def forward():
        x.add_(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backend.capture(forward)
    assert x.tolist() == [1.0] * 4
    backend.capture(lambda: x + 1).replay()


@pytest.mark.parametrize("how", ["raises", "reads on the host"])
def test_a_failed_capture_leaves_nothing_behind(backend, device, generator, how):
    """PyTorch issue 190348: a failed capture leaked its memory pool and its generator's state."""
    x = torch.ones(4, device=device)
    good = backend.capture(lambda: x * 3)
    generator.manual_seed(5)
    state = generator.get_state()
    made = []

    def forward():
        x.add_(1)
        noise = torch.rand(1 << 20, device=device)
        made.append(StorageWeakRef(noise.untyped_storage()))
        if how == "raises":
            raise LookupError
        return noise * noise.sum().item()

    for _ in range(2):
        refused(backend, forward)
    gc.collect()
    assert made
    assert all(ref.expired() for ref in made)
    assert x.tolist() == [1.0] * 4
    assert torch.equal(generator.get_state(), state)
    torch.rand(4, device=device)  # eager draws work
    x.fill_(2.0)
    good.replay()
    assert good.outputs.tolist() == [6.0] * 4
    again = backend.capture(lambda: x + torch.rand(4, device=device))
    again.replay()
    assert ((again.outputs >= 2.0) & (again.outputs < 3.0)).all().item()


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["raises", "reads on the host"])
@pytest.mark.parametrize("pool", ["own", "MemPool", "handle"])
def test_a_failed_capture_returns_its_device_memory(how, pool):
    given = {
        "own": lambda: None,
        "MemPool": torch.cuda.MemPool,
        "handle": torch.cuda.graph_pool_handle,
    }[pool]()
    backend = make_backend("cuda", memory_pool=given)
    x = torch.ones(4, device="cuda")
    elements = 64 << 20

    def forward():
        big = torch.ones(elements, device="cuda")
        if how == "raises":
            raise LookupError
        return big * big.sum().item()

    refused(backend, lambda: x.sum().item())  # what is set up once, is
    gc.collect()
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    for _ in range(3):
        refused(backend, forward)
    gc.collect()
    allocated_bytes = torch.cuda.memory_allocated()
    assert allocated_bytes == before_bytes[1]
    if pool == "own":
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == before_bytes[0]
    graph = backend.capture(lambda: x + 1)
    graph.replay()
    assert graph.outputs.tolist() == [2.0] * 4
    del backend, graph, given
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before_bytes[0]


@pytest.mark.gpu
def test_released_graphs_return_their_device_memory():
    backend = CudaBackend()
    x = torch.ones(64 << 20, device="cuda")
    backend.capture(lambda: x[:4] + 1).release()
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_reserved()
    graphs = [backend.capture(lambda n=n: x[: len(x) // n] + n) for n in (1, 2, 4)]
    assert graphs[0].nbytes >= x.nbytes
    assert torch.cuda.memory_reserved() > before_bytes
    for graph in graphs:
        graph.release()
    assert torch.cuda.memory_reserved() <= before_bytes + (2 << 20)  # a generator's few bytes
    del graph, graphs
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.cuda.MemPool, torch.cuda.graph_pool_handle])
def test_a_given_pool_serves_again_after_its_last_graph(kind):
    """PyTorch 2.11: the host's side of a pool does not survive the release of its last graph."""
    backend = make_backend("cuda", memory_pool=kind())
    x = torch.ones(4, device="cuda")
    for _ in range(3):
        graph = backend.capture(lambda: x + 1)
        graph.replay()
        assert graph.outputs.tolist() == [2.0] * 4
        graph.release()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_an_inspectable_graph_shows_its_nodes(mode):
    backend = CudaBackend(inspectable=True, capture_error_mode=mode)
    x = torch.ones(4, device="cuda")
    graph = backend.capture(lambda: x + 1)
    assert graph.graph is not None
    assert graph.graph.raw_cuda_graph()
    assert graph.graph.raw_cuda_graph_exec()
    graph.replay()
    assert graph.outputs.tolist() == [2.0] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("make", [torch.cuda.MemPool, torch.cuda.graph_pool_handle])
def test_backends_share_a_given_memory_pool(make):
    given = make()
    first, second = (make_backend("cuda", memory_pool=given) for _ in range(2))
    x = torch.ones(64 << 20, device="cuda")

    def forward():
        return (x + 1).sum()

    for backend in (first, second):
        backend.warmup(forward)
    graphs = [first.capture(forward), second.capture(forward)]
    # The second finds room where the first one's intermediate result was.
    assert graphs[1].nbytes < x.nbytes <= graphs[0].nbytes
    for graph in graphs:
        graph.replay()
        assert graph.outputs.item() == 2.0 * len(x)


@pytest.mark.gpu
def test_a_capture_leaves_the_current_device_and_stream_alone():
    backend = CudaBackend()
    x = torch.ones(4, device="cuda")
    own = torch.cuda.Stream()
    with torch.cuda.stream(own):
        backend.warmup(lambda: x + 1)
        refused(backend, lambda: x.sum().item())
        graph = backend.capture(lambda: x + 1)
        assert torch.cuda.current_stream() == own
        graph.replay()
    own.synchronize()
    assert graph.outputs.tolist() == [2.0] * 4


@pytest.mark.gpu
def test_a_side_stream_that_is_not_joined_voids_the_capture():
    backend = CudaBackend()
    x = torch.ones(4, device="cuda")
    side = torch.cuda.Stream()

    def forward():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return x + 1

    refused(backend, forward)

    def joined():
        y = forward()
        torch.cuda.current_stream().wait_stream(side)
        return y

    graph = backend.capture(joined)
    graph.replay()
    torch.cuda.synchronize()
    assert graph.outputs.tolist() == [2.0] * 4


@pytest.mark.gpu
def test_many_pools_in_one_process():
    """With PyTorch 2.11, asking for one pool's snapshot crashed processes with many pools."""
    pools = [torch.cuda.MemPool() for _ in range(300)]
    x = torch.ones(4, device="cuda")
    graphs = [make_backend("cuda").capture(lambda: x + 1) for _ in range(5)]
    for graph in graphs:
        graph.replay()
        assert graph.outputs.tolist() == [2.0] * 4
    assert len({pool.id for pool in pools}) == 300
