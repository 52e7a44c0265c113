"""Saving and loading a sharded model as safetensors, against torch's own calls: 4 gloo ranks on one
machine.

Run: ``python -m benchmarks.state_disk [--mebibytes 1024] [--repeats 5] [--directory DIR]``. Needs
safetensors.

Every side of a row runs in turn in the same processes, on the same model; a time is wall-clock
seconds from a barrier to a barrier, medians with the smallest and largest, and the ratio is that of
the medians. Saves go to new files each time, deleted and synced outside of the time, and have the
bytes on the disk (fsync) before they return. Loads read files that were just written, so from the
page cache: a slower disk moves all sides towards its own speed.

Peaks are of anonymous memory beyond what a rank had before, the largest of all ranks, sampled each
millisecond; in multiples of the largest tensor. What the load of a meta model is to leave behind,
the shards, is taken off.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from shardkit import shard_model
from shardkit.checkpoint import load_pretrained, save_checkpoint
from shardkit.testing import RankPool

RANKS = 4
WIDTH = 1024
PAGE = os.sysconf("SC_PAGE_SIZE")


class Model(nn.Module):
    """Embedding, blocks and head, in float32: 48 MiB a block, and 64 each for the other two, the
    largest tensors.
    """

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(16 * WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(
                *(nn.Linear(WIDTH, WIDTH) for _ in range(4)),
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.Linear(4 * WIDTH, WIDTH),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(WIDTH, 16 * WIDTH, bias=False)


def built(mebibytes: int, *, meta: bool = False) -> Model:
    """The model, sharded; without ever being whole anywhere."""
    with torch.device("meta"):
        model = Model(max(1, (mebibytes - 128) // 48))
    shard_model(model)
    if not meta:
        model.to_empty(device="cpu")
        for number, param in enumerate(model.parameters()):
            nn.init.normal_(param.to_local(), generator=torch.Generator().manual_seed(number))  # type: ignore[attr-defined]
    return model


# ---- the sides -----------------------------------------------------------------------------------


def save_shardkit(model: Model, directory: Path) -> None:
    """One file, written by all ranks, and its manifest."""
    save_checkpoint(directory, model)


def save_gathered(model: Model, directory: Path) -> None:
    """torch's full state dict on rank 0, and the package's save_file."""
    from safetensors.torch import save_file

    full = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if dist.get_rank() == 0:
        save_file(full, directory / "model.safetensors")
        with open(directory / "model.safetensors", "rb+") as file:
            os.fsync(file)


def save_dcp(model: Model, directory: Path) -> None:
    """torch.distributed.checkpoint, a file a rank."""
    writer = dcp.FileSystemWriter(directory / "dcp", sync_files=True)
    dcp.save(get_model_state_dict(model), storage_writer=writer)


def load_shardkit(model: Model, file: Path) -> None:
    """Each rank its own byte ranges."""
    load_pretrained(model, file)


def load_broadcast(model: Model, file: Path) -> None:
    """Rank 0 maps the file and broadcasts every tensor."""
    from safetensors.torch import load_file

    full = load_file(file) if dist.get_rank() == 0 else {}
    set_model_state_dict(
        model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )


SAVES: dict[str, Callable[[Model, Path], None]] = {
    "shardkit": save_shardkit,
    "gather + save_file": save_gathered,
    "DCP": save_dcp,
}
LOADS: dict[str, Callable[[Model, Path], None]] = {
    "shardkit": load_shardkit,
    "torch broadcast": load_broadcast,
}


# ---- measuring -----------------------------------------------------------------------------------


class Peak:
    """The largest anonymous memory of this process in a context, beyond that before
    it, in bytes.
    """

    def __enter__(self) -> Peak:
        """Begin to look."""
        self._before = self.bytes = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Look no more."""
        self._done.set()
        self._thread.join()
        self.bytes -= self._before

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.bytes = max(self.bytes, self._now())

    @staticmethod
    def _now() -> int:
        _, resident, shared = Path("/proc/self/statm").read_text().split()[:3]
        return (int(resident) - int(shared)) * PAGE


