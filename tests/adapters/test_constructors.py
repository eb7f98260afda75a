"""What owners and borrowers are made of is looked at before a library is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphshare.adapters.flash_attn import (
    FlashAttention2,
    FlashAttention2Owner,
    FlashAttention3,
    FlashAttention3Owner,
)
from graphshare.adapters.flashinfer import FlashInfer, FlashInferOwner, PageLists
from graphshare.adapters.paged import AttentionShape, PagedBuffers, PagedCapacity
from graphshare.adapters.toy.checkpoint import new_models, save_models
from graphshare.adapters.toy.config import EngineConfig, ToyConfig
from graphshare.adapters.toy.forwards import Forwards
from graphshare.adapters.toy.kernel import kernel_named

CAPACITY = PagedCapacity(max_num_tokens=12, max_num_reqs=4, max_seq_len=600, page_size=256)
SHAPE = AttentionShape(num_q_heads=4, num_kv_heads=2, head_size=64)

OWNERS: tuple[Callable[..., Any], ...] = (
    FlashAttention2Owner,
    FlashAttention3Owner,
    FlashInferOwner,
)
BORROWERS: tuple[Callable[..., Any], ...] = (FlashAttention2, FlashAttention3, FlashInfer)
WRONG: tuple[tuple[Callable[..., Any], dict[str, Any], type[Exception]], ...] = (
    (FlashAttention2, {"num_splits": -1}, ValueError),
    (FlashAttention2, {"num_splits": "4"}, TypeError),
    (FlashAttention2Owner, {"num_splits": True}, TypeError),
    (FlashAttention3, {"build": "dao"}, ValueError),
    (FlashAttention3, {"module": "flash_attn_interface"}, ValueError),  # without a build
    (FlashAttention3, {"device": "gpu"}, ValueError),
    (FlashAttention3Owner, {"num_splits": 0}, ValueError),
    (FlashAttention3Owner, {"num_splits": 257}, ValueError),
    (FlashAttention3Owner, {"num_splits": 2.0}, TypeError),
    (FlashAttention3Owner, {"max_split_tokens": -1}, ValueError),
    (FlashAttention3Owner, {"max_split_tokens": None}, TypeError),
    (FlashAttention3Owner, {"build": "dao"}, ValueError),
    (FlashInferOwner, {"kernel": "fa4"}, ValueError),
    (FlashInferOwner, {"kernel": ""}, ValueError),
    (FlashInferOwner, {"kernel": ["fa2"]}, ValueError),
    (FlashInferOwner, {"decode_kernel": "fa4"}, ValueError),
    (FlashInferOwner, {"also": SHAPE}, TypeError),
    (FlashInferOwner, {"also": [SHAPE, CAPACITY]}, TypeError),
    (FlashInferOwner, {"float_workspace": torch.zeros(64)}, ValueError),
    (FlashInferOwner, {"float_workspace": 1 << 20}, TypeError),
)


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "flash_attn", "flash_attn_interface", "flash_attn_3", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)


def make(cls: Callable[..., Any], *given: Any, **options: Any) -> Any:
    if cls in OWNERS and len(given) == 2:
        given = (*given, "cpu")
    elif cls is FlashAttention3:
        options.setdefault("device", "cpu")
    return cls(*given, **options)


def _whose(cls: Callable[..., Any]) -> dict[str, Any]:
    """What must be said beside a module."""
    return {"build": "vllm"} if cls in (FlashAttention3, FlashAttention3Owner) else {}


@pytest.mark.parametrize("cls", [*OWNERS, *BORROWERS])
def test_what_is_right_gets_as_far_as_the_library(cls: Callable[..., Any]) -> None:
    """Or the tests below would show nothing."""
    with pytest.raises(ModuleNotFoundError, match="graphshare"):
        make(cls, CAPACITY, SHAPE)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        make(cls, CAPACITY, SHAPE, module="no_such_module", **_whose(cls))


@pytest.mark.parametrize(("cls", "options", "error"), WRONG, ids=str)
def test_a_wrong_option_is_told_first(
    cls: Callable[..., Any], options: dict[str, Any], error: type[Exception]
) -> None:
    (name,) = options
    about = "build" if name == "module" else name
    with pytest.raises(error, match=rf"\b{about}\b"):
        make(cls, CAPACITY, SHAPE, **options)


@pytest.mark.parametrize("cls", [*OWNERS, *BORROWERS])
def test_arguments_in_each_others_places_are_told_first(cls: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="capacity: expected a PagedCapacity"):
        make(cls, SHAPE, CAPACITY)
    with pytest.raises(TypeError, match="shape: expected an AttentionShape"):
        make(cls, CAPACITY, CAPACITY)
    with pytest.raises(TypeError, match="module: expected a module or its name"):
        make(cls, CAPACITY, SHAPE, module=7, **_whose(cls))


@pytest.mark.parametrize("cls", OWNERS)
def test_a_device_that_is_none_is_told_first(cls: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="device: expected a device such as"):
        make(cls, CAPACITY, SHAPE, "gpu")
    # Where a borrower may leave it out, an owner may not: its states lie there.
    with pytest.raises(TypeError, match="device: expected a device"):
        make(cls, CAPACITY, SHAPE, None)


@pytest.mark.parametrize("cls", [PagedBuffers, PageLists])
def test_buffers_tell_their_arguments_too(cls: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="capacity: expected a PagedCapacity"):
        cls("cpu", CAPACITY)
    with pytest.raises(ValueError, match="device: expected a device such as"):
        cls(CAPACITY, "gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_gpu_that_is_not_there_is_told_first() -> None:
    for cls in OWNERS:
        with pytest.raises(RuntimeError, match="device: expected a device that is there"):
            make(cls, CAPACITY, SHAPE, "cuda")
    with pytest.raises(RuntimeError, match="device: expected a device that is there"):
        FlashAttention3(CAPACITY, SHAPE)
    for buffers in (PagedBuffers, PageLists):
        with pytest.raises(RuntimeError, match="device: expected a device that is there"):
            buffers(CAPACITY, "cuda")
    models = new_models(ToyConfig())
    for attention in ("torch", "flashinfer"):
        with pytest.raises(RuntimeError, match="device: expected a device that is there"):
            Forwards(*models, EngineConfig(), "cuda", kernel_named(attention))


def test_what_a_checkpoint_cannot_hold_is_told_first(tmp_path: Any) -> None:
    models = new_models(ToyConfig())
    with pytest.raises(TypeError, match="JSON"):
        save_models(tmp_path / "models.safetensors", *models, {"loss": torch.zeros(1)})
    with pytest.raises(ImportError, match="safetensors"):
        save_models(tmp_path / "models.safetensors", *models, {"loss": 1.0})
