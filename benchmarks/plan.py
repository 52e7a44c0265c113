"""Planning time: ``plan_model`` of a 1,000-layer Llama against one walk over its parameters.

Run: ``python -m benchmarks.plan``. Needs transformers. Both sides run in turn in this process;
times are CPU seconds of this process, medians with the spread from the 25th to the 75th percentile.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shardkit import MeshSpec, plan_model

REPEATS = 21


def model_of(layers: int) -> torch.nn.Module:
    """A Llama on the meta device, 9 parameters and 13 modules a layer."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def milliseconds(call: Callable[[], object]) -> float:
    """CPU time of one call in this process."""
    start = time.process_time()
    call()
    return (time.process_time() - start) * 1e3


def main() -> None:
    """Measure both sides in turn and print a table."""
    model = model_of(1000)
    sides: dict[str, Callable[[], object]] = {
        "plan_model": lambda: plan_model(model, mesh=MeshSpec.sharded(8)),
        "list(model.named_parameters())": lambda: list(model.named_parameters()),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(REPEATS):
        for name, call in sides.items():
            times[name].append(milliseconds(call))
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {REPEATS} repeats, 1,000 "
        "layers"
    )
    for name, each in times.items():
        low, middle, high = statistics.quantiles(each, n=4)
        print(f"{name:32s} median {middle:6.1f} ms  ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()
