"""What the tests of the engines share."""

import pytest
import torch

from graphshare.adapters.vllm import deactivate
from graphshare.adapters.vllm.versions import SUPPORTED
from tests.vllm_standin.installed import Installed


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Operators this small only wait for each other on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=sorted(SUPPORTED))
def vllm(request, monkeypatch):
    """A small vLLM of each version that is known; graphshare is asleep again afterwards."""
    yield Installed(request.param, monkeypatch)
    deactivate()
