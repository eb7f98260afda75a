"""Graphs on memory that has moved, the old memory given back to the device; for compute-sanitizer.

    compute-sanitizer --report-api-errors no --tool memcheck python -m tests.gpu.rebound_graphs

Each buffer is an allocation of the driver, just as large as it has to be, and freed with the last
tensor on it: PyTorch's allocator would keep the memory, and an access to it would be no error.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
from types import FrameType
from typing import Any, ClassVar

import torch
from cuda.bindings import driver

from graphshare import share_states
from tests.movable import Model, MovableOwner, key_of, pool_of

KEYS = [key_of(8), key_of(4), key_of(1)]
RESUMABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
TYPES = {torch.float32: "<f4", torch.int32: "<i4", torch.int64: "<i8"}


class Memory:
    """An allocation of the driver, which lives as long as a tensor on it."""

    alive: ClassVar[dict[int, str]] = {}
    """By address, what it is for."""

    def __init__(self, name: str, like: torch.Tensor) -> None:
        code, address = driver.cuMemAlloc(like.nbytes)
        if int(code):
            raise SystemExit(f"cuMemAlloc: {code}")
        self._address = address
        self.__cuda_array_interface__ = {
            "shape": tuple(like.shape),
            "typestr": TYPES[like.dtype],
            "data": (int(address), False),
            "version": 2,
        }
        Memory.alive[int(address)] = name

    def __del__(self) -> None:
        del Memory.alive[int(self._address)]
        driver.cuMemFree(self._address)


def alone(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in an allocation of its own."""
    copy = torch.as_tensor(Memory(name, tensor), device="cuda")
    return copy.copy_(tensor)


def move(holder: Any, names: tuple[str, ...]) -> dict[torch.Tensor, torch.Tensor]:
    """Put the tensors that an object holds elsewhere."""
    moves = {}
    for name in names:
        old = getattr(holder, name)
        moves[old] = alone(f"{type(holder).__name__}.{name}", old)
        setattr(holder, name, moves[old])
    return moves


def clear_frames() -> None:
    """Let go of what calls that have returned had in their variables.

    The sanitizer keeps the frames of Python in which the driver was called, for its reports; they
    would keep alive what a capture saw. Without it there are none.
    """
    for each in gc.get_objects():
        if type(each) is FrameType and not each.f_code.co_flags & RESUMABLE:
            with contextlib.suppress(RuntimeError):  # it is running
                each.clear()


def main() -> None:
    owner, models = MovableOwner("cuda"), [Model("cuda"), Model("cuda", seed=1)]
    holders = [(owner, ("lengths", "table", "slots"))]
    holders += [(each, ("x", "cache", "weight", "out")) for each in models]
    for holder, names in holders:
        move(holder, names)
    buffers = len(Memory.alive)
    target, draft = pool_of("cuda", owner=owner), pool_of("cuda", "draft")
    shared = share_states(target, draft)
    for pool, model in zip((target, draft), models, strict=True):
        pool.capture(KEYS, model.forward)
    nodes = 0
    for turn in range(3):
        old = set(Memory.alive)
        moves = {}
        for holder, names in holders:
            moves |= move(holder, names)
        nodes += target.rebind(moves).nodes
        torch.cuda.synchronize()  # what was launched before reads the old memory
        del moves
        clear_frames()
        gc.collect()
        held = [name for address, name in Memory.alive.items() if address in old]
        if held:
            raise SystemExit(f"turn {turn}: still held: {', '.join(held)}")
        shared.prove()
        for key in KEYS:
            target.refresh(key, turn + 2)
            for pool, model in zip((target, draft), models, strict=True):
                want = model.expected(key, pool.states[key])
                got = pool.replay(key)
                torch.cuda.synchronize()
                if not torch.allclose(got["hidden"], want):
                    raise SystemExit(f"wrong numbers: {pool.name}, {key}")
                del got  # one of the outputs lies in memory that moves next
    print(f"rebound {nodes} nodes in three turns, {buffers} old buffers freed in each: right")


if __name__ == "__main__":
    main()
