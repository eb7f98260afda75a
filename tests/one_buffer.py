"""An owner of one buffer, and pools on it, for tests that look at the pool alone."""

from __future__ import annotations

import torch

from graphshare import BatchDescriptor, GraphPool, share_states

BIG, SMALL = KEYS = BatchDescriptor(4, 4), BatchDescriptor(2, 2)


class Owner:
    """One buffer ``[8]`` float32; a key's state is its first rows, filled with the batch."""

    def __init__(self):
        self.buffer = torch.zeros(8)
        self.builds = []

    def build(self, key, batch, phase):
        self.builds.append((key, batch, phase))
        state = self.buffer[: self.rows(key)]
        return state.fill_(0.0 if batch is None else batch)

    def rows(self, key):
        return key.num_tokens


class Apart(Owner):
    """A buffer for each key."""

    def __init__(self):
        super().__init__()
        self.apart = {}

    def build(self, key, batch, phase):
        self.buffer = self.apart.setdefault(key, torch.zeros(8))
        return super().build(key, batch, phase)

    def writes(self, key):
        return [self.apart[key]]


def double(key, state):
    return state * 2


def make(owner=None, **options):
    owner = Owner() if owner is None else owner
    return GraphPool(options.pop("name", "pool"), owner=owner, device="cpu", **options)


def captured(owner=None, keys=(BIG, SMALL), forward=double, **options):
    pool = make(owner, **options)
    pool.capture(keys, forward)
    return pool


def served(pool, key, batch):
    pool.refresh(key, batch)
    return pool.replay(key).tolist()


def triple(key, state):
    return state * 3


def borrower(name="draft", **options):
    return GraphPool(name, device="cpu", **options)


def pair(owner=None, *, keys=KEYS, options=None, **loan):
    """A target that has captured, a draft that borrows from it and has captured, the handle."""
    target, draft = make(owner, name="target"), borrower(**(options or {}))
    shared = share_states(target, draft, **loan)
    target.capture(KEYS, double)
    draft.capture(keys, triple)
    return target, draft, shared
