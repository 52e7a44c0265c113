"""What shardkit adds on one rank of thousands: seconds, and messages and bytes beside the data, of
each of its calls.

Run: ``python -m benchmarks.many_ranks [--ranks 64 1024 4096 16384] [--models "Llama 405B"
DeepSeek-V3]``; ``--write`` puts the table into ``benchmarks/results/``. Needs transformers. Rows of
16,384 ranks take minutes of torch.

One process acts as rank 0 of a fake world, the rank that does most, on a meta model of full size.
Collectives return at once, so seconds, of CPU, are what the rank computes; bytes are what its
collectives leave on it, so a gather counts with the parts of all ranks. ``shard_model`` plans too.
Of its time that inside ``fully_shard`` and ``init_device_mesh`` is torch's and listed apart; to
agree is to hash what must be equal and to compare it. Saves and loads plan, open, lay out and check
as always, with AdamW's state in float32 and random generators that differ between ranks; only the
bytes of tensors are neither written, read nor summed, and files are sparse and not flushed.
Gradients are None. Of ``watch`` it is one poll in its thread, when every rank has made more calls
than are published.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.scale.published import on_meta
from benchmarks.scale.tables import MODELS
from shardkit import MeshSpec, clip_grad_norm_, plan_model, shard_model
from shardkit import ranks as exchange
from shardkit.apply import mesh, shard
from shardkit.checkpoint import byte_ranges, load_checkpoint, native, save, save_checkpoint
from shardkit.checkpoint.format import NewFile
from shardkit.shards import as_sharded
from shardkit.testing import fake_world
from shardkit.watching import watcher as watching

RANKS = (64, 1024, 4096, 16384)
SMALL = 1 << 16
RESULTS = Path(__file__).parent / "results" / "many_ranks_202611.md"


@dataclass
class Cost:
    """Of one call on this rank."""

    seconds: float = 0.0
    torchs: float = 0.0  # seconds of torch's own calls, on top
    agreeing: float = 0.0  # seconds of those of ours
    messages: int = 0
    bytes: int = 0


@contextmanager
def measured() -> Iterator[Cost]:
    """Fill a cost with what the body takes."""
    cost = Cost()

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            cost.messages += 1
            cost.bytes += sum(
                each.nbytes for each in (args[0] if isinstance(args[0], list) else [args[0]])
            )
            return call(*args, **kwargs)

        return counted

    def apart(call: Callable[..., Any], what: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                setattr(cost, what, getattr(cost, what) + time.process_time() - start)

        return timed

    with ExitStack() as stack:
        for name in ("all_reduce", "all_gather", "broadcast"):
            stack.enter_context(patch.object(dist, name, counting(getattr(dist, name))))
        stack.enter_context(patch.object(shard, "fully_shard", apart(shard.fully_shard, "torchs")))
        stack.enter_context(
            patch.object(mesh, "init_device_mesh", apart(mesh.init_device_mesh, "torchs"))
        )
        stack.enter_context(
            patch.object(exchange, "max_over_ranks", apart(exchange.max_over_ranks, "agreeing"))
        )
        gc.collect()
        start = time.process_time()
        yield cost
        cost.seconds = time.process_time() - start - cost.torchs


@contextmanager
def without_data() -> Iterator[None]:
    """No bytes of tensors are written, read or summed, but for small ones; headers and each rank's
    own data are.
    """

    def write_all(descriptor: int, data: memoryview, start: int) -> None:
        if start == 0 or len(data) < SMALL:
            _write_all(descriptor, data, start)

    def read_all(descriptor: int, data: memoryview, start: int) -> None:
        if len(data) < SMALL:
            _read_all(descriptor, data, start)

    def write_parts(
        files: Sequence[NewFile], *args: Any, **kwargs: Any
    ) -> dict[Path, tuple[int, int]]:
        written = _write_parts(files, *args, **kwargs)
        # as if the other ranks had written theirs
        for file in files:
            if file.path.exists():
                os.truncate(file.path, file.size)
        return {file.path: (file.size, written[file.path][1]) for file in files}

    def file_sums(sizes: Mapping[Path, int], *share: int) -> list[int]:
        """Only state.pt has been summed."""
        sums = []
        for file in sizes:
            total = 0
            if file.name == save.STATE:
                data = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
                total = byte_ranges.bytes_sum(data, 0)
            sums.append(total)
        return sums

    def part_sum(memory: torch.Tensor, box: Any, location: Any) -> int:
        return _part_sum(memory, box, location) if location.file.name == save.STATE else 0

    def equal_on_all(numbers: Mapping[str, int | None], groups: Any) -> set[str]:
        return _equal_on_all(numbers, groups) & {"tensors", "number of quantized"}

    _write_all, _read_all = byte_ranges.write_all, byte_ranges.read_all
    _write_parts, _equal_on_all = save.write_parts, save.equal_on_all
    _part_sum = byte_ranges._part_sum
    nothing: list[tuple[Any, str, Any]] = [
        (os, "fsync", lambda _: None),
        (byte_ranges, "read_all", read_all),
        (byte_ranges, "write_all", write_all),
        (byte_ranges, "_part_sum", part_sum),
        (save, "write_parts", write_parts),
        (save, "equal_on_all", equal_on_all),
        (native, "file_sums", file_sums),
    ]
    with ExitStack() as stack:
        for each in nothing:
            stack.enter_context(patch.object(*each))
        yield


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW as after a step, in memory that nobody touches."""
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        moments = {
            name: as_sharded(torch.empty_like(param.to_local()), param)
            for name in ("exp_avg", "exp_avg_sq")
        }  # type: ignore[attr-defined, arg-type]
        optimizer.state[param] = {"step": torch.tensor(1.0), **moments}
    return optimizer


