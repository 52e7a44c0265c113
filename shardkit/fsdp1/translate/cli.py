"""``python -m shardkit translate FILE``: translate a configuration of another tool to FSDP2."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from typing import Any

from shardkit.fsdp1.configs import read_config, write
from shardkit.fsdp1.configs.recognize import FORMATS
from shardkit.fsdp1.configs.target import Ranks, Reading, build
from shardkit.fsdp1.translate.notes import Note
from shardkit.fsdp1.translate.shard import Translation
from shardkit.planning.named import named_model

USAGE = 2  # argparse's own exit code for invalid commands


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command to ``commands``, which ``ArgumentParser.add_subparsers`` returned, and return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "translate",
        help="translate a configuration of FSDP1, DeepSpeed, ... to FSDP2, with a note for each key",
        description="Translate a configuration file of accelerate, transformers, axolotl, ROLL, Lightning, DeepSpeed "
        "or a plain training YAML to an FSDP2 configuration or code, with a note for each key. Exit code: 0 if "
        "everything was translated, 1 if anything was refused, 2 if the command itself is invalid.",
    )
    parser.add_argument("file", help="a JSON file, a YAML file if PyYAML is installed, or a program")
    parser.add_argument(
        "--to",
        choices=("accelerate2", "torch", "plan"),
        default="accelerate2",
        help="an accelerate file with fsdp_version 2, torch code, or the plan of a model (default: %(default)s)",
    )
    parser.add_argument("--world", type=_ranks, metavar="RANKS", help="number of ranks (default: from the file)")
    parser.add_argument("--ranks-per-node", type=_ranks, metavar="RANKS", help="ranks on a node, for hybrid strategies")
    parser.add_argument("--model", metavar="MODEL", help="package.module:factory, or a config.json of transformers")
    parser.add_argument("--format", choices=tuple(FORMATS), help="format of the file (default: recognized by its keys)")
    parser.add_argument("--json", action="store_true", help="print JSON: format, output, notes")
    return parser


def run(options: argparse.Namespace) -> int:
    """Print the translation and return 1 if anything was refused, 2 if the command itself is invalid, else 0."""
    if options.to == "plan" and options.model is None:
        print("translate: --to plan needs --model, since a plan names the modules of a model", file=sys.stderr)
        return USAGE
    ranks = Ranks(options.world, options.ranks_per_node)
    reading = read_config(options.file, ranks, format=options.format)
    made = None if options.model is None else build(reading.target, named_model(options.model), reading.notes, ranks)
    text, more = _output(options.to, reading, made)
    notes = (*(made.notes if made else reading.notes), *more)
    if options.json:
        values = {"format": reading.format, "saw": list(reading.saw), "output": text, "notes": [*map(vars, notes)]}
        print(json.dumps(values, indent=2))
    else:
        print(_text(reading, text, notes, options.to))
    return int(any(note.support == "refused" for note in notes))


def _output(to: str, reading: Reading, made: Translation | None) -> tuple[str, Iterable[Note]]:
    """Return the text to print, and notes on settings that its format does not support."""
    target = reading.target
    if to == "accelerate2":
        return write.accelerate2(target), write.notes_on_accelerate(target)
    if made is None:
        return write.script(target), write.notes_on_script(target)
    if to == "plan":
        return str(made.plan), ()
    before = write.before_sharding(target)
    imports = f"import torch\nimport torch.distributed as dist\n{before}\n" if before else ""
    return imports + made.plan.to_python() + write.after_sharding(made.buffer_dtypes), ()


def _text(reading: Reading, text: str, notes: tuple[Note, ...], to: str) -> str:
    """Return output and notes as one text; the notes are comments, so that it can be saved, except with a plan."""
    lines = write.comments(reading, notes)
    if to == "plan":
        return "\n".join([text.rstrip("\n"), "", *(line.removeprefix("# ") for line in lines)])
    return "\n".join([*lines, "", text.rstrip("\n")])


def _ranks(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a number of ranks")
    return number
