"""The safetensors format: eight bytes with the header's length, the header in JSON, then the bytes of the tensors.

The rules are those of the reference (https://github.com/huggingface/safetensors, ``tensor.rs``), and the tests compare
the two. The package itself reads and writes full tensors, and ranks need byte ranges of their shards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardkit.errors import CheckpointError, message
from shardkit.state.plan import Spec as Spec

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

    A file is closed before it would exceed ``max_shard_size``, so a larger tensor has a file to itself. Without
    tensors there is one file, with a header alone.
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
    """Return the header of a file with these tensors, and where each one starts. Pure.

    Raises:
        CheckpointError: the header would exceed the format's limit.
    """
    order = sorted(tensors, key=lambda name: (-_ORDER[tensors[name].dtype], name))
    table: dict[str, Any] = {METADATA: {"format": "pt"}}  # which transformers requires
    end = 0
    for each in order:
        spec, start = tensors[each], end
        end += spec.bytes
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


def header_length(first: bytes, file_bytes: int) -> int:
    """Return the length of the header from a file's first eight bytes. Pure; allocates nothing of that size.

    Raises:
        ValueError: these are not the first bytes of a safetensors file of ``file_bytes`` bytes.
    """
    length = int.from_bytes(first[:LENGTH], "little")
    if length > MAX_HEADER:
        raise ValueError(f"its header claims {length:,} bytes, and at most {MAX_HEADER:,} are allowed")
    if len(first) < LENGTH or LENGTH + length > file_bytes:
        raise ValueError(f"its header claims {length:,} bytes, and the file has {file_bytes:,}: it is truncated")
    return length


def parse_header(text: bytes, file_bytes: int) -> dict[str, Entry]:
    """Parse a header, and check that its tensors cover the rest of the file without gaps or overlaps. Pure.

    Args:
        text: the header, without the eight bytes before it.
        file_bytes: the size of the whole file.

    Returns:
        the tensors, in the order of the file.

    Raises:
        ValueError: the header breaks a rule of the format.
    """
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
    def are_sizes(value: Any) -> bool:
        return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 63 for size in value)

    if not isinstance(info, dict) or not {"dtype", "shape", "data_offsets"} <= info.keys():
        raise ValueError(f"{name} has no dtype, shape and data_offsets")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name} has the dtype {dtype!r}, and torch has {', '.join(DTYPES)}")
    if not are_sizes(shape) or not are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{name} has the shape {shape!r} at {offsets!r}: both must be lists of sizes")
    return Spec(DTYPES[dtype], torch.Size(shape)), (offsets[0], offsets[1])


def parse_json(text: bytes) -> Any:
    """Parse JSON in UTF-8. Pure; raises ValueError for anything else."""
    try:
        return json.loads(text.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
