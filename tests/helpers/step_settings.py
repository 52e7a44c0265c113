"""Every combination of what changes a step: checkpointing, compile, precision, offload, HSDP,
accumulation.

``benchmarks/sweeps/step_settings_table.py`` trains NET in all of them. CI takes ``pairs()``, where
any two meet.
"""

import functools
import itertools
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from plain_and_sharded import assert_trains_like_plain
from torch import nn
from torch._dynamo.utils import counters
from zoo_entry import Entry, floats

from shardkit import CPUOffloadPolicy, MixedPrecisionPolicy, ShardkitError

CHECKPOINTING = {"False": False, "True": True, '"selective"': "selective"}
COMPILE = {"False": False, "True": True}
PRECISION = {"float32": {}, "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}}
MESH = {"FSDP": (), "HSDP": (2, 2)}  # () for all ranks on one axis
OFFLOAD = {"no": {}, "yes": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}}
MICRO_BATCHES = {"1": 1, "2": 2}
FACTORS = [CHECKPOINTING, COMPILE, PRECISION, MESH, OFFLOAD, MICRO_BATCHES]
Cell = tuple[str, ...]
CELLS = list(itertools.product(*FACTORS))


class Block(nn.Module):
    """Attention and an MLP, perhaps with a buffer that stays and two that forward changes.

    With buffers the compiled block is checkpointed, without them the compiler traces the
    checkpointing.
    """

    def __init__(self, has_buffers):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.has_buffers = has_buffers
        if has_buffers:
            self.register_buffer("scale", torch.linspace(0.5, 1, 8))
            self.register_buffer("average", torch.zeros(8))
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.has_buffers:
            with torch.no_grad():
                self.average.lerp_(x.float().mean((0, 1)), 0.1)
                self.calls += 1
            x = x * self.scale.to(x.dtype)
        q, k, v = self.qkv(self.norm(x)).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([Block(False), Block(True)]), nn.Linear(8, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).clone()


def float8_net():
    """Net with torchao's float8 linear layers in its blocks, whose weights are
    gathered in float8.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config, net = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True), Net()
    return convert_to_float8_training(
        net, config=config, module_filter_fn=lambda _, fqn: fqn != "head"
    )


NET = Entry(Net, lambda seed: {"x": floats(seed, 2, 5, 8)})
FLOAT8 = Entry(float8_net, NET.batch)


def pairs():
    """A few cells in which every two settings meet; in this order few are compiled, which takes
    long.
    """
    pairs_of = {cell: {*itertools.combinations(enumerate(cell), 2)} for cell in CELLS}
    missing = set().union(*pairs_of.values())
    chosen = []
    order = sorted(CELLS, key=lambda cell: cell[::-1])
    while missing:
        chosen.append(max(order, key=lambda cell: len(missing & pairs_of[cell])))
        missing -= pairs_of[chosen[-1]]
    return chosen


def seen(cells, name="NET"):
    """Train a model in each cell as the plain one is trained, and say what differs. On each of
    4 ranks, or of 2 without HSDP.
    """
    entry = {"NET": NET, "float8": FLOAT8}.get(name, name)
    return {cell: _seen(cell, entry) for cell in cells}


def _seen(cell, entry):
    picked = [values[value] for values, value in zip(FACTORS, cell, strict=True)]
    checkpointing, compiles, precision, mesh, offload, micro_batches = picked
    options = {"checkpoint_activations": checkpointing, "compile": compiles, **precision, **offload}
    torch.compiler.reset()
    counters.clear()
    # it is tracing that counts, not the kernels
    eager = functools.partial(torch.compile, backend="aot_eager")
    try:
        with mock.patch.object(torch, "compile", eager):
            ranks = mesh or (dist.get_world_size(),)
            assert_trains_like_plain(entry, ranks, "sgd", 2, micro_batches, **options)
    except ShardkitError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "exact" if bool(counters["stats"]["unique_graphs"]) == compiles else "not compiled"
