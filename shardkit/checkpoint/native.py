"""Sources: safetensors files, directories of torch.distributed.checkpoint (DCP), and checkpoints of shardkit.

Of DCP torch's own reader and writer do the work. A pickle can run code, so ``.metadata`` is first unpickled with a list
of the names that torch writes there, and values that are not tensors with ``weights_only``.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import random
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shardkit._torch.dispatch import accelerator_state, default_generator
from shardkit.checkpoint.asynchronous import own_rank, ranks_of, sums_on_each
from shardkit.checkpoint.chunks import MASK, STAGE, blocks, covers, part_of, part_sum
from shardkit.checkpoint.directory import WAY, FileEntry, Manifest, check_sizes, crc32_of, read_manifest
from shardkit.checkpoint.format import INDEX, SUFFIX, Entry, Located, locate, read_parts, within
from shardkit.checkpoint.source import Contents, Stored, contents_of, decode
from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import Groups, gather_by_rank, together

DCP_NAME = ".metadata"
_ALONE = "torch.distributed is (disabled|unavailable)"  # what torch says of a save or load in one process
_CLASSES = "torch.distributed.checkpoint.metadata"
# What torch 2.0 to 2.15 writes. Paths are of the class of the system that saved.
_ADMITTED = {
    *((_CLASSES, name) for name in (*torchs.__all__, "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}


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


class DcpDirectory:
    """A DCP directory as a source."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        data = io.BytesIO((directory / DCP_NAME).read_bytes())
        found: torchs.Metadata = _Unpickler(data).load()
        leaves: dict[str, Any] = {}
        for key, each in found.state_dict_metadata.items():
            if isinstance(each, torchs.TensorStorageMetadata):
                if not covers({tuple(zip(at.offsets, at.sizes, strict=True)) for at in each.chunks}, each.size):
                    raise self._damaged(f"the chunks of {key} do not fill it")
                leaves[key] = Stored(each.properties.dtype, each.size, key)
            else:
                leaves |= self._plain(key, found.storage_data[torchs.MetadataIndex(key)])
        for info in found.storage_data.values():
            within(directory, info.relative_path)
        self.contents: Contents = contents_of(_nested(leaves, found.planner_data or {}), str(directory))

    def _plain(self, key: str, info: Any) -> dict[str, Any]:
        """Read a value that is not a tensor; nothing if it is an object that is not plain data."""
        with open(within(self._directory, info.relative_path), "rb") as file:
            file.seek(info.offset)
            data = io.BytesIO(file.read(info.length))
        try:
            return {key: torch.load(data, weights_only=True)}
        except pickle.UnpicklingError:  # of the program that wrote it, and perhaps of no use here
            return {}

    def _damaged(self, problem: str) -> CheckpointError:
        where, fix = str(self._directory), "Load an earlier checkpoint, or copy this one again"
        return CheckpointError(message(where, f"is damaged: {problem}", "", fix))

    def read(self, targets: Iterable[tuple[str, Tensor]]) -> None:
        """Fill each target from the tensor with its key; a DTensor reads only the chunks it has a part of. Local."""
        reader, planner = FileSystemReader(self._directory), DefaultLoadPlanner(flatten_state_dict=False)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=_ALONE)
                load(dict(targets), storage_reader=reader, planner=planner, no_dist=True)
        except (Exception, CheckpointException) as error:  # the latter is none of the former
            raise self._damaged(str(error).strip().splitlines()[-1]) from error


def _nested(leaves: dict[str, Any], paths: dict[str, tuple[str | int, ...]]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for key, value in leaves.items():
        *around, last = paths.get(key, (key,))
        at = tree
        for step in around:
            at = at.setdefault(step, {})
        at[last] = value
    return tree


class _Unpickler(pickle.Unpickler):
    """Loads DCP's metadata, and no other objects."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class of a name in the pickle, if torch writes it there."""
        if (module, name) in _ADMITTED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 pickle members of enums by it
            return lambda enum, member: enum.__members__[member]
        raise pickle.UnpicklingError(f"{DCP_NAME} has a pickled {module}.{name}")


def write_dcp(directory: Path, tree: dict[str, Any], groups: Groups) -> dict[str, FileEntry]:
    """Save nested dicts with ``dcp.save``, and return the entries of its files. Collective over ``groups``."""
    group = groups[0] if groups else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_ALONE)
        try:
            save(tree, storage_writer=FileSystemWriter(directory), process_group=group, no_dist=not groups)
        except CheckpointException as error:  # which is no Exception; on all ranks
            reasons = [f"rank {rank}: {type(each[0]).__name__}: {each[0]}" for rank, each in error.failures.items()]
            rule = "Nothing was saved; any earlier checkpoint is unchanged"
            raise CheckpointError(message("save_checkpoint", f"failed ({listing(reasons)})", rule, "")) from error
    rank = dist.get_rank(group) if groups else 0
    own: dict[str, Any] = {}
    with together(groups, CheckpointError):
        files = sorted(directory.glob(f"__{rank}_*")) + ([directory / DCP_NAME] if rank == 0 else [])
        sizes = {file: file.stat().st_size for file in files}
        own = {file.name: (size, size, crc32_of(file, size)) for file, size in sizes.items()}
    of_ranks = gather_by_rank(own, groups).values() if groups else [own]
    return {name: FileEntry(*entry) for each in of_ranks for name, entry in each.items()}


