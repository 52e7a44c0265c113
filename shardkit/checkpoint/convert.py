"""Convert checkpoints from one kind to another, in one process; ``python -m shardkit convert``."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from shardkit.checkpoint.byte_ranges import flush_directory, flush_file
from shardkit.checkpoint.dcp import ALONE
from shardkit.checkpoint.directory import draft_of
from shardkit.checkpoint.load import open_checkpoint
from shardkit.checkpoint.native import NativeCheckpoint
from shardkit.checkpoint.source import Quantized, Source, read_values
from shardkit.checkpoint.torch_files import SUFFIXES
from shardkit.errors import CheckpointError
from shardkit.state.optimizer import tensor_leaves


def convert_checkpoint(src: str | os.PathLike[str], dst: str | os.PathLike[str]) -> None:
    """Convert the checkpoint at ``src`` to another kind, at ``dst``. Local: one process, without a
    model.

    Holds the whole checkpoint in memory. Where it is too large for one process, load it with
    :func:`load_checkpoint` on several ranks, and save that.

    Args:
        src: anything that :func:`load_checkpoint` reads.
        dst: where nothing is yet. With a suffix of .pt, .pth, .bin or .ckpt a file of
            ``torch.save`` with ``{"model": ..., "optimizer": ...}`` in full tensors by FQN, which
            FSDP1 loads as FULL_STATE_DICT; else a directory of ``torch.distributed.checkpoint``
            with the same.

    Raises:
        CheckpointError: ``src`` is damaged or of no known kind, or ``dst`` exists.
    """
    place = Path(dst).absolute()
    if place.exists():
        raise CheckpointError(f"{place} exists. Delete it, or use another path.")
    source = open_checkpoint(Path(src))
    if isinstance(source, NativeCheckpoint):
        source.verify([], 0, 1)
    draft = draft_of(place)
    shutil.rmtree(draft, ignore_errors=True)
    if place.suffix in SUFFIXES:
        torch.save(_tree(source), draft)
        flush_file(draft)
    else:
        writer = FileSystemWriter(draft, sync_files=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=ALONE)
            save(_tree(source), storage_writer=writer, no_dist=True)
    os.replace(draft, place)
    flush_directory(place.parent)


def _tree(source: Source) -> dict[str, Any]:
    """Return the checkpoint as nested dicts of full tensors; ties are one object."""
    contents = source.contents
    tree: dict[str, Any] = {"model": read_values(source, contents.model)}
    for name, first in contents.ties.items():
        tree["model"].setdefault(name, tree["model"][first])
    if tensor_leaves(contents.optimizer, Quantized):
        raise CheckpointError(
            "The checkpoint has optimizer state in blocks of each rank's shard. Load the model "
            "without it, and save that."
        )
    if contents.optimizer is not None:
        tree["optimizer"] = read_values(source, contents.optimizer)
    if contents.scheduler is not None:
        tree["scheduler"] = contents.scheduler
    if isinstance(source, NativeCheckpoint):
        extra = source.resume(0, 1, random=False)
        if extra is not None:
            tree["extra"] = extra
    return tree


# ---- the command ---------------------------------------------------------------------------------


def add_parser(commands: Any) -> Any:
    """Add the parser of the command to ``commands``, which ``ArgumentParser.add_subparsers``
    returned.
    """
    about = "Read any checkpoint that load_checkpoint reads, and write another kind of it."
    parser = commands.add_parser(
        "convert", help="convert a checkpoint to another format", description=about
    )
    parser.add_argument("src", metavar="SRC", help="a checkpoint: directory or file")
    parser.add_argument(
        "dst",
        metavar="DST",
        help="full.pt, for torch.save as FSDP1's FULL_STATE_DICT; or a directory, for DCP",
    )
    return parser


def run(options: Any) -> int:
    """Run the command and return its exit code."""
    convert_checkpoint(options.src, options.dst)
    print(f"{options.src} -> {options.dst}")
    return 0
