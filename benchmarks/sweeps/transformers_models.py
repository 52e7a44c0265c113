"""Models of transformers, plain and under ``shard_model(model)``: two steps of SGD on two ranks.

About ten minutes: ``PYTHONPATH=.:tests/helpers python benchmarks/sweeps/transformers_models.py``
with ``[name ...]``. Every base model of ``AutoModel`` that can be built tiny and run on made-up
inputs is tried, in eval mode. CI runs those in the zoo.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tiny_transformers import builder
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from verdicts import is_large, sweep

from shardkit import plan_model, shard_model
from shardkit._fsdp.collectives import reduce_unused
from shardkit.errors import ShardkitError
from shardkit.testing import RankFailure, RankPool

Shard = Callable[[nn.Module], nn.Module]
ROUNDING = 1e-5  # of a tensor's largest element, after two steps


def base_models() -> list[str]:
    """The class names of what ``AutoModel`` gives."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    names = (
        name
        for each in MODEL_MAPPING_NAMES.values()
        for name in ([each] if isinstance(each, str) else each)
    )
    return sorted(set(names))


def inputs_of(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Made-up values for the usual arguments of a forward, as many as it has."""
    generator = torch.Generator().manual_seed(seed)
    config: Any = model.config
    parts = [config, *(value for value in vars(config).values() if hasattr(value, "attribute_map"))]

    def setting(name: str, default: int) -> int:
        values = (getattr(part, name, None) for part in parts)
        found = next((value for value in values if isinstance(value, int) and value > 0), default)
        return int(found)

    def ids(length: int = 8) -> Tensor:
        return torch.randint(3, setting("vocab_size", 50), (2, length), generator=generator)

    size, channels = setting("image_size", 32), setting("num_channels", 3)
    made = {
        "input_ids": ids,
        "decoder_input_ids": ids,
        "attention_mask": lambda: torch.ones(2, 8, dtype=torch.long),
        "pixel_values": lambda: torch.randn(2, channels, size, size, generator=generator),
        "input_values": lambda: torch.randn(2, 1600, generator=generator),
        "input_features": lambda: torch.randn(
            2, setting("num_mel_bins", 80), 128, generator=generator
        ),
        "bbox": lambda: torch.zeros(2, 8, 4, dtype=torch.long),
    }
    taken = [name for name in inspect.signature(model.forward).parameters if name in made]
    if "input_ids" not in taken and "attention_mask" in taken:
        taken.remove("attention_mask")
    return {name: made[name]() for name in taken}


def square_of(outputs: Any) -> Tensor:
    """The mean square of every output that depends on parameters."""
    floats = [
        leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    return torch.stack([leaf.double().square().mean() for leaf in floats]).sum()


def loss_of(model: nn.Module, seed: int) -> Tensor:
    return square_of(dict(model(**inputs_of(model, seed))))


def compare(
    plain: nn.Module, sharded: nn.Module, loss: Callable[[nn.Module, int], Tensor], lr: float = 0.1
) -> float:
    """The largest difference of a parameter after two steps, and of a buffer; 0.0 means equal bits.

    Over its largest element, or 0.01 where all are smaller: gradients that are zero but for
    rounding make biases so.
    """
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9) for model in (plain, sharded)
    ]
    for step in range(2):
        # one rank counts, so that the mean over the ranks is exact
        weight = float(dist.get_rank() == step)
        for model, optimizer in zip((plain, sharded), optimizers, strict=True):
            torch.manual_seed(step)  # dropout, and ViTMAE masks at random
            scale = weight if model is sharded else weight / dist.get_world_size()
            (loss(model, 2 * step + dist.get_rank()) * scale).backward()
            if model is plain:
                for param in plain.parameters():  # a rank may have no gradient of an expert's
                    if param.requires_grad:
                        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                        dist.all_reduce(param.grad)
            optimizer.step()
            optimizer.zero_grad()
    pairs = [*zip(plain.parameters(), sharded.parameters(), strict=True)]
    pairs += [*zip(plain.buffers(), sharded.buffers(), strict=True)]
    return max(difference(mine, theirs) for mine, theirs in pairs)


def difference(mine: Tensor, theirs: Tensor) -> float:
    full = theirs.full_tensor() if isinstance(theirs, DTensor) else theirs
    if torch.equal(mine, full) or not mine.numel():
        return 0.0
    off = float(
        (mine.double() - full.double()).abs().max() / mine.double().abs().max().clamp(min=0.01)
    )
    return off if math.isfinite(off) else math.inf  # max() passes over nan


def by_hand(model: nn.Module) -> nn.Module:
    """``fully_shard`` on the units of the default plan and nothing else."""
    plan = plan_model(model)
    ignored = {model.get_parameter(fqn) for fqn in (*plan.ignored, *plan.replicated)}
    for unit in plan.units:
        modules = [model.get_submodule(fqn) for fqn in unit.modules]
        fully_shard(
            modules, reshard_after_forward=unit.reshard_after_forward, ignored_params=ignored
        )
    return model


def outcome(
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module, int], Tensor],
    shard: Shard,
    lr: float = 0.1,
) -> tuple[str, str]:
    """What becomes of a model, as a word and a detail. Collective; raises what torch raises."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    try:
        loss(build(), 0).backward()
    except Exception as error:
        return "not run", f"{type(error).__name__}: {str(error)[:300]}"
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    try:
        sharded: Any = shard(build())  # not a copy, of which a lambda would call the first
        # experts without a token on one of the ranks
        reduce_unused(sharded.modules())
        off = compare(plain, sharded, loss, lr)
    except ShardkitError as error:
        return "refused", str(error)[:400]
    return (
        "equal" if not off else "within rounding" if off < ROUNDING else "wrong",
        f"off by {off:.2g}",
    )


def verdict(
    pool: RankPool, function: Callable[..., tuple[str, str]], *args: Any
) -> tuple[str, str]:
    """What ``function(*args, shard_model)`` finds; where that is bad, what it finds of ``by_hand``
    too.
    """
    found = []
    for shard in (shard_model, by_hand):
        try:
            found.append(pool.run(function, *args, shard)[0])
        except RankFailure as failure:  # it ended the ranks, and the next call gets new ones
            found.append(("error", str(failure).strip().splitlines()[-1][:300]))
        if found[0][0] not in ("refused", "wrong", "error"):
            return found[0]
    (word, detail), (by, how) = found
    return word, f"{detail} (by hand {by}: {how})"


def outcome_of(name: str, shard: Shard) -> tuple[str, str]:
    return outcome(lambda: builder(name)().eval(), loss_of, shard)


if __name__ == "__main__":
    with RankPool(2, timeout=300) as ranks:
        names = [name for name in sys.argv[1:] or base_models() if not is_large(name)]
        sweep(names, functools.partial(verdict, ranks, outcome_of))
