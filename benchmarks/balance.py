"""The bytes of the fullest rank, over the least that FSDP2 can reach, for models of transformers at
their real sizes.

Run: ``python -m benchmarks.balance [name ...] [--ranks 8 64 256 1024]``, some minutes. Needs
transformers. Every causal language model whose default config builds on meta is planned with
``plan_model(model)``; ``--apply`` also shards each in a fake process group and reads the local
shapes of rank 0, which holds the most. The bound is made here from shapes: for each parameter the
smallest shard over its dims, where dims other than 0 must divide. It is a count, with no GPU.
``dim 0`` is the same for a plan that shards dim 0 only; ``ideal`` is an equal part of everything.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Iterable, Iterator

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardkit import MeshSpec, apply_plan, plan_model
from shardkit.testing import fake_world


def shards(param: torch.Tensor, ranks: int) -> Iterator[int]:
    """Yield the bytes of the largest shard for each dim that FSDP2 can shard, dim 0 first."""
    for dim, size in enumerate(param.shape):
        if dim == 0 or size % ranks == 0:
            yield math.ceil(size / ranks) * (param.nbytes // size)


def held(model: nn.Module, ranks: int) -> int:
    """Return the bytes on the fullest rank that the plan predicts."""
    plan = plan_model(model, mesh=MeshSpec.sharded(ranks))
    total = sum(plan.specs[fqn].nbytes for fqn in plan.replicated)
    for unit in plan.units:
        dims = dict(unit.shard_dims)
        for fqn in unit.params:
            shape, dim = list(plan.specs[fqn].shape), dims.get(fqn, 0)
            shape[dim] = math.ceil(shape[dim] / ranks)
            total += math.prod(shape) * plan.specs[fqn].dtype.itemsize
    return total


def held_when_applied(model: nn.Module, ranks: int) -> int:
    """Return the bytes of the local tensors of rank 0 of a fake process group. Shards the model."""
    plan = plan_model(model, mesh=MeshSpec.sharded(ranks))
    with fake_world(ranks):
        params = apply_plan(model, plan).parameters()
        return sum(getattr(param, "_local_tensor", param).nbytes for param in params)


def on_meta(name: str) -> nn.Module | None:
    """Return the model of the default config, or None if it does not build."""
    try:
        model_class = getattr(transformers, name)
        with torch.device("meta"):
            model: nn.Module = model_class(model_class.config_class())
        return model
    except Exception:  # whatever a config lacks
        return None


def is_moe(model: nn.Module) -> bool:
    """Return whether experts share one parameter."""
    return any("expert" in name and param.ndim > 2 for name, param in model.named_parameters())


def compare(name: str, worlds: Iterable[int], apply: bool) -> tuple[float, bool] | None:
    """Print one line for a model; return the largest ratio and whether it is a MoE, or None if it
    does not build.
    """
    if (model := on_meta(name)) is None:
        return None
    total, moe = sum(param.nbytes for param in model.parameters()), is_moe(model)
    print(f"{name:42} {'moe' if moe else 'dense':5} {total / 2**30:9.1f} GiB", end="", flush=True)
    ratios = []
    for ranks in worlds:
        options = [list(shards(param, ranks)) or [param.nbytes] for param in model.parameters()]
        best, rows = sum(map(min, options)), sum(each[0] for each in options)
        ours = held(model, ranks)
        if apply:
            applied = held_when_applied(on_meta(name), ranks)
            assert applied == ours, (applied, ours)
        ratios.append(ours / best)
        print(
            f"  {ours / best:6.4f} ({rows / best:8.2f}, {best * ranks / total:5.2f})",
            end="",
            flush=True,
        )
    print(flush=True)
    return max(ratios), moe


def main() -> None:
    """Print a line per model: ratios to the best, in brackets those of dim 0, and of the best to an
    equal part.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", help="classes of transformers; all causal language models by default"
    )
    parser.add_argument("--ranks", nargs="*", type=int, default=[8, 64, 256, 1024])
    parser.add_argument(
        "--apply", action="store_true", help="also shard each model, in a fake process group"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    names = options.names or sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))
    print(f"on {options.ranks} ranks: plan over the best (dim 0 over the best, best over ideal)")
    found = [
        ratio
        for name in names
        if (ratio := compare(name, options.ranks, options.apply)) is not None
    ]
    for kind in (True, False):
        ratios = [ratio for ratio, moe in found if moe is kind]
        print(
            f"{'moe' if kind else 'dense'}: {len(ratios)} models, largest "
            f"{max(ratios, default=0):.4f}"
        )


if __name__ == "__main__":
    main()
