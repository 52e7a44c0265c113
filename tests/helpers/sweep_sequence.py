"""Split sequences against one process, on every causal LM of transformers: losses and gradients.

Run by hand, some minutes: ``python tests/helpers/sweep_sequence.py [--sp 2] [--dp 2] [name ...]``. One step of
micro-batches of odd length, padded on the left and on the right, and packed, as far as the model runs them unsplit, in
float64. A model is equal within 1e-12, refused by name, or a line of its own. Models that compute in float32 inside are
run a second time with float32 replaced by float64, and must then be equal too ("float32"). CI runs some models, in
``tests/sequence``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from sequence_parity import Batch, difference, kinds, plain_step, split, split_step
from sweep_meta import FIXES, builder, causal_lms
from sweep_parity import is_large
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardkit.errors import PlanError

SECONDS = 240
# Sizes that the small values of sweep_meta do not fit.
LATENT = {"head_dim": 4, "num_key_value_heads": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "qk_head_dim": 8}
FIXES.update(
    {
        **{f"{name}ForCausalLM": LATENT for name in ("AXK1", "AXK2", "DeepseekV3", "DeepseekV32", "Dots3Note")},
        **{f"{name}ForCausalLM": LATENT for name in ("Glm4MoeLite", "GlmMoeDsa", "HYV4", "MiniCPM3", "Youtu")},
        "DeepseekV2ForCausalLM": {**LATENT, "num_experts_per_tok": 2},
        "LongcatFlashForCausalLM": {**LATENT, "zero_expert_num": 2, "moe_topk": 2},
        "CodeGenForCausalLM": {"rotary_dim": 4},
        "GPTJForCausalLM": {"rotary_dim": 4},
        "DbrxForCausalLM": {"attn_config.rope_theta": 1e4, "attn_config.clip_qkv": 8.0},
        "Dots1ForCausalLM": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
        "XmodForCausalLM": {"default_language": "en_XX"},
    }
)
KINDS = ("odd", "left", "right", "packed")


class OnlyFloat64(TorchFunctionMode):
    """Replaces float32 by float64 where a model asks for it, so that nothing but the order of sums can differ."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` with other dtypes."""
        args = [torch.float64 if x is torch.float32 else x for x in args]
        kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)


def build(name: str) -> nn.Module:
    """The tiny model; grouped matmuls of experts have no float64."""
    torch.manual_seed(0)
    model = builder(name)().double().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.set_experts_implementation("eager")
    return model


def runs_of(name: str) -> list[str]:
    """The kinds of batches that the model runs in one process."""
    runs = []
    for index, kind in enumerate(KINDS):
        try:
            loss = float(plain_step(build(name), [kinds(0)[index]]))
        except Exception as error:
            print(f"{name}: {kind} does not run: {type(error).__name__}: {str(error)[:80]}", flush=True)
            continue
        if loss == loss:
            runs.append(kind)
    return runs


def chosen(rank: int, runs: list[str]) -> list[Batch]:
    """The micro-batches of a dp rank."""
    return [batch for kind, batch in zip(KINDS, kinds(rank), strict=True) if kind in runs]


def outcome(name: str, reference: nn.Module, loss: float, runs: list[str], sp: int) -> tuple[str, Any]:
    """What splitting gives: refused, or how far from the reference it is. Collective."""
    model = build(name)
    try:
        sequence = split(model, sp)
    except PlanError as error:
        return "refused", str(error)
    found = float(split_step(model, sequence, chosen(dist.get_rank() // sp, runs)))
    return "", max(abs(found - loss) / abs(loss), difference(model, reference))


def compared(name: str, runs: list[str], sp: int, dp: int) -> tuple[str, str]:
    """The verdict on a model."""

    def apart() -> tuple[str, Any]:
        reference, batches = build(name), [batch for rank in range(dp) for batch in chosen(rank, runs)]
        loss = float(plain_step(reference, batches)) if batches else 0.0
        return ranks(sp * dp, lambda: outcome(name, reference, loss, runs, sp))

    kind, detail = apart()
    if kind or detail < 1e-12:
        return kind or "equal", str(detail)
    torch.set_default_dtype(torch.float64)
    with OnlyFloat64():
        again, proof = apart()
    torch.set_default_dtype(torch.float32)
    equal = detail < 1e-5 and not again and proof < 1e-12
    return "float32" if equal else "wrong", f"{detail}; without float32 inside {again}{proof}"


def ranks(world: int, body: Any) -> tuple[str, Any]:
    """Run ``body`` on ``world`` forks of this process; what the first returns, or how the first failed."""
    fork = multiprocessing.get_context("fork")

    def work(rank: int) -> None:
        try:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
            result = body()
        except BaseException as error:
            result = ("failed", f"{type(error).__name__}: {str(error)[:600]}")
        Path(folder, str(rank)).write_text(json.dumps(result))
        os._exit(0)

    with tempfile.TemporaryDirectory() as folder:
        processes = [fork.Process(target=work, args=(rank,)) for rank in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(SECONDS)
            process.kill()
        results = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("[0-9]"))]
    failed = [result for result in results if result[0] == "failed"]
    return (failed or results or [("hangs", f"after {SECONDS} s")])[0]


def verdict(name: str, sp: int, dp: int) -> tuple[str, str]:
    """What splitting the model's sequences gives, in a word, and how far it is from one process."""
    try:
        if is_large(name):
            raise ValueError("over 30 million parameters")
        build(name)
    except Exception as error:
        return "not built", f"{type(error).__name__}: {str(error)[:100]}"
    runs = runs_of(name)
    kind, detail = compared(name, runs, sp, dp)
    if not runs and "does not run on" in detail:
        return "does not run in one process", ""
    return kind, detail + ("" if len(runs) == len(KINDS) else f" (only {', '.join(runs)})")


def main(names: list[str], sp: int, dp: int) -> None:
    """Print one line for each model, and the counts."""
    counts, begin = Counter[str](), time.perf_counter()
    for name in names or causal_lms():
        kind, detail = verdict(name, sp, dp)
        counts[kind] += 1
        print(f"{name}: {kind}: {detail}", flush=True)
    print(f"sp {sp}, dp {dp}: {dict(counts)}; {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    parser = argparse.ArgumentParser()
    parser.add_argument("--sp", type=int, default=2)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    main(given.names, given.sp, given.dp)
