"""As `benchmarks.host.refresh`, with tensors on a GPU.

Builds write nothing, so nothing is launched; only what is asked of a tensor differs by device.

    python -m benchmarks.gpu.refresh [--json PATH] [--rounds N] [--device cpu]
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks._states import device_of
from benchmarks._turns import arguments
from benchmarks.host.refresh import measure


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, rounds=1001)
    parser.add_argument("--device", default="cuda", help="cpu exercises the code without a GPU")
    options = parser.parse_args(argv)
    device = device_of(options.device)
    measure("gpu/refresh", device, rounds=options.rounds, path=options.json)


if __name__ == "__main__":
    main()
