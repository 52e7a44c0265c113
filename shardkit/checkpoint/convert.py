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

from shardkit.checkpoint import directory
from shardkit.checkpoint.byte_ranges import flush_directory
from shardkit.checkpoint.dcp import ALONE
from shardkit.checkpoint.load import open_checkpoint
from shardkit.checkpoint.native import NativeCheckpoint
from shardkit.checkpoint.save import make_snapshot, plan_checkpoint, write_checkpoint
from shardkit.checkpoint.source import Source, pack, read_values
from shardkit.checkpoint.torch_files import SUFFIXES
from shardkit.errors import CheckpointError
from shardkit.ranks import own_rank
from shardkit.state.model import is_extra

KINDS = ("safetensors", "dcp", "full")


def convert_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: str | None = None,
    overwrite: bool = False,
) -> None:
    """Convert the checkpoint at ``src`` to another kind, at ``dst``. Local: one process, without a
    model.

    Holds the whole checkpoint in memory. Where it is too large for one process, load it with
    :func:`load_checkpoint` on several ranks, and save that.

    Args:
        src: anything that :func:`load_checkpoint` reads.
        dst: a directory, or for ``"full"`` a file.
        to: ``"safetensors"`` as :func:`save_checkpoint`; ``"dcp"``; ``"full"``, a file of
            ``torch.save`` with ``{"model": ..., "optimizer": ...}`` in full tensors by FQN, which
            FSDP1 loads as FULL_STATE_DICT. None: ``"full"`` for a ``dst`` that ends in .pt, .pth,
            .bin or .ckpt, else ``"safetensors"``.
        overwrite: replace an existing checkpoint or file.

    Raises:
        CheckpointError: ``src`` is damaged or of no known kind, ``dst`` exists, or ``to`` is
            unknown.
    """
    place = Path(dst).absolute()
    kind = to or ("full" if place.suffix in SUFFIXES else "safetensors")
    if kind not in KINDS:
        raise CheckpointError(f"to must be one of {', '.join(KINDS)}, got {to!r}.")
    if kind == "safetensors":
        directory.prepare(place, overwrite)
    elif place.is_dir() or (place.exists() and not overwrite):
        raise CheckpointError(
            f"{place} exists. Use another path, or for a file pass overwrite=True."
        )
    source = open_checkpoint(Path(src))
    if isinstance(source, NativeCheckpoint):
        source.verify([], 0, 1)
    if kind == "safetensors":
        _write_safetensors(source, place)
        return
    draft = directory.draft_of(place)
    if kind == "full":
        torch.save(_tree(source), draft)
    else:
        shutil.rmtree(draft, ignore_errors=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=ALONE)
            save(
                _tree(source), storage_writer=FileSystemWriter(draft, sync_files=True), no_dist=True
            )
    os.replace(draft, place)
    flush_directory(place.parent)


def _tree(source: Source) -> dict[str, Any]:
    """Return the checkpoint as nested dicts of full tensors; ties are one object."""
    contents = source.contents
    found: dict[str, Any] = {"model": read_values(source, contents.model)}
    for name, first in contents.ties.items():
        found["model"].setdefault(name, found["model"][first])
    if contents.optimizer is not None:
        state = {key: contents.optimizer[key] for key in ("state", "param_groups")}
        found["optimizer"] = read_values(source, state)
    if contents.scheduler is not None:
        found["scheduler"] = contents.scheduler
    if (extra := _extra(source)) is not None:
        found["extra"] = extra
    return found


def _write_safetensors(source: Source, place: Path) -> None:
    contents, optimizer = source.contents, source.contents.optimizer
    for group in [] if optimizer is None else optimizer["param_groups"]:
        if any(type(name) is int for name in group["params"]):
            raise CheckpointError(
                "optimizer numbers its parameters. Numbers count the parameters of a model. Load "
                "it into the model with load_checkpoint, and save that."
            )
    tensors: dict[str, Any] = {}
    extra_state: dict[str, Any] = {}
    for name, value in read_values(source, contents.model).items():
        is_tensor = isinstance(value, torch.Tensor) and not is_extra(name)
        (tensors if is_tensor else extra_state)[name] = value
    snapshot = make_snapshot(tensors, read_values(source, optimizer))
    shared = source.shared if isinstance(source, NativeCheckpoint) else {}
    snapshot.plain |= {
        "extra_state": extra_state,
        "ties": contents.ties,
        "trainable_only": contents.trainable_only,
        "scheduler": contents.scheduler,
        "shared": {**shared, "extra": pack(_extra(source), "extra")},
    }
    files, parts = plan_checkpoint(place, snapshot, dict.fromkeys(snapshot.tensors, own_rank()))
    state = pack(snapshot.plain, str(place))
    write_checkpoint(place, files, parts, state, groups=[], ranks=[own_rank()])


def _extra(source: Source) -> Any:
    return source.resume(0, 1, random=False) if isinstance(source, NativeCheckpoint) else None


# ---- the command ---------------------------------------------------------------------------------


def add_parser(commands: Any) -> Any:
    """Add the parser of the command to ``commands``, which ``ArgumentParser.add_subparsers``
    returned.
    """
    about = (
        "Read any checkpoint that load_checkpoint reads, and write it in another format, "
        "in one process."
    )
    parser = commands.add_parser(
        "convert", help="convert a checkpoint to another format", description=about
    )
    parser.add_argument("src", metavar="SRC", help="a checkpoint: directory or file")
    parser.add_argument(
        "dst", metavar="DST", help="where to write: a directory, or a file for --to full"
    )
    kinds = (
        "safetensors and dcp are directories, full is a file of torch.save as FSDP1's "
        "FULL_STATE_DICT"
    )
    parser.add_argument("--to", choices=KINDS, help=f"{kinds} (default: by the suffix of DST)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing DST")
    return parser


def run(options: Any) -> int:
    """Run the command and return its exit code."""
    convert_checkpoint(options.src, options.dst, to=options.to, overwrite=options.overwrite)
    print(f"{options.src} -> {options.dst}")
    return 0
