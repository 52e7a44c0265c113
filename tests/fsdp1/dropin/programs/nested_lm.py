"""A language model that wraps itself while it is built: enable_wrap and wrap around checkpointed layers.

FSDP is subclassed, as older training libraries do, and takes its group by position. The loss is scaled for fp16,
state is one file a rank (LOCAL), and the norm of the weights is logged.
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import generator_of, parse, read_own, write_own
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import (
    LocalStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import enable_wrap, wrap


class FullyShardedModel(FSDP):
    """The library's own FSDP: knows its inner module by name and keeps a flag."""

    def __init__(self, *args, **kwargs):
        self.use_sharded_state = kwargs.pop("use_sharded_state", False)
        super().__init__(*args, **kwargs)

    @property
    def unwrapped_module(self):
        return self.module.unwrapped_module if isinstance(self.module, FSDP) else self.module


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = wrap(nn.Linear(width, 2 * width))
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x, scale=None):
        hidden = F.relu(self.fc1(self.norm(x)))
        hidden = (
            hidden.cumsum(1)
            / torch.arange(1, x.size(1) + 1, device=x.device, dtype=hidden.dtype)[None, :, None]
        )
        return x + self.fc2(hidden) * (1.0 if scale is None else scale)


class LanguageModel(nn.Module):
    def __init__(self, args, vocabulary=40, width=12):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([self.build_layer(args, width) for _ in range(args.layers)])
        self.tail = wrap(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary)))

    def build_layer(self, args, width):
        layer = Layer(width)
        if args.checkpoint_activations:
            layer = checkpoint_wrapper(layer)
        return wrap(layer) if args.wrap_layers else layer

    def forward(self, tokens, *, scale=None):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, scale=scale)
        return self.tail(x)

    def max_positions(self):
        return 128


def build(args):
    torch.manual_seed(11)
    precision = (
        MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        if args.bf16
        else None
    )
    parameters = {
        "process_group": dist.group.WORLD,
        "sharding_strategy": ShardingStrategy.FULL_SHARD
        if args.reshard
        else ShardingStrategy.SHARD_GRAD_OP,
        "mixed_precision": precision,
        "device_id": torch.device("cpu"),
    }
    with enable_wrap(wrapper_cls=FullyShardedModel, **parameters):
        model = LanguageModel(args)
    positional = parameters.pop("process_group"), parameters.pop("sharding_strategy"), None, None
    return FullyShardedModel(model, *positional, use_sharded_state=True, **parameters)


def weight_norm(model):
    """The norm of all weights, from what each rank keeps outside of forward and backward."""
    with FSDP.summon_full_params(model, recurse=True, writeback=False, rank0_only=True):
        if dist.get_rank() != 0:
            return 0.0
        return torch.stack([p.detach().float().norm() for p in model.parameters()]).norm().item()


def save(model, optimizer, args):
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()):
        write_own({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.out)


def load(model, optimizer, args):
    state = read_own(args.restore)
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()):
        model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def train_step(model, optimizer, scaler, args, step):
    losses = []
    generator = generator_of(step)
    optimizer.zero_grad()
    for micro in range(args.update_freq):
        tokens = torch.randint(0, 40, (2, 6), generator=generator)
        maybe_no_sync = (
            model.no_sync() if micro < args.update_freq - 1 else contextlib.nullcontext()
        )
        with maybe_no_sync:
            logits = model(tokens[:, :-1], scale=torch.tensor(0.5))
            loss = F.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:])
            scaler.scale(loss / args.update_freq).backward()
        losses.append(loss.item())
    scaler.unscale_(optimizer)
    if args.clip_norm:
        norm = model.clip_grad_norm_(args.clip_norm, norm_type=args.norm_type)
        assert norm.dim() == 0
    scaler.step(optimizer)
    scaler.update()
    return losses


def main(argv=None):
    args = parse(
        argv, steps=3, first=0, layers=2, update_freq=2, clip_norm=0.0, norm_type=2.0, bf16=False, reshard=False,
        wrap_layers=False, checkpoint_activations=False, save_at=0, out="", restore="",
    )  # fmt: skip
    model = build(args)
    assert model.unwrapped_module.max_positions() == model.max_positions() == 128
    assert model.use_sharded_state
    assert model.check_is_root()
    assert {type(unit) for unit in FSDP.fsdp_modules(model)} == {FullyShardedModel}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.98))
    scaler = ShardedGradScaler(init_scale=4.0, enabled=False, process_group=dist.group.WORLD)
    if args.restore:
        load(model, optimizer, args)
    losses = []
    for step in range(args.first, args.steps):
        losses += train_step(model, optimizer, scaler, args, step)
        if args.out and step + 1 == args.save_at:
            save(model, optimizer, args)
    losses.append(weight_norm(model))
    return losses
