"""Convert checkpoints from one kind to another, in one process; ``python -m shardkit convert``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeAlias

import torch

from shardkit.checkpoint import directory
from shardkit.checkpoint.agreement import ranks_of
from shardkit.checkpoint.chunks import flush_directory, flush_files
from shardkit.checkpoint.load import open_checkpoint
from shardkit.checkpoint.native import NativeCheckpoint
from shardkit.checkpoint.plain import encode
from shardkit.checkpoint.save import Content, Target, check_destination, commit_checkpoint
from shardkit.checkpoint.source import Source, by_name, is_stored, read_values
from shardkit.checkpoint.torch_files import SUFFIXES
from shardkit.errors import CheckpointError, message
from shardkit.state.names import is_extra

KINDS = ("safetensors", "dcp", "full")
Names: TypeAlias = dict[str, dict[str, Any]]  # the tensors of each group of files, by name


def convert_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: str | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
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
        allow_pickle: as for :func:`load_checkpoint`: unpickle whatever ``src`` holds, which can run code.

    Raises:
        CheckpointError: ``src`` is damaged or of no known kind, ``dst`` exists, or ``to`` is unknown.
    """
    place = Path(dst).absolute()
    kind = to or ("full" if place.suffix in SUFFIXES else "safetensors")
    replaces = overwrite
    if kind not in KINDS:
        raise CheckpointError(message("to", f"must be one of {', '.join(KINDS)}, got {to!r}", "", ""))
    if kind != "full":
        replaces = check_destination(place, kind, overwrite, None)
    elif place.is_dir() or (place.exists() and not overwrite):
        rule = "A file is replaced only on request, and a directory never"
        raise CheckpointError(message(str(place), "exists", rule, "Use another path, or pass overwrite=True"))
    source = open_checkpoint(Path(src), allow_pickle=allow_pickle)
    if isinstance(source, NativeCheckpoint):
        source.verify([])
    if source.contents.no_optimizer:
        raise CheckpointError(source.contents.no_optimizer)
    if kind == "full":
        _save_full(_tree(source), place)
    else:
        target = Target(place, kind, ranks_of([]), directory.draw_token(), replaces)
        commit_checkpoint(target, _content(source), [])


def _tree(source: Source) -> dict[str, Any]:
    """Return the checkpoint as nested dicts of full tensors, like FSDP1's FULL_STATE_DICT; ties are one object."""
    contents = source.contents
    found: dict[str, Any] = {"model": read_values(source, contents.model)}
    for name, first in contents.ties.items():
        found["model"].setdefault(name, found["model"][first])
    if contents.optimizer is not None:
        found["optimizer"] = read_values(source, {key: contents.optimizer[key] for key in ("state", "param_groups")})
    beside = {"scheduler": contents.scheduler, "extra": contents.extra}
    return found | {name: value for name, value in beside.items() if value is not None}


def _save_full(tree: dict[str, Any], place: Path) -> None:
    temporary = directory.sibling_path(place, "tmp", directory.draw_token())
    try:
        torch.save(tree, temporary)
        flush_files([temporary])
        os.replace(temporary, place)
    finally:
        temporary.unlink(missing_ok=True)
    flush_directory(place.parent)


def _content(source: Source) -> Content:
    """Return the checkpoint as ``save_checkpoint`` collects one, with full tensors."""
    contents = source.contents
    model = {name: value for name, value in contents.model.items() if is_stored(value) and not is_extra(name)}
    others, other_tensors = encode(
        read_values(source, {name: value for name, value in contents.model.items() if name not in model}), "model"
    )
    optimizer, tensors = encode(read_values(source, _named(contents.optimizer, list(model))), "")
    rest, rest_tensors = encode({"scheduler": contents.scheduler, "extra": contents.extra}, "")
    states = {kind: [each.hex() for each in of_ranks] for kind, of_ranks in contents.random.items()}
    plain = {"model": others, "optimizer": optimizer, **rest, "random": states, "ties": contents.ties}
    about: Any = {"trainable_only": contents.trainable_only, "quantized": contents.quantized, "config": contents.config}
    return Content(read_values(source, model), tensors, other_tensors | rest_tensors, plain, **about)


def _named(optimizer: dict[str, Any] | None, names: list[str]) -> dict[str, Any] | None:
    if optimizer is None:
        return None
    numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
    if any(type(number) is int for number in numbers) and len(numbers) != len(names):
        problem = f"numbers its {len(numbers)} parameters, and the model has {len(names)} tensors"
        rule = "Without the model, numbers can be resolved only if each of its tensors is a parameter"
        fix = "Load it into the model with load_checkpoint, and save that"
        raise CheckpointError(message("optimizer", problem, rule, fix))
    return by_name(optimizer, names)


# ---- the command ------------------------------------------------------------------------------------------------


def add_parser(commands: Any) -> Any:
    """Add the parser of the command to ``commands``, which ``ArgumentParser.add_subparsers`` returned."""
    parser = commands.add_parser(
        "convert",
        help="convert a checkpoint to another format",
        description="Read a checkpoint of any kind that shardkit knows (its own, DCP directories such as FSDP1's "
        "sharded ones, files of torch.save, safetensors) and write it as another, in one process.",
    )
    parser.add_argument("src", metavar="SRC", help="a checkpoint: directory or file")
    parser.add_argument("dst", metavar="DST", help="where to write: a directory, or a file for --to full")
    kinds = "safetensors and dcp are directories, full is a file of torch.save as FSDP1's FULL_STATE_DICT"
    parser.add_argument("--to", choices=KINDS, help=f"{kinds} (default: by the suffix of DST)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing DST")
    parser.add_argument("--allow-pickle", action="store_true", help="unpickle what SRC holds, which can run code")
    return parser


def run(options: Any) -> int:
    """Run the command and return its exit code."""
    given = {name: getattr(options, name) for name in ("to", "overwrite", "allow_pickle")}
    convert_checkpoint(options.src, options.dst, **given)
    print(f"{options.src} -> {options.dst}")
    return 0
