"""A Triton kernel; in a file of its own, since Triton reads its source."""

import triton
import triton.language as tl


@triton.jit
def scaled_add(x, y, out, scale, size, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(x + at, inside) * scale + tl.load(y + at, inside)
    tl.store(out + at, total, inside)