class NativeCheckpoint(Safetensors):
    """A checkpoint that ``save_checkpoint`` wrote, in either format."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.manifest: Manifest = read_manifest(directory)
        check_sizes(directory, self.manifest)
        # Headers and indexes, which are small; the tensors are left to verify().
        self._check_crc32([name for name in sorted(self.manifest.files) if not name.endswith(".distcp")])
        super().__init__({section: self._section(section) for section in ("model", "optimizer", "state", "random")})
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
        contents, rest = self.contents, self.stored("state")
        state = self.manifest.state or json.loads((self._directory / "state.json").read_bytes())  # of version 1
        tensors = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in rest.items()}
        super().read((rest[name].key, tensor) for name, tensor in tensors.items())
        if self._dcp is None:
            contents.optimizer = decode(state["optimizer"], self.stored("optimizer"))
        contents.model |= decode(state["model"], tensors)
        contents.scheduler, contents.extra = decode(state["scheduler"], tensors), decode(state["extra"], tensors)
        for kind, states in decode(state["random"], tensors).items():
            # Hexadecimal, in version 1 tensors of bytes.
            found = [bytes(s.tolist()) if isinstance(s, Tensor) else bytes.fromhex(s) for s in states]
            contents.random[kind] = found[:1] if len(set(found)) == 1 else found
        contents.random |= {kind: RandomRows(self.located[each.key]) for kind, each in self.stored("random").items()}
        contents.ties = {name: first for name, first in state["ties"].items() if first in contents.model}
        contents.quantized = bool(state.get("quantized"))
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

        def own() -> list[int]:
            self._check_crc32([name for name in sorted(files) if name.endswith(".distcp")][rank :: len(ranks)])
            return self._own_sums(rank, len(ranks))

        names = [f"{at.file.name}: {key.partition('/')[2]}" for key, at in self.located.items()]
        found = dict(zip(names, sums_on_each(own, len(names), groups), strict=True))
        written = {f"{file}: {name}": total for file, entry in files.items() for name, total in entry.sums.items()}
        self._check({name for name in written.keys() | found.keys() if found.get(name) != written.get(name)})

    def _check_crc32(self, names: Iterable[str]) -> None:
        files = [(name, self.manifest.files[name]) for name in names]
        self._check({name for name, each in files if crc32_of(self._directory / name, each.head) != each.crc32})

    def _check(self, damaged: set[str]) -> None:
        if damaged:
            raise self._refused(f"checksums differ in {listing(sorted(damaged))}; nothing was changed")

    def _own_sums(self, rank: int, world_size: int) -> list[int]:
        """Return what this rank's share, an equal part of the bytes of all, adds to the checksum of each tensor."""
        buffer, sums, begin = torch.empty(STAGE, dtype=torch.uint8), list[int](), 0
        share = -(-sum(at.entry.bytes for at in self.located.values()) // world_size)
        for at in self.located.values():
            size, total = at.entry.bytes, 0
            cuts = [max(share * number - begin, 0) for number in (rank, rank + 1)]
            first, stop = (min(-(-cut // 8) * 8, size) for cut in cuts)  # whole words
            flat = Located(at.file, Entry(torch.uint8, torch.Size([size]), at.entry.start))
            for block in blocks(((first, stop - first),), STAGE):
                values = buffer[: block[0][1]]
                read_parts([(flat, (values, block))])
                total += part_sum(values, block, [size])
            begin += size
            sums.append(total & MASK)
        return sums


# ---- random generators: Python's, torch's on the CPU, and the accelerator's ---------------------------------------


RANDOM_BYTES = 8192  # of a row in random.safetensors: the length of a state in 4 bytes, the state, and zeros


def random_row(state: bytes) -> Tensor:
    """Return a generator's state as a row of the tensor with those of all ranks. Pure."""
    row = bytearray((len(state).to_bytes(4, "little") + state).ljust(RANDOM_BYTES, b"\0"))
    assert len(row) == RANDOM_BYTES, "a generator with a larger state than those of torch 2.15 and Python 3.14"
    return torch.frombuffer(row, dtype=torch.uint8).unsqueeze(0)


class RandomRows:
    """The states of one kind of generator of all ranks, each read when asked for."""

    def __init__(self, at: Located) -> None:
        self._at = at

    def __len__(self) -> int:
        return int(self._at.entry.shape[0])

    def __getitem__(self, rank: int) -> bytes:
        row = random_row(b"")
        read_parts([(self._at, (row, ((rank, 1), (0, RANDOM_BYTES))))])
        data = bytes(row.flatten().tolist())
        return data[4 : 4 + int.from_bytes(data[:4], "little")]


def own_random_states() -> dict[str, bytes]:
    """Return the states of this process's generators, by kind; an accelerator's is empty before use. Local, pure."""
    found = {"python": json.dumps(random.getstate()).encode(), "cpu": bytes(torch.get_rng_state().tolist())}
    accelerator, state = torch.accelerator.current_accelerator(), accelerator_state()
    own = b"" if state is None else bytes(state.tolist())
    return found if accelerator is None else found | {accelerator.type: own}


def resume_random(saved: Mapping[str, Any], rank: int, world_size: int) -> None:
    """Set this rank's generators from those of all ranks that saved, or the one that all had. Local.

    If all ranks had the same state, every rank gets it. Else, in a world of the same size each rank gets its own; in
    any other world each is seeded by its rank and rank 0's state: different on each rank, and the same whenever this
    checkpoint is loaded into a world of this size. The state of an absent accelerator is skipped.
    """
    accelerator = torch.accelerator.current_accelerator()
    for kind, of_ranks in saved.items():
        if not (state := of_ranks[rank if len(of_ranks) == world_size else 0]):
            continue
        digest = hashlib.sha256(state + f"{kind} {rank} of {world_size}".encode()).digest()
        seed = int.from_bytes(digest[:8], "little") >> 1
        is_seeded = len(of_ranks) not in (1, world_size)
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
