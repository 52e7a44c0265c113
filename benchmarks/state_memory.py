"""CPU memory that saving, loading, gathering and initializing take beyond what they leave: 4 gloo
ranks, 2 GiB.

Run: ``python -m benchmarks.state_memory [--mebibytes 2048]``; ``--write`` puts the table into
``benchmarks/results/``. The model, and what a peak is, are those of ``benchmarks.state_disk``; from
each peak what stays is taken off: the shards of a model that was on meta, the full tensors where
they go. The largest tensors are the embedding and the head, a bucket is 64 MiB. Memory of a MiB or
more is returned as soon as it is freed (``mallopt``): by default glibc raises that limit to 32 MiB
and keeps twice as much, which would be counted as ours.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.state_disk import RANKS, Model, built, measured
from shardkit import init_on_meta, materialize, shard_model
from shardkit.checkpoint import load_checkpoint, load_pretrained, save_checkpoint
from shardkit.state import full_state_dict, load_full_state_dict
from shardkit.testing import RankPool

MIB = 1 << 20
_M_MMAP_THRESHOLD = -3  # of malloc.h
RESULTS = Path(__file__).parent / "results" / "state_memory_202611.md"


def recorded(mebibytes: int) -> Model:
    """The model, sharded, to be materialized."""
    with init_on_meta():
        model = Model(max(1, (mebibytes - 128) // 48))
    shard_model(model)
    return model


def on_rank(mebibytes: int, folder: Path) -> dict[str, float]:
    """MiB of each call on this rank, beyond what stays."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MIB)
    model: Any = built(mebibytes)
    shards = sum(param.to_local().nbytes for param in model.parameters())
    whole = sum(param.nbytes for param in model.parameters())
    is_root, found, kept = dist.get_rank() == 0, dict[str, float](), dict[str, Any]()

    def note(name: str, call: Callable[[], Any], stays: int = 0) -> None:
        def side(*_: Any) -> None:
            kept["result"] = call()

        found[name] = (measured(side, model, folder)[1] - stays) / MIB

    path = folder / "a"
    note("`save_checkpoint`", lambda: save_checkpoint(path, model))
    note(
        "`save_checkpoint(async_=True)`",
        lambda: save_checkpoint(folder / "b", model, async_=True).wait(),
    )
    note("`load_checkpoint`", lambda: load_checkpoint(path, model))
    note("`full_state_dict` to rank 0", lambda: full_state_dict(model), whole if is_root else 0)
    full = kept.pop("result")
    note("`load_full_state_dict` from rank 0", partial(load_full_state_dict, model, full))
    full = None
    kept.clear()
    del model
    model = built(mebibytes, meta=True)
    note(
        "`load_pretrained` of a model on meta",
        lambda: load_pretrained(model, path / "model.safetensors"),
        shards,
    )
    model = recorded(mebibytes)
    note("`materialize`", partial(materialize, model), shards)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=2048, help="size of the model in float32")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, RankPool(RANKS, timeout=580) as pool:
        of_ranks = pool.run(on_rank, options.mebibytes, Path(folder))
    whole, largest = options.mebibytes, 64
    sizes = (
        f"MiB: model {whole}, shards of a rank {whole // RANKS}, largest tensor {largest}, bucket "
        "64"
    )
    lines = [f"torch {torch.__version__}, {RANKS} gloo ranks; {sizes}.", ""]
    lines += ["| call | rank 0 | most of the other ranks |", "| --- | --- | --- |"]
    for name, mebibytes in of_ranks[0].items():
        lines.append(
            f"| {name} | {mebibytes:,.0f} | {max(each[name] for each in of_ranks[1:]):,.0f} |"
        )
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if options.write:
        command = f"`python -m benchmarks.state_memory --mebibytes {whole}`: beyond what stays."
        RESULTS.write_text(f"# Memory of state, November 2026\n\n{command}\n\n{text}")


if __name__ == "__main__":
    main()
