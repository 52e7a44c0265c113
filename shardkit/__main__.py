"""``python -m shardkit COMMAND``: one module for each command, with its parser and its run."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from shardkit.errors import ShardkitError

COMMANDS = {  # the module of each, in the order of --help
    "demo": "shardkit.demo",
    "plan": "shardkit.memory.report",
    "translate": "shardkit.fsdp1.translate.cli",
    "audit": "shardkit.fsdp1.audit",
    "convert": "shardkit.checkpoint.convert",
    "env": "shardkit.testing.env",
}


class Command(Protocol):
    """What the module of a command must define."""

    def add_parser(self, commands: Any) -> argparse.ArgumentParser:  # argparse has no public name for its type
        """Return the parser of the command, added to the result of ``ArgumentParser.add_subparsers``."""

    def run(self, options: argparse.Namespace) -> int:
        """Run it and return its exit code; on a ShardkitError the error is printed and the exit code is 1."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command named by ``arguments`` (by default ``sys.argv``) and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    named = [arguments[0]] if arguments and arguments[0] in COMMANDS else COMMANDS  # all of them for --help
    about = (sys.modules["shardkit"].__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m shardkit", description=about)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name in named:
        command: Command = importlib.import_module(COMMANDS[name])
        command.add_parser(commands).set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except ShardkitError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
