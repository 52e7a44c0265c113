"""How fast a model is saved to a disk and loaded from it, against what that disk and the way to the
GPU give.

The model is in bfloat16, as pretrained weights are, and sharded on the device. It is saved by
:func:`shardkit.checkpoint.save_checkpoint` and loaded by
:func:`shardkit.checkpoint.load_pretrained`. The bytes are on the disk when a save returns, and the
page cache is told to forget the file before a load, so neither is the speed of memory. A machine's
host may still cache: then it does so for both sides.

In the same run one thread writes a plain file in large pieces and flushes it, and reads it again
after the page cache forgot it; and bytes are copied between pinned memory and the device.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.models import SHAPES, Llama
from benchmarks.train.training import draw
from shardkit import shard_model
from shardkit.checkpoint import load_pretrained, save_checkpoint

PIECE = 64 * 2**20  # bytes of a call of the system, and of a copy to the device
MOST = 8 * 10**9  # bytes of the plain file
# bytes of a model that is saved and loaded several times; the fastest time counts, on both sides
FEW = 10**9
TIMES = 3
COPIES = 32


def measure(shape_name: str, device: torch.device, folder: Path) -> dict[str, float]:
    """GB/s (1e9 bytes) of ``"save"`` and ``"load"``, and of ``"write"``, ``"read"``, ``"from_gpu"``
    and ``"to_gpu"``.

    The last two are infinite where the device is a CPU: nothing is copied. Local: of one process,
    whose shards are all of the model. Makes a process group of one rank where there is none.

    Args:
        shape_name: a key of ``models.SHAPES``.
        device: of the model.
        folder: on the disk that is measured; what is written there is deleted again.
    """
    model = _built(shape_name, device)
    size = sum(param.numel() * param.itemsize for param in model.parameters())
    plain = min(size, MOST)
    times = 1 if size > FEW else TIMES
    seconds: dict[str, list[float]] = {"write": [], "save": [], "read": [], "load": []}
    with _scratch(folder) as place:
        for _ in range(times):
            seconds["write"].append(_seconds(lambda: _write(place / "plain", plain), device))
            seconds["save"].append(_save(model, place / "model", device))
            _forget(place)
            seconds["read"].append(_seconds(lambda: _read(place / "plain"), device))
            seconds["load"].append(_load(model, place / "model", device))
    sizes = {"write": plain, "read": plain, "save": size, "load": size}
    speeds = {name: sizes[name] / min(found) / 1e9 for name, found in seconds.items()}
    return speeds | _over_the_bus(device)


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    place = folder / f"disk-{os.getpid()}"
    place.mkdir(parents=True)
    try:
        yield place
    finally:
        shutil.rmtree(place)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


# The model.


@torch.no_grad()
def _built(shape_name: str, device: torch.device) -> nn.Module:
    """In bfloat16, sharded over this world, with values that are nowhere zero."""
    with torch.device("meta"):
        model = Llama(SHAPES[shape_name]).to(torch.bfloat16)
    shard_model(model)
    model.to_empty(device=device)
    for local in _shards(model):
        draw(local, local.dim())
    return model


def _shards(model: nn.Module) -> list[Tensor]:
    return [param.to_local().detach() for param in model.parameters()]  # type: ignore[attr-defined]


def _save(model: nn.Module, directory: Path, device: torch.device) -> float:
    """Seconds, until the bytes are on the disk."""
    shutil.rmtree(directory, ignore_errors=True)
    return _seconds(lambda: save_checkpoint(directory, model), device)


def _load(model: nn.Module, directory: Path, device: torch.device) -> float:
    """Seconds, until the values are on the device, over zeros."""
    shards = _shards(model)
    before = [shard.flatten()[-1000:].clone() for shard in shards]
    for shard in shards:
        shard.zero_()
    seconds = _seconds(lambda: load_pretrained(model, directory), device)
    for shard, values in zip(shards, before, strict=True):
        if not torch.equal(shard.flatten()[-1000:], values):
            raise AssertionError("what was loaded is not what was saved")
    return seconds


# The disk and the bus.


def _write(path: Path, size: int) -> None:
    """A new file of this many bytes, flushed to disk."""
    piece = memoryview(os.urandom(PIECE // 64) * 64)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        left = size
        while left:
            left -= os.write(descriptor, piece[:left])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> None:
    """The whole file, into memory that is there already."""
    piece = bytearray(PIECE)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while os.readv(descriptor, [piece]):
            pass
    finally:
        os.close(descriptor)


def _forget(directory: Path) -> None:
    """Have the page cache drop what it holds of the files, all of which is on the disk."""
    os.sync()  # a page that is not yet written stays
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _over_the_bus(device: torch.device) -> dict[str, float]:
    """GB/s of copies between pinned memory and the device."""
    if device.type != "cuda":
        return {"from_gpu": float("inf"), "to_gpu": float("inf")}
    host = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
    there = torch.randint(255, (PIECE,), dtype=torch.uint8, device=device)

    def speed(target: Tensor, source: Tensor) -> float:
        def copy() -> None:
            for _ in range(COPIES):
                target.copy_(source, non_blocking=True)

        return COPIES * PIECE / min(_seconds(copy, device) for _ in range(TIMES)) / 1e9

    torch.cuda.synchronize(device)
    return {"from_gpu": speed(host, there), "to_gpu": speed(there, host)}


def main() -> None:
    """``python -m benchmarks.train.disk``: one line."""
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="1B", choices=SHAPES)
    parser.add_argument("--folder", type=Path, default=Path.cwd())
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = measure(options.model, device, options.folder)
    print(f"torch {torch.__version__}, {device.type}, {options.model} in bfloat16, one process")
    print(", ".join(f"{name} {value:.2f} GB/s" for name, value in found.items()))
    save = found["save"] / min(found["write"], found["from_gpu"])
    load = found["load"] / min(found["read"], found["to_gpu"])
    print(f"save {save:.2f} and load {load:.2f} of what disk and bus give, goal: at least 0.8")


if __name__ == "__main__":
    main()
