"""``python -m shardkit COMMAND``: one module per command, which says how it is called and runs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from shardkit.checkpoint import cli as convert
from shardkit.demo import cli as demo
from shardkit.errors import ShardkitError
from shardkit.fsdp1.audit import cli as audit
from shardkit.fsdp1.translate import cli as translate
from shardkit.memory import cli as plan


class Command(Protocol):
    """What the module of a command offers."""

    def add_parser(self, commands: Any) -> argparse.ArgumentParser:  # argparse has no public name for its type
        """The parser of the command, added to ``commands``, which ``ArgumentParser.add_subparsers`` returned."""

    def run(self, options: argparse.Namespace) -> int:
        """Run it and return its exit code; a ShardkitError is printed, and the exit code is 1."""


COMMANDS: tuple[Command, ...] = (demo, plan, translate, audit, convert)  # in the order of --help


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` (by default the process's) name, and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except ShardkitError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130  # 128 + SIGINT, as shells count


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m shardkit", description=sys.modules["shardkit"].__doc__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands).set_defaults(run=command.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
