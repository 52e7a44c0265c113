"""A checkpoint of ``save_checkpoint`` as a source."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from shardkit.checkpoint.byte_ranges import bytes_sum, file_sums, raw, read_parts
from shardkit.checkpoint.directory import read_manifest
from shardkit.checkpoint.format import INDEX, SUFFIX, Entry, find_tensors
from shardkit.checkpoint.random_state import restore_random
from shardkit.checkpoint.save import FIRST, RANKS, STATE, optimizer_key
from shardkit.checkpoint.source import Contents, Safetensors, unpack
from shardkit.errors import CheckpointError, listing
from shardkit.ranks import Groups, raise_on_all_ranks, sum_over_ranks
from shardkit.state.optimizer import with_leaves

logger = logging.getLogger("shardkit")


class NativeCheckpoint(Safetensors):
    """A checkpoint that ``save_checkpoint`` wrote."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._manifest = directory, read_manifest(directory)
        entries: dict[str, Entry] = {}
        for section in ("model", "optimizer", RANKS):
            for name in (section + SUFFIX, section + INDEX):
                if name in self._manifest["files"]:
                    for key, entry in find_tensors(directory / name).items():
                        entries[f"{section}/{key}"] = entry
        super().__init__(entries)
        _, checksum = self._manifest["files"][STATE]
        data = (directory / STATE).read_bytes()
        if bytes_sum(data, 0) != checksum:
            raise self._damaged([STATE])
        state = unpack(data)
        model = {name: self.stored(f"model/{name}") for name in state["model"]}
        optimizer = with_leaves(
            state["optimizer"], lambda place, _: self.stored(optimizer_key(place))
        )
        self.shared, self._sizes = state["shared"], state.get("sizes")
        self.contents = Contents(
            model=model | state["extra_state"],
            optimizer=optimizer,
            scheduler=state["scheduler"],
            trainable_only=state["trainable_only"],
            ties=state["ties"],
        )

    def resume(self, number: int, world_size: int, random: bool) -> Any:
        """Restore the random generators of the rank with this number, and return its extra. Local.

        In a world of another size than the one that saved, a rank gets rank 0's where ranks
        differed: generators are seeded by its state and the rank, and a warning says that the extra
        is rank 0's.
        """
        own, differing = dict(self.shared), dict[str, bytes]()
        is_same_world = self._sizes is None or world_size == len(self._sizes)
        if self._sizes is not None:
            differing = self._of_rank(number if is_same_world else 0)
        if not is_same_world and "extra" in differing and number == 0:
            logger.warning(
                "%s: extra differs between the %d ranks that saved, and %d load: all get rank 0's. "
                "load_extras(path) returns all of them",
                *(self._directory, len(self._sizes), world_size),
            )
        extra = unpack((own | differing)["extra"])
        for part, is_own in ((own, True), (differing, is_same_world)) if random else ():
            states = {kind: unpack(data) for kind, data in part.items() if kind != "extra"}
            restore_random(states, None if is_own else f"{number} of {world_size}")
        return extra

    def extras(self) -> list[Any]:
        """Return the extra of each rank that saved. Local."""
        found = []
        for number in range(self._manifest["world_size"]):
            differing = self._of_rank(number) if self._sizes is not None else {}
            found.append(unpack((self.shared | differing)["extra"]))
        return found

    def _of_rank(self, number: int) -> dict[str, bytes]:
        """Read what the rank with this number had, where ranks differed."""
        data = torch.empty(self._sizes[number], dtype=torch.uint8)
        start = sum(self._sizes[:number])
        read_parts([(self.entries[f"{RANKS}/{RANKS}"], (data, ((start, data.numel()),)))])
        found: dict[str, bytes] = unpack(bytes(raw(data)))
        if found.get("extra") == FIRST:
            found["extra"] = self._of_rank(0)["extra"]
        return found

    def verify(self, groups: Groups, number: int, world_size: int) -> None:
        """Read every byte once, each rank its share, and raise if a checksum is wrong. Collective
        over ``groups``.
        """
        files = self._manifest["files"]
        sizes = {self._directory / name: size for name, (size, _) in files.items()}
        sums: list[int] = []
        with raise_on_all_ranks(groups, CheckpointError):
            sums = file_sums(sizes, number, world_size)
        totals = sum_over_ranks(sums, groups)
        damaged = [
            name for name, total in zip(files, totals, strict=True) if files[name][1] != total
        ]
        if damaged:
            raise self._damaged(damaged)

    def _damaged(self, names: list[str]) -> CheckpointError:
        return CheckpointError(
            f"{self._directory} is damaged: checksums differ in {listing(names)}; nothing was "
            "changed. Load an earlier checkpoint: latest_checkpoint() of the directory above "
            "returns the newest complete one."
        )
