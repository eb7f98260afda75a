"""Bookkeeping of a borrowed replay, by key and by bind, over `replay()` of the same CUDA graph.

The graph is one small kernel, and the device is waited for between rounds, outside of the timed
calls: launches are asynchronous, and one that waits for a place in the queue would be timed too.

    python -m benchmarks.gpu.replay [--json PATH] [--rounds N] [--device cpu]
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks._replay import measure
from benchmarks._states import device_of
from benchmarks._turns import arguments


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, rounds=1001)
    parser.add_argument("--device", default="cuda", help="cpu exercises the code on the tape")
    options = parser.parse_args(argv)
    device = device_of(options.device)
    measure("gpu/replay", device, graphs=True, rounds=options.rounds, path=options.json)


if __name__ == "__main__":
    main()
