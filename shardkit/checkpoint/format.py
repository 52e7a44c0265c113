"""The safetensors format: eight bytes that say how long the header is, the header in JSON, then the tensors' bytes.

All of it is pure: bytes in, bytes out. The rules are those of the reference implementation
(https://github.com/huggingface/safetensors, ``tensor.rs``), which the tests hold this one against. The package itself
reads and writes whole tensors through its own memory; shardkit's ranks need byte ranges, from and into their shards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardkit.errors import CheckpointError, message
from shardkit.state.plan import Spec as Spec

# In the reference's order, that of alignment: files begin with the last ones, so that every tensor lies at a multiple
# of its element's size.
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

LENGTH = 8  # bytes in front of the header, its length as a little-endian integer
ALIGNMENT = 8  # bytes; the header is filled up with spaces to a multiple of it
MAX_HEADER = 100_000_000  # bytes, the reference's limit
METADATA = "__metadata__"
INDEX = ".safetensors.index.json"
SUFFIX = ".safetensors"
_PICKLES = (b"PK\x03\x04", b"\x80")  # how zip files and pickles begin; no header is as long as these say


@dataclass(frozen=True)
class Entry(Spec):
    """A tensor in a file, ``start`` bytes from the file's beginning."""

    start: int


@dataclass(frozen=True)
class Header:
    """Attributes:
    tensors: by name, in the order of the file.
    metadata: the file's own texts, such as ``{"format": "pt"}``.
    bytes: where the tensors begin.
    file_bytes: how long the whole file is.
    """

    tensors: dict[str, Entry]
    metadata: dict[str, str]
    bytes: int
    file_bytes: int


