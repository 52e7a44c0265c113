"""Fine-tuning a Llama, in full or with LoRA: rank 0 holds the pretrained weights, the others begin
on meta.

Policies and checkpoint handlers are in llama_policies.py. Evaluation prints a perplexity over all
ranks, checkpoints are directories of torch.distributed.checkpoint.
"""

import llama_policies as policies
import torch
import torch.distributed as dist
from harness import Adapted, checkpoint_modules, parse
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim.lr_scheduler import StepLR
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


def get_peft_model(model):
    """Freeze the model and put LoRA on queries and values."""
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
    return model


def build_model(args, rank):
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    with torch.device("meta" if args.low_cpu_fsdp and rank != 0 else "cpu"):
        model = LlamaForCausalLM(config)
        if args.use_peft:
            model = get_peft_model(model)
    model.model.layers[: args.freeze_layers].requires_grad_(False)
    return model


def make_room(module):
    module.to_empty(device=torch.device("cpu"), recurse=False)


def wrap_model(model, args, rank):
    policy = (
        policies.fsdp_auto_wrap_policy(LlamaDecoderLayer)
        if args.use_peft
        else policies.get_llama_wrapper()
    )
    model = FSDP(
        model,
        auto_wrap_policy=policy,
        cpu_offload=policies.OFFLOAD if args.fsdp_cpu_offload else None,
        mixed_precision=policies.PRECISION[args.precision],
        sharding_strategy=ShardingStrategy[args.sharding_strategy],
        device_id=torch.device("cpu"),
        limit_all_gathers=True,
        sync_module_states=args.low_cpu_fsdp,
        param_init_fn=make_room if args.low_cpu_fsdp and rank != 0 else None,
        use_orig_params=args.freeze_layers > 0,
    )
    if args.fsdp_activation_checkpointing:
        checkpoint_modules(model, lambda module: isinstance(module, LlamaDecoderLayer))
    return model


def batches(args, seed, count):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = torch.randint(1, 64, (2, 8), generator=generator)
        labels = ids.clone()
        labels[:, :2] = -100
        yield {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def evaluation(model, args, rank, world_size):
    model.eval()
    eval_loss = torch.tensor(0.0)
    for batch in batches(args, 70 + rank, 2):
        with torch.no_grad():
            eval_loss += model(**batch).loss.detach().float()
    dist.all_reduce(eval_loss, op=dist.ReduceOp.SUM)
    return eval_loss.item() / 2 / world_size


def train(model, optimizer, scheduler, args, rank, world_size):
    scaler = ShardedGradScaler(enabled=torch.cuda.is_available()) if args.use_fp16 else None
    losses = []
    for epoch in range(args.first_epoch, args.num_epochs):
        model.train()
        for step, batch in enumerate(batches(args, 10 * epoch + rank, args.steps)):
            loss = model(**batch).loss / args.gradient_accumulation_steps
            losses.append(loss.detach().float().item())
            last = (step + 1) % args.gradient_accumulation_steps == 0 or step + 1 == args.steps
            (loss if scaler is None else scaler.scale(loss)).backward()
            if last and scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            elif last:
                optimizer.step()
            if last:
                optimizer.zero_grad()
        scheduler.step()
        losses.append(evaluation(model, args, rank, world_size))
        if args.out and epoch == args.first_epoch:
            policies.save_model_and_optimizer_sharded(model, args.out + "/sharded", optimizer)
    return losses


def main(argv=None):
    args = parse(
        argv, steps=3, num_epochs=2, first_epoch=0, lr=0.005, seed=42, gradient_accumulation_steps=1,
        sharding_strategy="FULL_SHARD", precision="none", freeze_layers=0, use_peft=False,
        low_cpu_fsdp=False, use_fp16=False, fsdp_cpu_offload=False,
        fsdp_activation_checkpointing=False, dist_checkpoint="", out="",
    )  # fmt: skip
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = wrap_model(build_model(args, rank), args, rank)
    if args.dist_checkpoint:
        policies.load_model_sharded(model, args.dist_checkpoint)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=args.lr,
        weight_decay=0.01,
        foreach=False,
    )
    scheduler = StepLR(optimizer, step_size=1, gamma=0.85)
    if args.dist_checkpoint:
        policies.load_optimizer_sharded(model, optimizer, args.dist_checkpoint)
    assert model.module.config.model_type == "llama"
    return train(model, optimizer, scheduler, args, rank, world_size)
