"""Convert checkpoints from one kind to another, in one process, tensor by tensor; ``python -m shardkit convert``."""

from __future__ import annotations

import mmap
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardkit._torch.dispatch import tree_map
from shardkit.checkpoint import dcp, directory, random_state
from shardkit.checkpoint.chunks import full_box
from shardkit.checkpoint.format import Spec, lay_out
from shardkit.checkpoint.load import open_checkpoint
from shardkit.checkpoint.manifest import FileEntry
from shardkit.checkpoint.native import NativeCheckpoint
from shardkit.checkpoint.plain import encode
from shardkit.checkpoint.save import Content, check_destination, commit_checkpoint, entries_of
from shardkit.checkpoint.source import Source, Stored, by_name, is_stored, read_values
from shardkit.checkpoint.torch_files import SUFFIXES
from shardkit.checkpoint.transfer import Meter, ProgressLine, flush_directory, flush_files
from shardkit.checkpoint.write import MAX_SHARD_SIZE, create_files, write_parts
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

    Holds one tensor at a time, and for DCP the pieces it is stored in. For output to DCP or ``torch.save``, input that
    cannot be mapped into memory is first written as safetensors beside ``dst``.

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
    with ExitStack() as held:
        source = open_checkpoint(Path(src), held, allow_pickle=allow_pickle)
        if isinstance(source, NativeCheckpoint):
            source.verify([], 0, 1)
        if source.contents.no_optimizer:
            raise CheckpointError(source.contents.no_optimizer)
        if kind == "safetensors":
            _to_safetensors(source, place, replaces)
            return
        if isinstance(source, NativeCheckpoint) and source.manifest.format == "safetensors":
            _to_mapped(source, place, kind, replaces)
            return
        between = place.with_name(f".{place.name}.converting-{directory.new_token()}")
        try:
            _to_safetensors(source, between)
            mapped = open_checkpoint(between, held)
            assert isinstance(mapped, NativeCheckpoint), "it was just written"
            _to_mapped(mapped, place, kind, replaces)
        finally:
            shutil.rmtree(between, ignore_errors=True)


# ---- to safetensors, tensor by tensor ---------------------------------------------------------------------------


def _to_safetensors(source: Source, place: Path, replaces: bool = False) -> None:
    content, names = _plan(source)

    def write(temporary: Path) -> dict[str, FileEntry]:
        return {
            file: entry
            for section, tensors in names.items()
            for file, entry in _copy(source, temporary, section, tensors).items()
        }

    commit_checkpoint(place, "safetensors", content, [], replaces=replaces, writer=write)


def _plan(source: Source) -> tuple[Content, Names]:
    """Return the plain values, encoded, and the tensors of each group of files."""
    contents = source.contents
    model = {name: value for name, value in contents.model.items() if is_stored(value) and not is_extra(name)}
    others = read_values(source, {name: value for name, value in contents.model.items() if name not in model})
    others, other_tensors = encode(others, "model")
    optimizer = contents.optimizer
    if optimizer is not None:
        numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
        if any(type(number) is int for number in numbers) and len(numbers) != len(model):
            problem = f"numbers its {len(numbers)} parameters, and the model has {len(model)} tensors"
            rule = "Without the model, numbers can be resolved only if each of its tensors is a parameter"
            fix = "Load it into the model with load_checkpoint, and save that"
            raise CheckpointError(message("optimizer", problem, rule, fix))
        optimizer = by_name(optimizer, list(model))
    encoded, tensors = encode(optimizer, "")
    rest, rest_tensors = encode({"scheduler": contents.scheduler, "extra": contents.extra}, "")
    states, state_tensors = encode(random_state.as_tensors(contents.random), "random")
    plain = {"model": others, "optimizer": encoded, **rest, "random": states, "ties": contents.ties}
    about: Any = {"trainable_only": contents.trainable_only, "quantized": contents.quantized, "config": contents.config}
    content = Content({}, {}, other_tensors | rest_tensors | state_tensors, plain, **about)
    return content, {"model": model} | ({"optimizer": tensors} if tensors else {})


