"""Read safetensors files into shards: each rank the byte ranges that it needs, straight into its memory.

From a path to the tensors behind it: a safetensors file, an index of many, or a directory that has either. What is read
here was written by anyone, so nothing in it is believed before it is checked.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardkit import _torch
from shardkit.checkpoint.agreement import axes_of
from shardkit.checkpoint.format import (
    INDEX,
    LENGTH,
    MAX_HEADER,
    SUFFIX,
    Entry,
    Header,
    header_length,
    parse_header,
    strict_json,
)
from shardkit.checkpoint.pieces import Part, Runs, blocks, common, inside, is_plain_memory, part_of, runs_of
from shardkit.checkpoint.transfer import Meter, Progress, Staging, opened, raw, raw_bytes, read_all
from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import Groups, together
from shardkit.shards import Box, local_value
from shardkit.state.plan import IncompatibleKeys, KeyMap, Request, among_floats, exactly, plan_load

_PAGE = 4096  # bytes; the system reads no less, so shorter runs are read with what lies between them
_RULE = "shardkit reads a safetensors file, a *.safetensors.index.json, or a directory that has either"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

Piece: TypeAlias = "tuple[Box, Callable[[], Tensor]]"  # where it lies in its tensor, and what gives its values


@dataclass(frozen=True)
class Located:
    """A tensor, and the file that has it."""

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

    **Collective** over ``groups``, but only to raise on all ranks what one of them met: nothing else is communicated.
    Each rank reads the bytes of its shards, straight into them; what is on another device, of another dtype or not
    contiguous goes through 16 MiB of memory. Names, shapes and dtypes are compared before anything is read.

    Args:
        path: see :func:`shardkit.checkpoint.read.locate`.
        into: DTensor and plain, by name. The same object under several names is read once, from the first that is
            there.
        key_map: from names in the files to names in ``into``: a function (None: leave it out), a map of whole names,
            or pairs of a regular expression and what replaces it, of which the first that is found is applied.
        strict: names that are missing or unexpected are errors.
        cast: floating-point values may be converted to the dtype of their tensor.
        progress: called on each rank with its bytes read, and its total, every 64 MiB.
        groups: which together reach all ranks that read; None: those of the tensors' meshes.

    Returns:
        what was left alone for ``strict=False``.

    Raises:
        CheckpointError: on every rank; the files break a rule of their format, or do not fit: nothing was changed.
            Also when reading itself fails half-way, on a broken disk: then tensors are partly changed.
    """
    groups = axes_of(into.values()) if groups is None else groups
    with together(groups, CheckpointError):
        found = locate(path)
        specs = {name: located.entry for name, located in found.items()}
        request = Request(os.fspath(path), strict, key_map, among_floats if cast else exactly)
        plan = plan_load(into, specs, request)
    with together(groups, CheckpointError):
        jobs = [(found[source], part_of(into[name])) for name, source in plan.copies.items()]
        read_parts(jobs, progress)
        torch.autograd.graph.increment_version([into[name] for name in plan.copies])
    return plan.keys


