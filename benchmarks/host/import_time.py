"""What importing graphshare adds to importing torch, in interpreters that were just started.

Each interpreter imports torch, reads the clock, imports every name of graphshare (the package
itself loads none before it is asked for), and reads the clock again: the two are paired in one
process, and what differs between processes is in neither. On a busy machine the processor's time
says more than the time that passed.

    python -m benchmarks.host.import_time [--json PATH] [--rounds N]
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks._measure import bootstrap
from benchmarks._turns import Figure, arguments, report

ROOT = Path(__file__).parents[2]
TARGET_MS = 50.0
CODE = """
import time
start = time.perf_counter()
import torch
middle, busy = time.perf_counter(), time.process_time()
from graphshare import *
end = time.perf_counter()
print(middle - start, end - middle, time.process_time() - busy)
"""

# An installed package has its bytecode beside it; the run that does not count writes it.
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
}


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, rounds=21).parse_args(argv)
    torch_ms: list[float] = []
    added_ms: list[float] = []
    processor_ms: list[float] = []
    for number in range(-1, options.rounds):
        done = subprocess.run(
            [sys.executable, "-c", CODE],
            check=True,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=ENVIRONMENT,
        )
        if number >= 0:
            of_torch, of_graphshare, busy = map(float, done.stdout.split())
            torch_ms.append(of_torch * 1e3)
            added_ms.append(of_graphshare * 1e3)
            processor_ms.append(busy * 1e3)
    figures = [
        Figure.of("import graphshare, after torch", bootstrap(added_ms), "ms", TARGET_MS),
        Figure.of("import graphshare, processor time", bootstrap(processor_ms), "ms"),
        Figure.of("import torch", bootstrap(torch_ms), "ms"),
    ]
    details = {
        "import_graphshare_ms": added_ms,
        "import_graphshare_processor_ms": processor_ms,
        "import_torch_ms": torch_ms,
    }
    report(options.json, "host/import_time", figures, details)


if __name__ == "__main__":
    main()
