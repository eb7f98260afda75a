"""``GRAPHSHARE_VLLM``: whether and how graphshare takes part in vLLM."""

from __future__ import annotations

import enum
from collections.abc import Mapping

__all__ = ["VARIABLE", "Mode", "mode_from"]

VARIABLE = "GRAPHSHARE_VLLM"


class Mode(enum.Enum):
    """What ``GRAPHSHARE_VLLM`` may say."""

    OFF = "off"
    """Nothing is touched; the same as leaving it out."""
    ON = "on"
    """Draft prefills borrow; layout checked at each refresh, freshness at each replay."""
    STRICT = "strict"
    """The same, and at each replay the layout and the order of streams too."""
    VERIFY = "verify"
    """The same as ``on``, and every borrowed state is also built by the draft, and compared."""


def mode_from(environ: Mapping[str, str]) -> Mode:
    """Read the switch.

    Raises:
        ValueError: It has another value; names the good ones.
    """
    value = environ.get(VARIABLE, "")
    if not value:
        return Mode.OFF
    try:
        return Mode(value)
    except ValueError:
        good = ", ".join(mode.value for mode in Mode)
        raise ValueError(f"{VARIABLE}: expected one of {good}, got {value!r}") from None