def read_parts(jobs: Iterable[tuple[Located, Part]], progress: Progress | None = None) -> None:
    """Fill parts of tensors, converted to their dtype, from where the tensors lie in files. Local.

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
    values, box = part
    runs = runs_of(box, entry.shape)
    is_fine = len(runs.starts) > 1 and runs.length * entry.dtype.itemsize < _PAGE
    if values.dtype == entry.dtype and is_plain_memory(values) and not is_fine:
        _read_runs(descriptor, values, runs, entry, meter)
        return
    read = _read_span if is_fine else _read_block
    for block in blocks(box, entry.shape, Staging.BYTES // entry.dtype.itemsize):
        view = inside(values, box, block)
        view.copy_(read(descriptor, view, runs_of(block, entry.shape), entry, staging, meter))


def _read_block(descriptor: int, view: Tensor, runs: Runs, entry: Entry, staging: Staging, meter: Meter) -> Tensor:
    """The values for a view, read run by run."""
    staged = staging.take(view.shape, entry.dtype, view.device)
    _read_runs(descriptor, staged, runs, entry, meter)
    return staged


def _read_span(descriptor: int, view: Tensor, runs: Runs, entry: Entry, staging: Staging, meter: Meter) -> Tensor:
    """The values for a view, read in one piece with what lies between them."""
    staged = staging.take((runs.span,), entry.dtype, view.device)
    read_all(descriptor, raw(staged), entry.start + runs.starts[0] * entry.dtype.itemsize)
    meter.add(view.numel() * entry.dtype.itemsize)
    return staged.as_strided(view.shape, torch.empty(entry.shape, device="meta").stride())


def _read_runs(descriptor: int, values: Tensor, runs: Runs, entry: Entry, meter: Meter) -> None:
    data, size = raw(values), entry.dtype.itemsize
    for number, start in enumerate(runs.starts):
        run = data[number * runs.length * size : (number + 1) * runs.length * size]
        read_all(descriptor, run, entry.start + start * size, meter)


@torch.no_grad()
def fill(
    targets: Iterable[tuple[str, Tensor]], pieces: Callable[[str], Iterable[Piece]], progress: Progress | None = None
) -> None:
    """Copy into each target, given with its key, what it has of the pieces of its tensor. Local; one at a time.

    Raises a CheckpointError for a piece that is quantised, where what it goes into is plain memory.
    """
    wanted = [(key, *part_of(target)) for key, target in targets]
    meter = Meter(progress, sum(into.nbytes for _, into, _ in wanted))
    for key, into, box in wanted:
        for at, values in pieces(key):
            if (shared := common(box, at)) is not None:
                _copy(inside(into, box, shared), inside(local_value(values()), at, shared), key)
        meter.add(into.nbytes)


def _copy(into: Tensor, values: Tensor, key: str) -> None:
    if _torch.is_wrapper(values) and not _torch.is_wrapper(into):
        problem = f"stored as {type(values).__name__}, where it goes is plain"
        rule = "Quantised tensors are loaded as what they were"
        fix = "Load it with torch's dcp.load into an optimizer that has stepped, and save that with save_checkpoint"
        raise CheckpointError(message(key, problem, rule, fix))
    into.copy_(values)


# ---- files ------------------------------------------------------------------------------------------------------


def locate(path: str | os.PathLike[str]) -> dict[str, Located]:
    """Every tensor behind a path, by name. Local; reads headers and indexes only.

    Args:
        path: a safetensors file; an index (``*.index.json``), whose files lie beside it; or a directory, of which
            ``model.safetensors``, else ``model.safetensors.index.json``, else its only index, else its only
            safetensors file is taken. A snapshot in the hub's cache, with its links to blobs, is such a directory.

    Raises:
        CheckpointError: there is no such thing, or it breaks a rule of its format, or leads out of its directory.
    """
    start = Path(path)
    try:
        file = within(start, _choice(start)) if start.is_dir() else start
        if file.suffix == ".json":
            return _by_index(file)
        return {name: Located(file, entry) for name, entry in _read_header(file).tensors.items()}
    except (OSError, RuntimeError, ValueError) as error:  # what may not be listed, links in a circle, a NUL in a name
        reason = error.strerror if isinstance(error, OSError) and error.filename == str(start) else None
        raise _refused(start, reason or f"it cannot be read ({error})") from None


def _choice(directory: Path) -> str:
    names = sorted(each.name for each in directory.iterdir())
    indexes = [name for name in names if name.endswith(INDEX)]
    for choice in ("model" + SUFFIX, "model" + INDEX):
        if choice in names:
            return choice
    found = indexes or [name for name in names if name.endswith(SUFFIX)]
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(message(str(directory), f"it has {listing(found)}", "One must be meant", "Pass its path"))
    pickles = [name for name in names if name.endswith(_PICKLES)]
    problem = f"it has pickles, {listing(pickles)}, and no safetensors" if pickles else "it has no safetensors"
    raise CheckpointError(message(str(directory), problem, _RULE, "Convert it, or pass another path"))


def _by_index(index: Path) -> dict[str, Located]:
    places = _weight_map(index)
    files = {name: within(index.parent, name) for name in dict.fromkeys(places.values())}
    if absent := [name for name, file in files.items() if not file.exists()]:
        problem = f"it names {listing(absent)}"
        raise CheckpointError(message(str(index), problem, "Its files lie beside it", "Fetch what is missing"))
    headers = {name: _read_header(file) for name, file in files.items()}
    if lost := [f"{key} ({name})" for key, name in places.items() if key not in headers[name].tensors]:
        problem, rule = f"it names {listing(lost)}, not there", "Each tensor is in the file that the index says"
        raise CheckpointError(message(str(index), problem, rule, "Fetch index and files again"))
    return {key: Located(files[name], headers[name].tensors[key]) for key, name in places.items()}


def _weight_map(index: Path) -> dict[str, str]:
    text = _read(index, 0, _checked_size(index, MAX_HEADER))
    try:
        table = strict_json(text)
    except (ValueError, RecursionError) as error:
        raise _refused(index, f"it is not JSON ({error})") from None
    found: Any = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise _refused(index, "it has no weight_map from tensors to files")
    return found


def within(directory: Path, name: str) -> Path:
    """A file of a directory, which must really be there, or in the blobs of the hub's cache that it belongs to."""
    if name in ("", ".", "..") or os.path.basename(name) != name or "\0" in name:
        raise _refused(directory, f"{name!r} is not the name of a file in it")
    root, file = directory.resolve(), (directory / name).resolve()
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    if not file.is_relative_to(root) and not file.is_relative_to(blobs):
        rule = "What a directory or an index names lies in the directory, or in the blobs of the hub's cache"
        fix = "Copy it there, or pass the path of the one file"
        raise CheckpointError(message(str(directory / name), f"it is a link to {file}", rule, fix))
    return directory / name


def _read_header(file: Path) -> Header:
    size = _checked_size(file, None)
    try:
        length = header_length(_read(file, 0, min(LENGTH, size)), size)
        return parse_header(_read(file, LENGTH, length), size)
    except ValueError as error:
        raise _refused(file, str(error)) from None


def _checked_size(file: Path, most: int | None) -> int:
    found = os.stat(file)
    if not stat.S_ISREG(found.st_mode):
        raise _refused(file, "it is not a regular file")
    if most is not None and found.st_size > most:
        raise _refused(file, f"it has {found.st_size:,} bytes, and an index at most {most:,}")
    return found.st_size


def _read(file: Path, start: int, count: int) -> bytes:
    with opened(file, os.O_RDONLY) as descriptor:
        return raw_bytes(descriptor, start, count)


def _refused(file: Path, problem: str) -> CheckpointError:
    return CheckpointError(message(str(file), problem, _RULE, "Check the path, or fetch the file again"))
