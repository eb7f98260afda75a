"""The one call to the CUDA driver that PyTorch has no name for."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import torch

__all__ = ["begin_capture"]

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL(_LIBRARY)  # loaded already: PyTorch drives the device through it


def begin_capture(stream: torch.cuda.Stream) -> None:
    """Put a stream into capture, behind PyTorch's back.

    Source: CUDA driver API, ``cuStreamBeginCapture_v2``.

    Raises:
        RuntimeError: The driver refuses, with its code.
    """
    handle = ctypes.c_void_p(stream.cuda_stream)
    code = _driver().cuStreamBeginCapture_v2(handle, ctypes.c_int(_THREAD_LOCAL))
    if code:
        raise RuntimeError(f"cuStreamBeginCapture returned CUresult {code}")
