"""What exact meta init costs: ``materialize`` on one rank of 4 against ordinary construction of the
same model.

Run: ``python -m benchmarks.meta``. Needs transformers. Both sides run in turn in this process, in
wall-clock seconds: medians with the smallest and largest. The bytes are those of live tensors
beyond this rank's shards, at their peak.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

from shardkit import init_on_meta, materialize, shard_model
from shardkit.testing import fake_world

REPEATS = 5
MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama, 8 layers of 1024": lambda: LlamaForCausalLM(
        LlamaConfig(
            hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16
        )
    ),
    "nn.Transformer": lambda: nn.Transformer(batch_first=True),
    "ViT-B/16": lambda: ViTForImageClassification(ViTConfig()),
}


def seconds(call: Callable[[], object]) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def recorded(build: Callable[[], nn.Module]) -> nn.Module:
    """The model on meta, sharded and ready to be materialized."""
    torch.manual_seed(0)
    with init_on_meta():
        model = build()
    return shard_model(model)


def spread(times: list[float]) -> str:
    """Median, and the range."""
    return f"{statistics.median(times):5.2f} s ({min(times):.2f} to {max(times):.2f})"


def main() -> None:
    """Measure both sides in turn and print a table."""
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one rank of 4, {REPEATS} repeats, 1 thread")
    for name, build in MODELS.items():
        construct: list[float] = []
        replay: list[float] = []
        for repeat in range(REPEATS):
            with fake_world(4):
                model = recorded(build)
                sides = [(construct, build), (replay, functools.partial(materialize, model))]
                # the first finds colder memory
                for times, call in sides if repeat % 2 else sides[::-1]:
                    times.append(seconds(call))
        ratio = statistics.median(replay) / statistics.median(construct)
        print(
            f"{name:24s} construct {spread(construct)}  materialize {spread(replay)}  ratio "
            f"{ratio:.2f}"
        )


if __name__ == "__main__":
    main()
