"""The safetensors format: eight bytes with the header's length, the header in JSON, then the bytes of the tensors.

Here files are planned, and read by byte ranges. Anyone may have written them, so all in them is checked before use.

The rules are those of the reference (https://github.com/huggingface/safetensors, ``tensor.rs``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from shardkit.checkpoint.chunks import Part, opened, raw, read_all, runs_of, staged
from shardkit.errors import CheckpointError, listing, message
from shardkit.shards import Box
from shardkit.state.load import Spec as Spec

# In the reference's order, by alignment: a file starts with the last ones, so that every tensor's offset is a multiple
# of its element size.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = {dtype: number for number, dtype in enumerate(DTYPES.values())}

LENGTH = 8  # bytes before the header: its length as a little-endian integer
ALIGNMENT = 8  # bytes; the header is padded with spaces to a multiple of this
MAX_HEADER = 100_000_000  # bytes; the reference's limit
METADATA = "__metadata__"
INDEX = ".safetensors.index.json"
SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Entry(Spec):
    """A tensor that starts ``start`` bytes into its file."""

    start: int


@dataclass(frozen=True)
class File:
    """A safetensors file, or an index."""

    name: str
    head: bytes  # everything before the first tensor; the whole text of an index
    tensors: dict[str, Entry]
    bytes: int  # of the whole file


def lay_out(tensors: Mapping[str, Spec], name: str, max_shard_size: int) -> list[File]:
    """Assign tensors to files, in order, as transformers does; the index of several files comes last. Pure.

    A tensor of more than ``max_shard_size`` bytes has a file to itself. Without tensors there is one file.
    """
    shares: list[dict[str, Spec]] = [{}]
    filled = 0
    for tensor, spec in tensors.items():
        if shares[-1] and filled + spec.bytes > max_shard_size:
            shares.append({})
            filled = 0
        shares[-1][tensor] = spec
        filled += spec.bytes
    if len(shares) == 1:
        return [build_file(name + SUFFIX, shares[0])]
    names = [f"{name}-{number:05d}-of-{len(shares):05d}{SUFFIX}" for number in range(1, len(shares) + 1)]
    weight_map = {tensor: file for file, share in zip(names, shares, strict=True) for tensor in share}
    total = {"total_size": sum(spec.bytes for spec in tensors.values())}
    index = (json.dumps({"metadata": total, "weight_map": weight_map}, indent=2) + "\n").encode()
    return [*map(build_file, names, shares), File(name + INDEX, index, {}, len(index))]


def build_file(name: str, tensors: Mapping[str, Spec]) -> File:
    """Return the header of a file with these tensors, and where each one starts. Pure."""
    order = sorted(tensors, key=lambda name: (-_ORDER[tensors[name].dtype], name))
    table: dict[str, Any] = {METADATA: {"format": "pt"}}  # which transformers requires
    end = 0
    for each in order:
        spec, start, end = tensors[each], end, end + tensors[each].bytes
        table[each] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    if len(text) > MAX_HEADER:
        problem = f"need a header of {len(text):,} bytes, as {len(tensors):,} in one file"
        rule = f"A safetensors header has at most {MAX_HEADER:,} bytes"
        raise CheckpointError(message("tensors", problem, rule, "Pass a smaller max_shard_size, for more files"))
    begin = LENGTH + len(text)
    entries = {n: Entry(tensors[n].dtype, tensors[n].shape, begin + table[n]["data_offsets"][0]) for n in order}
    return File(name, len(text).to_bytes(LENGTH, "little") + text, entries, begin + end)


# ---- what anyone wrote --------------------------------------------------------------------------------------------


def read_header(file: Path) -> dict[str, Entry]:
    """Return the tensors of a file, in its order. Local; raises ValueError if it breaks a rule of the format."""
    size = _size(file)
    try:
        length = int.from_bytes(_read(file, 0, min(LENGTH, size)), "little")
        if size < LENGTH or length > MAX_HEADER or LENGTH + length > size:
            raise ValueError(f"its header claims {length:,} of {size:,} bytes; at most {MAX_HEADER:,} are allowed")
        return _parse_header(_read(file, LENGTH, length), size)
    except ValueError as error:
        raise ValueError(f"{file.name} is not a safetensors file: {error}") from None


def _parse_header(text: bytes, file_bytes: int) -> dict[str, Entry]:
    """Parse a header, and check that its tensors cover the rest of the file without gaps or overlaps. Pure."""
    if not text.startswith(b"{"):
        raise ValueError("its header is not a JSON object")
    table = parse_json(text)
    metadata = table.pop(METADATA, None)
    if not isinstance(metadata, dict | None) or not all(isinstance(value, str) for value in (metadata or {}).values()):
        raise ValueError(f"{METADATA} does not map names to strings")
    end = begin = LENGTH + len(text)
    entries = {}
    rows = [(name, *_parse_entry(name, info)) for name, info in table.items()]
    for name, spec, (start, stop) in sorted(rows, key=lambda row: row[2]):
        if begin + start != end or stop - start != spec.bytes:
            raise ValueError(
                f"{name} of {spec.bytes} bytes is at [{start}, {stop}]: each tensor starts where the previous one "
                f"ends, here at {end - begin}, and takes the bytes of its shape and dtype"
            )
        entries[name] = Entry(spec.dtype, spec.shape, end)
        end = begin + stop
    if end != file_bytes:
        raise ValueError(f"its header describes {end:,} bytes, and the file has {file_bytes:,}")
    return entries


def _parse_entry(name: str, info: Any) -> tuple[Spec, tuple[int, int]]:
    def are_sizes(value: Any) -> TypeGuard[list[int]]:
        return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 63 for size in value)

    found: dict[str, Any] = info if isinstance(info, dict) else {}
    dtype, shape, offsets = (found.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name} has the dtype {dtype!r}, and torch has {', '.join(DTYPES)}")
    if not are_sizes(shape) or not are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{name} has the shape {shape!r} at {offsets!r}: both must be lists of sizes")
    return Spec(DTYPES[dtype], torch.Size(shape)), (offsets[0], offsets[1])


def parse_json(text: bytes) -> Any:
    """Parse JSON in UTF-8; raise ValueError for anything else. Pure."""
    try:
        return json.loads(text.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


# ---- files: where tensors are, and reading them ------------------------------------------------------------------


@dataclass(frozen=True)
class Located:
    """A tensor, and the file that holds it."""

    file: Path
    entry: Entry


def file_runs(values: Tensor, box: Box, entry: Entry) -> Iterator[tuple[memoryview, int]]:
    """Yield the memory of each contiguous run of a part of a tensor, and where it starts in the file."""
    (starts, length), size, data = runs_of(box, entry.shape), entry.dtype.itemsize, raw(values)
    for number, start in enumerate(starts):
        yield data[number * length * size : (number + 1) * length * size], entry.start + start * size


def read_parts(jobs: Iterable[tuple[Located, Part]]) -> None:
    """Fill parts of tensors from files, converted to their dtype: straight, or through a buffer of 16 MiB. Local."""
    by_file: dict[Path, list[tuple[Entry, Part]]] = {}
    for located, part in sorted(jobs, key=lambda job: job[0].entry.start):
        by_file.setdefault(located.file, []).append((located.entry, part))
    for file, job in sorted(by_file.items()):
        with opened(file, os.O_RDONLY) as descriptor:
            for entry, part in job:
                for view, values, box in staged(part, entry.dtype):
                    for data, start in file_runs(values, box, entry):
                        read_all(descriptor, data, start)
                    if values is not view:
                        view.copy_(values)


def locate(path: str | os.PathLike[str]) -> dict[str, Located]:
    """Return every tensor at a path, by name. Local; reads headers and indexes only.

    Args:
        path: a safetensors file; an index (``*.index.json``); or a directory, such as a snapshot in the hub's cache:
            ``model.safetensors``, else ``model.safetensors.index.json``, else its only index or safetensors file.
    """
    start = Path(path)
    try:
        file = within(start, _choice(start)) if start.is_dir() else start
        if file.suffix == ".json":
            return _by_index(file)
        return {name: Located(file, entry) for name, entry in read_header(file).items()}
    except (OSError, RuntimeError, ValueError) as error:  # no permission, links in a circle, a NUL in a name
        rule = "shardkit reads a safetensors file, a *.safetensors.index.json, or a directory that has either"
        fix = "Pass a path, such as huggingface_hub.snapshot_download(name) returns, or fetch the files again"
        raise CheckpointError(message(str(start), f"cannot be read: {error}", rule, fix)) from None


def _choice(directory: Path) -> str:
    names = sorted(each.name for each in directory.iterdir())
    for choice in ("model" + SUFFIX, "model" + INDEX):
        if choice in names:
            return choice
    indexes = [name for name in names if name.endswith(INDEX)]
    found = indexes or [name for name in names if name.endswith(SUFFIX)]
    if len(found) != 1:
        raise ValueError(f"it has {listing(found or names) or 'no files'}, and not one index, or one file without one")
    return found[0]


def _by_index(index: Path) -> dict[str, Located]:
    table = parse_json(_read(index, 0, min(_size(index), MAX_HEADER)))
    places: Any = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError("it has no weight_map from tensors to files")
    files = {name: within(index.parent, name) for name in dict.fromkeys(places.values())}
    headers = {name: read_header(file) for name, file in files.items()}
    if lost := [f"{key} ({name})" for key, name in places.items() if key not in headers[name]]:
        raise ValueError(f"it lists tensors that the files do not have: {listing(lost)}")
    return {key: Located(files[name], headers[name][key]) for key, name in places.items()}


def within(directory: Path, name: str) -> Path:
    """Return the path of a file; raise ValueError unless it is in the directory, or the blobs of its hub's cache."""
    root, file = directory.resolve(), (directory / name).resolve()
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    if os.path.basename(name) != name or not (file.is_relative_to(root) or file.is_relative_to(blobs)):
        raise ValueError(f"{name!r} leads out of the directory, to {file}")
    return directory / name


def _size(file: Path) -> int:
    if file.exists() and not file.is_file():  # opening a pipe would wait for its writer
        raise ValueError(f"{file.name} is not a regular file")
    return file.stat().st_size


def _read(file: Path, start: int, count: int) -> bytes:
    data = bytearray(count)
    with opened(file, os.O_RDONLY) as descriptor:
        read_all(descriptor, memoryview(data), start)
    return bytes(data)
