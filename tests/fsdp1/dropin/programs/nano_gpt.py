"""A small GPT from scratch: tied head, decay groups by dimension, cosine schedule, accumulation
under no_sync.

Wrapped with use_orig_params for torch.compile and parameter groups; the checkpoint holds model,
optimizer and the arguments, and training resumes from it.
"""

import contextlib
import math
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from harness import Block, Decoder, generator_of, parse, write
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F


@dataclass
class GPTConfig:
    block_size: int = 8
    vocab_size: int = 48
    n_layer: int = 2
    n_embd: int = 16


class GPT(Decoder):
    def __init__(self, config):
        super().__init__(config.vocab_size, config.n_embd, config.n_layer)
        self.config, self.wpe = config, nn.Embedding(config.block_size, config.n_embd)
        self.embed.weight = self.head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.2)

    def forward(self, idx, targets=None):
        x = self.embed(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.layers:
            x = block(x)
        logits = self.head(self.norm(x[:, [-1], :] if targets is None else x))
        return logits, None if targets is None else F.cross_entropy(
            logits.flatten(0, 1), targets.reshape(-1)
        )

    @torch.no_grad()
    def generate(self, idx, max_new_tokens):
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -self.config.block_size :])
            idx = torch.cat((idx, logits[:, -1, :].argmax(-1, keepdim=True)), dim=1)
        return idx


def configure_optimizer(model, weight_decay, lr, use_orig_params):
    """Weights of two dimensions decay, biases and norms do not."""
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not use_orig_params:
        return torch.optim.AdamW(
            params.values(), lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay
        )
    plain = {
        name.replace("_fsdp_wrapped_module.", "").replace("_orig_mod.", ""): p
        for name, p in params.items()
    }
    no_decay = {name for name in plain if "norm" in name or name.endswith("bias")}
    groups = [
        {
            "params": [p for name, p in plain.items() if name not in no_decay],
            "weight_decay": weight_decay,
        },
        {"params": [p for name, p in plain.items() if name in no_decay], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def get_lr(it, args):
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * it / args.max_iters))


def get_batch(data, args, config, generator):
    ix = torch.randint(len(data) - config.block_size - 1, (args.batch_size,), generator=generator)
    x = torch.stack([data[i : i + config.block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + config.block_size] for i in ix])
    return x, y


@torch.no_grad()
def estimate_loss(model, data, args, config):
    out = []
    model.eval()
    for split in ("train", "val"):
        generator = torch.Generator().manual_seed(len(split))
        losses = torch.stack(
            [model(*get_batch(data, args, config, generator))[1] for _ in range(2)]
        )
        mean = losses.float().mean()
        dist.all_reduce(mean)
        out.append(mean.item() / dist.get_world_size())
    model.train()
    return out


def save(model, optimizer, config, it, path):
    with FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
    ):
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": FSDP.optim_state_dict(model, optimizer),
            "model_args": asdict(config),
            "iter_num": it,
        }
    write(checkpoint, path)


def wrap(model, args):
    precision = None
    if args.dtype != "float32":
        dtype = getattr(torch, args.dtype)
        precision = MixedPrecision(
            param_dtype=dtype, reduce_dtype=torch.float32, buffer_dtype=dtype
        )
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[args.strategy],
        mixed_precision=precision,
        device_id=torch.device("cpu"),
        use_orig_params=not args.flat,
    )


def train_step(model, optimizer, data, args, config, generator):
    total = 0.0
    for micro_step in range(args.accumulation):
        last = micro_step == args.accumulation - 1
        with contextlib.nullcontext() if last or args.always_sync else model.no_sync():
            _, loss = model(*get_batch(data, args, config, generator))
            loss = loss / args.accumulation
            loss.backward()
        total += loss.item()
    if args.grad_clip:
        model.clip_grad_norm_(args.grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def main(argv=None):
    args = parse(
        argv, max_iters=4, batch_size=2, accumulation=2, lr=0.006, grad_clip=0.0, dtype="float32",
        strategy="FULL_SHARD", compile="", flat=False, always_sync=False, sample=False, save_at=0, init_from="", out="",
    )  # fmt: skip
    torch.manual_seed(1337)
    data = torch.arange(400) * 7 % 41 + torch.randint(0, 3, (400,))
    checkpoint = (
        torch.load(args.init_from, weights_only=False, mmap=True) if args.init_from else None
    )
    config = GPTConfig(**checkpoint["model_args"]) if checkpoint else GPTConfig()
    model = GPT(config)
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
    model = wrap(model, args)
    optimizer = configure_optimizer(model, 0.1, args.lr, not args.flat)
    first = 0
    if checkpoint:
        first = checkpoint["iter_num"]
        optimizer.load_state_dict(
            FSDP.optim_state_dict_to_load(model, optimizer, checkpoint["optimizer"])
        )
    fsdp_model = model
    if args.compile:
        model = torch.compile(model, backend=args.compile)
    raw_model = fsdp_model.module
    losses = estimate_loss(model, data, args, config)
    for it in range(first, args.max_iters):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(it, args)
        generator = generator_of(it, 1000)
        losses.append(train_step(model, optimizer, data, args, config, generator))
        if it + 1 == args.save_at and args.out:
            save(fsdp_model, optimizer, config, it + 1, args.out)
    losses += estimate_loss(model, data, args, config)
    if args.sample:
        with FSDP.summon_full_params(fsdp_model, writeback=False):
            sampled = raw_model.generate(torch.zeros((1, 1), dtype=torch.long), 10)
        losses += sampled[0].float().tolist()
    return losses