def build_header(tensors: Mapping[str, Spec], metadata: Mapping[str, str]) -> tuple[bytes, Header]:
    """What a file of these tensors begins with, and where they lie in it. Pure.

    Raises:
        CheckpointError: the header would be longer than the format allows.
    """
    names = sorted(tensors, key=lambda name: (-_ORDER[tensors[name].dtype], name))
    table: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].bytes
        table[name] = {
            "dtype": NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    if len(text) > MAX_HEADER:
        rule = f"A header has at most {MAX_HEADER:,} bytes"
        fix = "Pass a smaller max_shard_size, so that there are more files"
        raise CheckpointError(message("tensors", f"{len(tensors):,} names make {len(text):,}", rule, fix))
    begin = LENGTH + len(text)
    entries = {
        name: Entry(tensors[name].dtype, tensors[name].shape, begin + table[name]["data_offsets"][0]) for name in names
    }
    return len(text).to_bytes(LENGTH, "little") + text, Header(entries, dict(metadata), begin, begin + end)


def header_length(first: bytes, file_bytes: int) -> int:
    """How many bytes of header follow the file's first eight. Pure; nothing of that size is allocated.

    Raises:
        ValueError: they are not the beginning of a safetensors file of ``file_bytes``.
    """
    if len(first) < LENGTH:
        raise ValueError(f"it has {file_bytes} bytes, fewer than the {LENGTH} that say how long the header is")
    length = int.from_bytes(first[:LENGTH], "little")
    if length > MAX_HEADER and first.startswith(_PICKLES):
        raise ValueError("it is a pickle, as torch.save writes, which can run code when it is read")
    if length > MAX_HEADER:
        raise ValueError(f"its header would have {length:,} bytes, and at most {MAX_HEADER:,} are allowed")
    if LENGTH + length > file_bytes:
        raise ValueError(f"its header would have {length:,} bytes, and the file has {file_bytes:,}: it is cut off")
    return length


def parse_header(text: bytes, file_bytes: int) -> Header:
    """The header of a file, after checking that its tensors cover the rest of the file without gap or overlap. Pure.

    Args:
        text: the header, without the eight bytes in front.
        file_bytes: how long the whole file is.

    Raises:
        ValueError: it breaks a rule of the format.
    """
    table = _table(text)
    metadata = _metadata(table.pop(METADATA, None))
    begin, end = LENGTH + len(text), 0
    entries = {}
    rows = [(name, *_row(name, info)) for name, info in table.items()]
    for name, spec, (start, stop) in sorted(rows, key=lambda row: row[2]):
        if start != end or stop - start != spec.bytes:
            raise ValueError(
                f"{name} of {spec.bytes} bytes lies at [{start}, {stop}]: each tensor begins where the one before "
                f"ends, here at {end}, and takes the bytes of its shape and dtype"
            )
        entries[name] = Entry(spec.dtype, spec.shape, begin + start)
        end = stop
    if begin + end != file_bytes:
        raise ValueError(f"by its header it has {begin + end:,} bytes, and it has {file_bytes:,}")
    return Header(entries, metadata, begin, file_bytes)


def _table(text: bytes) -> Any:
    if not text.startswith(b"{"):
        raise ValueError("its header is not a JSON object")
    try:
        return strict_json(text)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None


def strict_json(text: bytes) -> Any:
    """A JSON text, without what Python allows beyond JSON, and without repeated keys. Pure.

    Raises:
        ValueError: it is not such a text.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key appears twice in its header")
    for key in table:
        key.encode()  # half a surrogate pair, which JSON can escape, is not text
    return table


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _metadata(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError(f"{METADATA} is not a map of texts")
    return value


def _row(name: str, info: Any) -> tuple[Spec, tuple[int, int]]:
    if not isinstance(info, dict) or not {"dtype", "shape", "data_offsets"} <= info.keys():
        raise ValueError(f"{name} has no dtype, shape and data_offsets")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name} has the dtype {dtype!r}, and torch's are {', '.join(DTYPES)}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{name} has the shape {shape!r} at {offsets!r}: both are lists of sizes")
    return Spec(DTYPES[dtype], torch.Size(shape)), (offsets[0], offsets[1])


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 63 for size in value)


# ---- which tensor goes into which file ---------------------------------------------------------------------------


@dataclass(frozen=True)
class FileLayout:
    """Attributes:
    name: of the file.
    head: what it begins with.
    header: where its tensors lie.
    """

    name: str
    head: bytes
    header: Header


@dataclass(frozen=True)
class Layout:
    """Attributes:
    files: in order.
    index: name and text of the index; None for a single file, which needs none.
    """

    files: tuple[FileLayout, ...]
    index: tuple[str, bytes] | None = None

    @property
    def names(self) -> list[str]:
        """Of all files, the index last."""
        return [file.name for file in self.files] + ([] if self.index is None else [self.index[0]])


def lay_out(tensors: Mapping[str, Spec], name: str, max_shard_size: int, metadata: Mapping[str, str]) -> Layout:
    """Lay tensors out as transformers does: in order, a file is closed before it would exceed ``max_shard_size``. Pure.

    A tensor that is larger than that has a file to itself. Without any tensor there is one file, of a header alone.
    """
    shares = _shares(tensors, max_shard_size)
    if len(shares) == 1:
        return Layout((FileLayout(name + SUFFIX, *build_header(shares[0], metadata)),))
    names = [f"{name}-{number:05d}-of-{len(shares):05d}{SUFFIX}" for number in range(1, len(shares) + 1)]
    files = [FileLayout(name, *build_header(share, metadata)) for name, share in zip(names, shares, strict=True)]
    weight_map = {tensor: file for file, share in zip(names, shares, strict=True) for tensor in share}
    total = {"total_size": sum(spec.bytes for spec in tensors.values())}
    index = json.dumps({"metadata": total, "weight_map": weight_map}, indent=2) + "\n"
    return Layout(tuple(files), (name + INDEX, index.encode()))


def _shares(tensors: Mapping[str, Spec], most: int) -> list[dict[str, Spec]]:
    shares: list[dict[str, Spec]] = [{}]
    filled = 0
    for name, spec in tensors.items():
        if shares[-1] and filled + spec.bytes > most:
            shares.append({})
            filled = 0
        shares[-1][name] = spec
        filled += spec.bytes
    return shares
