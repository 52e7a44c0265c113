"""The safetensors format: plan files that many ranks write, and find the tensors in files.

A file is the length of its header in 8 bytes, the header in JSON, then the bytes of the tensors, in
row-major order. The rules are those of the reference (https://github.com/huggingface/safetensors,
``tensor.rs``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardkit.errors import CheckpointError, listing
from shardkit.state.load import Spec as Spec

# In the reference's order, by alignment. A file starts with the last ones, so that every tensor
# lies at a multiple of its element size.
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

SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"
MAX_FILE_BYTES = 5 * 10**9
_MAX_FILES = 64  # of a large model; every rank opens all files
_MAX_HEADER = 100_000_000  # bytes; the reference's limit
_METADATA = "__metadata__"


@dataclass(frozen=True)
class Location(Spec):
    """Where a tensor lies: ``start`` bytes into a file."""

    file: Path
    start: int


class NewFile(NamedTuple):
    """A file to be written."""

    path: Path
    header: bytes  # everything before the first tensor; of an index all of it
    size: int


def plan_files(
    directory: Path, stem: str, specs: Mapping[str, Spec], max_file_bytes: int | None = None
) -> tuple[list[NewFile], dict[str, Location]]:
    """Assign tensors to files in order, as transformers does, with an index if there are several.
    Pure.

    A larger tensor has a file to itself. By default a file has 5 GB, or more in a large model.
    """
    total_size = sum(spec.bytes for spec in specs.values())
    if max_file_bytes is None:
        max_file_bytes = max(MAX_FILE_BYTES, total_size // _MAX_FILES)
    shares: list[dict[str, Spec]] = [{}]
    filled = 0
    for name, spec in specs.items():
        if shares[-1] and filled + spec.bytes > max_file_bytes:
            shares.append({})
            filled = 0
        shares[-1][name] = spec
        filled += spec.bytes

    files: list[NewFile] = []
    locations: dict[str, Location] = {}
    for number, share in enumerate(shares, 1):
        suffix = f"-{number:05d}-of-{len(shares):05d}" if len(shares) > 1 else ""
        file, in_file = _plan_file(directory / f"{stem}{suffix}{SUFFIX}", share)
        files.append(file)
        locations |= in_file
    if len(shares) > 1:
        weight_map = {name: locations[name].file.name for name in specs}
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        text = (json.dumps(index, indent=2) + "\n").encode()
        files.append(NewFile(directory / f"{stem}{INDEX}", text, len(text)))
    return files, locations


def _plan_file(path: Path, specs: Mapping[str, Spec]) -> tuple[NewFile, dict[str, Location]]:
    names = sorted(specs, key=lambda name: (-_ORDER[specs[name].dtype], name))
    table: dict[str, Any] = {_METADATA: {"format": "pt"}}  # which transformers requires
    starts: dict[str, int] = {}
    end = 0
    for name in names:
        spec = specs[name]
        starts[name] = end
        end += spec.bytes
        offsets = [starts[name], end]
        dtype = NAMES[spec.dtype]
        table[name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    locations = {}
    for name, start in starts.items():
        locations[name] = Location(specs[name].dtype, specs[name].shape, path, len(header) + start)
    return NewFile(path, header, len(header) + end), locations


def read_header(file: Path) -> dict[str, Location]:
    """Return the tensors of a file, which anyone may have written. Local.

    Raises ValueError, KeyError or TypeError unless its tensors fill it without gaps or overlaps.
    """
    if not file.is_file():  # opening a pipe would wait for its writer
        raise ValueError(f"{file.name} is not a file")
    size = file.stat().st_size
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > min(_MAX_HEADER, size - 8):
            raise ValueError(f"its header claims {length:,} of {size:,} bytes")
        table = json.loads(opened.read(length).decode())
    if not isinstance(table, dict):
        raise ValueError("its header is not a JSON object")
    table.pop(_METADATA, None)
    begin = end = 8 + length
    locations: dict[str, Location] = {}
    for name, info in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
        location = Location(DTYPES[info["dtype"]], torch.Size(info["shape"]), file, end)
        offsets = [end - begin, end - begin + location.bytes]
        if info["data_offsets"] != offsets or min(location.shape, default=0) < 0:
            raise ValueError(f"{name} of {location.bytes} bytes lies at {info['data_offsets']}")
        locations[name] = location
        end += location.bytes
    if end != size:
        raise ValueError(f"its header describes {end:,} bytes, and the file has {size:,}")
    return locations


def find_tensors(path: Path) -> dict[str, Location]:
    """Return every tensor at a path by name. Local; reads headers and indexes only.

    Args:
        path: a safetensors file; an index (``*.index.json``); or a directory that has
            ``model.safetensors``, its index, or only one index or one file.
    """
    try:
        file = path / _main_file(path) if path.is_dir() else path
        if file.suffix != ".json":
            return read_header(file)
        weight_map: dict[str, str] = json.loads(file.read_bytes())["weight_map"]
        headers = {}
        for name in sorted(set(weight_map.values())):
            headers[name] = read_header(_beside(file, name))
        return {tensor: headers[name][tensor] for tensor, name in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}). Pass a safetensors file, a "
            "*.safetensors.index.json, or a directory that has either, such as a snapshot of the "
            "hub."
        ) from error


def _beside(index: Path, name: str) -> Path:
    """Return a file that an index names; raise unless it is in the directory of the index, or a
    blob of the hub's cache around that.
    """
    directory, file = index.parent.resolve(), (index.parent / name).resolve()
    allowed = [directory]
    if directory.parent.name == "snapshots":
        allowed.append(directory.parent.parent / "blobs")
    if file.parent not in allowed:
        raise ValueError(f"{name!r} leads out of the directory, to {file}")
    return index.parent / name


def _main_file(directory: Path) -> str:
    names = sorted(file.name for file in directory.iterdir())
    for name in ("model" + SUFFIX, "model" + INDEX):
        if name in names:
            return name
    indexes = [name for name in names if name.endswith(INDEX)]
    candidates = indexes or [name for name in names if name.endswith(SUFFIX)]
    if len(candidates) != 1:
        raise ValueError(f"it has {listing(candidates or names) or 'no files'}")
    return candidates[0]
