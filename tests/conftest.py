"""What all tests share: Hypothesis profiles, and what becomes of GPU tests without a GPU."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

# A property that deserves more examples than the rest multiplies what its profile says, so that
# `deep` deepens it too: @settings(max_examples=10 * settings.default.max_examples).
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=50, **_COMMON)
settings.register_profile(
    "ci", max_examples=200, derandomize=True, database=None, print_blob=True, **_COMMON
)
settings.register_profile("deep", max_examples=5_000, print_blob=True, **_COMMON)
# A failure as it was found, where the minutes that shrinking takes are not to be had.
settings.register_profile(
    "unshrunk",
    max_examples=50,
    print_blob=True,
    phases=[phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)],
    **_COMMON,
)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if "CI" in os.environ else "dev")
)

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # workers that each take every core only slow each other down


def _gpu_required() -> bool:
    value = os.environ.get("GRAPHSHARE_REQUIRE_GPU", "0")
    if value not in ("0", "1"):
        raise pytest.UsageError(f"GRAPHSHARE_REQUIRE_GPU: expected 0 or 1, got {value!r}")
    return value == "1"


def pytest_configure(config: pytest.Config) -> None:
    _gpu_required()  # a misspelt switch must not look like a GPU run that passed


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None or torch.cuda.is_available():
        return
    if _gpu_required():
        pytest.fail("GRAPHSHARE_REQUIRE_GPU=1, and torch finds no CUDA device", pytrace=False)
    pytest.skip("needs a CUDA device")
