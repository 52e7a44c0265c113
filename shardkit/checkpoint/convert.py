"""From one kind of checkpoint to another, in one process, tensor by tensor; ``python -m shardkit convert``."""

from __future__ import annotations

import mmap
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardkit._torch import tree_map
from shardkit.checkpoint import dcp, directory, random_state
from shardkit.checkpoint.format import Spec, lay_out
from shardkit.checkpoint.inner import MARK
from shardkit.checkpoint.load import open_checkpoint
from shardkit.checkpoint.manifest import FileEntry
from shardkit.checkpoint.own import OwnDirectory
from shardkit.checkpoint.pieces import whole
from shardkit.checkpoint.plain import encode
from shardkit.checkpoint.progress import Progress
from shardkit.checkpoint.save import Content, check_destination, commit_checkpoint, entries_of
from shardkit.checkpoint.source import Contents, Source, Stored, by_name
from shardkit.checkpoint.torch_files import SUFFIXES
from shardkit.checkpoint.transfer import Meter
from shardkit.checkpoint.write import MAX_SHARD_SIZE, make_files, write_parts, written_files
from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import Groups

KINDS = ("safetensors", "dcp", "full")
Names: TypeAlias = dict[str, dict[str, Any]]  # what goes into which group of files, by its name there


def convert_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: str | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
) -> None:
    """Write the checkpoint at ``src`` once more, as another kind, to ``dst``. Local: one process, without a model.

    Nothing is held but one tensor at a time, and for DCP the pieces it is stored in; what goes to DCP or to
    ``torch.save`` and cannot be mapped into memory is first written as safetensors beside ``dst``.

    Args:
        src: anything that :func:`load_checkpoint` reads.
        dst: a directory, or for ``"full"`` a file.
        to: ``"safetensors"`` and ``"dcp"`` as of :func:`save_checkpoint`; ``"full"``, a file of ``torch.save`` with
            ``{"model": ..., "optimizer": ...}`` in full tensors by FQN, which FSDP1 loads as FULL_STATE_DICT. None:
            ``"full"`` for a ``dst`` that ends in .pt, .pth, .bin or .ckpt, else ``"safetensors"``.
        overwrite: replace a checkpoint or file that is there.
        allow_pickle: as for :func:`load_checkpoint`: unpickle whatever ``src`` holds, which can run code.

    Raises:
        CheckpointError: ``src`` is damaged or of no known kind, ``dst`` exists, or ``to`` is unknown.
    """
    place = Path(dst).absolute()
    kind = to or ("full" if place.suffix in SUFFIXES else "safetensors")
    if kind not in KINDS:
        raise CheckpointError(message("to", f"is {to!r}", f"It is one of {', '.join(KINDS)}", "Use one"))
    if kind != "full":
        check_destination(place, kind, overwrite, None)
    elif place.is_dir() or (place.exists() and not overwrite):
        rule = "A file is replaced only when that is asked for, and a directory never"
        raise CheckpointError(message("dst", f"{place} exists", rule, "Use another path, or pass overwrite=True"))
    with ExitStack() as held:
        source = open_checkpoint(Path(src), held, allow_pickle=allow_pickle)
        if isinstance(source, OwnDirectory):
            source.verify([], 0, 1)
        if source.contents.no_optimizer:
            raise CheckpointError(source.contents.no_optimizer)
        if kind == "safetensors":
            _to_safetensors(source, place, overwrite)
        else:
            _refuse_quantised(source.contents)
            _to_mapped(source, place, kind, overwrite)


def _refuse_quantised(contents: Contents) -> None:
    state = (contents.optimizer or {"state": {}})["state"]
    found = [fqn for fqn, own in state.items() if any(isinstance(v, dict) and MARK in v for v in own.values())]
    if found:
        rule = "It is in blocks of the shards that made it: it has no full tensors, and dcp.load would not find it"
        fix = "Convert to safetensors, or save the model alone"
        raise CheckpointError(message("to", f"quantised state of {listing(map(str, found))}", rule, fix))


# ---- to safetensors, tensor by tensor ---------------------------------------------------------------------------


def _to_safetensors(source: Source, place: Path, overwrite: bool = False) -> None:
    content, names = _plan(source.contents)

    def write(temporary: Path, content: Content, groups: Groups) -> dict[str, FileEntry]:
        return {
            file: entry
            for section, tensors in names.items()
            for file, entry in _copy(source, temporary, section, tensors).items()
        }

    commit_checkpoint(place, "safetensors", content, [], overwrite=overwrite, writer=write)


