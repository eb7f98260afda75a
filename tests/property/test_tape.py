"""Random programs of in-place, view and functional operators replay on the tape like eager."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshare.capture import TapeBackend
from graphshare.errors import CaptureError

SIZE = 4
FLOATS = 3  # buffers [SIZE, SIZE] float32 that programs read and write

Step = tuple[str, int, int, int]
Values = list[torch.Tensor]


def _add_out(a, b, i):
    torch.add(b, 1, out=a)


def _swap_rows(a, b, i):
    a[0:2], b[1:3] = b[1:3].clone(), a[0:2].clone()


# Each takes three values of the program so far: two [SIZE, SIZE] float32 and one [SIZE] int64 of
# indices, and returns a new value of either kind, or None.
OPERATORS: dict[str, Callable] = {
    "add": lambda a, b, i: a + b,
    "mul number": lambda a, b, i: a * 0.5,
    "matmul": lambda a, b, i: a @ b,
    "tanh": lambda a, b, i: a.tanh(),
    "softmax": lambda a, b, i: a.softmax(-1),
    "cumsum": lambda a, b, i: b.cumsum(0),
    "where": lambda a, b, i: torch.where(a > b, a, b),
    "cat": lambda a, b, i: torch.cat([a[:1], b[1:]], 0),
    "sorted": lambda a, b, i: a.sort(dim=0, stable=True).values,
    "layer norm": lambda a, b, i: torch.nn.functional.layer_norm(a, (SIZE,)),
    "down and up": lambda a, b, i: a.to(torch.bfloat16).float(),
    "gather": lambda a, b, i: a[i],
    "gather twice": lambda a, b, i: a[i][:, i],
    "random": lambda a, b, i: torch.rand_like(a) + a,
    "dropout": lambda a, b, i: torch.dropout(a, 0.5, train=True),
    "view: transpose": lambda a, b, i: a.t(),
    "view: row": lambda a, b, i: a[1].expand(SIZE, SIZE),
    "view: flat": lambda a, b, i: a.as_strided((SIZE, SIZE), (1, SIZE), 0),
    "view: self": lambda a, b, i: a.view_as(a),
    "argsort": lambda a, b, i: a.sum(0).argsort(stable=True),
    "argmax": lambda a, b, i: a.argmax(0),
    "next": lambda a, b, i: (i + 1) % SIZE,
    "permute indices": lambda a, b, i: i.flip(0),
    "add_": lambda a, b, i: a.add_(b, alpha=0.5),
    "clamp_": lambda a, b, i: a.clamp_(-3, 3),
    "copy_": lambda a, b, i: a.copy_(b.t()),
    "fill row": lambda a, b, i: a[2].fill_(0.25),
    "set row": lambda a, b, i: a.__setitem__(1, 2.0),
    "set slice": lambda a, b, i: a.__setitem__(slice(1, 3), b[0:2]),
    "set rows": lambda a, b, i: a.__setitem__(i.argsort(stable=True), b),
    "set masked": lambda a, b, i: a.__setitem__(b > 1, -1.0),
    "index_copy_": lambda a, b, i: a.index_copy_(0, i.argsort(stable=True), b.clone()),
    "index_add_": lambda a, b, i: a.index_add_(1, i, b.clone()),
    "scatter_": lambda a, b, i: a.scatter_(0, i.argsort(stable=True)[None], b[:1].clone()),
    "masked_fill_": lambda a, b, i: a.masked_fill_(b < 0, 0.125),
    "normal_": lambda a, b, i: a.normal_(),
    "foreach": lambda a, b, i: torch._foreach_mul_([a], 0.5),
    "out=": _add_out,
    "swap": _swap_rows,
    "next_": lambda a, b, i: i.add_(1).remainder_(SIZE),
}

# These write their first value, which then may not share elements with itself.
WRITES = (
    "add_",
    "clamp_",
    "copy_",
    "fill",
    "set ",
    "index_",
    "scatter_",
    "masked_fill_",
    "normal_",
)
WRITES += ("foreach", "out=", "swap")

steps = st.tuples(
    st.sampled_from(sorted(OPERATORS)), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99)
)


def start(seed: int) -> Values:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(SIZE, SIZE, generator=generator) for _ in range(FLOATS)]
    return [*values, torch.randperm(SIZE, generator=generator)]


def run(program: list[Step], buffers: Values) -> Values:
    floats, indices = list(buffers[:FLOATS]), list(buffers[FLOATS:])
    for name, a, b, i in program:
        first, second = floats[a % len(floats)], floats[b % len(floats)]
        index = indices[i % len(indices)]
        if name.startswith(WRITES):
            if 0 in first.stride() or 0 in second.stride():
                continue
            second = second.clone()  # what overlaps itself in part, operators refuse
        result = OPERATORS[name](first, second, index)
        if isinstance(result, torch.Tensor) and result.shape == first.shape:
            floats.append(result)
        elif isinstance(result, torch.Tensor) and not result.is_floating_point():
            indices.append(result)
    return floats + indices


@settings(max_examples=4 * settings.default.max_examples)
@given(
    program=st.lists(steps, min_size=1, max_size=12),
    seed=st.integers(0, 2**31),
    context=st.sampled_from([torch.enable_grad, torch.no_grad, torch.inference_mode]),
)
def test_programs_replay_like_eager(program, seed, context):
    """Outputs, buffers and the generator are, replay for replay, what eager makes of them."""
    buffers = start(seed)
    before = [b.clone() for b in buffers]
    torch.manual_seed(seed)
    state = torch.get_rng_state()
    with context():
        graph = TapeBackend().capture(lambda: run(program, buffers))
    assert torch.equal(torch.get_rng_state(), state)
    for buffer, old in zip(buffers, before, strict=True):
        assert torch.equal(buffer, old)

    for k in range(3):
        if k == 1:  # new contents in place; the third goes on from where the second ended
            for buffer, new in zip(buffers, start(seed + 1), strict=True):
                buffer.copy_(new)
        own = [b.clone() for b in buffers]
        torch.manual_seed(seed + k)
        expected = run(program, own)
        after = torch.get_rng_state()
        torch.manual_seed(seed + k)
        graph.replay()
        assert torch.equal(torch.get_rng_state(), after)
        for got, want in zip(graph.outputs, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        for got, want in zip(buffers, own, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@given(
    program=st.lists(steps, max_size=8),
    seed=st.integers(0, 2**31),
    refused=st.sampled_from(["item", "nonzero", "raise"]),
)
def test_programs_that_fail_leave_no_trace(program, seed, refused):
    """Wherever a forward fails, buffers and the generator are as before, and a capture works."""
    buffers = start(seed)
    before = [b.clone() for b in buffers]
    state = torch.get_rng_state()
    tape = TapeBackend()

    def forward():
        values = run(program, buffers)
        if refused == "raise":
            raise LookupError
        return values[0].sum().item() if refused == "item" else values[0].nonzero()

    try:
        tape.capture(forward)
    except CaptureError:
        pass
    else:
        raise AssertionError("not refused")
    assert torch.equal(torch.get_rng_state(), state)
    for buffer, old in zip(buffers, before, strict=True):
        assert torch.equal(buffer, old)
    graph = tape.capture(lambda: buffers[0] + 1)
    graph.replay()
    assert torch.equal(graph.outputs, before[0] + 1)


@given(data=st.data())
def test_a_write_is_refused_exactly_when_it_meets_what_is_protected(data):
    """Protection is exact to the element: strides count, not extents."""
    spans = st.tuples(st.integers(0, 7), st.integers(1, 8), st.integers(1, 3))
    base = torch.zeros(24, dtype=torch.int64)
    (a, m, p), (b, n, q) = data.draw(spans), data.draw(spans)
    protected, written = base[a : a + m * p : p], base[b : b + n * q : q]
    marks = torch.arange(24)
    meets = bool(set(marks[a : a + m * p : p].tolist()) & set(marks[b : b + n * q : q].tolist()))
    try:
        TapeBackend().capture(lambda: written.add_(1), protected=[protected])
        refused = False
    except CaptureError:
        refused = True
    assert refused == meets
    assert not base.any()
