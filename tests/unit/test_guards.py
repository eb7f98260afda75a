"""Guards of torch are tried before they are trusted, and what they do not tell apart is seen."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphshare.state import LayoutChecker, _guards
from graphshare.state._guards import guard_maker


def test_the_versions_we_know_have_guards() -> None:
    # Without them the checks take nearly twice as long, and are as right.
    if (2, 11) <= tuple(map(int, torch.__version__.split(".")[:2])) <= (2, 13):
        assert guard_maker() is not None


def test_guards_come_without_the_compiler() -> None:
    code = (
        "import sys, torch; from graphshare.state import LayoutChecker; t = torch.zeros(3);"
        "c = LayoutChecker([t], 'cpu'); assert c.matches([t]) and c.matches([t[:]]);"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, env=environment)


def test_a_guard_keeps_no_tensor() -> None:
    make_guard = guard_maker()
    if make_guard is None:
        pytest.skip("this torch has no guards that can be trusted")
    tensors = [torch.zeros(2, i) for i in range(1, 4)]
    gone = [weakref.ref(tensor) for tensor in tensors]
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
    guard = make_guard(tensors)
    assert guard(*tensors)
    tensors.clear()
    gc.collect()
    assert [one() for one in gone + storages] == [None] * 6
    assert guard(*(torch.zeros(2, i) for i in range(1, 4)))


def raises(*_: Any) -> Any:
    raise RuntimeError


class Liar:
    """A guard that says what it is told, of anything."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __call__(self, tensors: Any) -> Any:
        return lambda *_: self.answer


@pytest.mark.parametrize(
    "make", [raises, lambda tensors: raises, Liar(True), Liar(False), Liar(None), Liar(1)]
)
def test_guards_that_are_not_what_they_were_are_not_used(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_guards, "_tried", [])
    monkeypatch.setattr(_guards, "_make", make)
    assert guard_maker() is None
    tensor = torch.zeros(3)
    check = LayoutChecker([tensor], "cpu")
    assert check.matches([tensor[:]])
    assert not check.matches([tensor[1:]])


# What a guard must tell apart; each leaves one of them out.
ASPECTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "type": type,
    "shape": lambda t: t.shape,
    "stride": lambda t: t.stride(),
    "dtype": lambda t: t.dtype,
    "device": lambda t: t.device,
}


@pytest.mark.parametrize("blind", [*ASPECTS, "second", "identity", None])
def test_guards_that_are_blind_in_one_eye_are_not_used(
    blind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def aspects(tensors: Any) -> Any:
        if any(not isinstance(tensor, torch.Tensor) for tensor in tensors):
            return None
        if blind == "second":
            tensors = tensors[:1]
        if blind == "identity":
            return [id(tensor) for tensor in tensors]
        seen = [look for name, look in ASPECTS.items() if name != blind]
        return [[look(tensor) for look in seen] for tensor in tensors]

    def make(tensors: Any) -> Any:
        expected = aspects(tensors)
        return lambda *got: aspects(got) == expected

    monkeypatch.setattr(_guards, "_tried", [])
    monkeypatch.setattr(_guards, "_make", make)
    assert (guard_maker() is None) is (blind is not None)
