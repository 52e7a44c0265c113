"""``python -m shardkit demo``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from shardkit.demo import run_demo
from shardkit.errors import ShardkitError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` (by default the process's) name, and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return run_demo(ranks=options.ranks, steps=options.steps, device=options.device)
    except ShardkitError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130  # 128 + SIGINT, as shells count


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m shardkit", description=sys.modules["shardkit"].__doc__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train a small transformer sharded and plain, and compare",
        description="Shard a small byte-level transformer, train it on Python's own sources, and check it against "
        "the same model trained without sharding. Under torchrun its ranks are used, else they are started here.",
    )
    demo.add_argument("--ranks", type=_positive, help="processes to start (default: one for each GPU, else 2)")
    demo.add_argument("--steps", type=_positive, default=60, help="optimizer steps (default: %(default)s)")
    demo.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number


if __name__ == "__main__":
    sys.exit(main())