def _copy(source: Source, temporary: Path, section: str, tensors: dict[str, Any]) -> dict[str, FileEntry]:
    """Write one group of safetensors files, with one tensor in memory at a time; options may be tensors already."""
    specs = {name: each if isinstance(each, Stored) else Spec(each.dtype, each.shape) for name, each in tensors.items()}
    files = lay_out(specs, section, MAX_SHARD_SIZE, {"format": "pt"})
    create_files(temporary, files)
    progress, sums = ProgressLine(f"convert {section}"), dict[str, int]()
    meter = Meter(progress, sum(spec.bytes for spec in specs.values()))
    room = torch.empty(max((spec.bytes for spec in specs.values()), default=0), dtype=torch.uint8)
    for name, spec in specs.items():
        full = room[: spec.bytes].view(spec.dtype).view(spec.shape)
        source.read([(spec.key, full)]) if isinstance(spec, Stored) else full.copy_(tensors[name].detach())
        written = write_parts(temporary, files, [(name, (full, full_box(spec.shape)))])
        sums[name] = written[name][1]
        meter.add(spec.bytes)
    progress.close()
    flush_files(temporary / file.name for file in files)
    return entries_of(files, sums)


# ---- to formats that need all tensors at once: they are mapped from files, and take no memory of this process ----


def _to_mapped(source: NativeCheckpoint, place: Path, kind: str, replaces: bool) -> None:
    maps: dict[Path, mmap.mmap] = {}
    contents = source.contents

    def value(each: Any) -> Any:
        return _mapped(source, each.key, maps) if isinstance(each, Stored) else each

    tree: dict[str, Any] = {"model": {name: value(each) for name, each in contents.model.items()}}
    for name, first in contents.ties.items():  # the same object, so that a file has it once
        tree["model"].setdefault(name, tree["model"][first])
    if contents.optimizer is not None:
        tree["optimizer"] = tree_map(value, {key: contents.optimizer[key] for key in ("state", "param_groups")})
    if kind == "dcp":

        def write(temporary: Path) -> dict[str, FileEntry]:
            return dcp.write(temporary, tree, [])

        commit_checkpoint(place, "dcp", _plan(source)[0], [], replaces=replaces, writer=write)
        return
    beside = {"scheduler": contents.scheduler, "extra": contents.extra}
    tree |= {name: value for name, value in beside.items() if value is not None}
    temporary = directory.sibling_path(place, "tmp", directory.new_token())
    try:
        torch.save(tree, temporary)
        flush_files([temporary])
        os.replace(temporary, place)
    finally:
        temporary.unlink(missing_ok=True)
    flush_directory(place.parent)


def _mapped(source: NativeCheckpoint, key: str, maps: dict[Path, mmap.mmap]) -> Tensor:
    """Return a stored tensor as memory that is mapped from its file, copy on write."""
    file, entry = source.located[key].file, source.located[key].entry
    if not entry.bytes:
        return torch.empty(entry.shape, dtype=entry.dtype)
    if file not in maps:
        with open(file, "rb") as opened:
            maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    found = torch.frombuffer(maps[file], dtype=entry.dtype, count=entry.shape.numel(), offset=entry.start)
    return found.reshape(entry.shape)


# ---- the command ------------------------------------------------------------------------------------------------


def add_parser(commands: Any) -> Any:
    """Add the parser of the command to ``commands``, which ``ArgumentParser.add_subparsers`` returned."""
    parser = commands.add_parser(
        "convert",
        help="convert a checkpoint to another format",
        description="Read a checkpoint of any kind that shardkit knows (its own, DCP directories such as FSDP1's "
        "sharded ones, files of torch.save, safetensors) and write it as another, in one process, tensor by tensor.",
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
