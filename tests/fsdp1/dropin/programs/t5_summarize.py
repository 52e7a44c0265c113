"""Summaries with a T5: FSDP over T5 blocks, an epoch loop with validation, the best model saved by rank 0.

As tutorials do it: everything by keyword, one FullStateDictConfig made once and passed around, the pair
full_optim_state_dict / scatter_full_optim_state_dict.
"""

import functools

import torch
import torch.distributed as dist
from harness import parse, read, run, write
from torch import optim
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

POLICIES = {
    "fp32": MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32, buffer_dtype=torch.float32),
    "bf16": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16),
    "bf16_working": MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16),
    "none": None,
}
SAVE_POLICY = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)


class Articles(Dataset):
    """Random articles, each with a summary that copies its beginning."""

    def __init__(self, count, length=12, summary=6, vocabulary=64, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.source = torch.randint(2, vocabulary, (count, length), generator=generator)
        self.lengths = torch.randint(length // 2, length + 1, (count,), generator=generator)
        self.summary = summary

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        mask = (torch.arange(self.source.shape[1]) < self.lengths[index]).long()
        return {
            "source_ids": self.source[index] * mask,
            "source_mask": mask,
            "target_ids": self.source[index, : self.summary],
        }


def train(model, loader, optimizer, epoch, sampler, losses, clip):
    model.train()
    sampler.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        output = model(input_ids=batch["source_ids"], attention_mask=batch["source_mask"], labels=batch["target_ids"])
        loss = output["loss"]
        loss.backward()
        if clip:
            model.clip_grad_norm_(clip)
        optimizer.step()
        losses.append(loss.item())


def validate(model, loader):
    model.eval()
    fsdp_loss = torch.zeros(2)
    with torch.no_grad():
        for batch in loader:
            output = model(
                input_ids=batch["source_ids"], attention_mask=batch["source_mask"], labels=batch["target_ids"]
            )
            fsdp_loss[0] += output["loss"].item()
            fsdp_loss[1] += len(batch)
    dist.all_reduce(fsdp_loss, op=dist.ReduceOp.SUM)
    return fsdp_loss[0] / fsdp_loss[1]


def build_model(args):
    torch.manual_seed(args.seed)
    config = T5Config(
        vocab_size=64,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=args.dropout,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def setup_model(args, rank):
    """The plain model; a checkpoint is read by rank 0 alone, and reaches the others when they are wrapped."""
    model = build_model(args)
    if args.resume and rank == 0:
        model.load_state_dict(read(f"{args.resume}/t5.pt"))
    wrap_policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})
    return FSDP(
        model,
        auto_wrap_policy=wrap_policy,
        mixed_precision=POLICIES[args.precision],
        sharding_strategy=getattr(ShardingStrategy, args.strategy),
        cpu_offload=CPUOffload(offload_params=True) if args.offload else None,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=torch.device(args.device),
        limit_all_gathers=True,
        sync_module_states=bool(args.resume),
        forward_prefetch=args.strategy == "FULL_SHARD",
    )


def save(model, optimizer, out):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, SAVE_POLICY):
        cpu_state = model.state_dict()
    optim_state = FSDP.full_optim_state_dict(model, optimizer)
    write(cpu_state, f"{out}/t5.pt")
    write(optim_state, f"{out}/t5-adamw.pt")


def load_optimizer(model, optimizer, rank, path):
    full = read(f"{path}/t5-adamw.pt") if rank == 0 else None
    sharded = FSDP.scatter_full_optim_state_dict(full, model)
    optimizer.load_state_dict(sharded)


def main(argv=None):
    args = parse(
        argv, batch_size=2, samples=8, epochs=2, first_epoch=1, lr=0.002, seed=1, dropout=0.0, clip=0.0,
        precision="none", strategy="FULL_SHARD", device="cpu", offload=False, out="", resume="",
    )  # fmt: skip
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, val_set = Articles(args.samples), Articles(4, seed=1)
    sampler = DistributedSampler(train_set, rank=rank, num_replicas=world_size, shuffle=True)
    val_sampler = DistributedSampler(val_set, rank=rank, num_replicas=world_size)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size=args.batch_size, sampler=val_sampler)

    model = setup_model(args, rank)
    optimizer = optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    if args.resume:
        load_optimizer(model, optimizer, rank, args.resume)

    losses, best = [], float("inf")
    for epoch in range(args.first_epoch, args.first_epoch + args.epochs):
        train(model, train_loader, optimizer, epoch, sampler, losses, args.clip)
        current = validate(model, val_loader)
        losses.append(current.item())
        scheduler.step()
        if args.out and current < best:
            save(model, optimizer, args.out)
        best = min(best, current.item())
    dist.barrier()
    return losses


if __name__ == "__main__":
    run(main)