def polled(model: nn.Module, ranks: int, rank: int) -> tuple[Cost, float]:
    """One poll of a watch, of which every rank made the same calls; and the
    seconds between polls.
    """
    cost, held = Cost(), dict[str, bytes]()

    class Store:
        def set(self, key: str, value: str) -> None:
            held[key] = value.encode()
            cost.messages, cost.bytes = cost.messages + 1, cost.bytes + len(value)

        def get(self, key: str) -> bytes:
            cost.messages, cost.bytes = cost.messages + 1, cost.bytes + len(held[key])
            return held[key]

        def check(self, keys: list[str]) -> bool:
            cost.messages += 1
            return keys[0] in held

    with ExitStack() as stack:
        stack.enter_context(patch.object(watching, "store_of_its_own", lambda *_: Store()))
        stack.enter_context(patch.object(watching.Watcher, "_run", lambda _: None))
        stack.enter_context(patch.object(dist, "get_rank", lambda *_: rank))
        found = watching.Watcher([model], list(range(ranks)), 30.0, end=False, asks=False)
        for number in range(2 * watching.TAIL):
            found._add(
                f"all-gather of model.layers.{number % 400}",
                f"train.py:{number % 2}: loss = model(ids)",
            )
        found._poll()
        for key in [key for key in held if key.partition(" ")[0] == str(rank)]:
            held |= {f"{other}{key.removeprefix(str(rank))}": held[key] for other in range(ranks)}
        cost.messages = cost.bytes = 0
        start = time.process_time()
        found._poll()
        cost.seconds = time.process_time() - start
        found.leave(None)
    return cost, found._period


def costs(model: nn.Module, ranks: int, folder: Path) -> Iterator[tuple[str, Cost]]:
    """Yield each call of ours and its cost."""
    with measured() as cost:
        plan_model(model, mesh=MeshSpec.sharded(ranks))
    yield "`plan_model`", cost
    with fake_world(ranks):
        with measured() as cost:
            shard_model(model)
        yield "`shard_model`", cost
        model.to_empty(device="cpu")
        optimizer = stepped(model)
        with measured() as cost:
            clip_grad_norm_(model, 1.0)
        yield "`clip_grad_norm_`", cost
        with without_data():
            with measured() as cost:
                save_checkpoint(folder / "a", model, optimizer)
            yield "`save_checkpoint`", cost
            with measured() as cost:
                load_checkpoint(folder / "a", model, optimizer)
            yield "`load_checkpoint`", cost
        for rank in (0, ranks - 1):
            cost, period = polled(model, ranks, rank)
            yield f"`watch` on rank {rank}, each {period:.0f} s", cost


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=["Llama 405B", "DeepSeek-V3"]
    )
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    command = f"`python -m benchmarks.many_ranks --ranks {' '.join(map(str, options.ranks))}`"
    lines = [
        f"# Many ranks, November 2026\n\n{command}: torch {torch.__version__}, 2 shared cores.\n"
    ]
    lines.append(
        "| model | ranks | call | CPU seconds of ours | to agree | of torch | messages | bytes |"
    )
    lines.append("|---" * 8 + "|")
    for name in options.models:
        for ranks in options.ranks:
            with tempfile.TemporaryDirectory() as folder:
                for call, cost in costs(on_meta(MODELS[name]()), ranks, Path(folder)):
                    agreeing, torchs = (
                        f"{s:.3f}" if s else "-" for s in (cost.agreeing, cost.torchs)
                    )
                    numbers = (
                        f"{cost.seconds:.3f} | {agreeing} | {torchs} | {cost.messages:,} | "
                        f"{cost.bytes:,}"
                    )
                    lines.append(f"| {name} | {ranks:,} | {call} | {numbers} |")
                    print(lines[-1], flush=True)
            if options.write:
                RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
