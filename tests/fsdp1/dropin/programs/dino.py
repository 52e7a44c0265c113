"""Self-supervised images: a student and a teacher of a backbone and a head, each part a root of FSDP in a ModuleDict.

The teacher follows the student within the full parameters, gradients are clipped part by part, and groups have rates
of their own for each layer.
"""

from functools import partial

import torch
import torch.nn.functional as F
from harness import generator_of, parse, read_own, run, write_own
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class BlockChunk(nn.ModuleList):
    def forward(self, x):
        for block in self:
            x = x + block(x)
        return x


class Backbone(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.patch_embed = nn.Linear(6, width)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.mask_token = nn.Parameter(torch.zeros(1, width))
        block = partial(nn.Sequential, nn.LayerNorm(width), nn.Linear(width, width))
        self.blocks = nn.ModuleList([BlockChunk([block(), nn.Sequential(nn.Linear(width, width), nn.GELU())])])
        self.norm = nn.LayerNorm(width)

    def tokens(self, x, masks):
        x = self.patch_embed(x)
        if masks is not None:
            x = torch.where(masks.unsqueeze(-1), self.mask_token.to(x.dtype).unsqueeze(0), x)
        return torch.cat([self.cls_token.to(x.dtype).expand(len(x), -1, -1), x], dim=1)

    def forward(self, crops, masks=None):
        """One batch, or a list of batches of several sizes that go through the same blocks."""
        if not isinstance(crops, list):
            return self.forward([crops], [masks])[0]
        found = [self.tokens(x, mask) for x, mask in zip(crops, masks, strict=True)]
        for chunk in self.blocks:
            found = [chunk(x) for x in found]
        found = [self.norm(x) for x in found]
        return [{"cls": x[:, 0], "patches": x[:, 1:]} for x in found]


class Head(nn.Module):
    def __init__(self, width=12, prototypes=10):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 8))
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, prototypes, bias=False))

    def forward(self, x):
        return self.last_layer(F.normalize(self.mlp(x), dim=-1))


def get_fsdp_wrapper(strategy, dtype, modules_to_wrap):
    return partial(
        FSDP,
        sharding_strategy=ShardingStrategy[strategy],
        mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=torch.float32),
        device_id=torch.device("cpu"),
        sync_module_states=True,
        use_orig_params=True,
        auto_wrap_policy=ModuleWrapPolicy(modules_to_wrap),
    )


class SSLMetaArch(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.fp16_scaler = ShardedGradScaler(enabled=False)
        self.student = nn.ModuleDict({"backbone": Backbone(), "dino_head": Head()})
        self.teacher = nn.ModuleDict({"backbone": Backbone(), "dino_head": Head()})
        self.teacher.requires_grad_(False)

    def prepare_for_distributed_training(self):
        for name in self.student:
            self.teacher[name].load_state_dict(self.student[name].state_dict())
            dtype = torch.bfloat16 if self.args.half and name == "backbone" else torch.float32
            wrapper = get_fsdp_wrapper(self.args.strategy, dtype, {BlockChunk})
            self.student[name], self.teacher[name] = wrapper(self.student[name]), wrapper(self.teacher[name])

    @torch.no_grad()
    def targets(self, crops):
        found = self.teacher.backbone(crops)
        return F.softmax(self.teacher.dino_head(found["cls"].float()) / 0.1, dim=-1)

    def forward_backward(self, crops, local, masks):
        targets = self.targets(crops)
        whole, part = self.student.backbone([crops, local], [masks, None])
        outputs = self.student.dino_head(torch.cat([whole["cls"], part["cls"]]).float())
        seen, cut = outputs.log_softmax(-1).split([len(crops), len(local)])
        loss = -(targets * seen).sum(-1).mean() - (targets * cut).sum(-1).mean()
        loss = loss + 0.1 * whole["patches"].float().square().mean()
        self.fp16_scaler.scale(loss).backward()
        return loss

    @torch.no_grad()
    def update_teacher(self, momentum):
        with FSDP.summon_full_params(self):
            teachers = list(self.teacher.parameters())
            torch._foreach_mul_(teachers, momentum)
            torch._foreach_add_(teachers, list(self.student.parameters()), alpha=1 - momentum)

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    def params_groups(self):
        """A group for each rate and decay."""
        fused = {}
        for module in self.student.values():
            for name, param in module.named_parameters():
                name = name.replace("_fsdp_wrapped_module.", "")
                rate = 0.5 if "blocks" in name else 0.2 if "patch_embed" in name else 1.0
                decay = 0.0 if name.endswith("bias") or "norm" in name or "token" in name else 1.0
                group = fused.setdefault((rate, decay), {"params": [], "rate": rate, "decay": decay, "foreach": True})
                group["params"].append(param)
        return list(fused.values())


def checkpoint(model, optimizer, folder, load):
    """A file a rank, of the state as it is there, of parts that are FSDP in a model that is not."""
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        if load:
            state = read_own(folder)
            found = model.load_state_dict(state["model"], strict=False)
            assert found.missing_keys == found.unexpected_keys == []
            optimizer.load_state_dict(state["optimizer"])
        else:
            write_own({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder)


def main(argv=None):
    args = parse(
        argv, steps=3, first=0, clip_grad=1e9, strategy="SHARD_GRAD_OP", half=False, save_at=0,
        out="", resume="",
    )  # fmt: skip
    torch.manual_seed(9)
    model = SSLMetaArch(args)
    model.prepare_for_distributed_training()
    model.train()
    optimizer = torch.optim.AdamW(model.params_groups(), betas=(0.9, 0.999))
    if args.resume:
        checkpoint(model, optimizer, args.resume, load=True)
    losses = []
    for step in range(args.first, args.steps):
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.01 * group["rate"], 0.04 * group["decay"]
        generator = generator_of(step)
        crops, local = (torch.randn(3, size, 6, generator=generator) for size in (5, 2))
        optimizer.zero_grad(set_to_none=True)
        loss = model.forward_backward(crops, local, torch.rand(3, 5, generator=generator) < 0.4)
        model.fp16_scaler.unscale_(optimizer)
        for module in model.student.values():
            module.clip_grad_norm_(args.clip_grad)
        model.fp16_scaler.step(optimizer)
        model.fp16_scaler.update()
        model.update_teacher(0.9)
        losses.append(loss.item())
        if args.out and step + 1 == args.save_at:
            checkpoint(model, optimizer, args.out, load=False)
    return losses


if __name__ == "__main__":
    run(main)
