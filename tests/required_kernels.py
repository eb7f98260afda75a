"""What becomes of a test whose kernel library is not installed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import pytest

_T = TypeVar("_T")


def required(make: Callable[[], _T]) -> _T:
    """Return what ``make`` returns; skip the test where a library is missing.

    With ``GRAPHSHARE_REQUIRE_KERNELS=1`` a missing library is a failure.
    """
    value = os.environ.get("GRAPHSHARE_REQUIRE_KERNELS", "0")
    if value not in ("0", "1"):
        raise pytest.UsageError(f"GRAPHSHARE_REQUIRE_KERNELS: expected 0 or 1, got {value!r}")
    try:
        return make()
    except ModuleNotFoundError as error:
        if value == "1":
            pytest.fail(f"GRAPHSHARE_REQUIRE_KERNELS=1, and {error}", pytrace=False)
        pytest.skip(str(error))