def measured(side: Callable[[Model, Path], None], model: Model, path: Path) -> tuple[float, int]:
    """Seconds from barrier to barrier, and this rank's peak."""
    # memory that an earlier side freed would hide what this one takes
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    start = time.perf_counter()
    with Peak() as peak:
        side(model, path)
    dist.barrier()
    return time.perf_counter() - start, peak.bytes


def on_ranks(mebibytes: int, repeats: int, directory: Path) -> dict[str, list[tuple[float, float]]]:
    """Every side in turn: seconds, and its peak in multiples of the largest tensor."""
    model = built(mebibytes)
    largest = max(param.numel() * param.itemsize for param in model.parameters())
    local = sum(param.to_local().nbytes for param in model.parameters())  # type: ignore[attr-defined]
    results: dict[str, list[tuple[float, float]]] = {}

    def note(name: str, result: tuple[float, int], less: int = 0) -> None:
        results.setdefault(name, []).append((result[0], (result[1] - less) / largest))

    for repeat in range(repeats + 1):  # the first warms up, and is not kept
        for name, save in rotated(SAVES, repeat):
            target = fresh(directory / "save")
            note(f"save: {name}", measured(save, model, target))
        target = fresh(directory / "save")
        save_shardkit(model, target)
        file = target / "model.safetensors"
        for name, load in rotated(LOADS, repeat):
            wipe(model)
            note(f"load: {name}", measured(load, model, file))
            check(model)
        empty = built(mebibytes, meta=True)
        note("load: shardkit, meta", measured(load_shardkit, empty, file), local)
        check(empty)
    return {name: found[1:] for name, found in results.items()}


def rotated(
    sides: dict[str, Callable[[Model, Path], None]], by: int
) -> list[tuple[str, Callable[[Model, Path], None]]]:
    """The sides in another order each time, for the first one finds colder memory."""
    items = list(sides.items())
    return items[by % len(items) :] + items[: by % len(items)]


def fresh(directory: Path) -> Path:
    """An empty directory, with nothing left for the disk to do."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        os.sync()
    dist.barrier()
    return directory


def wipe(model: Model) -> None:
    """Zeros in place of all values, so that a load that does nothing is noticed."""
    for param in model.parameters():
        param.to_local().detach().zero_()  # type: ignore[attr-defined]


def check(model: Model) -> None:
    """The values are those of ``built``."""
    for number, param in enumerate(model.parameters()):
        local = param.to_local().detach()  # type: ignore[attr-defined]
        drawn = torch.empty_like(local).normal_(generator=torch.Generator().manual_seed(number))
        assert torch.equal(local, drawn), "not what was saved"


# ---- the table -----------------------------------------------------------------------------------

RATIOS = [
    ("save: shardkit", "save: gather + save_file", 0.25),
    ("save: shardkit", "save: DCP", 0.8),
    ("load: shardkit", "load: torch broadcast", 0.3),
]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=1024, help="size of the model in float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--directory",
        type=Path,
        default=None,
        help="where files are written; default: the system's",
    )
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=args.directory) as directory,
        RankPool(RANKS, timeout=580) as pool,
    ):
        by_rank = pool.run(on_ranks, args.mebibytes, args.repeats, Path(directory))
    print(
        f"torch {torch.__version__}, {RANKS} gloo ranks, 1 thread each, {args.mebibytes} MiB, "
        f"{args.repeats} repeats"
    )
    times = {name: [seconds for seconds, _ in found] for name, found in by_rank[0].items()}
    for name, found in times.items():
        peak = max(peak for rank in by_rank for _, peak in rank[name])
        spread = f"{statistics.median(found):6.2f} s ({min(found):.2f} to {max(found):.2f})"
        print(f"{name:26s} {spread:28s} peak {peak:5.2f} largest tensors")
    for ours, theirs, goal in RATIOS:
        ratio = statistics.median(times[ours]) / statistics.median(times[theirs])
        print(f"{ours} / {theirs}: {ratio:.2f} (goal: at most {goal})")


if __name__ == "__main__":
    main()
