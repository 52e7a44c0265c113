"""Random models, trained plain and sharded: either bit for bit alike, or refused by name with the
model unchanged.

A case is plain data, from which every rank builds the same model. In each step
one rank's loss counts ``world_size`` times and the others' not at all: the mean over ranks is then
exactly the plain gradient, and whatever is not reduced over all ranks shows.
``random_cases.py`` runs many, and ``tests/training/test_parity.py`` a few.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import OffloadPolicy
from torch.utils.checkpoint import checkpoint

from shardkit import (
    CPUOffloadPolicy,
    MeshSpec,
    ShardkitError,
    accumulate,
    by_class,
    by_size,
    clip_grad_norm_,
    double_backward,
    full_state_dict,
    init_on_meta,
    materialize,
    shard_model,
    step_on_local_shards,
)

GOOD = {"equal", "invalid", "refused", "refused late"}
WORDS = 11
KERNELS_BY_ALIGNMENT = {"transposed", "attention", "lstm"}
IN_BLOCK = (
    "batch_norm", "counter", "spectral_norm", "weight_norm", "attention", "lstm", "cached", "transposed", "lazy",
)  # fmt: skip
IN_MODEL = (
    "tied", "shared_block", "shared_param", "frozen_block", "frozen_biases", "scalar", "root_param", "weight_outside",
    "unused", "own_checkpoint", "no_grad_block", "mixed_dtypes", "inplace",
)  # fmt: skip
ON_PARAMS = ("grad_hook", "post_hook", "forward_hook", "attribute")


@dataclass(frozen=True)
class Case:
    """One model and the way it is sharded and trained."""

    features: frozenset[str]
    container: str
    blocks: int
    dim: int
    units: str
    mesh: str
    meta: bool
    reshard: bool | None
    offload: bool
    recompute: bool
    micro_batches: int
    clip: bool
    local_step: bool
    first: str
    penalty: bool


FEATURES = sorted({*IN_BLOCK, *IN_MODEL, *ON_PARAMS})
CHOICES: dict[str, list[Any]] = {
    "container": ["list", "sequential", "dict"],
    "blocks": [1, 2, 3],
    "dim": [3, 4, 6],
    "units": ["default", "default", "root", "class", "size"],
    "mesh": ["fsdp", "fsdp", "hsdp", "replicate"],
    "meta": [False, True],
    "reshard": [None, True, False],
    "offload": [False] * 5 + [True],
    "recompute": [False] * 3 + [True],
    "micro_batches": [1, 2, 3],
    "clip": [False] * 3 + [True],
    "local_step": [False, True],
    "first": ["nothing", "nothing", "eval", "inference", "child"],
    "penalty": [False] * 9 + [True],
}


def drawn(count: int, seed: int) -> list[Case]:
    """That many cases."""
    dice = random.Random(seed)
    features = [frozenset(dice.sample(FEATURES, dice.randrange(5))) for _ in range(count)]
    return [
        Case(each, **{name: dice.choice(options) for name, options in CHOICES.items()})
        for each in features
    ]


class Block(nn.Module):
    """A residual block with one or more of ``IN_BLOCK``."""

    def __init__(self, dim: int, features: frozenset[str]) -> None:
        super().__init__()
        self.features = features
        self.norm = nn.BatchNorm1d(dim) if "batch_norm" in features else nn.LayerNorm(dim)
        self.up = nn.LazyLinear(2 * dim) if "lazy" in features else nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        if "counter" in features:
            self.register_buffer("count", torch.zeros(()))
        if "spectral_norm" in features:
            nn.utils.parametrizations.spectral_norm(self.down)
        elif "weight_norm" in features:
            nn.utils.parametrizations.weight_norm(self.down)
        elif "transposed" in features:
            self.down.weight = nn.Parameter(self.down.weight.detach().t().contiguous().t())
        if "attention" in features:
            self.mixer: nn.Module | None = nn.MultiheadAttention(dim, 1, batch_first=True)
        else:
            self.mixer = nn.LSTM(dim, dim, batch_first=True) if "lstm" in features else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "counter" in self.features:
            self.count += 1
            x = x + self.count
        if "cached" in self.features:
            if not hasattr(self, "mask"):
                self.mask = torch.ones(x.shape[-1], dtype=x.dtype)
            x = x * self.mask
        if self.mixer is not None:
            x = x + self.mixer(*([x] * (3 if "attention" in self.features else 1)))[0]
        y = (
            self.norm(x.transpose(1, 2)).transpose(1, 2)
            if "batch_norm" in self.features
            else self.norm(x)
        )
        y = self.down(F.gelu(self.up(y)))
        return x + y


class Model(nn.Module):
    """Embedding, blocks, norm and head, with one or more of ``IN_MODEL`` and ``ON_PARAMS``."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.features = features = case.features
        self.micro_batches = case.micro_batches
        self.embed = nn.Embedding(WORDS, case.dim)
        blocks = [Block(case.dim, features) for _ in range(case.blocks)]
        if "shared_block" in features:
            blocks[-1] = blocks[0]
        named = {f"b{i}": block for i, block in enumerate(blocks)}
        containers = {
            "list": nn.ModuleList(blocks),
            "sequential": nn.Sequential(*blocks),
            "dict": nn.ModuleDict(named),
        }
        self.blocks = containers[case.container]
        self.norm = nn.LayerNorm(case.dim)
        self.head = nn.Linear(case.dim, WORDS, bias=False)
        if "scalar" in features:
            self.scale = nn.Parameter(torch.tensor(1.5))
        if "root_param" in features:
            self.gain = nn.Parameter(torch.randn(case.dim))
        if "unused" in features:
            self.spare = nn.Linear(2, 2)
        self._tie(blocks)
        self._hold(blocks[0])

    def _tie(self, blocks: list[Block]) -> None:
        if "tied" in self.features:
            self.head.weight = self.embed.weight
        if "shared_param" in self.features and "lazy" not in self.features:
            blocks[-1].up.weight = blocks[0].up.weight
        if "mixed_dtypes" in self.features and "cached" not in self.features:
            blocks[0].double()
        if "frozen_block" in self.features:
            blocks[0].requires_grad_(False)
        if "frozen_biases" in self.features:
            for name, param in self.named_parameters():
                param.requires_grad_(param.requires_grad and not name.endswith("bias"))

    def _hold(self, block: Block) -> None:
        """What sharding must carry over or refuse."""
        param = block.norm.weight
        if "grad_hook" in self.features and param.requires_grad:
            param.register_hook(lambda grad: grad * 2)
        # It runs once a reduction, so not for each of several micro-batches as on a plain model.
        if (
            "post_hook" in self.features
            and self.norm.weight.requires_grad
            and self.micro_batches == 1
        ):
            self.norm.weight.register_post_accumulate_grad_hook(_halve)
        if "forward_hook" in self.features:
            block.register_forward_hook(lambda module, args, output: output * 2)
        if "attribute" in self.features:
            param.no_decay = True

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.seen = self.embed(ids)
        for block in (
            self.blocks.values() if isinstance(self.blocks, nn.ModuleDict) else self.blocks
        ):
            dtype = block.norm.weight.dtype
            with torch.no_grad() if "no_grad_block" in self.features else contextlib.nullcontext():
                if "own_checkpoint" in self.features:
                    x = checkpoint(block, x.to(dtype), use_reentrant=False).to(x.dtype)
                else:
                    x = block(x.to(dtype)).to(x.dtype)
            if "inplace" in self.features:
                x = x.mul_(2)
        x = self.norm(x)
        if "scalar" in self.features:
            x = x * self.scale
        if "root_param" in self.features:
            x = x * self.gain
        return F.linear(x, self.embed.weight) if "weight_outside" in self.features else self.head(x)


