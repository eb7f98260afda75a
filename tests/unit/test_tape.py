"""The tape: what it refuses beyond the contract, what it records, and what it leaves alone."""

from __future__ import annotations

import contextlib
import itertools
import threading

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphshare.capture import CudaBackend, TapeBackend, make_backend
from graphshare.errors import CaptureError


@pytest.fixture
def tape() -> TapeBackend:
    return TapeBackend()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
)
def test_outputs_are_nan_until_the_first_replay(tape, dtype):
    x = torch.ones(4)
    graph = tape.capture(lambda: x.to(dtype) if dtype != torch.float32 else x + 1)
    values = graph.outputs
    as_float = values if dtype.is_complex else values.float()
    assert as_float.isnan().all()
    graph.replay()
    as_float = values if dtype.is_complex else values.float()
    assert not as_float.isnan().any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_integer_outputs_are_far_off_until_the_first_replay(tape, dtype):
    """An index that was never computed must not look like one."""
    x = torch.arange(4)
    graph = tape.capture(lambda: (x * 2).to(dtype))
    assert (graph.outputs < -64).all()
    graph.replay()
    assert graph.outputs.tolist() == [0, 2, 4, 6]


def test_a_write_into_a_protected_tensor_is_refused(tape):
    state = torch.zeros(8, 4)
    columns = state[:, 1]
    x = torch.ones(8)
    before = state.clone()
    for write in (
        lambda: state[2:4].add_(1),
        lambda: torch.add(x, x, out=columns),
        lambda: state.view(-1)[5:6].fill_(1),
        lambda: torch._foreach_add_([x, columns], 1.0),
    ):
        with pytest.raises(CaptureError, match="writes_state=True"):
            tape.capture(write, protected=[columns])
    assert torch.equal(state, before)
    assert torch.equal(x, torch.ones(8))


def test_a_write_beside_a_protected_tensor_is_not_refused(tape):
    state = torch.zeros(8, 4)
    tape.capture(lambda: state[:, 2].fill_(1), protected=[state[:, 1], state[:, 3]])
    tape.capture(lambda: state + 1, protected=[state])


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x.resize_(100),
        lambda x: x.set_(torch.zeros(9)),
        lambda x: torch.add(x[:2], 1, out=x[:0]),
        lambda x: torch.mul(x, x, out=torch.zeros(4).set_(x)[:3]),
        lambda x: torch.linalg.inv(torch.eye(3)),
        lambda x: torch.from_numpy(x.new_zeros(2).numpy()),
        lambda x: torch.Tensor([1.0]),
        lambda x: x.new_tensor([1.0]),
        lambda x: torch.as_tensor([1.0]),
        lambda x: x.bincount(),
        lambda x: f"{x[0]}",
        lambda x: x.__dlpack__(),
        lambda x: x.to_sparse(),
        lambda x: x[x[1].to(torch.int64) :],
        lambda x: torch.allclose(x, x),
        lambda x: x.index_put_((x > 0,), x[:1]),
    ],
    ids=itertools.count(),
)
@pytest.mark.parametrize("inference", [False, True])
def test_refused_beyond_the_contract(tape, forward, inference):
    x = torch.arange(4.0)
    address, shape = x.data_ptr(), x.shape
    with torch.inference_mode(inference), pytest.raises(CaptureError):
        tape.capture(lambda: forward(x))
    assert (x.data_ptr(), x.shape) == (address, shape)
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_refusal_names_the_operator_and_the_call(tape):
    x = torch.arange(4.0)
    with pytest.raises(CaptureError) as caught:
        tape.capture(lambda: x[x > 0])
    assert "aten.index.Tensor" in caught.value.what
    assert "__getitem__" in caught.value.what
    with pytest.raises(CaptureError) as caught:
        tape.capture(lambda: x.tolist())
    assert "tolist" in caught.value.what


