"""Safetensors files as a source, and checkpoints of shardkit: directories with a manifest."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardkit.checkpoint.agreement import on_each
from shardkit.checkpoint.chunks import MASK, part_of, word_sum
from shardkit.checkpoint.dcp import DcpDirectory
from shardkit.checkpoint.format import INDEX, SUFFIX
from shardkit.checkpoint.manifest import CONFIG, WAY, Manifest, check_sizes, crc32_of, read_manifest
from shardkit.checkpoint.plain import decode
from shardkit.checkpoint.read import Located, locate, read_parts
from shardkit.checkpoint.source import Contents, Stored
from shardkit.checkpoint.transfer import Progress, opened, raw, read_all
from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import Groups

STATE = "state.json"
_SUMMED = 1 << 24  # bytes of a file that are summed at a time


class Safetensors:
    """Safetensors files as a source; keys are ``section/name``."""

    def __init__(self, files: Mapping[str, Mapping[str, Located]]) -> None:
        self.located = {f"{section}/{name}": at for section, part in files.items() for name, at in part.items()}
        self.contents = Contents(self.stored("model"))

    def stored(self, section: str) -> dict[str, Any]:
        """Return the tensors of a section by their own names."""
        return {
            key.partition("/")[2]: Stored(at.entry.dtype, at.entry.shape, key)
            for key, at in self.located.items()
            if key.startswith(f"{section}/")
        }

    def read(self, targets: Iterable[tuple[str, Tensor]], progress: Progress | None = None) -> None:
        """Fill each target from the tensor with its key, straight from the file. Local."""
        wanted = list(targets)
        read_parts([(self.located[key], part_of(tensor)) for key, tensor in wanted], progress)
        torch.autograd.graph.increment_version([tensor for _, tensor in wanted])


class NativeCheckpoint(Safetensors):
    """A checkpoint that ``save_checkpoint`` wrote, in either format."""

    def __init__(self, directory: Path, *, allow_pickle: bool = False) -> None:
        self._directory = directory
        self.manifest: Manifest = read_manifest(directory)
        check_sizes(directory, self.manifest)
        # Headers, indexes and the state, which are small; the tensors are left to verify().
        self._check_crc32([name for name in sorted(self.manifest.files) if not name.endswith(".distcp")])
        super().__init__({section: self._section(section) for section in ("model", "optimizer", "state")})
        self._dcp: DcpDirectory | None = None
        if self.manifest.format == "dcp":
            self._dcp = DcpDirectory(directory, allow_pickle=allow_pickle)
            self.contents = self._dcp.contents
        try:
            self._read_state()
        except (OSError, TypeError, ValueError, KeyError, AttributeError, RuntimeError, RecursionError) as error:
            raise self._refused(f"{STATE} cannot be read ({type(error).__name__}: {error})") from None

    def _section(self, name: str) -> dict[str, Located]:
        for file in (name + SUFFIX, name + INDEX):
            if file in self.manifest.files:
                found = locate(self._directory / file)
                if others := {at.file.name for at in found.values()} - self.manifest.files.keys():
                    raise self._refused(f"{file} lists {listing(sorted(others))}, which the manifest does not list")
                return found
        if name == "model" and self.manifest.format == "safetensors":
            raise self._refused("the manifest does not list a model")
        return {}

    def _read_state(self) -> None:
        """Add the values of ``state.json`` to the contents."""
        contents, stored = self.contents, self.stored("state")
        tensors = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in stored.items()}
        super().read((stored[name].key, tensor) for name, tensor in tensors.items())
        if STATE not in self.manifest.files:
            raise ValueError("the manifest does not list it")
        state: dict[str, Any] = json.loads((self._directory / STATE).read_bytes())
        if self._dcp is None:
            contents.optimizer = decode(state["optimizer"], self.stored("optimizer"))
        contents.model |= decode(state["model"], tensors)
        contents.scheduler, contents.extra = decode(state["scheduler"], tensors), decode(state["extra"], tensors)
        random = decode(state["random"], tensors)
        contents.random = {kind: [bytes(each.tolist()) for each in of_ranks] for kind, of_ranks in random.items()}
        ties = state.get("ties", {})  # the first saves did not write it
        contents.ties = {name: first for name, first in ties.items() if first in contents.model}
        contents.quantized = bool(state.get("quantized"))
        contents.trainable_only = self.manifest.trainable_only
        config = self._directory / CONFIG
        contents.config = config.read_text() if CONFIG in self.manifest.files and config.is_file() else ""

    def _refused(self, problem: str) -> CheckpointError:
        return CheckpointError(message(str(self._directory), f"is damaged: {problem}", "", WAY))

    def read(self, targets: Iterable[tuple[str, Tensor]], progress: Progress | None = None) -> None:
        """Fill each target from the tensor with its key. Local."""
        if self._dcp is not None:
            self._dcp.read(targets, progress)
        else:
            super().read(targets, progress)

    def verify(self, groups: Groups, rank: int, world_size: int) -> None:
        """Read every byte once, each rank its share, and raise if a checksum is wrong. Collective over ``groups``."""
        files = self.manifest.files

        def own() -> dict[str, int]:
            self._check_crc32([name for name in sorted(files) if name.endswith(".distcp")][rank::world_size])
            return self._own_sums(rank, world_size)

        found: dict[str, int] = {}
        for of_rank in on_each(own, groups).values():
            found |= {name: (found.get(name, 0) + total) & MASK for name, total in of_rank.items()}
        written = {f"{file}: {name}": total for file, entry in files.items() for name, total in entry.sums.items()}
        self._check({name for name in written.keys() | found.keys() if found.get(name) != written.get(name)})

    def _check_crc32(self, names: Iterable[str]) -> None:
        files = {name: self.manifest.files[name] for name in names if name != CONFIG}
        self._check({name for name, each in files.items() if crc32_of(self._directory / name, each.head) != each.crc32})

    def _check(self, damaged: set[str]) -> None:
        if damaged:
            raise self._refused(f"checksums differ in {listing(sorted(damaged))}; nothing was changed")

    def _own_sums(self, rank: int, world_size: int) -> dict[str, int]:
        """Return what this rank's share of each tensor adds to its checksum."""
        buffer, sums = torch.empty(_SUMMED, dtype=torch.uint8), {}
        for key, at in self.located.items():
            share = -(-at.entry.bytes // (8 * world_size)) * 8  # whole words
            stop, total = min(share * (rank + 1), at.entry.bytes), 0
            with opened(at.file, os.O_RDONLY) as descriptor:
                for start in range(share * rank, stop, len(buffer)):
                    count = min(len(buffer), stop - start)
                    buffer[count : count + -count % 8] = 0
                    read_all(descriptor, raw(buffer[:count]), at.entry.start + start)
                    total += word_sum(buffer[: count + -count % 8])
            sums[f"{at.file.name}: {key.partition('/')[2]}"] = total & MASK
        return sums