def _plan(contents: Contents) -> tuple[Content, Names]:
    """What is plain, encoded, and which tensors go where."""
    model = {name: value for name, value in contents.model.items() if isinstance(value, Stored)}
    others, other_tensors = encode({name: v for name, v in contents.model.items() if name not in model}, "model")
    optimizer = None if contents.optimizer is None else by_name(contents.optimizer, _parameters(contents))
    encoded, tensors = encode(optimizer, "")
    rest, rest_tensors = encode({"scheduler": contents.scheduler, "extra": contents.extra}, "")
    states, state_tensors = encode(random_state.as_tensors(contents.random), "random")
    plain = {"model": others, "optimizer": encoded, **rest, "random": states, "ties": contents.ties}
    about: Any = {"trainable_only": contents.trainable_only, "config": contents.config}
    content = Content({}, {}, other_tensors | rest_tensors | state_tensors, plain, **about)
    names: Names = {"model": model, "optimizer": tensors}
    return content, {section: found for section, found in names.items() if found or section == "model"}


def _parameters(contents: Contents) -> list[str]:
    """The names that an optimizer's numbers count, as far as shapes can tell.

    Raises:
        CheckpointError: the model has other tensors beside its parameters, and which are which shows nowhere.
    """
    assert contents.optimizer is not None, "asked for its parameters"
    names = [name for name, value in contents.model.items() if isinstance(value, Stored)]
    numbers = [number for group in contents.optimizer["param_groups"] for number in group["params"]]
    if any(type(number) is int for number in numbers) and len(numbers) != len(names):
        problem = f"its {len(numbers)} parameters are numbered, and the model has {len(names)} tensors"
        rule = "Without the model, numbers can be read only where every tensor of it is a parameter"
        fix = "Load it into the model with load_checkpoint, and save"
        raise CheckpointError(message("optimizer", problem, rule, fix))
    return names


def _copy(source: Source, temporary: Path, section: str, tensors: dict[str, Any]) -> dict[str, FileEntry]:
    """One group of safetensors files, with one tensor in memory at a time; options may be tensors already."""
    specs = {name: each if isinstance(each, Stored) else Spec(each.dtype, each.shape) for name, each in tensors.items()}
    layout = lay_out(specs, section, MAX_SHARD_SIZE, {"format": "pt"})
    make_files(temporary, layout, flush=False)
    progress, sums = Progress(f"convert {section}"), dict[str, int]()
    meter = Meter(progress, sum(spec.bytes for spec in specs.values()))
    room = torch.empty(max((spec.bytes for spec in specs.values()), default=0), dtype=torch.uint8)
    for name, spec in specs.items():
        full = room[: spec.bytes].view(spec.dtype).view(spec.shape)
        source.read([(spec.key, full)]) if isinstance(spec, Stored) else full.copy_(tensors[name].detach())
        write_parts(temporary, layout, [(name, (full, whole(spec.shape)))], sums=sums)
        meter.add(spec.bytes)
    progress.close()
    for name in layout.names:
        directory.flush_file(temporary / name)
    return entries_of(temporary, written_files(layout), sums)


# ---- to what takes all tensors at once: mapped from files, they are no memory of this process --------------------


def _to_mapped(source: Source, place: Path, kind: str, overwrite: bool) -> None:
    if isinstance(source, OwnDirectory) and source.manifest.format == "safetensors":
        _write_mapped(source, place, kind, overwrite)
        return
    between = place.with_name(f".{place.name}.converting-{directory.new_token()}")
    try:
        _to_safetensors(source, between)
        with ExitStack() as held:
            found = open_checkpoint(between, held)
            assert isinstance(found, OwnDirectory), "it was just written"
            _write_mapped(found, place, kind, overwrite)
    finally:
        shutil.rmtree(between, ignore_errors=True)


def _write_mapped(source: OwnDirectory, place: Path, kind: str, overwrite: bool) -> None:
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
        content, _ = _plan(contents)
        commit_checkpoint(
            place, "dcp", content, [], overwrite=overwrite, writer=lambda to, _, groups: dcp.write(to, tree, groups)
        )
        return
    beside = {"scheduler": contents.scheduler, "extra": contents.extra}
    tree |= {name: value for name, value in beside.items() if value is not None}
    temporary = directory.sibling_path(place, "tmp", directory.new_token())
    try:
        torch.save(tree, temporary)
        directory.flush_file(temporary)
        os.replace(temporary, place)
    finally:
        temporary.unlink(missing_ok=True)
    directory.flush_directory(place.parent)


def _mapped(source: OwnDirectory, key: str, maps: dict[Path, mmap.mmap]) -> Tensor:
    """A stored tensor as memory that is the file's, until it is written to."""
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
    """The parser of the command, added to ``commands``, which ``ArgumentParser.add_subparsers`` returned."""
    parser = commands.add_parser(
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


def run(options: Any) -> int:
    """Run it and return its exit code."""
    given = {name: getattr(options, name) for name in ("to", "overwrite", "allow_pickle")}
    convert_checkpoint(options.src, options.dst, **given)
    print(f"{options.src} -> {options.dst}")
    return 0
