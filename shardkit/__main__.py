"""``python -m shardkit COMMAND``: one module for each command, with ``add_parser(commands)`` and
``run(options)``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from shardkit.errors import ShardkitError

COMMANDS = {  # the module of each, in the order of --help
    "demo": "shardkit.demo",
    "plan": "shardkit.memory.report",
    "translate": "shardkit.fsdp1.configs.cli",
    "convert": "shardkit.checkpoint.convert",
    "env": "shardkit.testing.env",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command named by ``arguments`` (by default ``sys.argv``) and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # all of them for --help
    named = [arguments[0]] if arguments and arguments[0] in COMMANDS else COMMANDS
    about = "Shard a whole model with PyTorch FSDP2, and read the plan before it runs."
    parser = argparse.ArgumentParser(prog="python -m shardkit", description=about)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name in named:
        command = importlib.import_module(COMMANDS[name])
        command.add_parser(commands).set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except ShardkitError as error:
        print(error, file=sys.stderr)
        return 1


def script() -> int:
    """Run ``main`` for the console script ``shardkit``.

    A script's import path begins with its own directory. ``python -m shardkit`` finds the models of
    the working directory, so ``shardkit`` does too.
    """
    sys.path.insert(0, os.getcwd())
    return main()


if __name__ == "__main__":
    sys.exit(main())
