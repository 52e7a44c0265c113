"""``python -m shardkit convert``."""

from __future__ import annotations

import argparse
from typing import Any

from shardkit.checkpoint.convert import KINDS, convert_checkpoint


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The parser of the command, added to ``commands``, which ``ArgumentParser.add_subparsers`` returned."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "convert",
        help="write a checkpoint once more, as another kind",
        description="Read a checkpoint of any kind that shardkit knows (its own, DCP directories such as FSDP1's "
        "sharded ones, files of torch.save, safetensors) and write it as another, in one process, tensor by tensor.",
    )
    parser.add_argument("src", metavar="SRC", help="a checkpoint: directory or file")
    parser.add_argument("dst", metavar="DST", help="where to write: a directory, or a file for --to full")
    kinds = "safetensors and dcp are directories, full is a file of torch.save as FSDP1's FULL_STATE_DICT"
    parser.add_argument("--to", choices=KINDS, help=f"{kinds} (default: by the ending of DST)")
    parser.add_argument("--overwrite", action="store_true", help="replace what is at DST")
    parser.add_argument("--allow-pickle", action="store_true", help="unpickle what SRC holds, which can run code")
    return parser


def run(options: argparse.Namespace) -> int:
    """Run it and return its exit code."""
    convert_checkpoint(
        options.src, options.dst, to=options.to, overwrite=options.overwrite, allow_pickle=options.allow_pickle
    )
    print(f"{options.src} -> {options.dst}")
    return 0
