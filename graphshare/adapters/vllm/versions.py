"""The one place that knows which versions of vLLM there are."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphshare.adapters.vllm.family import Family

__all__ = ["SUPPORTED", "find_family"]

SUPPORTED = {
    "0.20.2": "v0_20_2",
    "0.21.0": "v0_21_0",
    "0.25.1": "v0_25_1",
    "0.26.0": "v0_26_0",
}
"""Version of vLLM to the module that knows it; each was seen to run with graphshare on a GPU."""


def find_family() -> tuple[Family | None, str]:
    """Find what is known of the vLLM that is installed.

    Returns:
        The family, and the version; or ``None``, and why this vLLM is left alone.
    """
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None, "vLLM is not installed as a package"
    # A build for another CUDA says so after a plus sign.
    release = version.partition("+")[0]
    module = SUPPORTED.get(release)
    if module is None:
        return None, f"vLLM {version}; supported are {', '.join(SUPPORTED)}"
    family: Family = importlib.import_module(f"graphshare.adapters.vllm.{module}").FAMILY
    return family, release
