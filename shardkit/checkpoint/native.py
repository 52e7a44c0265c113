"""A checkpoint of ``save_checkpoint`` as a source."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from shardkit.checkpoint.byte_ranges import Part, bytes_sum, file_sums, raw, read_parts
from shardkit.checkpoint.directory import VERSION, read_manifest
from shardkit.checkpoint.format import INDEX, SUFFIX, find_tensors
from shardkit.checkpoint.random_state import restore_random
from shardkit.checkpoint.save import RANKS, STATE, optimizer_name
from shardkit.checkpoint.source import Contents, Quantized, Safetensors, unpack
from shardkit.errors import CheckpointError, listing
from shardkit.ranks import Groups, raise_on_all_ranks, sum_over_ranks
from shardkit.state.optimizer import with_leaves

logger = logging.getLogger("shardkit")


class NativeCheckpoint(Safetensors):
    """A checkpoint that ``save_checkpoint`` wrote."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._manifest = directory, read_manifest(directory)
        self.created = self._manifest["created"]
        version = self._manifest["shardkit_checkpoint"]
        if version != VERSION:
            raise CheckpointError(
                f"{directory} has version {version}, and this shardkit reads version {VERSION}. "
                "Its weights load from the file model.safetensors in it, by strict=False if the "
                "model has extra state."
            )
        files = self._manifest["files"]
        stored: dict[str, dict[str, Any]] = {}
        for section in ("model", "optimizer", RANKS):
            name = section + (INDEX if section + INDEX in files else SUFFIX)
            if name in files:
                stored[section] = Safetensors(find_tensors(directory / name)).contents.model
        data = (directory / STATE).read_bytes()
        _, checksum = files[STATE]
        if bytes_sum(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0) != checksum:
            raise self._damaged([STATE])
        state = unpack(data)
        # what was equal on all ranks that saved; and if something was not, each rank's bytes of it
        self._shared, self._sizes = state["shared"], state.get("sizes")
        self._row = None if self._sizes is None else stored[RANKS][RANKS]

        self._quantized = set(state.get("quantized", ()))

        def leaf_at(place: str, _: Any) -> Any:
            name = optimizer_name(place)
            key = f"optimizer/{name}"
            return Quantized(key) if key in self._quantized else stored["optimizer"][name]

        self.contents = Contents(
            model=stored["model"] | state["extra_state"],
            optimizer=with_leaves(state["optimizer"], leaf_at),
            scheduler=state["scheduler"],
            trainable_only=state["trainable_only"],
            ties=state["ties"],
        )

    def resume(self, number: int, world_size: int, random: bool) -> Any:
        """Restore the random generators of the rank with this number, and return its extra. Local.

        In a world of another size than the one that saved, generators that differed are left as
        they are, and the extra is rank 0's if it differed, with a warning.
        """
        is_same_world = self._sizes is None or world_size == len(self._sizes)
        differing = self._of_rank(number if is_same_world else 0)
        extra = unpack((self._shared | differing)["extra"])
        if not is_same_world and "extra" in differing and number == 0:
            logger.warning(
                "%s: extra differs between the %d ranks that saved, and %d load: all get rank 0's. "
                "load_extras(path) returns all of them",
                *(self._directory, len(self._sizes), world_size),
            )
        if random:
            restored = self._shared | differing if is_same_world else self._shared
            no_generators = ("extra", "quantized")
            restore_random({k: unpack(v) for k, v in restored.items() if k not in no_generators})
        return extra

    def quantized(self, number: int, world_size: int) -> dict[str, Part]:
        """Return the rank's shards of quantized optimizer state, by name; none in a world of
        another size. Local.
        """
        if not self._quantized or world_size != len(self._sizes):
            return {}
        shards: dict[str, Part] = unpack(self._of_rank(number)["quantized"])
        return shards

    def extras(self) -> list[Any]:
        """Return the extra of each rank that saved. Local."""
        numbers = range(self._manifest["world_size"])
        return [unpack((self._shared | self._of_rank(number))["extra"]) for number in numbers]

    def _of_rank(self, number: int) -> dict[str, bytes]:
        """Read what the rank with this number had, where ranks differed."""
        if self._row is None:
            return {}
        data = torch.empty(self._sizes[number], dtype=torch.uint8)
        start = sum(self._sizes[:number])
        read_parts([(self._row.key, (data, ((start, data.numel()),)))])
        differing: dict[str, bytes] = unpack(bytes(raw(data)))
        if "extra" in differing and not differing["extra"]:  # this rank gave none
            differing["extra"] = self._of_rank(0)["extra"]
        return differing

    def verify(self, groups: Groups, number: int, world_size: int) -> None:
        """Read every byte once, each rank its share, and raise if a checksum is wrong. Collective
        over ``groups``.
        """
        files = self._manifest["files"]
        sizes = {self._directory / name: size for name, (size, _) in files.items()}
        with raise_on_all_ranks(groups, CheckpointError):
            sums = file_sums(sizes, number, world_size)
        totals = sum_over_ranks(sums, groups)
        damaged = []
        for (name, (_, checksum)), total in zip(files.items(), totals, strict=True):
            if total != checksum:
                damaged.append(name)
        if damaged:
            raise self._damaged(damaged)

    def _damaged(self, names: list[str]) -> CheckpointError:
        return CheckpointError(
            f"{self._directory} is damaged: checksums differ in {listing(names)}; nothing was "
            "changed. Load an earlier checkpoint: latest_checkpoint() of the directory above "
            "returns the newest complete one."
        )
