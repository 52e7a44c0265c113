"""A student learns from a teacher: both FSDP inside one plain module that is not FSDP itself.

The optimizer is made before wrapping, as use_orig_params allows. The teacher follows the student
(EMA over the full parameters), and state is saved through the plain module, with
set_state_dict_type.
"""

import copy

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import torch.nn.functional as F
from harness import generator_of, hybrid_groups, parse, read, write
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import always_wrap_policy, size_based_auto_wrap_policy


class Encoder(nn.Module):
    def __init__(self, width=12, depth=3, outputs=7):
        super().__init__()
        self.stem = nn.Linear(5, width)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
        )
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, outputs)

    def features(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x)

    def forward(self, x, return_features=False):
        features = self.features(x)
        logits = self.head(features)
        return {"logits": logits, "features": features} if return_features else {"logits": logits}


class Distiller(nn.Module):
    """Holds both models; only the student trains."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher
        self.center = nn.Parameter(torch.zeros(7), requires_grad=False)

    def wrap(self, args):
        options = {
            "device_id": torch.device("cpu"),
            "use_orig_params": True,
            "sharding_strategy": fsdp.ShardingStrategy[args.strategy],
        }
        if args.process_groups:
            options["process_group"] = hybrid_groups()
        if args.policy == "size":
            options["auto_wrap_policy"] = lambda module, recurse, nonwrapped_numel: (
                size_based_auto_wrap_policy(module, recurse, nonwrapped_numel, min_num_params=100)
            )
        elif args.policy == "always":
            options["auto_wrap_policy"] = always_wrap_policy
        self.student = FullyShardedDataParallel(self.student, **options)
        self.teacher = FullyShardedDataParallel(self.teacher, **options)

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x)["logits"]
        out = self.student(x, return_features=True)
        soft = F.softmax((target - self.center) / 0.5, dim=-1)
        loss = (
            -(soft * F.log_softmax(out["logits"], dim=-1)).sum(-1).mean()
            + 0.01 * out["features"].pow(2).mean()
        )
        return loss, target

    @torch.no_grad()
    def update_teacher(self, momentum):
        with FullyShardedDataParallel.summon_full_params(self):
            for mine, theirs in zip(
                self.student.parameters(), self.teacher.parameters(), strict=True
            ):
                theirs.mul_(momentum).add_(mine, alpha=1 - momentum)


def save(model, optimizer, path):
    FullyShardedDataParallel.set_state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        fsdp.FullStateDictConfig(rank0_only=False),
        fsdp.FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=True),
    )
    settings = FullyShardedDataParallel.get_state_dict_type(model.student)
    assert settings.state_dict_type is StateDictType.FULL_STATE_DICT
    state = {
        "model": model.state_dict(),
        "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer),
    }
    write(state, path)


def log_norms(model):
    """Norms of gradients and weights by name, over all ranks: of the parts that this rank has."""
    for name, param in model.student.named_parameters():
        clean = name.replace("_fsdp_wrapped_module.", "")
        assert not clean.startswith("module.")
        assert param.grad is None or param.grad.dtype == param.dtype
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False):
        named = dict(model.student.named_parameters())
        norms = [param.grad.norm().item() for param in named.values() if param.grad is not None]
        assert {"head.weight", "layers.0.0.bias"} <= named.keys()
    return norms


def main(argv=None):
    args = parse(
        argv, steps=4, first=0, policy="size", strategy="FULL_SHARD", process_groups=False, norms=False, save_at=0,
        out="", resume="",
    )  # fmt: skip
    torch.manual_seed(5)
    student = Encoder()
    teacher = copy.deepcopy(student)
    for param in teacher.parameters():
        param.requires_grad_(False)
    model = Distiller(student, teacher)
    biases = [p for name, p in student.named_parameters() if name.endswith("bias")]
    weights = [p for name, p in student.named_parameters() if not name.endswith("bias")]
    optimizer = torch.optim.SGD(
        [{"params": weights, "weight_decay": 0.01}, {"params": biases, "lr": 0.05}],
        lr=0.1,
        momentum=0.9,
    )
    model.wrap(args)
    assert sum(isinstance(module, FullyShardedDataParallel) for module in model.modules()) >= 2
    assert len(FullyShardedDataParallel.fsdp_modules(model, root_only=True)) == 2
    if args.resume:
        state = read(args.resume)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(
                FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state["optim"])
            )
    model.student.train()
    model.teacher.eval()
    losses = []
    for step in range(args.first, args.steps):
        x = torch.randn(6, 5, generator=generator_of(step, 100))
        loss, target = model(x)
        loss.backward()
        if args.norms:
            losses += log_norms(model)
        optimizer.step()
        optimizer.zero_grad()
        mean = target.mean(0)
        dist.all_reduce(mean)
        model.center.data = model.center * 0.9 + mean / dist.get_world_size() * 0.1
        model.update_teacher(0.9)
        losses.append(loss.item())
        if args.out and step + 1 == args.save_at:
            save(model, optimizer, args.out)
    with (
        torch.no_grad(),
        FullyShardedDataParallel.summon_full_params(model.teacher, writeback=False),
    ):
        losses.append(model.teacher.features(torch.ones(2, 5)).mean().item())
    return losses
