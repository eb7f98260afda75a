"""Bookkeeping of a borrowed replay, by key and by bind, over a bare launch that does nothing.

The launch is registered through `capturing()` and `commit`, so that only bookkeeping shows.

    python -m benchmarks.host.replay [--json PATH] [--rounds N]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks._replay import measure
from benchmarks._turns import arguments


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, rounds=1001).parse_args(argv)
    cpu = torch.device("cpu")
    measure("host/replay", cpu, graphs=False, rounds=options.rounds, path=options.json)


if __name__ == "__main__":
    main()
