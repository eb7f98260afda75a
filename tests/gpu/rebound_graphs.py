"""Graphs on memory that has moved, the old memory given back to the device; for compute-sanitizer.

    compute-sanitizer --tool memcheck python -m tests.gpu.rebound_graphs

Each tensor is a segment of the allocator of its own, so that an access to one that was freed is an
access to memory that nobody has.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

from graphshare import share_states
from tests.movable import Model, MovableOwner, key_of, pool_of

KEYS = [key_of(8), key_of(4), key_of(1)]
SEGMENT_BYTES = 12 << 20  # from 10 MiB on PyTorch's allocator makes a segment for each


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that lies at the start of a segment of its own."""
    segment = torch.zeros(SEGMENT_BYTES, dtype=torch.uint8, device="cuda")
    copy = segment.view(tensor.dtype)[: tensor.numel()].view(tensor.shape)
    return copy.copy_(tensor)


def move(holder: Any, names: tuple[str, ...]) -> dict[torch.Tensor, torch.Tensor]:
    """Put the tensors that an object holds elsewhere."""
    moves = {}
    for name in names:
        old = getattr(holder, name)
        moves[old] = alone(old)
        setattr(holder, name, moves[old])
    return moves


def main() -> None:
    owner, models = MovableOwner("cuda"), [Model("cuda"), Model("cuda", seed=1)]
    holders = [(owner, ("lengths", "table", "slots"))]
    holders += [(each, ("x", "cache", "weight", "out")) for each in models]
    for holder, names in holders:
        move(holder, names)
    target, draft = pool_of("cuda", owner=owner), pool_of("cuda", "draft")
    shared = share_states(target, draft)
    for pool, model in zip((target, draft), models, strict=True):
        pool.capture(KEYS, model.forward)
    nodes = 0
    for turn in range(3):
        moves = {}
        for holder, names in holders:
            moves |= move(holder, names)
        nodes += target.rebind(moves).nodes
        del moves
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        freed = before - torch.cuda.memory_reserved()
        print(f"turn {turn}: {freed >> 20} MiB of old memory freed")
        if freed < 11 * SEGMENT_BYTES:
            raise SystemExit(f"only {freed} bytes of old memory were free")
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
    print(f"rebound {nodes} nodes in three turns, old memory freed: right")


if __name__ == "__main__":
    main()
