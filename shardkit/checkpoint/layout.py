"""Which tensor goes into which file, by names, dtypes and shapes: one file, or Hugging Face's many and an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from shardkit.checkpoint.format import Header, Spec, build_header

INDEX = ".safetensors.index.json"
SUFFIX = ".safetensors"


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
