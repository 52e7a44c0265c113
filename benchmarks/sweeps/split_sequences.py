"""Split sequences against one process, on every causal LM of transformers: losses and gradients.

Some minutes, with ``[--sp 2] [--dp 2] [name ...]``:
``PYTHONPATH=.:tests/helpers python benchmarks/sweeps/split_sequences.py``.
One step of micro-batches of odd length, padded on the left and on the right, and packed, as far as
the model runs them unsplit, in float64. A model is equal within 1e-12, refused by name, or a line
of its own. Models that compute in float32 inside are run a second time with float32 replaced by
float64, and must then be equal too ("float32"). CI runs some models, in ``tests/sequence``.
"""

from __future__ import annotations

import argparse
import functools
import warnings
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
import transformers
from split_training import difference, kinds, plain_step, split, split_step
from tiny_transformers import FIXES, builder
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from verdicts import causal_lms, is_large, sweep

from shardkit.errors import PlanError
from shardkit.testing import RankFailure, RankPool

# Sizes that the small values of tiny_transformers do not fit.
LATENT = {
    "head_dim": 4,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "qk_head_dim": 8,
}
FIXES.update(
    {
        **{
            f"{name}ForCausalLM": LATENT
            for name in ("AXK1", "AXK2", "DeepseekV3", "DeepseekV32", "Dots3Note")
        },
        **{
            f"{name}ForCausalLM": LATENT
            for name in ("Glm4MoeLite", "GlmMoeDsa", "HYV4", "MiniCPM3", "Youtu")
        },
        "DeepseekV2ForCausalLM": {**LATENT, "num_experts_per_tok": 2},
        "LongcatFlashForCausalLM": {**LATENT, "zero_expert_num": 2, "moe_topk": 2},
        "CodeGenForCausalLM": {"rotary_dim": 4},
        "GPTJForCausalLM": {"rotary_dim": 4},
        "DbrxForCausalLM": {"attn_config.rope_theta": 1e4, "attn_config.clip_qkv": 8.0},
        "Dots1ForCausalLM": {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
        },
        "XmodForCausalLM": {"default_language": "en_XX"},
    }
)


class OnlyFloat64(TorchFunctionMode):
    """Replaces float32 by float64 where a model asks for it, so that nothing but the order of sums
    can differ.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` with other dtypes."""
        args = [torch.float64 if x is torch.float32 else x for x in args]
        kwargs = {
            name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()
        }
        return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)


def build(name: str) -> nn.Module:
    """The tiny model; grouped matmuls of experts have no float64."""
    torch.manual_seed(0)
    model = builder(name)().double().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.set_experts_implementation("eager")
    return model


def runs_of(name: str) -> list[int]:
    """The kinds of batches that the model runs in one process, by their places."""
    runs = []
    for index in range(len(kinds(0))):
        with suppress(Exception):
            runs += [index] if plain_step(build(name), [kinds(0)[index]]).isfinite() else []
    return runs


def outcome(name: str, sp: int, exact: bool) -> tuple[str, str | float, list[int]]:
    """What splitting gives: refused, or how far from one process it is; the kinds that were
    compared. Collective.
    """
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_default_dtype(torch.float64 if exact else torch.float32)
    with OnlyFloat64() if exact else nullcontext():
        runs, reference, model = runs_of(name), build(name), build(name)
        try:
            sequence = split(model, sp)
        except PlanError as error:
            return "refused", str(error), runs
        if not runs:
            return "does not run in one process", "", runs
        batches = [
            [kinds(dp)[index] for index in runs] for dp in range(dist.get_world_size() // sp)
        ]
        loss = float(plain_step(reference, [each for dp in batches for each in dp]))
        found = float(split_step(model, sequence, batches[dist.get_rank() // sp]))
        return "", max(abs(found - loss) / abs(loss), difference(model, reference)), runs


def verdict(pool: RankPool, sp: int, name: str) -> tuple[str, str]:
    """What splitting the model's sequences gives, in a word, and how far it is from one process."""
    try:
        if is_large(name):
            raise ValueError("over 30 million parameters")
        build(name)
    except Exception as error:
        return "not built", f"{type(error).__name__}: {str(error)[:100]}"
    try:
        kind, detail, runs = pool.run(outcome, name, sp, False)[0]
        some = "" if len(runs) == len(kinds(0)) else f" (only kinds {runs})"
        if kind or detail < 1e-12:
            return kind or "equal", f"{detail}{some}"
        again, proof, _ = pool.run(outcome, name, sp, True)[0]
    except RankFailure as failure:
        return "failed", str(failure)[-600:]
    equal = detail < 1e-5 and not again and proof < 1e-12
    return "float32" if equal else "wrong", f"{detail}; without float32 inside {again}{proof}{some}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sp", type=int, default=2)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    with RankPool(given.sp * given.dp, timeout=240) as ranks:
        sweep(given.names or causal_lms(), functools.partial(verdict, ranks, given.sp))
