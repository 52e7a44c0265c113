"""A class-conditional diffusion transformer with an average of its weights (EMA).

The average is a deep copy made before wrapping and is wrapped itself. Checkpoints: model and EMA
full, by rank 0, and the optimizer as it is, one file a rank.
"""

import functools
from collections import OrderedDict
from copy import deepcopy

import torch
import torch.distributed as dist
import torch.nn as nn
from harness import generator_of, parse, read, read_own, write, write_own
from torch.distributed.fsdp import (
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, lambda_auto_wrap_policy

TOKENS, CHANNELS, CLASSES = 4, 6, 5


class DiTBlock(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.attn = nn.MultiheadAttention(hidden_size, 2, batch_first=True)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 3 * hidden_size))

    def forward(self, x, c):
        shift, scale, gate = self.adaLN_modulation(c)[:, None].chunk(3, dim=2)
        h = self.norm(x) * (1 + scale) + shift
        return x + gate * self.attn(h, h, h, need_weights=False)[0]


class DiT(nn.Module):
    def __init__(self, hidden_size=16, depth=3):
        super().__init__()
        self.x_embedder, self.t_embedder = (
            nn.Linear(CHANNELS, hidden_size),
            nn.Linear(1, hidden_size),
        )
        self.y_embedder = nn.Embedding(CLASSES, hidden_size)
        self.pos_embed = nn.Parameter(torch.zeros(1, TOKENS, hidden_size), requires_grad=False)
        self.blocks = nn.ModuleList([DiTBlock(hidden_size) for _ in range(depth)])
        self.final_layer = nn.Linear(hidden_size, CHANNELS)
        self.pos_embed.data.copy_(
            torch.sin(torch.arange(self.pos_embed.numel()) / 3.0).view_as(self.pos_embed)
        )

    def forward(self, x, t, y):
        x = self.x_embedder(x) + self.pos_embed
        c = self.t_embedder(t[:, None].to(x.dtype)) + self.y_embedder(y)
        for block in self.blocks:
            x = block(x, c)
        return self.final_layer(x)

    def sampled(self, x, t, y):
        """A method of its own, which is called within the full parameters."""
        return x - self.forward(x, t, y) / 3

    def get_fsdp_wrap_module_list(self):
        return list(self.blocks)


@torch.no_grad()
def update_ema(ema_model, model, decay=0.9):
    ema_params = OrderedDict(ema_model.named_parameters())
    model_params = OrderedDict(model.named_parameters())
    assert set(ema_params) == set(model_params)
    for name, param in model_params.items():
        ema_params[name].mul_(decay).add_(param.data, alpha=1 - decay)


def requires_grad(model, flag=True):
    for p in model.parameters():
        p.requires_grad = flag


def setup_fsdp_sync(model, args, precision=None):
    """The model on its device, the same on all ranks, in units that the model names or by class."""
    if args.policy == "class":
        policy = ModuleWrapPolicy([DiTBlock])
    else:
        modules = model.get_fsdp_wrap_module_list()
        policy = functools.partial(
            lambda_auto_wrap_policy, lambda_fn=lambda module: module in modules
        )
    return FSDP(
        model,
        auto_wrap_policy=policy,
        process_group=None,
        sharding_strategy=ShardingStrategy[args.strategy],
        mixed_precision=precision,
        device_id=torch.device("cpu"),
        sync_module_states=True,
        limit_all_gathers=True,
        use_orig_params=True,
    )


def training_losses(model, x, t, y, noise):
    x_t = (1 - t)[:, None, None] * x + t[:, None, None] * noise
    out = model(x_t, t, y)
    return ((out.float() - (noise - x)) ** 2).mean(dim=(1, 2))


def save_checkpoint(directory, model, ema, opt, step):
    for name, module in (("consolidated", model), ("consolidated_ema", ema)):
        with FSDP.state_dict_type(
            module,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(rank0_only=True, offload_to_cpu=True),
        ):
            write(module.state_dict(), f"{directory}/{name}.pth")
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        write_own(opt.state_dict(), directory)
    write(step, f"{directory}/resume_step.pth")


def resume_optimizer(opt, args):
    opt.load_state_dict(read_own(args.resume))
    for group in opt.param_groups:
        group["lr"], group["weight_decay"] = args.lr, 0.01


def build(args):
    torch.manual_seed(0)
    model = DiT()
    model_ema = deepcopy(model)
    if args.resume:
        if dist.get_rank() == 0:
            model.load_state_dict(read(f"{args.resume}/consolidated.pth"), strict=True)
            model_ema.load_state_dict(read(f"{args.resume}/consolidated_ema.pth"), strict=True)
        dist.barrier()
    requires_grad(model_ema, False)
    dtype = {"fp32": torch.float, "bf16": torch.bfloat16}[args.precision]
    reduce_dtype = {"fp32": torch.float, "bf16": torch.bfloat16}[
        args.grad_precision or args.precision
    ]
    precision = MixedPrecision(param_dtype=dtype, reduce_dtype=reduce_dtype)
    model = setup_fsdp_sync(model, args, precision)
    model_ema = setup_fsdp_sync(model_ema, args)
    model_ema.eval()
    return model, model_ema


def train_step(model, ema, opt, generator, args):
    x = torch.randn(args.batch_size, TOKENS, CHANNELS, generator=generator)
    y = torch.randint(0, CLASSES, (args.batch_size,), generator=generator)
    opt.zero_grad()
    total = 0.0
    for start in range(0, len(x), args.micro_batch_size):
        part = slice(start, start + args.micro_batch_size)
        t = torch.rand(len(x[part]), generator=generator)
        noise = torch.randn(x[part].shape, generator=generator)
        last = start + args.micro_batch_size >= len(x)
        loss = training_losses(model, x[part], t, y[part], noise).sum() / len(x)
        if last or not args.no_sync:
            loss.backward()
        else:
            with model.no_sync():
                loss.backward()
        total += loss.item()
    grad_norm = model.clip_grad_norm_(args.grad_clip)
    opt.step()
    update_ema(ema, model)
    assert grad_norm > 0
    return total


@torch.no_grad()
def sample(ema):
    """A sample of the average, by its own method, inside of the full parameters."""
    x = torch.randn(1, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(9))
    with FSDP.summon_full_params(ema, writeback=False, recurse=True):
        return ema.module.sampled(x, torch.ones(1), torch.tensor([1])).mean().item()


def main(argv=None):
    args = parse(
        argv, steps=4, batch_size=4, micro_batch_size=2, lr=0.003, grad_clip=2.0, policy="lambda",
        strategy="FULL_SHARD", precision="fp32", grad_precision="", no_sync=False,
        save_at=0, out="", resume="",
    )  # fmt: skip
    model, ema = build(args)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    first = 0
    if args.resume:
        resume_optimizer(opt, args)
        first = read(f"{args.resume}/resume_step.pth")
    else:
        update_ema(ema, model, decay=0)
    model.train()
    losses = []
    for step in range(first, args.steps):
        torch.manual_seed(100 * step + dist.get_rank())
        generator = generator_of(step)
        losses.append(train_step(model, ema, opt, generator, args))
        if args.out and step + 1 == args.save_at:
            save_checkpoint(args.out, model, ema, opt, step + 1)
    losses.append(sample(ema))
    return losses
