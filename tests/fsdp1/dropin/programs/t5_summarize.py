"""Summaries with a T5: FSDP over T5 blocks, an epoch loop with validation, the best model saved by
rank 0.

As tutorials do it: everything by keyword, one FullStateDictConfig made once and passed around, the
pair full_optim_state_dict / scatter_full_optim_state_dict.
"""

import functools

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from harness import generator_of, parse, read, write
from torch import optim
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

bf16 = torch.bfloat16
POLICIES = {
    "bf16": fsdp.MixedPrecision(param_dtype=bf16, reduce_dtype=bf16, buffer_dtype=bf16),
    "bf16_working": fsdp.MixedPrecision(
        param_dtype=torch.float32, reduce_dtype=bf16, buffer_dtype=bf16
    ),
    "none": None,
}
SAVE_POLICY = fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)


def batch_of(seed):
    """Random articles, of which one is shorter, each with a summary that copies its beginning."""
    source = torch.randint(2, 64, (2, 12), generator=generator_of(seed))
    mask = (torch.arange(12) < torch.tensor([[12], [8]])).long()
    return {
        "input_ids": source * mask,
        "attention_mask": mask,
        "labels": source[:, :6].contiguous(),
    }


def train(model, optimizer, epoch, losses, clip):
    model.train()
    for step in range(2):
        optimizer.zero_grad()
        loss = model(**batch_of(10 * epoch + step))["loss"]
        loss.backward()
        if clip:
            model.clip_grad_norm_(clip)
        optimizer.step()
        losses.append(loss.item())


def validate(model):
    model.eval()
    with torch.no_grad():
        fsdp_loss = model(**batch_of(999))["loss"].float()
    dist.all_reduce(fsdp_loss, op=dist.ReduceOp.SUM)
    return fsdp_loss / dist.get_world_size()


def setup_model(args, rank):
    """The plain model; a checkpoint is read by rank 0 alone, and reaches the others when they are
    wrapped.
    """
    torch.manual_seed(1)
    sizes = {
        "vocab_size": 64,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
    }
    config = T5Config(**sizes, dropout_rate=args.dropout, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config)
    if args.resume and rank == 0:
        model.load_state_dict(read(f"{args.resume}/t5.pt"))
    wrap_policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})
    return FSDP(
        model,
        auto_wrap_policy=wrap_policy,
        mixed_precision=POLICIES[args.precision],
        sharding_strategy=getattr(fsdp.ShardingStrategy, args.strategy),
        cpu_offload=fsdp.CPUOffload(offload_params=True) if args.offload else None,
        backward_prefetch=fsdp.BackwardPrefetch.BACKWARD_PRE,
        device_id=torch.device(args.device),
        limit_all_gathers=True,
        sync_module_states=bool(args.resume),
        forward_prefetch=args.strategy == "FULL_SHARD",
    )


def save(model, optimizer, out):
    with FSDP.state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT, SAVE_POLICY):
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
        argv, epochs=2, first_epoch=1, lr=0.002, dropout=0.0, clip=0.0,
        precision="none", strategy="FULL_SHARD", device="cpu", offload=False, out="", resume="",
    )  # fmt: skip
    rank = dist.get_rank()
    model = setup_model(args, rank)
    optimizer = optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    if args.resume:
        load_optimizer(model, optimizer, rank, args.resume)

    losses, best = [], float("inf")
    for epoch in range(args.first_epoch, args.first_epoch + args.epochs):
        train(model, optimizer, epoch, losses, args.clip)
        current = validate(model)
        losses.append(current.item())
        scheduler.step()
        if args.out and current < best:
            save(model, optimizer, args.out)
        best = min(best, current.item())
    dist.barrier()
    return losses
