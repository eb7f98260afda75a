"""PersistentBuffer: one place, live rows as given, and a defined padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphshare import PersistentBuffer

DTYPES = [torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.uint8, torch.bool]
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


@given(
    writes=st.lists(
        st.tuples(st.lists(st.integers(0, 99), max_size=6), st.integers(0, 3)), min_size=1
    ),
    padding=st.sampled_from([0, 1, -1, "last"]),
)
def test_rows_past_the_live_ones_hold_the_padding(writes, padding):
    """After any writes: live rows as given, padding up to the key's rows, one address."""
    buffer = PersistentBuffer(9, torch.int64, "cpu", padding=padding)
    address = buffer.tensor.data_ptr()
    for values, more in writes:
        rows = len(values) + more
        if padding == "last" and not values and rows:
            with pytest.raises(ValueError, match="no last row"):
                buffer.write(values, rows)
            continue
        view = buffer.write(values, rows)
        fill = values[-1] if padding == "last" and values else padding
        assert view.tolist() == values + [fill] * more
        assert view.data_ptr() == (address if rows else view.data_ptr())
        assert view.untyped_storage().data_ptr() == address
        assert buffer.tensor.data_ptr() == address
        assert buffer.live_rows == len(values)


@given(
    live=st.integers(0, 4),
    width=st.integers(0, 3),
    more=st.integers(0, 2),
    padding=st.sampled_from([-1, "last"]),
)
def test_narrow_rows_are_padded_on_the_right(live, width, more, padding):
    """A batch with few pages leaves no old page behind in the columns past its own."""
    if padding == "last" and live == 0:
        live = 1
    buffer = PersistentBuffer((6, 3), torch.int32, "cpu", padding=padding)
    buffer.tensor.fill_(77)
    values = torch.arange(live * width).view(live, width)
    view = buffer.write(values, live + more)
    inner = 0 if padding == "last" else padding
    expected = torch.full((live + more, 3), inner, dtype=torch.int32)
    expected[:live, :width] = values
    if padding == "last":
        expected[live:] = expected[live - 1]
    else:
        expected[live:] = padding
    assert torch.equal(view, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_cast_to_the_dtype(device, dtype):
    """Any source dtype that loses nothing, from host or device; the buffer keeps its own."""
    buffer = PersistentBuffer((4, 2), dtype, device, padding=0)
    values = torch.tensor([[1, 0], [1, 1]])
    sources = [values, values.bool(), values.to(device)]
    if dtype.is_floating_point:
        sources.append(values.double())
    for source in sources:
        view = buffer.write(source, 3)
        assert view.dtype == dtype
        assert view.cpu().double().tolist() == [[1, 0], [1, 1], [0, 0]]


@pytest.mark.parametrize("device", DEVICES)
def test_back_to_back_writes_do_not_mix(device):
    """The host may write again at once; what was sent before has been read by then."""
    buffer = PersistentBuffer(4096, torch.int64, device, padding=0)
    copies = []
    for step in range(20):
        copies.append(buffer.write([step] * 4096, 4096).clone())
    assert [int(each.min()) for each in copies] == list(range(20))
    assert [int(each.max()) for each in copies] == list(range(20))


WIDE = {
    torch.bool: [torch.uint8, torch.int64, torch.uint64],
    torch.uint8: [torch.int8, torch.int32, torch.uint16, torch.uint64],
    torch.int16: [torch.uint16, torch.int32, torch.uint32],
    torch.int32: [torch.int64, torch.uint32, torch.uint64],
    torch.int64: [torch.uint64],
}


def _limits(dtype):
    if dtype is torch.bool:
        return 0, 1
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def _holds(dtype, number):
    return _limits(dtype)[0] <= number <= _limits(dtype)[1]


@given(data=st.data(), dtype=st.sampled_from(sorted(WIDE, key=str)))
def test_integers_arrive_as_they_are_or_not_at_all(data, dtype):
    """A list, an array and a CPU tensor of any integers obey one rule: in range, or refused."""
    source = data.draw(st.sampled_from([dtype, *WIDE[dtype]]))
    near = sorted(
        {*_limits(dtype), *(each + by for each in _limits(dtype) for by in (-1, 1)), 0, 1}
    )
    numbers = st.sampled_from([each for each in near if _holds(source, each)])
    values = data.draw(st.lists(numbers, max_size=4))
    buffer = PersistentBuffer(5, dtype, "cpu", padding=0, name="lens")
    buffer.write([1, 1], 2)
    fits = all(_holds(dtype, each) for each in values)
    tensor = torch.tensor(values, dtype=source)
    forms = [values, tuple(values), tensor]
    if source is not torch.bool:
        forms.append(tensor.numpy())
    for given_as in forms:
        if fits:
            assert [int(each) for each in buffer.write(given_as, 5)[: len(values)]] == values
            continue
        before = buffer.tensor.tolist(), buffer.live_rows
        with pytest.raises(ValueError, match="lens"):
            buffer.write(given_as, 5)
        assert (buffer.tensor.tolist(), buffer.live_rows) == before


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize(
    "values",
    [
        [1.0, 2.0],
        [1, 2.5],
        torch.tensor([1.0]),
        "array",
        torch.tensor([1.0], dtype=torch.bfloat16),
        torch.tensor([1j]),
        [1j],
        b"12",
    ],
    ids=repr,
)
def test_floats_do_not_become_integers(dtype, values):
    """Whole ones neither, in whichever form they come: which dtype they have is no accident."""
    buffer = PersistentBuffer(4, dtype, "cpu", padding=0, name="lens")
    if isinstance(values, str):
        values = torch.tensor([1.0]).numpy()
    with pytest.raises(ValueError, match="lens"):
        buffer.write(values, 4)
    assert buffer.tensor.tolist() == [0] * 4


@pytest.mark.gpu
def test_wide_integers_on_a_device_are_not_looked_at():
    """That would wait for the device; floats are refused there too, which needs no look."""
    buffer = PersistentBuffer(2, torch.int32, "cuda:0", padding=0)
    assert buffer.write(torch.tensor([3, (1 << 32) + 5], device="cuda:0"), 2).tolist() == [3, 5]
    with pytest.raises(ValueError, match="float"):
        buffer.write(torch.ones(2, device="cuda:0"), 2)
    with pytest.raises(ValueError, match="values"):
        buffer.write(torch.tensor([1 << 40]), 2)


def test_fill_is_for_captures():
    """Every row up to the key's gets the value; what lies beyond is left alone."""
    buffer = PersistentBuffer(4, torch.int32, "cpu", padding=-1)
    assert buffer.tensor.tolist() == [-1] * 4
    assert buffer.fill(1, 3).tolist() == [1, 1, 1]
    assert buffer.tensor.tolist() == [1, 1, 1, -1]
    assert buffer.live_rows == 3


def test_a_view_is_the_same_for_each_build_of_a_key():
    """Address, shape, stride and dtype of a key's view do not depend on the batch."""
    buffer = PersistentBuffer((8, 4), torch.int64, "cpu", padding=0)
    one = buffer.write(torch.ones(2, 1, dtype=torch.int64), 4)
    other = buffer.write(torch.ones(4, 4, dtype=torch.int64), 4)
    assert one.data_ptr() == other.data_ptr()
    assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@pytest.mark.parametrize(
    ("values", "rows"),
    [
        ([1, 2, 3], 2),  # more live rows than the key has
        ([1], 5),  # more rows than the buffer has
        ([1], -1),
        ([[1, 2]], 1),  # wrong number of dimensions
        (torch.ones((), dtype=torch.int64), 1),
        (["a"], 1),
        ([1.5, None], 2),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(values, rows):
    """A refused write leaves the buffer as it was."""
    buffer = PersistentBuffer(4, torch.int64, "cpu", padding=0, name="seq_lens")
    buffer.write([9, 9], 4)
    with pytest.raises(ValueError, match="seq_lens"):
        buffer.write(values, rows)
    assert buffer.tensor.tolist() == [9, 9, 0, 0]
    assert buffer.live_rows == 2


def test_inner_sizes_must_fit():
    """Only the last dimension may be narrower."""
    buffer = PersistentBuffer((4, 3, 2), torch.int64, "cpu", padding=0)
    buffer.write(torch.ones(2, 3, 1, dtype=torch.int64), 4)
    for shape in ((2, 2, 2), (2, 3, 3), (2, 6), (5, 3, 2)):
        with pytest.raises(ValueError, match="buffer"):
            buffer.write(torch.ones(shape, dtype=torch.int64), 4)
    with pytest.raises(ValueError, match="buffer"):
        buffer.fill(0, 5)


@pytest.mark.parametrize(
    ("shape", "dtype", "padding"),
    [
        ((), torch.int32, 0),
        (0, torch.int32, 0),
        ((4, 0), torch.int32, 0),
        (4, torch.int32, 0.5),
        (4, torch.uint8, -1),
        (4, torch.int32, 1 << 40),
        (4, torch.int32, float("nan")),
        (4, torch.int32, "first"),
        (4, torch.float16, 1e6),
        (4, torch.int64, 1 << 63),
        (4, torch.bool, 2),
    ],
)
def test_impossible_buffers_are_refused(shape, dtype, padding):
    """No rows, a padding that the dtype cannot hold, an unknown word."""
    with pytest.raises(ValueError, match="plan"):
        PersistentBuffer(shape, dtype, "cpu", padding=padding, name="plan")


def test_the_extreme_integers_may_pad():
    """No detour by way of floats, which would round them."""
    for number in (-(1 << 63), (1 << 63) - 1, (1 << 53) + 1):
        buffer = PersistentBuffer(2, torch.int64, "cpu", padding=number)
        assert buffer.write([1], 2).tolist() == [1, number]


def test_padding_of_floats():
    """Infinities, and NaN where the dtype has it, may pad."""
    buffer = PersistentBuffer(3, torch.float32, "cpu", padding=float("-inf"))
    assert buffer.write([1.5], 3).tolist() == [1.5, float("-inf"), float("-inf")]
    buffer = PersistentBuffer(3, torch.float32, "cpu", padding=float("nan"))
    assert buffer.write([1.5], 2).isnan().tolist() == [False, True]


def test_repr_says_what_it_is():
    """For messages."""
    text = repr(PersistentBuffer((4, 2), torch.int32, "cpu", padding="last", name="starts"))
    assert "starts" in text
    assert "(4, 2)" in text
    assert "last" in text
