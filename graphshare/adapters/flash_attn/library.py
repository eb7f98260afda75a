"""Finding the installed builds of FlashAttention, when an owner is made and not before."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, TypeVar

import torch

from graphshare.adapters.flash_attn.schedule import Layout
from graphshare.adapters.paged.arguments import check_module
from graphshare.errors import GraphShareError

__all__ = [
    "Module",
    "UnsupportedBuildError",
    "find_flash_attention_2",
    "find_flash_attention_3",
    "places_of_flash_attention_3",
]

_T = TypeVar("_T")

Module = str | ModuleType | None

_PACKAGES: dict[Layout, tuple[str, ...]] = {
    "vllm": ("vllm.vllm_flash_attn",),
    "upstream": ("flash_attn_interface", "flash_attn_3.flash_attn_interface"),
}


class UnsupportedBuildError(GraphShareError):
    """An installed kernel library is not one that this adapter knows how to plan for.

    Attributes:
        backend: The kernel and its build, as a spec names it.
    """

    backend: str = ""


@dataclass(frozen=True, slots=True)
class FlashAttention2Library:
    """The functions of flash-attn that are used.

    Args:
        backend: As a spec names it.
        with_kvcache: ``flash_attn_with_kvcache``.
        varlen: ``flash_attn_varlen_func``.
    """

    backend: str
    with_kvcache: Callable[..., torch.Tensor]
    varlen: Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class FlashAttention3Library:
    """The functions of a FlashAttention 3 build that are used.

    Args:
        backend: As a spec names it.
        layout: Whose build.
        get_scheduler_metadata: Plans a launch.
        launch: vLLM's ``flash_attn_varlen_func``, or the original's ``flash_attn_with_kvcache``.
    """

    backend: str
    layout: Layout
    get_scheduler_metadata: Callable[..., torch.Tensor]
    launch: Callable[..., torch.Tensor]

    def refuse(
        self, expected: int, got: int, *, key: Hashable = None, of: str = "a plan"
    ) -> UnsupportedBuildError:
        """Return the error for a plan of another size than this adapter computes."""
        return UnsupportedBuildError(
            f"{self.backend}: size of {of} by get_scheduler_metadata",
            expected=f"{expected} elements, by the layout that this adapter knows",
            got=got,
            key=key,
            consequence="Entries would be copied to the wrong places, and launches misread them",
            remedy="Use a release of the library that this adapter was tested with",
            backend=self.backend,
        )


def find_flash_attention_2(module: Module = None) -> FlashAttention2Library:
    """Import flash-attn's own package.

    Args:
        module: Import this one instead.

    Raises:
        ModuleNotFoundError: It is not installed.
        UnsupportedBuildError: It lacks a function.
    """
    backend = "flash_attn2/flash_attn"
    _, found = _first(backend, {"flash_attn" if module is None else module: None}, "flash-attn")
    return FlashAttention2Library(
        backend,
        _function(backend, found, "flash_attn_with_kvcache"),
        _function(backend, found, "flash_attn_varlen_func"),
    )


def places_of_flash_attention_3(
    build: Literal["auto", "vllm", "upstream"] = "auto", module: Module = None
) -> Mapping[str | ModuleType, Layout]:
    """Return where to look for a build of FlashAttention 3, in turn, and its layout there.

    Args:
        build: Whose; ``"auto"`` takes vLLM's if vLLM is installed, else the original's.
        module: Where that build is, if not in its usual place. Needs a ``build``.

    Raises:
        TypeError: For a module that is neither one nor the name of one.
        ValueError: For another ``build``, or a module without one.
    """
    check_module("FlashAttention 3", module)
    if build not in ("auto", *_PACKAGES):
        raise ValueError(f"build: expected 'auto', 'vllm' or 'upstream', got {build!r}")
    if build == "auto":
        if module is not None:
            raise ValueError("build: expected 'vllm' or 'upstream' beside a module, got 'auto'")
        layouts = tuple(_PACKAGES)
    else:
        layouts = (build,)
    return {
        place: layout
        for layout in layouts
        for place in (_PACKAGES[layout] if module is None else (module,))
    }


def find_flash_attention_3(places: Mapping[str | ModuleType, Layout]) -> FlashAttention3Library:
    """Import a build of FlashAttention 3.

    Args:
        places: As :func:`places_of_flash_attention_3` returns them.

    Raises:
        ModuleNotFoundError: None is installed.
        UnsupportedBuildError: The first that is lacks a function.
    """
    layout, found = _first("flash_attn3", places, "vllm")
    backend = f"flash_attn3/{layout}"
    name = "flash_attn_varlen_func" if layout == "vllm" else "flash_attn_with_kvcache"
    return FlashAttention3Library(
        backend,
        layout,
        _function(backend, found, "get_scheduler_metadata"),
        _function(backend, found, name),
    )


def _first(
    backend: str, places: Mapping[str | ModuleType, _T], extra: str
) -> tuple[_T, ModuleType]:
    """Return what belongs to the first module that is installed, and the module."""
    for place, what in places.items():
        if isinstance(place, ModuleType):
            return what, place
        try:
            return what, import_module(place)
        except ModuleNotFoundError as error:
            # Of the package itself; one that is missing inside it is another fault.
            missing = error.name or ""
            if place != missing and not place.startswith(f"{missing}."):
                raise
    names = [str(place) for place in places]
    raise ModuleNotFoundError(
        f"{backend}: expected {' or '.join(names)} to be installed, got none. There is no kernel "
        f"to plan for. Install it, or the extra: pip install 'graphshare[{extra}]'",
        name=names[0],
    )


def _function(backend: str, module: ModuleType, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if not callable(function):
        raise UnsupportedBuildError(
            f"{backend}: {module.__name__}",
            expected=f"a function {name}",
            got="none",
            consequence="States for it cannot be built",
            remedy="Install a build of FlashAttention that has it",
            backend=backend,
        )
    return function
