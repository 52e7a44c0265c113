"""``python -m shardkit translate FILE``: translate a configuration of another tool to FSDP2."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from shardkit.fsdp1.configs import read_config
from shardkit.fsdp1.configs.formats import FORMATS
from shardkit.fsdp1.configs.target import Ranks, build
from shardkit.memory.report import positive
from shardkit.planning.build import named_model

USAGE = 2  # argparse's own exit code for invalid commands


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command to ``commands``, of ``ArgumentParser.add_subparsers``; return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "translate",
        help="translate a configuration of FSDP1 to FSDP2, with a note for each key",
        description="Translate a configuration file of accelerate, transformers or axolotl. "
        "Prints a note for each key and, with --model, torch code or the plan. Exit code: 0 if "
        "everything was translated, 1 if anything was refused, 2 if the command is invalid.",
    )
    parser.add_argument("file", help="a JSON file, or a YAML file if PyYAML is installed")
    parser.add_argument("--model", help="package.module:factory, or a config.json of transformers")
    parser.add_argument("--to", choices=("torch", "plan"), help="what to print, of the model")
    parser.add_argument("--world", type=positive, metavar="RANKS", help="number of ranks")
    parser.add_argument("--ranks-per-node", type=positive, metavar="RANKS")
    parser.add_argument("--format", choices=tuple(FORMATS), help="(default: by its keys)")
    return parser


def run(options: argparse.Namespace) -> int:
    """Print the translation; return 1 if anything was refused, else 0."""
    if options.to and not options.model:
        print(f"translate: --to {options.to} needs --model", file=sys.stderr)
        return USAGE
    ranks = Ranks(options.world, options.ranks_per_node)
    reading = read_config(options.file, ranks, format=options.format)
    width = max((len(note.argument) for note in reading.notes), default=0)
    print(f"# {reading.format}")
    for note in reading.notes:
        line = f"# {note.support:<9} {note.argument:<{width}}  {note.value}: {note.sentence}"
        print(line.replace("\n", " "))
    if reading.refused:
        print(f"translate: refused keys: {len(reading.refused)}", file=sys.stderr)
        return 1
    if options.model:
        translation = build(reading.target, named_model(options.model), reading.notes)
        print()
        print(translation.to_python() if options.to == "torch" else translation.plan)
    return 0