def test_memory_made_by_the_forward_may_grow(tape):
    x = torch.arange(4.0)

    def forward():
        out = torch.empty(0)
        torch.add(x, 1, out=out)
        return out * 2

    graph = tape.capture(forward)
    x.fill_(2.0)
    graph.replay()
    assert graph.outputs.tolist() == [6.0] * 4


def test_buffers_that_a_schema_does_not_name_are_put_back(tape):
    """Batch norm writes its running statistics without a word in the operator's schema."""
    norm = nn.BatchNorm1d(4)
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    x = torch.randn(8, 4)
    with torch.no_grad():
        graph = tape.capture(lambda: norm(x))
    for name, buffer in norm.named_buffers():
        assert torch.equal(buffer, before[name]), name
    graph.replay()
    torch.testing.assert_close(norm.running_mean, x.mean(0) * 0.1)
    torch.testing.assert_close(
        graph.outputs, nn.functional.batch_norm(x, None, None, training=True)
    )
    assert norm.num_batches_tracked.item() == 1


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x.split(2) + x.unbind(1),
        lambda x: x.topk(2, dim=0),
        lambda x: x.sort(dim=0, stable=True),
        lambda x: (x.max(dim=1), x.argmax(), x.cumsum(0)),
        lambda x: torch._foreach_add([x, x * 2], 1.0),
        lambda x: torch.var_mean(x, dim=0),
        lambda x: (x.detach(), torch.ops.aten.alias(x), x.view(-1)),
        lambda x: x.to(torch.float16).to(torch.int32),
        lambda x: torch.cat([x, x.t()], 0).view(torch.int32),
        lambda x: nn.functional.layer_norm(x, (4,)).softmax(-1).log(),
        lambda x: nn.functional.embedding(x.abs().clamp(max=3).to(torch.int64), torch.eye(4)),
        lambda x: torch.where(x > 0, x, 0.0).masked_fill(x > 1, 7.0),
        lambda x: torch.einsum("ij,jk->ik", x, x).expand(3, 4, 4),
        lambda x: torch.zeros(4, 4).scatter_(1, x.argsort(1), x),
        lambda x: torch.zeros(4, 4).index_put_((x[0].argsort(),), x, accumulate=True),
        lambda x: nn.functional.scaled_dot_product_attention(
            x[None, None], x[None, None], x[None, None]
        ),
        lambda x: nn.functional.conv1d(x[None], torch.ones(4, 4, 1)),
        lambda x: torch.fft.rfft(x).conj() * 2,
        lambda x: torch.polar(x.abs(), x),
        lambda x: x.clone().t_().mul_(2),
        lambda x: torch.empty_like(x).copy_(x.t()),
        lambda x: torch.arange(4.0) + torch.full((4,), 2.0) + torch.ones(()) + x,
        lambda x: x.logsumexp(0) + x.norm() + torch.linalg.vector_norm(x),
        lambda x: torch.bucketize(x, torch.linspace(-2, 2, 5)),
    ],
    ids=itertools.count(),
)
@pytest.mark.parametrize("inference", [False, True])
def test_a_replay_computes_what_the_operators_compute(tape, forward, inference):
    x = torch.randn(4, 4)
    with torch.inference_mode(inference):
        graph = tape.capture(lambda: forward(x))
    for _ in range(2):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(graph.outputs, forward(x), rtol=0, atol=0)


def test_a_view_of_an_input_needs_no_step(tape):
    x = torch.randn(4, 4)
    graph = tape.capture(lambda: x.t()[1:].reshape(3, 2, 2))
    assert graph.nbytes == 0 or not graph.outputs._is_view()
    graph = tape.capture(lambda: x.view(-1)[3:])
    assert graph.nbytes == 0
    assert torch.equal(graph.outputs, x.view(-1)[3:])


def test_nbytes_are_those_of_what_the_forward_allocated(tape):
    x = torch.randn(4, 4)
    graph = tape.capture(lambda: (x + 1).to(torch.float64).t())
    assert graph.nbytes == 16 * 4 + 16 * 8


