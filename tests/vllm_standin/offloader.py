"""Who brings weights to the GPU: here, nobody has to."""

from __future__ import annotations


class BaseOffloader:
    def sync_prev_onload(self):
        pass


class NoopOffloader(BaseOffloader):
    pass


_instance = NoopOffloader()


def get_offloader():
    return _instance


def set_offloader(instance):
    global _instance
    _instance = instance
