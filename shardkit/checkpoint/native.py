"""Safetensors files as a source; checkpoints of shardkit, which have a manifest; and random generators in them."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardkit._torch.dispatch import accelerator_state, default_generator
from shardkit.checkpoint.asynchronous import on_each, own_rank, ranks_of
from shardkit.checkpoint.chunks import MASK, STAGE, opened, part_of, raw, read_all, word_sum
from shardkit.checkpoint.dcp import DcpDirectory
from shardkit.checkpoint.directory import WAY, Manifest, check_sizes, crc32_of, read_manifest
from shardkit.checkpoint.format import INDEX, SUFFIX, Located, locate, read_parts
from shardkit.checkpoint.source import Contents, Stored, decode
from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import Groups


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

    def read(self, targets: Iterable[tuple[str, Tensor]]) -> None:
        """Fill each target from the tensor with its key, straight from the file. Local."""
        wanted = list(targets)
        read_parts([(self.located[key], part_of(tensor)) for key, tensor in wanted])
        torch.autograd.graph.increment_version([tensor for _, tensor in wanted])


class NativeCheckpoint(Safetensors):
    """A checkpoint that ``save_checkpoint`` wrote, in either format."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.manifest: Manifest = read_manifest(directory)
        check_sizes(directory, self.manifest)
        # Headers and indexes, which are small; the tensors are left to verify().
        self._check_crc32([name for name in sorted(self.manifest.files) if not name.endswith(".distcp")])
        super().__init__({section: self._section(section) for section in ("model", "optimizer", "state")})
        self._dcp: DcpDirectory | None = None
        if self.manifest.format == "dcp":
            self._dcp = DcpDirectory(directory)
            self.contents = self._dcp.contents
        self._read_state()

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
        """Add to the contents what is not a tensor, and the small tensors."""
        contents, rest, state = self.contents, self.stored("state"), self.manifest.state
        tensors = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in rest.items()}
        super().read((rest[name].key, tensor) for name, tensor in tensors.items())
        if self._dcp is None:
            contents.optimizer = decode(state["optimizer"], self.stored("optimizer"))
        contents.model |= decode(state["model"], tensors)
        contents.scheduler, contents.extra = decode(state["scheduler"], tensors), decode(state["extra"], tensors)
        contents.random = {kind: [bytes.fromhex(each) for each in texts] for kind, texts in state["random"].items()}
        contents.ties = {name: first for name, first in state["ties"].items() if first in contents.model}
        contents.quantized = state["quantized"]
        contents.trainable_only = self.manifest.trainable_only

    def _refused(self, problem: str) -> CheckpointError:
        return CheckpointError(message(str(self._directory), f"is damaged: {problem}", "", WAY))

    def read(self, targets: Iterable[tuple[str, Tensor]]) -> None:
        """Fill each target from the tensor with its key. Local."""
        if self._dcp is None:
            super().read(targets)
        else:
            self._dcp.read(targets)

    def verify(self, groups: Groups) -> None:
        """Read every byte once, each rank its share, and raise if a checksum is wrong. Collective over ``groups``."""
        files, ranks = self.manifest.files, ranks_of(groups)
        rank = ranks.index(own_rank())

        def own() -> dict[str, int]:
            self._check_crc32([name for name in sorted(files) if name.endswith(".distcp")][rank :: len(ranks)])
            return self._own_sums(rank, len(ranks))

        found: dict[str, int] = {}
        for of_rank in on_each(own, groups).values():
            found |= {name: (found.get(name, 0) + total) & MASK for name, total in of_rank.items()}
        written = {f"{file}: {name}": total for file, entry in files.items() for name, total in entry.sums.items()}
        self._check({name for name in written.keys() | found.keys() if found.get(name) != written.get(name)})

    def _check_crc32(self, names: Iterable[str]) -> None:
        files = [(name, self.manifest.files[name]) for name in names]
        self._check({name for name, each in files if crc32_of(self._directory / name, each.head) != each.crc32})

    def _check(self, damaged: set[str]) -> None:
        if damaged:
            raise self._refused(f"checksums differ in {listing(sorted(damaged))}; nothing was changed")

    def _own_sums(self, rank: int, world_size: int) -> dict[str, int]:
        """Return what this rank's share of each tensor adds to its checksum."""
        buffer, sums = torch.empty(STAGE, dtype=torch.uint8), {}
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


# ---- random generators: Python's, torch's on the CPU, and the accelerator's ---------------------------------------


def own_random_states() -> dict[str, bytes]:
    """Return the states of this process's generators, by kind; the accelerator's if it has been used. Local, pure."""
    found = {"python": json.dumps(random.getstate()).encode(), "cpu": bytes(torch.get_rng_state().tolist())}
    accelerator, state = torch.accelerator.current_accelerator(), accelerator_state()
    return found if accelerator is None or state is None else found | {accelerator.type: bytes(state.tolist())}


def resume_random(saved: Mapping[str, Sequence[bytes]], rank: int, world_size: int) -> None:
    """Set this rank's generators from those of all ranks that saved. Local.

    If all ranks had the same state, every rank gets it. Else, in a world of the same size each rank gets its own; in
    any other world each is seeded by its rank and rank 0's state: different on each rank, and the same whenever this
    checkpoint is loaded into a world of this size. The state of an absent accelerator is skipped.
    """
    accelerator = torch.accelerator.current_accelerator()
    for kind, of_ranks in saved.items():
        state = of_ranks[rank if len(of_ranks) == world_size else 0]
        digest = hashlib.sha256(state + f"{kind} {rank} of {world_size}".encode()).digest()
        seed = int.from_bytes(digest[:8], "little") >> 1
        is_seeded = len(set(of_ranks)) > 1 and len(of_ranks) != world_size
        if kind == "python" and is_seeded:
            random.seed(seed)
        elif kind == "python":
            version, internal, gauss = json.loads(state)
            random.setstate((version, tuple(internal), gauss))
        elif kind == "cpu" or (accelerator is not None and accelerator.type == kind):
            generator = torch.default_generator if kind == "cpu" else default_generator(torch.device(kind))
            if is_seeded:
                generator.manual_seed(seed)
            else:
                generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