def test_replays_are_untouched_by_what_surrounds_them(tape):
    class Never(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    class NeverF(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    weight = nn.Parameter(torch.randn(4, 4))
    x = torch.randn(4, 4)
    graph = tape.capture(lambda: (x @ weight).relu())
    expected = (x @ weight).relu().detach()
    with Never(), NeverF(), torch.autocast("cpu", dtype=torch.bfloat16):
        graph.replay()
    assert torch.equal(graph.outputs.detach(), expected)
    with torch.inference_mode():
        graph.replay()
    assert torch.equal(graph.outputs.detach(), expected)


def test_a_capture_under_a_dispatch_mode_is_refused(tape):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Mode(), pytest.raises(CaptureError):
        tape.capture(lambda: torch.ones(3))
    x = torch.ones(3)

    def forward():
        with Mode():
            return x + 1

    graph = tape.capture(forward)
    x.fill_(2.0)
    graph.replay()
    assert graph.outputs.tolist() == [3.0] * 3


def test_another_thread_may_replay_during_a_capture(tape):
    x = torch.ones(3)
    done = tape.capture(lambda: x + 1)

    def forward():
        thread = threading.Thread(target=done.replay)
        thread.start()
        thread.join()
        return x * 2

    tape.capture(forward).replay()
    assert done.outputs.tolist() == [2.0] * 3


def test_tensors_that_wrap_others_are_recorded_by_what_they_wrap(tape):
    class Doubled(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            args = [a.inner * 2 if isinstance(a, Doubled) else a for a in args]
            return func(*args, **(kwargs or {}))

    x = torch.ones(3)
    wrapped = Doubled(x)
    graph = tape.capture(lambda: torch.add(wrapped, 1))
    x.fill_(5.0)
    graph.replay()
    assert graph.outputs.tolist() == [11.0] * 3


def test_a_failed_capture_frees_what_it_made_once_the_error_is_gone(tape):
    made = []

    def forward():
        y = torch.ones(1000) + 1
        made.append(StorageWeakRef(y.untyped_storage()))
        return y.sum().item()

    with contextlib.suppress(CaptureError):
        tape.capture(forward)
    assert made[0].expired()


def test_a_released_tape_frees_what_it_made(tape):
    x = torch.ones(3)
    graph = tape.capture(lambda: x + 1)
    ref = StorageWeakRef(graph.outputs.untyped_storage())
    graph.release()
    assert ref.expired()


def test_a_failed_recording_holds_no_memory(tape):
    """Though a debugger may hold the exception, whose traceback leads to the recording."""
    x = torch.ones(3)
    made = []

    def forward():
        made.append(StorageWeakRef((x + 1).untyped_storage()))
        raise LookupError

    with pytest.raises(CaptureError) as caught:
        tape.capture(forward)
    assert made[0].expired()
    assert isinstance(caught.value.__cause__, LookupError)


def test_bad_arguments_are_refused_when_a_backend_is_made():
    with pytest.raises(ValueError, match="backend"):
        make_backend("graph")
    with pytest.raises(ValueError, match="device"):
        make_backend("auto", "meta")
    with pytest.raises(ValueError, match="device"):
        make_backend("tape", "cuda")
    with pytest.raises(ValueError, match="device"):
        make_backend("cuda", "cpu")
    with pytest.raises(ValueError, match="capture_error_mode"):
        make_backend("cuda", "cuda", capture_error_mode="none")


def test_the_device_picks_the_backend():
    assert make_backend("auto", "cpu").name == "tape"
    assert make_backend(device="cpu").device == torch.device("cpu")
    assert make_backend("tape").name == "tape"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without a CUDA device")
def test_cuda_without_a_device_says_so():
    with pytest.raises(RuntimeError, match="CUDA device"):
        CudaBackend()
