"""`pool.capture` on the tape against a loop over the same backend, written by hand.

python -m benchmarks.host.capture [--json PATH] [--rounds N] [--sizes N]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks._capture import measure
from benchmarks._turns import arguments


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, rounds=11)
    parser.add_argument("--sizes", type=int, default=4, help="sizes to capture")
    parser.add_argument("--layers", type=int, default=32, help="of the decoder")
    options = parser.parse_args(argv)
    measure(
        "host/capture",
        torch.device("cpu"),
        layers=options.layers,
        width=32,
        sizes=options.sizes,
        rounds=options.rounds,
        path=options.json,
    )


if __name__ == "__main__":
    main()
