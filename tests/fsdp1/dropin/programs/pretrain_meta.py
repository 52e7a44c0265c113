"""Pretraining from a meta model: every rank begins on meta, reset_parameters draws the values while
wrapping.

Hybrid sharding, activation checkpointing of every other block before or after wrapping, a LambdaLR,
and a checkpointer with sharded model and optimizer state through torch.distributed.checkpoint.
"""

import functools
from pathlib import Path

import torch
import torch.distributed as dist
from harness import checkpoint_modules, generator_of, parse, read, write
from torch import nn, optim
from torch.distributed import checkpoint as dist_cp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

half = torch.bfloat16
bfSixteen = MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half)
fpThirtytwo_bfReduce = MixedPrecision(
    param_dtype=torch.float32, reduce_dtype=half, buffer_dtype=torch.float32
)


class RotaryTable(nn.Module):
    """Angles in a buffer that no checkpoint holds: made again wherever the model lands."""

    def __init__(self, width, length=16):
        super().__init__()
        self.width, self.length = width, length
        self.register_buffer("table", torch.empty(length, width), persistent=False)

    def compute(self):
        rates = 1.0 / 100 ** (torch.arange(self.width, device=self.table.device) / self.width)
        angles = torch.arange(self.length, device=self.table.device)[:, None] * rates[None]
        self.table.copy_(torch.cos(angles))

    reset_parameters = compute

    def forward(self, x):
        return x * self.table[: x.shape[1]]


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def reset_parameters(self):
        nn.init.ones_(self.weight)

    def forward(self, x):
        return (
            x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5).type_as(x) * self.weight
        )


class LLaMABlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln, self.rotary = RMSNorm(width), RotaryTable(width)
        self.up, self.down = nn.Linear(width, 32, bias=False), nn.Linear(32, width, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.rotary(self.ln(x)).cumsum(1))))


class LLaMA(nn.Module):
    def __init__(self, vocabulary=40, width=16, depth=4):
        super().__init__()
        self.shared = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([LLaMABlock(width) for _ in range(depth)])
        self.dec_norm, self.head = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def reset_parameters(self):
        """Of all modules below, as a model that was not built on meta would have done."""
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def forward(self, tokens):
        x = self.shared(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.dec_norm(x))


def param_init_function(module):
    """Real memory and values for this module's own parameters and buffers."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if own and hasattr(module, "reset_parameters"):
        module.to_empty(device=torch.device("cpu"), recurse=False)
        # the values do not depend on the order of wrapping
        torch.manual_seed(sum(tensor.numel() for tensor in own))
        with torch.no_grad():
            module.reset_parameters()


def apply_checkpointing(model, every):
    chosen = [module for module in model.modules() if isinstance(module, LLaMABlock)][
        every - 1 :: every
    ]
    checkpoint_modules(model, lambda module: module in chosen)


class Checkpointer:
    """Sharded state in one directory a step; training goes on from the newest."""

    def __init__(self, directory):
        self.directory = Path(directory)

    def save(self, step, model, optimizer):
        path = self.directory / f"step_{step}_ckp"
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = {"model_state": model.state_dict()}
            state["optimizer_state"] = FSDP.optim_state_dict(model, optimizer)
            dist_cp.save(state, checkpoint_id=path)
        write(step, str(path / "metadata.pth"))

    def load(self, model, optimizer):
        paths = sorted(self.directory.glob("step_*_ckp"))
        if not paths:
            return 0
        reader = FileSystemReader(paths[-1])
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            model_state = {"model_state": model.state_dict()}
            dist_cp.load(model_state, storage_reader=reader, planner=DefaultLoadPlanner())
            model.load_state_dict(model_state["model_state"])
            optimizer_state = load_sharded_optimizer_state_dict(
                model_state_dict=model_state["model_state"],
                optimizer_key="optimizer_state",
                storage_reader=reader,
            )["optimizer_state"]
            optimizer.load_state_dict(
                FSDP.optim_state_dict_to_load(model, optimizer, optimizer_state)
            )
        return read(paths[-1] / "metadata.pth")


def main(argv=None):
    args = parse(
        argv, steps=4, lr=0.003, clip=1e6, precision="none", strategy="FULL_SHARD", checkpoint_every=0,
        checkpoint_after=False, orig=False, default_init=False, nameless_mesh=False, save_at=0,
        ckpt="",
    )  # fmt: skip
    names = None if args.nameless_mesh else ("replicate", "shard")
    with torch.device("meta"):
        model = LLaMA()
    if args.checkpoint_every and not args.checkpoint_after:
        apply_checkpointing(model, args.checkpoint_every)
    model = FSDP(
        model,
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={LLaMABlock}
        ),
        mixed_precision={"none": None, "bf16": bfSixteen, "reduce": fpThirtytwo_bfReduce}[
            args.precision
        ],
        sharding_strategy=ShardingStrategy[args.strategy],
        device_mesh=init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=names)
        if "HYBRID" in args.strategy
        else None,
        use_orig_params=args.orig,
        device_id=torch.device("cpu"),
        limit_all_gathers=True,
        param_init_fn=None if args.default_init else param_init_function,
    )
    if args.checkpoint_every and args.checkpoint_after:
        apply_checkpointing(model, args.checkpoint_every)
    # each rank drew its own values, or the same by its seed: what counts is that they are there
    if args.default_init:
        assert all(p.device.type == "cpu" and p.isfinite().all() for p in model.parameters())
    optimizer = optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    checkpointer = Checkpointer(args.ckpt) if args.ckpt else None
    first = checkpointer.load(model, optimizer) if checkpointer else 0
    scheduler = optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((first + step + 1) / 3, 1.0)
    )
    model.train()
    losses = []
    criterion = nn.CrossEntropyLoss()
    for step in range(first, args.steps):
        tokens = torch.randint(0, 40, (2, 9), generator=generator_of(step))
        optimizer.zero_grad()
        output = model(tokens[:, :-1])
        loss = criterion(output.view(-1, output.size(-1)).float(), tokens[:, 1:].reshape(-1))
        loss.backward()
        assert model.clip_grad_norm_(args.clip).isfinite()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if checkpointer and (step + 1) == args.save_at:
            checkpointer.save(step + 1, model, optimizer)
    return losses
