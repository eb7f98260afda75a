"""Every test here runs on each capture backend; ``cuda`` is skipped without a GPU."""

from __future__ import annotations

import pytest
import torch

from graphshare.capture import CaptureBackend, make_backend


@pytest.fixture(params=["tape", pytest.param("cuda", marks=pytest.mark.gpu)], scope="session")
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def backend(kind: str) -> CaptureBackend:
    return make_backend(kind)


@pytest.fixture
def device(backend: CaptureBackend) -> torch.device:
    return backend.device


@pytest.fixture
def generator(device: torch.device) -> torch.Generator:
    """The generator that operators on the device draw from unless told otherwise."""
    if device.type == "cpu":
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[device.index]