def _halve(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def shard(model: nn.Module, case: Case) -> None:
    """As the case says; raises what shardkit raises."""
    n = dist.get_world_size()
    shapes = {
        "fsdp": MeshSpec.sharded(n),
        "hsdp": MeshSpec.hybrid(2, n // 2),
        "replicate": MeshSpec.hybrid(n, 1),
    }
    units = {"default": None, "root": [], "class": by_class(Block), "size": by_size(20)}
    shard_model(
        model,
        mesh=shapes[case.mesh],
        units=units[case.units],
        reshard_after_forward=case.reshard,
        offload_policy=CPUOffloadPolicy(pin_memory=False) if case.offload else OffloadPolicy(),
        # A recomputation starts from the buffers of now, which spectral_norm computes with.
        checkpoint_activations=case.recompute
        and not {"own_checkpoint", "spectral_norm"} & case.features,
    )


def train(
    model: nn.Module, case: Case, sharded: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of three steps and the whole state afterwards."""
    _before(model, case.first)
    decayed = [param for param in model.parameters() if not getattr(param, "no_decay", False)]
    others = [param for param in model.parameters() if getattr(param, "no_decay", False)]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        *([{"params": others, "weight_decay": 0.0}] if others else []),
    ]
    # AdamW divides by gradients that may be zero but for rounding, and so makes much of it where
    # bits may differ.
    optimizer: Any = torch.optim.AdamW(groups, lr=0.05)
    if not is_exact(case):
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    stepper = step_on_local_shards(optimizer) if sharded and case.local_step else optimizer
    losses = []
    for step in range(3):
        for micro in range(case.micro_batches):
            last = micro == case.micro_batches - 1
            with contextlib.ExitStack() as stack:
                if sharded:
                    stack.enter_context(accumulate(model, last=last))
                if sharded and case.penalty:
                    stack.enter_context(double_backward(model))
                loss = _loss(model, _ids(step, micro), case)
                counts = not sharded or dist.get_rank() == step % dist.get_world_size()
                (loss * (dist.get_world_size() if sharded else 1) * counts).backward()
            losses.append(loss.item())
        if case.clip:
            clip_grad_norm_(model, 0.01) if sharded else nn.utils.clip_grad_norm_(
                model.parameters(), 0.01
            )
        stepper.step()
        stepper.zero_grad()
    return losses, full_state_dict(model, rank0_only=False) if sharded else model.state_dict()


def is_exact(case: Case) -> bool:
    """Whether every bit must be alike.

    Clipping adds squares in another order; weights are contiguous that were not, and lie elsewhere
    in memory, which some kernels of the CPU go by.
    """
    return not case.clip and not case.features & KERNELS_BY_ALIGNMENT


def _before(model: nn.Module, first: str) -> None:
    if first == "eval":
        model.eval()
        with torch.no_grad():
            model(_ids(9, 9))
        model.train()
    if first == "inference":
        with torch.inference_mode():
            model(_ids(9, 9))
    if first == "child":
        with torch.no_grad():
            model.norm(torch.ones(2, model.norm.weight.shape[0]))


def _loss(model: nn.Module, ids: torch.Tensor, case: Case) -> torch.Tensor:
    logits = model(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
    if case.penalty:
        (slope,) = torch.autograd.grad(loss, model.seen, create_graph=True)
        loss = loss + slope.square().sum()
    return loss


def _ids(step: int, micro: int) -> torch.Tensor:
    return torch.randint(WORDS, (2, 5), generator=torch.Generator().manual_seed(10 * step + micro))


def build(case: Case, meta: bool) -> Model:
    """The same values either way."""
    torch.manual_seed(0)
    with init_on_meta() if meta else contextlib.nullcontext():
        return Model(case)


def outcome(case: Case) -> str:
    """``equal``, ``invalid`` (plain training fails), ``refused: ...``, or what is wrong.

    In float64 where bits may differ: the steps of training carry float32's rounding to 1e-5.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if is_exact(case) else torch.float64)
    try:
        return _outcome(case)
    finally:
        torch.set_default_dtype(before)


def _outcome(case: Case) -> str:
    try:
        torch.manual_seed(1)
        expected = train(build(case, meta=False), case, sharded=False)
    except Exception as error:
        return f"invalid: {_line(error)}"
    try:
        model = build(case, case.meta)
    except Exception as error:
        return f"{'refused' if isinstance(error, ShardkitError) else 'error'}: {_line(error)}"
    before = _identity(model)
    try:
        shard(model, case)
    except ShardkitError as error:
        return (
            f"refused: {_line(error)}"
            if _identity(model) == before
            else f"changed by a refusal: {_line(error)}"
        )
    except Exception as error:
        return f"error: {_line(error)}"
    try:
        if case.meta:
            materialize(model)
        torch.manual_seed(1)
        got = train(model, case, sharded=True)
    except ShardkitError as error:
        return f"refused late: {_line(error)}"
    except Exception as error:
        # torch's error for a parameter that is used while its unit is not gathered.
        mixed = "got mixed torch.Tensor and DTensor" in str(error)
        return f"{'refused late' if mixed else 'error'}: {_line(error)}"
    return _compare(got, expected, exact=is_exact(case))


def _identity(model: nn.Module) -> list[Any]:
    modules = [
        (name, type(module), len(module._forward_hooks), module.forward)
        for name, module in model.named_modules()
    ]
    return [
        *modules,
        *((name, id(param)) for name, param in model.named_parameters(remove_duplicate=False)),
    ]


def _compare(got: Any, expected: Any, exact: bool) -> str:
    """Compare losses and state, in float64 if not ``exact``."""
    tolerance = 0.0 if exact else 1e-9
    losses = [abs(mine - theirs) for mine, theirs in zip(got[0], expected[0], strict=True)]
    if not max(losses) <= tolerance:
        return f"differs: losses by {losses}"
    if got[1].keys() != expected[1].keys():
        return f"differs: names {sorted(got[1].keys() ^ expected[1].keys())}"
    wrong = [
        name for name, value in expected[1].items() if not _same(got[1][name], value, tolerance)
    ]
    return f"differs: {wrong}" if wrong else "equal"


def _same(mine: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> bool:
    return mine.dtype == theirs.dtype and torch.allclose(
        mine, theirs, rtol=tolerance, atol=tolerance
    )


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]


def outcomes(cases: list[Case]) -> list[str]:
    """What becomes of each on this rank."""
    return [outcome(case) for case in cases]
