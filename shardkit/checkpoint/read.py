"""Read safetensors files into shards: each rank reads the byte ranges that it needs, straight into its memory.

Anyone may have written the files, so everything in them is checked before it is used.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardkit._torch import is_wrapper
from shardkit.checkpoint.agreement import world
from shardkit.checkpoint.chunks import (
    Part,
    blocks,
    common,
    inside,
    is_plain_memory,
    part_of,
    refuse_subclasses,
    runs_of,
)
from shardkit.checkpoint.format import (
    INDEX,
    LENGTH,
    MAX_HEADER,
    SUFFIX,
    Entry,
    header_length,
    parse_header,
    strict_json,
)
from shardkit.checkpoint.transfer import Meter, Progress, Staging, opened, raw, read_all
from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import Groups, together
from shardkit.shards import Box, local_value
from shardkit.state.plan import IncompatibleKeys, KeyMap, Request, among_floats, plan_load

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

Chunk: TypeAlias = "tuple[Box, Callable[[], Tensor]]"  # its box in its tensor, and a function that loads it


@dataclass(frozen=True)
class Located:
    """A tensor, and the file that holds it."""

    file: Path
    entry: Entry


def read_tensors(
    path: str | os.PathLike[str],
    into: Mapping[str, Tensor],
    *,
    key_map: KeyMap | None = None,
    strict: bool = True,
    cast: bool = False,
    progress: Progress | None = None,
    groups: Groups | None = None,
) -> IncompatibleKeys:
    """Fill tensors in place from safetensors files, each rank its own part of each.

    **Collective** over ``groups``, which exchange only whether a rank failed. Each rank reads the bytes of its shards
    straight into them; shards on another device, of another dtype or not contiguous go through a buffer of 16 MiB.
    Names, shapes and dtypes are compared before anything is read.

    Args:
        path: see :func:`shardkit.checkpoint.read.locate`.
        into: DTensors and plain tensors, by name. The same object under several names is read once, from the first
            name that the files have.
        key_map: from names in the files to names in ``into``: a function (None leaves the tensor out), a dict of whole
            names, or pairs of a regular expression and its replacement, of which the first match is applied.
        strict: raise for missing and unexpected names.
        cast: convert floating-point values to the dtype of their tensor.
        progress: called on each rank with the bytes it has read, and its total, every 64 MiB.
        groups: process groups that together reach all ranks that read; None: all ranks.

    Returns:
        the names that were left alone with ``strict=False``.

    Raises:
        CheckpointError: on every rank; the files break a rule of their format or do not fit, and nothing was changed.
            Also if reading itself fails, and then tensors may be partly changed.
    """
    groups = world() if groups is None else groups
    with together(groups, CheckpointError):
        refuse_subclasses(into)
        found = locate(path)
        specs = {name: located.entry for name, located in found.items()}
        request = Request(os.fspath(path), strict, key_map, among_floats if cast else operator.eq)
        plan = plan_load(into, specs, request)
    with together(groups, CheckpointError):
        jobs = [(found[source], part_of(into[name])) for name, source in plan.copies.items()]
        read_parts(jobs, progress)
        torch.autograd.graph.increment_version([into[name] for name in plan.copies])
    return plan.keys


def read_parts(jobs: Iterable[tuple[Located, Part]], progress: Progress | None = None) -> None:
    """Fill parts of tensors from files, converted to their dtype. Local.

    Raises OSError where the system refuses, or a file is shorter than it was.
    """
    by_file: dict[Path, list[tuple[Entry, Part]]] = {}
    for located, part in sorted(jobs, key=lambda job: job[0].entry.start):
        by_file.setdefault(located.file, []).append((located.entry, part))
    total = sum(part.numel() * entry.dtype.itemsize for job in by_file.values() for entry, (part, _) in job)
    meter, staging = Meter(progress, total), Staging()
    for file, job in sorted(by_file.items()):
        with opened(file, os.O_RDONLY) as descriptor:
            for entry, part in job:
                _read_part(descriptor, part, entry, staging, meter)


def _read_part(descriptor: int, part: Part, entry: Entry, staging: Staging, meter: Meter) -> None:
    def read(values: Tensor, box: Box) -> Tensor:
        data = raw(values)
        for low, high, start in runs_of(box, entry.shape).bytes(entry.dtype.itemsize):
            read_all(descriptor, data[low:high], entry.start + start, meter)
        return values

    values, box = part
    if values.dtype == entry.dtype and is_plain_memory(values):
        read(values, box)
        return
    for block in blocks(box, Staging.BYTES // entry.dtype.itemsize):
        view = inside(values, box, block)
        view.copy_(read(staging.take(view.shape, entry.dtype, view.device), block))


@torch.no_grad()
def fill(
    targets: Iterable[tuple[str, Tensor]], chunks: Callable[[str], Iterable[Chunk]], progress: Progress | None = None
) -> None:
    """Copy into each target, given with its key, its part of the chunks of that key. Local; one chunk at a time.

    Quantized chunks, such as torchao's optimizer state in DCP files, are copied as their values.
    """
    wanted = [(key, *part_of(target)) for key, target in targets]
    meter = Meter(progress, sum(into.nbytes for _, into, _ in wanted))
    for key, into, box in wanted:
        for at, load in chunks(key):
            if (shared := common(box, at)) is not None:
                loaded = local_value(load())
                values = loaded.dequantize() if is_wrapper(loaded) else loaded
                inside(into, box, shared).copy_(inside(values, at, shared))
        meter.add(into.nbytes)


# ---- files ------------------------------------------------------------------------------------------------------


def locate(path: str | os.PathLike[str]) -> dict[str, Located]:
    """Return every tensor at a path, by name. Local; reads headers and indexes only.

    Args:
        path: a safetensors file; an index (``*.index.json``) with its files beside it; or a directory, in which
            ``model.safetensors`` is taken, else ``model.safetensors.index.json``, else its only index, else its only
            safetensors file. A snapshot in the hub's cache, with its links to blobs, is such a directory.

    Raises:
        CheckpointError: there is no such file, it breaks a rule of its format, or it leads out of its directory.
    """
    start = Path(path)
    try:
        file = within(start, _choice(start)) if start.is_dir() else start
        if file.suffix == ".json":
            return _by_index(file)
        return {name: Located(file, entry) for name, entry in _read_header(file).items()}
    except (OSError, RuntimeError, ValueError) as error:  # no permission, links in a circle, a NUL in a name
        raise _refused(start, f"cannot be read ({error})") from None


def _choice(directory: Path) -> str:
    names = sorted(each.name for each in directory.iterdir())
    for choice in ("model" + SUFFIX, "model" + INDEX):
        if choice in names:
            return choice
    indexes = [name for name in names if name.endswith(INDEX)]
    found = indexes or [name for name in names if name.endswith(SUFFIX)]
    if len(found) == 1:
        return found[0]
    if found:
        rule = "A directory must have one index, or one file without an index"
        raise CheckpointError(message(str(directory), f"has {listing(found)}", rule, "Pass the path of one of them"))
    pickles = [name for name in names if name.endswith(_PICKLES)]
    raise _refused(
        directory, f"has pickles, {listing(pickles)}, and no safetensors" if pickles else "has no safetensors"
    )


def _by_index(index: Path) -> dict[str, Located]:
    size = _checked_size(index)
    if size > MAX_HEADER:
        raise _refused(index, f"has {size:,} bytes, and an index may have at most {MAX_HEADER:,}")
    try:
        table = strict_json(_read(index, 0, size))
    except ValueError as error:
        raise _refused(index, f"is not JSON ({error})") from None
    places: Any = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise _refused(index, "has no weight_map from tensors to files")
    files = {name: within(index.parent, name) for name in dict.fromkeys(places.values())}
    if absent := [name for name, file in files.items() if not file.exists()]:
        raise _refused(index, f"lists files that do not exist: {listing(absent)}")
    headers = {name: _read_header(file) for name, file in files.items()}
    if lost := [f"{key} ({name})" for key, name in places.items() if key not in headers[name]]:
        raise _refused(index, f"lists tensors that the files do not have: {listing(lost)}")
    return {key: Located(files[name], headers[name][key]) for key, name in places.items()}


def within(directory: Path, name: str) -> Path:
    """Return the path of a file that is really in the directory, or in the blobs of the hub's cache it belongs to."""
    if name in ("", ".", "..") or os.path.basename(name) != name or "\0" in name:
        raise _refused(directory, f"has no file of the name {name!r}")
    root, file = directory.resolve(), (directory / name).resolve()
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    if not file.is_relative_to(root) and not file.is_relative_to(blobs):
        rule = "Files of a directory or an index must be in the same directory, or in the blobs of the hub's cache"
        fix = "Copy it there, or pass the path of the one file"
        raise CheckpointError(message(str(directory / name), f"is a link to {file}", rule, fix))
    return directory / name


def _read_header(file: Path) -> dict[str, Entry]:
    size = _checked_size(file)
    try:
        length = header_length(_read(file, 0, min(LENGTH, size)), size)
        return parse_header(_read(file, LENGTH, length), size)
    except ValueError as error:
        raise _refused(file, f"is not a safetensors file: {error}") from None


def _checked_size(file: Path) -> int:
    if not file.is_file():  # opening a pipe would wait for its writer
        raise _refused(file, "is not a regular file" if file.exists() else "cannot be read (No such file or directory)")
    return file.stat().st_size


def _read(file: Path, start: int, count: int) -> bytes:
    data = bytearray(count)
    with opened(file, os.O_RDONLY) as descriptor:
        read_all(descriptor, memoryview(data), start)
    return bytes(data)


def _refused(file: Path, problem: str) -> CheckpointError:
    rule = "shardkit reads a safetensors file, a *.safetensors.index.json, or a directory that has either"
    return CheckpointError(message(str(file), problem, rule, "Check the path, or fetch the files again"))
