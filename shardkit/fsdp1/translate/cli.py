"""``python -m shardkit translate FILE``: translate a configuration of another tool to FSDP2."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from shardkit.errors import TranslationError
from shardkit.fsdp1.configs import FORMATS, read_config
from shardkit.fsdp1.configs.target import Ranks, accelerate2, build, comments, notes_on_accelerate, torch_code
from shardkit.memory.report import positive
from shardkit.planning.build import named_model

USAGE = 2  # argparse's own exit code for invalid commands


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command to ``commands``, which ``ArgumentParser.add_subparsers`` returned, and return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "translate",
        help="translate a configuration of FSDP1 to FSDP2, with a note for each key",
        description="Translate a configuration file of accelerate, transformers, axolotl or ROLL to FSDP2, with a note "
        "for each key. Exit code: 0 if everything was translated, 1 if anything was refused, which prints the notes "
        "only, 2 if the command itself is invalid. Example: python -m shardkit translate fsdp.yaml --to torch --model "
        "my.package:build --world 16 --ranks-per-node 8",
    )
    parser.add_argument("file", help="a JSON file, or a YAML file if PyYAML is installed")
    to = "print accelerate's file with fsdp_version 2, fully_shard code, or the plan (default: %(default)s)"
    parser.add_argument("--to", choices=("accelerate2", "torch", "plan"), default="accelerate2", help=to)
    parser.add_argument("--world", type=positive, metavar="RANKS", help="number of ranks, if not in the file")
    parser.add_argument(
        "--ranks-per-node", type=positive, metavar="RANKS", help="ranks on a node, for hybrid strategies"
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="package.module:factory, or a config.json of transformers; needed for --to torch and plan",
    )
    parser.add_argument("--format", choices=tuple(FORMATS), help="format of the file (default: recognized by its keys)")
    return parser


def run(options: argparse.Namespace) -> int:
    """Print the translation and return 1 if anything was refused, 2 if the command itself is invalid, else 0."""
    if options.to != "accelerate2" and options.model is None:
        print(f"translate: --to {options.to} needs --model, whose modules it names", file=sys.stderr)
        return USAGE
    try:
        return _translate(options)
    except TranslationError as error:  # which names the arguments of from_config
        text = str(error).replace("world_size=", "--world ").replace("ranks_per_node=", "--ranks-per-node ")
        raise TranslationError(text.replace("ranks_per_node", "--ranks-per-node")) from error


def _translate(options: argparse.Namespace) -> int:
    ranks = Ranks(options.world, options.ranks_per_node)
    reading = read_config(options.file, ranks, format=options.format)
    model = None if options.model is None else named_model(options.model)
    notes, text = reading.notes, ""
    if options.to == "accelerate2" and not reading.refused:
        notes = (*notes, *notes_on_accelerate(reading.target, model))
        text = accelerate2(reading.target)
    elif model is not None and not reading.refused:
        made = build(reading.target, model, notes, ranks)
        notes, text = made.notes, torch_code(made) if options.to == "torch" else str(made.plan)
    refused = sum(note.support == "refused" for note in notes)
    text = "" if refused else text
    if refused:
        print(f"translate: {refused} refused, so no translation is printed", file=sys.stderr)
    if options.to == "plan":
        print("\n".join([*([text] if text else []), *(line.removeprefix("# ") for line in comments(reading, notes))]))
    else:
        print("\n".join([*comments(reading, notes), *(["", text.rstrip("\n")] if text else [])]))
    return int(refused > 0)
