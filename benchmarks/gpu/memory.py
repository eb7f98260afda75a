"""As `benchmarks.host.memory`, with CUDA graphs, and the device's memory read as well.

The device is waited for at every hundredth step, so that the queue of launches never fills.

    python -m benchmarks.gpu.memory [--json PATH] [--rounds N] [--device cpu]
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks._states import device_of
from benchmarks._turns import arguments
from benchmarks.host.memory import measure


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, rounds=100_000)
    parser.add_argument("--device", default="cuda", help="cpu exercises the code on the tape")
    options = parser.parse_args(argv)
    measure("gpu/memory", device_of(options.device), steps=options.rounds, path=options.json)


if __name__ == "__main__":
    main()
