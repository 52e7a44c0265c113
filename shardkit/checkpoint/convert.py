"""Convert checkpoints from one kind to another, in one process; ``python -m shardkit convert``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from shardkit.checkpoint import directory
from shardkit.checkpoint.asynchronous import ranks_of
from shardkit.checkpoint.chunks import flush_directory, flush_files
from shardkit.checkpoint.load import open_checkpoint
from shardkit.checkpoint.native import NativeCheckpoint
from shardkit.checkpoint.save import Content, check_destination, commit_checkpoint, layouts_of
from shardkit.checkpoint.source import Source, Stored, encode, read_values
from shardkit.checkpoint.torch_files import SUFFIXES
from shardkit.errors import CheckpointError, message
from shardkit.state.model import is_extra

KINDS = ("safetensors", "dcp", "full")


def convert_checkpoint(
    src: str | os.PathLike[str], dst: str | os.PathLike[str], *, to: str | None = None, overwrite: bool = False
) -> None:
    """Convert the checkpoint at ``src`` to another kind, at ``dst``. Local: one process, without a model.

    Holds the whole checkpoint in memory. Where it is too large for one process, load it with :func:`load_checkpoint` on
    several ranks, and save that.

    Args:
        src: anything that :func:`load_checkpoint` reads.
        dst: a directory, or for ``"full"`` a file.
        to: ``"safetensors"`` and ``"dcp"`` as for :func:`save_checkpoint`; ``"full"``, a file of ``torch.save`` with
            ``{"model": ..., "optimizer": ...}`` in full tensors by FQN, which FSDP1 loads as FULL_STATE_DICT. None:
            ``"full"`` for a ``dst`` that ends in .pt, .pth, .bin or .ckpt, else ``"safetensors"``.
        overwrite: replace an existing checkpoint or file.

    Raises:
        CheckpointError: ``src`` is damaged or of no known kind, ``dst`` exists, or ``to`` is unknown.
    """
    place = Path(dst).absolute()
    kind = to or ("full" if place.suffix in SUFFIXES else "safetensors")
    if kind not in KINDS:
        raise CheckpointError(message("to", f"must be one of {', '.join(KINDS)}, got {to!r}", "", ""))
    if kind != "full":
        overwrite = check_destination(place, kind, overwrite, None)
    elif place.is_dir() or (place.exists() and not overwrite):
        rule = "A file is replaced only on request, and a directory never"
        raise CheckpointError(message(str(place), "exists", rule, "Use another path, or pass overwrite=True"))
    source = open_checkpoint(Path(src))
    if isinstance(source, NativeCheckpoint):
        source.verify([])
    if kind == "full":
        temporary = place.with_name(f".{place.name}.tmp")
        torch.save(_tree(source), temporary)
        flush_files([temporary])
        os.replace(temporary, place)
        flush_directory(place.parent)
    else:
        content, ranks = _content(source), ranks_of([])
        options: Any = {"ranks": ranks, "format": kind, "token": directory.draw_token(), "replaces": overwrite}
        commit_checkpoint(place, content, layouts_of(content, kind, ranks), [], **options)


def _tree(source: Source) -> dict[str, Any]:
    """Return the checkpoint as nested dicts of full tensors; ties are one object."""
    contents = source.contents
    found: dict[str, Any] = {"model": read_values(source, contents.model)}
    for name, first in contents.ties.items():
        found["model"].setdefault(name, found["model"][first])
    if contents.optimizer is not None:
        found["optimizer"] = read_values(source, {key: contents.optimizer[key] for key in ("state", "param_groups")})
    beside = {"scheduler": contents.scheduler, "extra": contents.extra}
    return found | {name: value for name, value in beside.items() if value is not None}


def _content(source: Source) -> Content:
    """Return the checkpoint as ``save_checkpoint`` collects one, with full tensors."""
    contents, optimizer = source.contents, source.contents.optimizer
    groups = [] if optimizer is None else optimizer["param_groups"]
    if any(type(name) is int for group in groups for name in group["params"]):
        rule = "Numbers count the parameters of a model"
        fix = "Load it into the model with load_checkpoint, and save that"
        raise CheckpointError(message("optimizer", "numbers its parameters", rule, fix))
    model = {name: value for name, value in contents.model.items() if isinstance(value, Stored) and not is_extra(name)}
    others = read_values(source, {name: value for name, value in contents.model.items() if name not in model})
    rest = {"model": others, "scheduler": contents.scheduler, "extra": contents.extra}
    plain, beside = encode(rest, "")
    encoded, tensors = encode(read_values(source, optimizer), "")
    states = {
        kind: [of_ranks[rank].hex() for rank in range(len(of_ranks))] for kind, of_ranks in contents.random.items()
    }
    plain |= {"optimizer": encoded, "ties": contents.ties, "random": states}
    about: Any = {"trainable_only": contents.trainable_only, "quantized": contents.quantized}
    return Content(read_values(source, model), tensors, beside, plain, **about)


# ---- the command ------------------------------------------------------------------------------------------------


def add_parser(commands: Any) -> Any:
    """Add the parser of the command to ``commands``, which ``ArgumentParser.add_subparsers`` returned."""
    about = "Read any checkpoint that shardkit.load_checkpoint reads, and write it in another format, in one process."
    parser = commands.add_parser("convert", help="convert a checkpoint to another format", description=about)
    parser.add_argument("src", metavar="SRC", help="a checkpoint: directory or file")
    parser.add_argument("dst", metavar="DST", help="where to write: a directory, or a file for --to full")
    kinds = "safetensors and dcp are directories, full is a file of torch.save as FSDP1's FULL_STATE_DICT"
    parser.add_argument("--to", choices=KINDS, help=f"{kinds} (default: by the suffix of DST)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing DST")
    return parser


def run(options: Any) -> int:
    """Run the command and return its exit code."""
    convert_checkpoint(options.src, options.dst, to=options.to, overwrite=options.overwrite)
    print(f"{options.src} -> {options.dst}")
    return 0
