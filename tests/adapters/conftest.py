"""What the tests of the toy engine share."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Operators this small only wait for each other on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
