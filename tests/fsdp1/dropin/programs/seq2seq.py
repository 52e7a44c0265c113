"""A toolkit's recipe: each layer is wrapped by a function it is handed, on groups of the toolkit's own.

State is sharded from the start, by one call, and saved as each rank's tensors. Sequences are generated within the full
parameters, cast to half, with the wrappers' forward replaced by that of what they wrap.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import generator_of, hybrid_groups, parse, read_own, run, write_own
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.api import (
    BackwardPrefetch,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)

FSDP1Module = FSDP
VOCABULARY = 28


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.inner, self.output = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, seqs, context=None):
        hidden = self.inner(self.norm(seqs)).relu().cumsum(1)
        return seqs + self.output(hidden if context is None else hidden + context.mean())

    def reset_parameters(self):
        for part in self.children():
            part.reset_parameters()


class Model(nn.Module):
    def __init__(self, width=10):
        super().__init__()
        self.frontend = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.ModuleList([Layer(width) for _ in range(2)])
        self.decoder = nn.ModuleList([Layer(width) for _ in range(2)])
        self.final_proj = nn.Linear(width, VOCABULARY)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, source, target):
        memory = self.frontend(source)
        for layer in self.encoder:
            memory = layer(memory)
        context, seqs = memory * self.scale, self.frontend(target)
        for layer in self.decoder:
            seqs = layer(seqs, context=context)
        return self.final_proj(seqs)


def apply_to_layers(module, wrap):
    """Every layer is a unit; those of the decoder stay gathered until backward."""
    for name, reshards in (("encoder", None), ("decoder", False)):
        layers = getattr(module, name)
        for index, layer in enumerate(layers):
            layers[index] = wrap(layer, reshards)
    return module


def to_fsdp1(module, args, applier):
    """The module with its parts and itself wrapped, and sharded state."""
    group, full, partly = dist.group.WORLD, ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
    if args.hybrid:
        group, full, partly = hybrid_groups(), ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2
    precision = MixedPrecision(torch.bfloat16, torch.float32, buffer_dtype=None) if args.half else None

    def wrap(each, reshard_after_forward=None):
        return FSDP1Module(
            each,
            process_group=group,
            sharding_strategy=partly if reshard_after_forward is False else full,
            cpu_offload=None,
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            mixed_precision=precision,
            param_init_fn=None,
            device_id=torch.device("cpu"),
            sync_module_states=True,
            forward_prefetch=False,
            limit_all_gathers=True,
            use_orig_params=True,
        )

    module = applier(module, wrap)
    if not isinstance(module, FSDP1Module):
        module = wrap(module, reshard_after_forward=False)
    FSDP.set_state_dict_type(
        module,
        StateDictType.SHARDED_STATE_DICT,
        state_dict_config=ShardedStateDictConfig(offload_to_cpu=False),
        optim_state_dict_config=ShardedOptimStateDictConfig(offload_to_cpu=False),
    )
    nn.SyncBatchNorm.convert_sync_batchnorm(module, dist.group.WORLD)
    return module


def local_state_dict(module):
    state = {}
    for name, item in module.state_dict().items():
        if isinstance(item, ShardedTensor):
            if not item.local_shards():
                continue  # sharded unevenly: nothing of it is here
            item = item.local_tensor()
        state[name] = item.detach()
    return state


def load_local_state_dict(module, state):
    for name, item in module.state_dict().items():
        if isinstance(item, ShardedTensor) and name in state:
            item.local_tensor().detach().copy_(state[name])
            state[name] = item
    module.load_state_dict(state)


@contextmanager
def full_parameters(module):
    """Full and in the dtype of computing; calls go past the wrappers, which refuse them then."""
    precision = module.mixed_precision or MixedPrecision()
    wrappers = [each for each in module.modules() if isinstance(each, FSDP1Module)]
    with FSDP.summon_full_params(module, writeback=False):
        backups = [each.forward for each in wrappers]
        for each in wrappers:
            each.forward = each.module.__call__
        for param in module.parameters():
            param.data = param.data.to(precision.param_dtype or param.dtype)
        try:
            yield
        finally:
            for each, forward in zip(wrappers, backups, strict=True):
                each.forward = forward


@torch.inference_mode()
def generate(module, source):
    module.eval()
    target = torch.zeros(len(source), 1, dtype=torch.int64)
    with full_parameters(module):
        for _ in range(3):
            target = torch.cat([target, module(source, target)[:, -1:].argmax(-1)], dim=1)
    module.train()
    return target


def main(argv=None):
    args = parse(
        argv, steps=3, first=0, max_norm=1e9, hybrid=False, half=False, generate=False, save_at=0, out="", resume="",
    )  # fmt: skip
    torch.manual_seed(dist.get_rank())  # rank 0's values are everybody's
    module = to_fsdp1(Model(), args, apply_to_layers)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02, betas=(0.9, 0.98))
    if args.resume:
        state = read_own(args.resume)
        load_local_state_dict(module, state["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(module, optimizer, state["optimizer"]))
    losses = []
    for step in range(args.first, args.steps):
        generator = generator_of(step)
        source, target = torch.randint(0, VOCABULARY, (2, 2, 6), generator=generator)
        logits = module(source, target[:, :-1]).float()
        loss = F.cross_entropy(logits.transpose(1, 2), target[:, 1:], reduction="sum")
        (loss * dist.get_world_size() / target.numel()).backward()
        norm = module.clip_grad_norm_(max_norm=args.max_norm)
        assert norm.isfinite()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if args.generate:
            losses.append(float(generate(module, source).float().mean()))
        if args.out and step + 1 == args.save_at:
            write_own(
                {"model": local_state_dict(module), "optimizer": FSDP.optim_state_dict(module, optimizer)}, args.out
            )
    return losses


if __name__ == "__main__":
    run(main)
