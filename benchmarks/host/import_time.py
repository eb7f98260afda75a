"""What importing graphshare adds to importing torch, in interpreters that were just started.

Each interpreter imports torch, reads the clock, imports graphshare, and reads it again. In turn
with it another one imports torch alone, so that the whole processes can be compared as well;
that includes the start and the end, and is noisier by far.

    python -m benchmarks.host.import_time [--json PATH] [--rounds N]
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from benchmarks._measure import bootstrap
from benchmarks._turns import Figure, arguments, report

ROOT = Path(__file__).parents[2]
TARGET_MS = 50.0
TORCH = "import torch"
BOTH = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import graphshare
end = time.perf_counter()
print(middle - start, end - middle)
"""


def _run(code: str) -> tuple[float, str]:
    start = perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    )
    return perf_counter() - start, done.stdout


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, rounds=15).parse_args(argv)
    torch_ms: list[float] = []
    added_ms: list[float] = []
    wall_ms: list[float] = []
    for number in range(-1, options.rounds):  # the first reads files from the disk
        order = (TORCH, BOTH) if number % 2 else (BOTH, TORCH)
        results = {code: _run(code) for code in order}
        if number < 0:
            continue
        of_torch, of_graphshare = map(float, results[BOTH][1].split())
        torch_ms.append(of_torch * 1e3)
        added_ms.append(of_graphshare * 1e3)
        wall_ms.append((results[BOTH][0] - results[TORCH][0]) * 1e3)
    figures = [
        Figure.of("import graphshare, after torch", bootstrap(added_ms), "ms", TARGET_MS),
        Figure.of("import torch", bootstrap(torch_ms), "ms"),
        Figure.of("whole process, over one without graphshare", bootstrap(wall_ms), "ms"),
    ]
    details = {"import_graphshare_ms": added_ms, "import_torch_ms": torch_ms, "wall_ms": wall_ms}
    report(options.json, "host/import_time", figures, details)


if __name__ == "__main__":
    main()
