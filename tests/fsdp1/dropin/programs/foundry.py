"""A trainer that wraps the children of the user's model, by a policy object that gives modules arguments of their own.

The model begins on meta with a tied head, which param_init_fn ties again. The optimizer was made before: its groups are
emptied and filled by cleaned names. Hooks that talk to other ranks are put on every wrapped module.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Block, checkpoint_modules, generator_of, parse, run
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp.wrap import CustomPolicy


class Decoder(nn.Module):
    """Says itself what is wrapped and how modules get their first values."""

    def __init__(self, vocabulary=40, width=12, layers=3):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        self.lm_head._fsdp_wrap = False

    def fsdp_wrap_fn(self, module):
        """The last block stays gathered between forward and backward."""
        if module is self.blocks[-1]:
            return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "forward_prefetch": True}
        return isinstance(module, Block)

    def activation_checkpointing_fn(self, module):
        return isinstance(module, Block)

    def param_init_fn(self, module):
        for offset, param in enumerate(module.parameters(recurse=False)):
            wave = torch.sin(torch.arange(param.numel(), dtype=param.dtype) * 1.3 + offset + param.numel())
            with torch.no_grad():
                param.copy_((wave * 0.2 + (param.dim() == 1 and offset == 0)).view_as(param))

    def forward(self, tokens):
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm_f(x))


class TrainerModel(nn.Module):
    """What a user hands in: a model with a loss, and a metric that must not be wrapped."""

    def __init__(self):
        super().__init__()
        self.model, self.seen = Decoder(), nn.Identity()
        self.seen._fsdp_wrap = False

    def loss(self, tokens):
        logits = self.seen(self.model(tokens[:, :-1])).float()
        return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])


def tied_to(model):
    """For each module whose parameter others share: those others, with the names of the attribute here and there."""
    places = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            places.setdefault(id(param), []).append((module, name))
    shared = [each for each in places.values() if len(each) > 1]
    return {first: [(name, *other) for other in others] for (first, name), *others in shared}


def sync_hook(*_):
    """Whether any rank ran out of memory."""
    found = torch.zeros(1, dtype=torch.uint8)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    assert not found.item()


def prepare_fsdp_module(model, optimizer, args):
    pointers = {id(param): name for name, param in model.named_parameters()}
    group_of = {pointers[id(p)]: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    optimizer.param_groups.clear()
    optimizer.state.clear()
    for name, child in model.named_children():
        if not getattr(child, "_fsdp_wrap", True):
            continue
        ties = tied_to(child)

        def init(module, child=child, ties=ties):
            if not any(each.is_meta for each in [*module.parameters(recurse=False), *module.buffers(recurse=False)]):
                return
            module.to_empty(device=torch.device("cpu"), recurse=False)
            for here, other, there in ties.get(module, []):
                setattr(other, there, getattr(module, here))
            child.param_init_fn(module)

        def chosen(module, child=child):
            found = module._fsdp_wrap if hasattr(module, "_fsdp_wrap") else child.fsdp_wrap_fn(module)
            if found and args.hooks:
                module.register_forward_hook(sync_hook)
                module.register_full_backward_hook(sync_hook)
            return found

        wrapped = FullyShardedDataParallel(
            child,
            process_group=None,
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            auto_wrap_policy=CustomPolicy(chosen),
            cpu_offload=CPUOffload(offload_params=False),
            mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16) if args.pure else None,
            backward_prefetch=BackwardPrefetch.BACKWARD_POST,
            ignored_modules=None,
            param_init_fn=init,
            device_id=torch.device("cpu"),
            sync_module_states=False,
            forward_prefetch=False,
            limit_all_gathers=True,
            use_orig_params=True,
        )
        getattr(wrapped, "_exec_order_data", None)  # for prefetch limits
        if args.checkpointing:
            checkpoint_modules(wrapped, child.activation_checkpointing_fn)
        setattr(model, name, wrapped)
    groups = [{"params": [], **each} for each in settings]
    for name, param in model.named_parameters():
        groups[group_of[clean_tensor_name(name)]]["params"].append(param)
    for group in groups:
        optimizer.add_param_group(group)


def main(argv=None):
    args = parse(argv, steps=3, lr=0.005, clip=1e9, hooks=False, pure=False, checkpointing=False)
    with torch.device("meta"):
        model = TrainerModel()
    decay = [p for name, p in model.named_parameters() if p.dim() > 1]
    rest = [p for name, p in model.named_parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 2 * args.lr}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr)
    prepare_fsdp_module(model, optimizer, args)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses = []
    for step in range(args.steps):
        generator = generator_of(step)
        micro_batches = torch.randint(0, 40, (4, 7), generator=generator).split(2)
        for index, tokens in enumerate(micro_batches):
            last = index + 1 == len(micro_batches)
            with nullcontext() if last else model.model.no_sync():
                loss = model.loss(tokens)
                (loss / len(micro_batches)).backward()
            losses.append(loss.item())
        for module in FullyShardedDataParallel.fsdp_modules(model, root_only=True):
            module.clip_grad_norm_(max_norm=args.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    run(main)
