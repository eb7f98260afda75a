"""A stand-in for the module ``flashinfer``: its signatures, its scheduler's sizes, no kernels.

Signatures are those in `tests/data/flashinfer_signatures.json`, written from the library's source,
so a call that the library would refuse is refused here. Plans are sized as the library's C++
sizes them, on a GPU of 4
multiprocessors and with room for 64 works; what they hold is the lists, over and over.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

SIGNATURES = json.loads((Path(__file__).parent / "data" / "flashinfer_signatures.json").read_text())
NUM_SMS = 4
NUM_WORKS = 64


def bind(wrapper: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Arguments by name, as the library's method would take them."""
    given = SIGNATURES["wrappers"][wrapper]["methods"][method]
    kinds = inspect.Parameter
    signature = inspect.Signature(
        [
            kinds(
                name,
                kinds.POSITIONAL_OR_KEYWORD,
                default=kinds.empty if default is None else ("default", default),
            )
            for name, default in given.items()
        ]
    )
    return SimpleNamespace(**signature.bind(*args, **kwargs).arguments)


class _Allocator:
    """As allocator.h: aligned pieces of a workspace, and an error where it ends."""

    def __init__(self, space: int) -> None:
        self.used, self.space = 0, space

    def take(self, nbytes: int, alignment: int = 16) -> int:
        start = -(-self.used // alignment) * alignment
        if start + nbytes > self.space:
            raise RuntimeError(
                f"Buffer overflow when allocating memory with size {nbytes}, but only "
                f"{self.space - self.used} bytes available"
            )
        self.used = start + nbytes
        return start


def _decode(a: Any, ints: _Allocator, floats: _Allocator) -> list[int]:
    padded = max(8 * NUM_SMS // a.num_kv_heads, a.batch_size)
    split = a.batch_size * a.num_kv_heads < 8 * NUM_SMS
    request, tile = ints.take(4 * padded), ints.take(4 * padded)
    o_indptr, chunk = ints.take(4 * (padded + 1)), ints.take(4, 1)
    v = s = mask = 0
    if split:
        v = floats.take(a.num_qo_heads * padded * a.head_dim_vo * 4)
        s = floats.take(a.num_qo_heads * padded * 4)
        mask = ints.take(padded)
    return [padded, v, s, request, tile, o_indptr, mask, chunk, 1, int(split)]


def _fa2(a: Any, ints: _Allocator, floats: _Allocator) -> list[int]:
    group = a.num_qo_heads // a.num_kv_heads
    packed = (a.total_num_rows - a.batch_size + 1) * group
    rows = 128 if packed > 64 else 64 if packed > 16 else 16
    tiles = -(-a.total_num_rows * group // rows) + a.batch_size - 1
    padded = max(2 * NUM_SMS // a.num_kv_heads, tiles)
    request, q_tile, kv_tile = (ints.take(4 * padded) for _ in range(3))
    o_indptr, chunk = ints.take(4 * (a.batch_size + 1)), ints.take(4, 1)
    total = ints.take(4)
    v = floats.take(a.num_qo_heads * padded * rows * a.head_dim_vo * 4)
    s = floats.take(a.num_qo_heads * padded * rows * 4)
    merge, mask = ints.take(4 * (a.total_num_rows + 1)), ints.take(padded)
    indices = [request, q_tile, kv_tile, merge, o_indptr, chunk]
    return [padded, a.total_num_rows, total, rows, *indices, v, s, mask, 1, 1]


def _fa3(a: Any, ints: _Allocator, floats: _Allocator) -> list[int]:
    works = -(-a.total_num_rows // 128) + a.batch_size - 1
    same = works > 4096
    nbytes = 4 * works * (1 if same else a.num_qo_heads)
    arrays = [ints.take(nbytes) for _ in range(6)]
    return [*arrays, ints.take(4 * (NUM_SMS + 1)), ints.take(nbytes), int(same)]


def _batch_attention(a: Any, ints: _Allocator, floats: _Allocator) -> list[int]:
    tasks = [ints.take(4 * NUM_WORKS) for _ in range(20)]
    chunk = ints.take(8)
    splits = 4 * 2 * NUM_SMS * (128 + 16)
    merge, merge_o, count = ints.take(4 * splits), ints.take(4 * splits), ints.take(4)
    partial = floats.take(splits * 2 * a.head_dim_o * a.num_kv_heads)
    sums = floats.take(splits * 4 * a.num_kv_heads)
    return [1, 2 * NUM_SMS, *tasks, chunk, partial, sums, merge, merge_o, count]


_SCHEDULERS = {"decode": _decode, "fa2": _fa2, "fa3": _fa3, "batch_attention": _batch_attention}


class Compiled:
    """What a wrapper holds of the compiled library."""

    def __init__(self, kernel: str, library: Any) -> None:
        self.kernel, self.library = kernel, library

    def plan(self, *args: Any) -> list[int]:
        names = SIGNATURES["compiled"][self.kernel]
        if len(args) != len(names):
            raise TypeError(f"{self.kernel}: expected {len(names)} arguments, got {len(args)}")
        a = SimpleNamespace(**dict(zip(names, args, strict=True)))
        device, host = a.int_workspace_buffer, a.page_locked_int_workspace_buffer
        assert host.numel() >= device.numel()
        ints = _Allocator(device.numel())
        numbers = _SCHEDULERS[self.kernel](a, ints, _Allocator(a.float_workspace_buffer.numel()))
        lists = [each for each in args[3:] if isinstance(each, torch.Tensor) and each.numel()]
        content = torch.cat(lists).view(torch.uint8)
        host[: ints.used] = content.repeat(ints.used // len(content) + 1)[: ints.used]
        device[: ints.used].copy_(host[: ints.used])
        if self.library.records:
            self.library.plans.append((self.kernel, a))
        return numbers + self.library.more_numbers


class _Wrapper:
    name = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.given = bind(self.name, "__init__", args, kwargs)
        for attribute in SIGNATURES["wrappers"][self.name]["attributes"]:
            setattr(self, attribute, None)
        self.int_buffer = torch.zeros(8 << 20, dtype=torch.uint8)

    def reset_workspace_buffer(self, *args: Any, **kwargs: Any) -> None:
        given = bind(self.name, "reset_workspace_buffer", args, kwargs)
        self._float_workspace_buffer = given.float_workspace_buffer
        self._int_workspace_buffer = given.int_workspace_buffer

    def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = bind(self.name, "run", args, kwargs)
        self.library.runs.append((self, given))
        return given.out.copy_(given.q)


def make_library(**options: Any) -> Any:
    """The module; each test has its own, and may change ``more_numbers`` and ``without``.

    Attributes:
        plans: ``(kernel, arguments by name)`` of every plan.
        runs: ``(wrapper, arguments by name)`` of every launch.
        more_numbers: Appended to each plan's numbers.
        without: Attributes that wrappers are to lack.
        records: Whether plans are kept.
    """
    library: Any = ModuleType("flashinfer")
    library.__version__ = SIGNATURES["version"]
    library.plans, library.runs, library.more_numbers = [], [], []
    library.without, library.records = (), True
    vars(library).update(options)

    def planned(wrapper: Any) -> None:
        for name in library.without:
            vars(wrapper).pop(name, None)

    class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
        name = "BatchDecodeWithPagedKVCacheWrapper"

        def plan(self, *args: Any, **kwargs: Any) -> None:
            a = bind(self.name, "plan", args, kwargs)
            assert len(a.last_page_len) == len(self.given.paged_kv_last_page_len_buffer)
            self._cached_module = Compiled("decode", library)
            self._plan_info = self._cached_module.plan(
                self.given.float_workspace_buffer, self.int_buffer, self.int_buffer.clone(),
                a.indptr, len(a.last_page_len), a.num_qo_heads, a.num_kv_heads, a.page_size, True,
                a.window_left, a.logits_soft_cap, a.head_dim, a.head_dim, torch.empty(0),
                torch.empty(0),
            )  # fmt: skip
            planned(self)

    class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
        name = "BatchPrefillWithPagedKVCacheWrapper"

        def plan(self, *args: Any, **kwargs: Any) -> None:
            a = bind(self.name, "plan", args, kwargs)
            num_reqs = len(a.qo_indptr) - 1
            assert num_reqs + 1 == len(self.given.qo_indptr_buf)
            self._cached_module = Compiled(self.given.backend, library)
            split = (-1, False, 0) if self.given.backend == "fa2" else ()
            self._plan_info = self._cached_module.plan(
                self.given.float_workspace_buffer, self.int_buffer, self.int_buffer.clone(),
                a.qo_indptr, a.paged_kv_indptr, a.paged_kv_last_page_len, int(a.qo_indptr[-1]),
                num_reqs, a.num_qo_heads, a.num_kv_heads, a.page_size, True, a.head_dim_qk,
                a.head_dim_qk, a.causal, a.window_left, *split,
            )  # fmt: skip
            planned(self)

    class BatchAttention(_Wrapper):
        name = "BatchAttention"

        def plan(self, *args: Any, **kwargs: Any) -> None:
            a = bind(self.name, "plan", args, kwargs)
            self.module = Compiled("batch_attention", library)
            self._plan_info = self.module.plan(
                self.float_workspace_buffer, self.int_buffer, self.int_buffer.clone(),
                a.qo_indptr, a.kv_indptr, a.kv_len_arr, len(a.kv_len_arr), a.num_qo_heads,
                a.num_kv_heads, a.head_dim_vo, a.causal,
            )  # fmt: skip
            planned(self)

    for cls in (
        BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper,
        BatchAttention,
    ):
        cls.library = library
        setattr(library, cls.__name__, cls)
    return library
