"""`pool.capture` with CUDA graphs against loops of `torch.cuda.CUDAGraph`, written by hand.

One loop synchronises and empties the allocator's cache once, as `capture` does; the other uses
the context manager `torch.cuda.graph`, which does so before every capture.

    python -m benchmarks.gpu.capture [--json PATH] [--rounds N] [--sizes N] [--device cpu]
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks._capture import measure
from benchmarks._states import device_of
from benchmarks._turns import arguments


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, rounds=9)
    parser.add_argument("--sizes", type=int, default=35, help="sizes to capture")
    parser.add_argument("--layers", type=int, default=32, help="of the decoder")
    parser.add_argument("--device", default="cuda", help="cpu exercises the code on the tape")
    options = parser.parse_args(argv)
    measure(
        "gpu/capture",
        device_of(options.device),
        layers=options.layers,
        width=512,
        sizes=options.sizes,
        rounds=options.rounds,
        path=options.json,
    )


if __name__ == "__main__":
    main()
