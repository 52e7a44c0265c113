"""The command line; ``benchmarks/README.md`` says what comes out."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from benchmarks.train import report
from benchmarks.train.run import Runner
from benchmarks.train.suites import SUITES


def main(arguments: list[str] | None = None) -> int:
    """Run a suite, or print the table of a folder. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=DESCRIPTION)
    parser.add_argument("--suite", choices=SUITES, help="what to measure")
    parser.add_argument(
        "--out",
        type=Path,
        help="directory of results; a case whose JSON file it has is not measured again",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="do not start what does not fit; default: the suite's own limit",
    )
    parser.add_argument(
        "--retry", action="store_true", help="measure again what failed or was not available"
    )
    parser.add_argument(
        "--table", type=Path, metavar="DIR", help="print the table of a folder, which may be empty"
    )
    options = parser.parse_args(arguments)
    if options.table is not None:
        print(report.short(options.table))
        return 0
    if options.suite is None or options.out is None:
        parser.error("give --suite and --out, or --table")
    signal.signal(signal.SIGTERM, _leave)
    return _run(options.suite, options.out, options.minutes, options.retry)


def _run(name: str, folder: Path, minutes: float | None, retry: bool) -> int:
    suite = SUITES[name]()
    if suite.device == "cuda" and not has_gpu():
        print(
            f"--suite {name}: torch sees no GPU here. It measures on one. Use --suite smoke on a "
            "CPU.",
            file=sys.stderr,
        )
        return 2
    runner = Runner(
        suite, folder, minutes=suite.minutes if minutes is None else minutes, retry=retry
    )
    runner.run()
    if runner.ranks.rank == 0:
        print((folder / "README.md").read_text())
    return 0


def has_gpu() -> bool:
    """Whether torch sees one; makes no CUDA context."""
    import torch

    return torch.cuda.is_available()


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


DESCRIPTION = (
    "Measure training steps of one model, by implementation. Resumable; tables are rewritten "
    "after every case."
)

if __name__ == "__main__":
    raise SystemExit(main())
