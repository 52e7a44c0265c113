"""Zero-argument parity on models of transformers: the plain model against ``shard_model(model)``, two steps of SGD.

Run by hand, about ten minutes: ``python tests/helpers/sweep_parity.py [name ...]``. Every base model of
``AutoModel`` that can be built tiny and run on made-up inputs is tried, in eval mode. CI runs those in the zoo.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import transformers
from sweep_meta import builder, is_large, sweep
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from shardkit import shard_model
from shardkit.errors import ShardkitError
from shardkit.testing import RankFailure, RankPool


def base_models() -> list[str]:
    """The class names of what ``AutoModel`` gives."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    names = (name for each in MODEL_MAPPING_NAMES.values() for name in ([each] if isinstance(each, str) else each))
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
        "input_features": lambda: torch.randn(2, setting("num_mel_bins", 80), 128, generator=generator),
        "bbox": lambda: torch.zeros(2, 8, 4, dtype=torch.long),
    }
    taken = [name for name in inspect.signature(model.forward).parameters if name in made]
    if "input_ids" not in taken and "attention_mask" in taken:
        taken.remove("attention_mask")
    return {name: made[name]() for name in taken}


def loss_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The mean square of every output that depends on parameters."""
    leaves = tree_leaves(dict(model(**inputs)))
    floats = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([leaf.double().square().mean() for leaf in floats]).sum()


def compare(plain: nn.Module) -> float:
    """The largest difference of a parameter after two steps; 0.0 means equal bits.

    Over its largest element, or 0.01 where all are smaller: gradients that are zero but for rounding make biases so.
    """
    sharded = shard_model(copy.deepcopy(plain))
    sharded.set_reduce_scatter_unused_params(True)  # experts without a token on one of the ranks
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, sharded)]
    for step in range(2):
        inputs = inputs_of(plain, 2 * step + dist.get_rank())
        weight = float(dist.get_rank() == step)  # one rank counts, so that the mean over the ranks is exact
        for model, optimizer in zip((plain, sharded), optimizers, strict=True):
            torch.manual_seed(step)  # ViTMAE masks at random
            scale = weight if model is sharded else weight / dist.get_world_size()
            (loss_of(model, inputs) * scale).backward()
            if model is plain:
                for param in plain.parameters():  # a rank may have no gradient of an expert's
                    param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                    dist.all_reduce(param.grad)
            optimizer.step()
            optimizer.zero_grad()
    worst = 0.0
    for mine, theirs in zip(plain.parameters(), sharded.parameters(), strict=True):
        full = theirs.full_tensor() if isinstance(theirs, DTensor) else theirs
        if not torch.equal(mine, full) and mine.numel():
            worst = max(worst, float((mine - full).abs().max() / mine.abs().max().clamp(min=0.01)))
    return worst


def outcome(name: str) -> float | str | None:
    """What ``compare`` says of a model, the text of a refusal, or None if it does not run unsharded. Collective."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    try:
        torch.manual_seed(0)
        model = builder(name)().eval()
        loss_of(copy.deepcopy(model), inputs_of(model, 0)).backward()
    except Exception:
        return None
    try:
        return compare(model)
    except ShardkitError as error:
        return str(error)[:400]


def verdict(pool: RankPool, name: str) -> tuple[str, str]:
    try:
        found = None if is_large(name) else pool.run(outcome, name)[0]
    except RankFailure as failure:  # it ended the ranks, and the next model gets new ones
        return "failed", str(failure)[-900:]
    if not isinstance(found, float):
        return ("not run", "") if found is None else ("refused", found)
    return "equal" if not found else "within rounding" if found < 1e-5 else "different", str(found)


if __name__ == "__main__":
    with RankPool(2, timeout=300) as ranks:
        sweep(sys.argv[1:] or base_models(), functools.partial(verdict, ranks))
