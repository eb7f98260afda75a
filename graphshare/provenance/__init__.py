"""Which addresses a captured graph bakes in, and graphs put on other memory."""

from __future__ import annotations

import importlib
import typing

if typing.TYPE_CHECKING:
    from graphshare.capture.reading import Certainty as Certainty
    from graphshare.provenance.places import Place as Place
    from graphshare.provenance.places import Use as Use
    from graphshare.provenance.rebinding import Rebinding as Rebinding
    from graphshare.provenance.report import Address as Address
    from graphshare.provenance.report import NodeReport as NodeReport
    from graphshare.provenance.report import Provenance as Provenance

__all__ = ["Address", "Certainty", "NodeReport", "Place", "Provenance", "Rebinding", "Use"]

# Loaded when they are first asked for: pools import this package, and most never read a graph.
_HOMES = {
    "Address": "graphshare.provenance.report",
    "Certainty": "graphshare.capture.reading",
    "NodeReport": "graphshare.provenance.report",
    "Place": "graphshare.provenance.places",
    "Provenance": "graphshare.provenance.report",
    "Rebinding": "graphshare.provenance.rebinding",
    "Use": "graphshare.provenance.places",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
