"""Each incident on the tape, and on CUDA graphs where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from graphshare import GraphPool
from tests.small_engine import Place


@pytest.fixture(params=["tape", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Place:
    return Place("cuda", "cuda:0") if request.param == "cuda" else Place("tape", "cpu")


@pytest.fixture
def make_pool(place: Place) -> Callable[..., GraphPool[Any]]:
    def make(name: str, **options: Any) -> GraphPool[Any]:
        return GraphPool(name, device=place.device, backend=place.backend, **options)

    return make
