"""From one kind of checkpoint to another, in one process, tensor by tensor."""

from __future__ import annotations

import mmap
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardkit.checkpoint import dcp, directory, manifest
from shardkit.checkpoint.checksums import part_sum
from shardkit.checkpoint.fsdp1 import SUFFIXES
from shardkit.checkpoint.inner import MARK
from shardkit.checkpoint.layout import lay_out
from shardkit.checkpoint.load import open_checkpoint
from shardkit.checkpoint.locate import Located
from shardkit.checkpoint.manifest import FileEntry
from shardkit.checkpoint.own import OwnDirectory
from shardkit.checkpoint.pieces import whole
from shardkit.checkpoint.plain import encode
from shardkit.checkpoint.progress import Progress
from shardkit.checkpoint.save import Content, Job, check_destination, write_checkpoint
from shardkit.checkpoint.source import Contents, Source, Stored, by_name
from shardkit.checkpoint.transfer import Meter
from shardkit.checkpoint.write import MAX_SHARD_SIZE, make_files, write_parts
from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import Groups

KINDS = ("safetensors", "dcp", "full")
Names: TypeAlias = dict[str, dict[str, Stored]]  # what goes into which group of files, by its name there


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
    if kind == "full":
        _check_file(place, overwrite)
    else:
        check_destination(place, kind, overwrite, None)
    with ExitStack() as held:
        source = open_checkpoint(Path(src), held, allow_pickle=allow_pickle)
        if isinstance(source, OwnDirectory):
            source.verify([], 0, 1)
        if source.contents.no_optimizer:
            raise CheckpointError(source.contents.no_optimizer)
        if kind == "full":
            _refuse_quantised(source.contents)
        if kind == "safetensors":
            _to_safetensors(source, place, overwrite)
        else:
            _to_mapped(source, place, kind, overwrite)


def _refuse_quantised(contents: Contents) -> None:
    state = (contents.optimizer or {"state": {}})["state"]
    if names := [
        fqn for fqn, entries in state.items() if any(isinstance(v, dict) and MARK in v for v in entries.values())
    ]:
        rule = "It is in blocks of the shards that made it, so it has no full tensors"
        fix = "Convert to safetensors or DCP, or save the model alone"
        raise CheckpointError(message("to", f"quantised state of {listing(map(str, names))}", rule, fix))


def _check_file(file: Path, overwrite: bool) -> None:
    if file.is_dir() or (file.exists() and not overwrite):
        rule = "A file is replaced only when that is asked for, and a directory never"
        raise CheckpointError(message("dst", f"{file} exists", rule, "Use another path, or pass overwrite=True"))


# To safetensors, tensor by tensor.


def _to_safetensors(source: Source, place: Path, overwrite: bool = False) -> None:
    content, names = _plan(source.contents)

    def write(temporary: Path, content: Content, groups: Groups) -> dict[str, FileEntry]:
        files: dict[str, FileEntry] = {}
        for section, tensors in names.items():
            files |= _copy(source, temporary, section, tensors)
        return files

    write_checkpoint(Job(place, directory.new_token(), "safetensors", overwrite=overwrite), content, [], write)


def _plan(contents: Contents) -> tuple[Content, Names]:
    """What is plain, encoded, and which tensors go where."""
    model = {name: value for name, value in contents.model.items() if isinstance(value, Stored)}
    others, other_tensors = encode({name: v for name, v in contents.model.items() if name not in model}, "model")
    optimizer = None if contents.optimizer is None else by_name(contents.optimizer, _parameters(contents))
    stand_ins: dict[int, Stored] = {}
    encoded, tensors = encode(_with_stand_ins(optimizer, stand_ins), "")
    rest, rest_tensors = encode({"scheduler": contents.scheduler, "extra": contents.extra}, "")
    random = {kind: [_bytes_tensor(each) for each in of_ranks] for kind, of_ranks in contents.random.items()}
    states, state_tensors = encode(random, "random")
    plain = {"model": others, "optimizer": encoded, **rest, "random": states, "ties": contents.ties}
    names = {"model": model, "optimizer": {name: stand_ins[id(tensor)] for name, tensor in tensors.items()}}
    content = Content({}, {}, other_tensors | rest_tensors | state_tensors, plain, "", [])
    content = replace(content, trainable_only=contents.trainable_only, config=contents.config)
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
        raise CheckpointError(
            message("optimizer", problem, rule, "Load it into the model with load_checkpoint, and save")
        )
    return names


