"""A class of graphs as torch's: its method, of torch's own module, calls that of its base."""

from __future__ import annotations

import pytest
import torch

LAUNCH = "        super().replay()"
_SOURCE = """
class CUDAGraph(base):
    def replay(self):
{}
"""


def give_torch_graphs(monkeypatch: pytest.MonkeyPatch, base: type, body: str = LAUNCH) -> type:
    """Put such a class in the place of ``torch.cuda.CUDAGraph``, and return it.

    Args:
        monkeypatch: Undoes it.
        base: What launches.
        body: Of the method.
    """
    names = vars(torch.cuda.graphs)  # its globals, as those of torch's method
    monkeypatch.setitem(names, "base", base)
    made: dict[str, type] = {}
    exec(_SOURCE.format(body), names, made)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", made["CUDAGraph"])
    return made["CUDAGraph"]
