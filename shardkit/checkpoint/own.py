"""Checkpoints of shardkit: a directory with a manifest."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardkit.checkpoint.checksums import added, run_sum
from shardkit.checkpoint.dcp import DcpDirectory
from shardkit.checkpoint.layout import INDEX, SUFFIX
from shardkit.checkpoint.locate import Located, locate
from shardkit.checkpoint.manifest import CONFIG, FileEntry, Manifest, check_sizes, crc32_of, read_manifest
from shardkit.checkpoint.pieces import part_of
from shardkit.checkpoint.plain import decode
from shardkit.checkpoint.read import read_parts
from shardkit.checkpoint.source import Contents, Source, Stored, checked_optimizer
from shardkit.checkpoint.transfer import Progress, opened, raw, read_all
from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import Groups, together

STATE = "state.json"
_CHUNK = 1 << 24  # bytes of a file that are summed at a time


class Safetensors:
    """Safetensors files as a source: tensors by section and name."""

    def __init__(self, files: Mapping[str, Mapping[str, Located]]) -> None:
        self.located = {f"{section}/{name}": at for section, part in files.items() for name, at in part.items()}
        self.contents = Contents(self.stored("model"))

    def stored(self, section: str) -> dict[str, Any]:
        """The tensors of a section by their own names."""
        return {
            key.partition("/")[2]: Stored(at.entry.dtype, at.entry.shape, key)
            for key, at in self.located.items()
            if key.startswith(f"{section}/")
        }

    def read(self, targets: Iterable[tuple[str, Tensor]], progress: Progress | None = None) -> None:
        """Fill each target from the tensor of its key, straight from the file. Local."""
        wanted = list(targets)
        read_parts([(self.located[key], part_of(tensor)) for key, tensor in wanted], progress)
        torch.autograd.graph.increment_version([tensor for _, tensor in wanted])


class OwnDirectory:
    """A checkpoint that ``save_checkpoint`` wrote, of either format."""

    def __init__(self, directory: Path, *, allow_pickle: bool = False) -> None:
        self._directory = directory
        self.manifest: Manifest = read_manifest(directory)
        check_sizes(directory, self.manifest)
        self._check_heads()
        self._files = Safetensors({section: self._section(section) for section in ("model", "optimizer", "state")})
        self._source: Source = self._files
        if self.manifest.format == "dcp":
            self._source = DcpDirectory(directory, self.manifest.files, allow_pickle=allow_pickle)
        self.contents = self._contents()

    def _check_heads(self) -> None:
        """Headers, indexes and the state, which are small; the tensors are :func:`verify`'s affair."""
        kept = {name: entry for name, entry in self.manifest.files.items() if name != CONFIG}
        small = {name: entry for name, entry in kept.items() if not name.endswith(".distcp")}
        damaged = [name for name, entry in small.items() if crc32_of(self._directory / name, entry.head) != entry.crc32]
        _raise_damaged(self._directory, damaged)

    def _section(self, name: str) -> dict[str, Located]:
        for file in (name + SUFFIX, name + INDEX):
            if file in self.manifest.files:
                found = locate(self._directory / file)
                strangers = {at.file.name for at in found.values()} - self.manifest.files.keys()
                if strangers:
                    raise self._refused(f"{file} names {listing(sorted(strangers))}, which the manifest does not list")
                return found
        if name == "model" and self.manifest.format == "safetensors":
            raise self._refused("the manifest lists no model")
        return {}

    def _contents(self) -> Contents:
        tensors = self._rest()
        contents = self._source.contents
        contents.trainable_only = self.manifest.trainable_only
        try:
            state = self._state()
            if self.manifest.format == "safetensors":
                contents.optimizer = checked_optimizer(decode(state["optimizer"], self._files.stored("optimizer")))
            contents.model |= decode(state["model"], tensors)
            contents.scheduler, contents.extra = decode(state["scheduler"], tensors), decode(state["extra"], tensors)
            random = decode(state["random"], tensors)
            contents.random = {kind: [bytes(each.tolist()) for each in of_ranks] for kind, of_ranks in random.items()}
            contents.ties = {
                n: f for n, f in state.get("ties", {}).items() if f in contents.model
            }  # of older ones none
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, RecursionError) as error:
            raise self._refused(f"{STATE} is not what a save writes ({type(error).__name__}: {error})") from None
        contents.config = self._config()
        return contents

    def _config(self) -> str:
        file = self._directory / CONFIG
        return file.read_text() if CONFIG in self.manifest.files and file.is_file() else ""

    def _state(self) -> dict[str, Any]:
        if STATE not in self.manifest.files:
            raise ValueError("the manifest does not list it")
        state: dict[str, Any] = json.loads((self._directory / STATE).read_bytes())
        return state

    def _refused(self, problem: str) -> CheckpointError:
        rule = "A checkpoint holds what its save wrote, and nothing else is read"
        return CheckpointError(message(str(self._directory), problem, rule, "Use another checkpoint"))

    def _rest(self) -> dict[str, Tensor]:
        stored = self._files.stored("state")
        tensors = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in stored.items()}
        self._files.read((stored[name].key, tensor) for name, tensor in tensors.items())
        return tensors

    @property
    def located(self) -> dict[str, Located]:
        """Where the tensors of its safetensors files lie, by key."""
        return self._files.located

    def read(self, targets: Iterable[tuple[str, Tensor]], progress: Progress | None = None) -> None:
        """As the source of its format."""
        self._source.read(targets, progress)

    def verify(self, groups: Groups, rank: int, world_size: int) -> None:
        """Read every byte once, each rank its share, and raise if a checksum is wrong. Collective over ``groups``."""
        with together(groups, CheckpointError):
            own = self._own_sums(rank, world_size)
        names = sorted(own)
        found = dict(zip(names, added([own[name] for name in names], groups), strict=True))
        written = {f"{file}: {name}": value for file, entry in self._entries() for name, value in entry.sums.items()}
        differ = [name for name in written.keys() | found.keys() if found.get(name) != written.get(name)]
        _raise_damaged(self._directory, sorted(differ))
        with together(groups, CheckpointError):
            pickled = [(name, entry) for name, entry in self._entries() if name.endswith(".distcp")][rank::world_size]
            damaged = [name for name, each in pickled if crc32_of(self._directory / name, each.head) != each.crc32]
            _raise_damaged(self._directory, damaged)

    def _entries(self) -> list[tuple[str, FileEntry]]:
        return sorted(self.manifest.files.items())

    def _own_sums(self, rank: int, world_size: int) -> dict[str, int]:
        """What this rank's share of the bytes of each tensor adds to its checksum."""
        by_file: dict[Path, dict[str, Located]] = {}
        for key, at in self._files.located.items():
            by_file.setdefault(at.file, {})[f"{at.file.name}: {key.partition('/')[2]}"] = at
        buffer, sums = torch.empty(_CHUNK, dtype=torch.uint8), {}
        for file, tensors in by_file.items():
            with opened(file, os.O_RDONLY) as descriptor:
                for name, at in tensors.items():
                    sums[name] = _sum_of_share(descriptor, at, rank, world_size, buffer) if at.entry.bytes else 0
        return sums


def _sum_of_share(descriptor: int, at: Located, rank: int, world_size: int, buffer: Tensor) -> int:
    share = -(-at.entry.bytes // world_size)
    stop, total = min(share * (rank + 1), at.entry.bytes), 0
    for start in range(share * rank, stop, len(buffer)):
        data = buffer[: min(len(buffer), stop - start)]
        read_all(descriptor, raw(data), at.entry.start + start)
        total += run_sum(data, start)
    return total % 2**64


def _raise_damaged(directory: Path, names: list[str]) -> None:
    if names:
        rule = "Every byte is as it was written"
        fix = "Use another checkpoint; nothing was changed"
        raise CheckpointError(message(str(directory), f"damaged: {listing(names)}", rule, fix))
