"""Peak memory of the default rule against the usual hand-written grouping, of one rank of 8, without a GPU.

Run: ``python -m benchmarks.default_rule``. Needs transformers. A Llama of 8B shape in float32 with bfloat16 compute
trains on fake tensors in a fake process group of 8 ranks, while torch's ``FSDPMemTracker`` adds up what is alive. That
is a count, not a measurement on a GPU: no allocator, no fragmentation, no communication. It repeats to the byte.

Sides: blocks and root, as ``fully_shard`` is usually called by hand, and ``shard_model``'s default.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from shardkit import MixedPrecisionPolicy, shard_model
from shardkit.testing import fake_world

RANKS = 8
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def by_hand(model: nn.Module, mesh: DeviceMesh) -> None:
    """Blocks, then the root, as most code does it."""
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=POLICY)
    fully_shard(model, mesh=mesh, mp_policy=POLICY)


def by_default(model: nn.Module, mesh: DeviceMesh) -> None:
    """What shardkit decides."""
    shard_model(model, mesh=mesh, mp_policy=POLICY)


def peak_bytes(shard: Callable[[nn.Module, DeviceMesh], None], tokens: int, layers: int) -> int:
    """The most bytes alive on one rank during the third training step."""
    config = LlamaConfig(
        intermediate_size=14336, num_hidden_layers=layers, num_key_value_heads=8, vocab_size=128256, use_cache=False
    )
    with fake_world(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp_shard",))
        with FakeTensorMode():
            return _peak_of_a_step(config, shard, mesh, tokens)


def _peak_of_a_step(
    config: LlamaConfig, shard: Callable[[nn.Module, DeviceMesh], None], mesh: DeviceMesh, tokens: int
) -> int:
    model = LlamaForCausalLM(config)
    shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    inputs = torch.randint(0, config.vocab_size, (1, tokens))

    def step() -> None:
        model(input_ids=inputs, labels=inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):  # makes the optimizer's state; DTensor plans its ops once, on tensors of whole size
        step()
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((inputs,))
    with tracker:
        step()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def main() -> None:
    """Measure both sides and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options.layers} layers, {options.tokens} tokens, rank 0 of {RANKS}, counted")
    hand = peak_bytes(by_hand, options.tokens, options.layers)
    default = peak_bytes(by_default, options.tokens, options.layers)
    print(f"blocks and root by hand  {hand / 2**30:6.2f} GiB")
    print(f"shard_model's default    {default / 2**30:6.2f} GiB  {default / hand:.3f} of it")


if __name__ == "__main__":
    main()