def _with_stand_ins(value: Any, found: dict[int, Stored]) -> Any:
    """The same nested dicts with an empty tensor for each stored one, which can be encoded."""
    if isinstance(value, Stored):
        stand_in = torch.empty(0)
        found[id(stand_in)] = value
        return stand_in
    if isinstance(value, dict):
        return {key: _with_stand_ins(each, found) for key, each in value.items()}
    return [_with_stand_ins(each, found) for each in value] if type(value) is list else value


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _copy(source: Source, temporary: Path, section: str, tensors: dict[str, Stored]) -> dict[str, FileEntry]:
    """One group of safetensors files, from a source, with one tensor in memory at a time."""
    layout = lay_out(tensors, section, MAX_SHARD_SIZE, {"format": "pt"})
    make_files(temporary, layout)
    progress = Progress(f"convert {section}")
    meter, sums = Meter(progress, sum(stored.bytes for stored in tensors.values())), {}
    room = torch.empty(max((stored.bytes for stored in tensors.values()), default=0), dtype=torch.uint8)
    for name, stored in tensors.items():
        full = room[: stored.bytes].view(stored.dtype).view(stored.shape)
        source.read([(stored.key, full)])
        write_parts(temporary, layout, [(name, (full, whole(stored.shape)))])
        sums[name] = part_sum(full, whole(stored.shape), stored.shape)
        meter.add(stored.bytes)
    progress.close()
    entries = {}
    for file in layout.files:
        directory.flush_file(temporary / file.name)
        of_file = {name: sums[name] for name in file.header.tensors}
        entries[file.name] = manifest.entry_of(temporary / file.name, file.header.bytes, of_file)
    if layout.index is not None:
        directory.flush_file(temporary / layout.index[0])
        entries[layout.index[0]] = manifest.entry_of(temporary / layout.index[0])
    return entries


# To what takes all tensors at once: mapped from files, they are no memory of this process.


def _to_mapped(source: Source, place: Path, kind: str, overwrite: bool) -> None:
    if isinstance(source, OwnDirectory) and source.manifest.format == "safetensors":
        _write_mapped(source, place, kind, overwrite)
        return
    token = directory.new_token()
    between = place.with_name(f".{place.name}.converting-{token}")
    try:
        _to_safetensors(source, between)
        with ExitStack() as held:
            found = open_checkpoint(between, held)
            assert isinstance(found, OwnDirectory), "it was just written"
            _write_mapped(found, place, kind, overwrite)
    finally:
        directory.remove(between)


def _write_mapped(source: OwnDirectory, place: Path, kind: str, overwrite: bool) -> None:
    maps: dict[Path, mmap.mmap] = {}
    contents = source.contents

    def value(each: Any) -> Any:
        if isinstance(each, dict):
            return {key: value(inner) for key, inner in each.items()}
        if type(each) is list:
            return [value(inner) for inner in each]
        return mapped(source.located[each.key], maps) if isinstance(each, Stored) else each

    tree: dict[str, Any] = {"model": {name: value(each) for name, each in contents.model.items()}}
    for name, first in contents.ties.items():  # the same object, so that a file has it once
        tree["model"].setdefault(name, tree["model"][first])
    if contents.optimizer is not None:
        tree["optimizer"] = value({key: contents.optimizer[key] for key in ("state", "param_groups")})
    if kind == "dcp":
        content, _ = _plan(contents)

        def write(temporary: Path, content: Content, groups: Groups) -> dict[str, FileEntry]:
            return dcp.write(temporary, tree, groups)

        write_checkpoint(Job(place, directory.new_token(), "dcp", overwrite=overwrite), content, [], write)
    else:
        _save_file(tree | _present(contents), place)


def _present(contents: Contents) -> dict[str, Any]:
    found = {"scheduler": contents.scheduler, "extra": contents.extra}
    return {name: value for name, value in found.items() if value is not None}


def _save_file(tree: dict[str, Any], file: Path) -> None:
    temporary = directory.servant(file, "tmp", directory.new_token())
    try:
        torch.save(tree, temporary)
        directory.flush_file(temporary)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    directory.flush_directory(file.parent)


def mapped(at: Located, maps: dict[Path, mmap.mmap]) -> Tensor:
    """A stored tensor as memory that is the file's, until it is written to. Local."""
    if not at.entry.bytes:
        return torch.empty(at.entry.shape, dtype=at.entry.dtype)
    if at.file not in maps:
        with open(at.file, "rb") as opened:
            maps[at.file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    count, start = at.entry.shape.numel(), at.entry.start
    return torch.frombuffer(maps[at.file], dtype=at.entry.dtype, count=count, offset=start).reshape(at.entry.shape)
