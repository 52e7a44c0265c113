"""Split sequences against one process, on every causal LM of transformers: losses and gradients in float64.

Run by hand: ``python tests/helpers/sweep_sequence.py [--sp 2] [--dp 2] [name ...]``. One step of
micro-batches of odd length, padded on the left and on the right, and packed, as far as the model runs them unsplit. A
model is equal within 1e-12, refused by name, or a line of its own; "rounds" where float32 inside the model makes one
process differ as much from itself, row by row. CI runs a choice of models, in ``tests/sequence``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
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
from torch import nn

from shardkit.errors import PlanError

SECONDS = 240
# Sizes that the small values of sweep_meta do not fit.
FIXES.update(
    {
        **{
            f"{name}ForCausalLM": {"head_dim": 4}
            for name in ("AXK1", "AXK2", "DeepseekV2", "DeepseekV3", "DeepseekV32")
        },
        "CodeGenForCausalLM": {"rotary_dim": 4},
        "Dots1ForCausalLM": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    }
)
KINDS = ("odd", "left", "right", "packed")


def build(name: str) -> nn.Module:
    """The tiny model in float64; grouped matmuls of experts have no float64."""
    torch.manual_seed(0)
    model = builder(name)().double().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.set_experts_implementation("eager")
    return model


def plain(name: str, dp: int) -> tuple[nn.Module, list[str], dict[str, float]]:
    """The model with its gradients, the kinds of batches that it runs in one process, and its losses."""
    runs, losses = [], {}
    for index, kind in enumerate(KINDS):
        try:
            loss = float(plain_step(build(name), [kinds(0)[index]]))
        except Exception as error:
            print(f"{name}: {kind} does not run: {type(error).__name__}: {str(error)[:80]}", flush=True)
            continue
        if loss == loss:
            runs.append(kind)
    model = build(name)
    if runs:
        losses["all"] = float(plain_step(model, [batch for rank in range(dp) for batch in chosen(rank, runs)]))
    return model, runs, losses


def reordered(name: str, runs: list[str], dp: int) -> nn.Module:
    """The model with gradients of the same batches in one process, row by row."""
    model = build(name)
    batches = [batch for rank in range(dp) for batch in chosen(rank, runs)]
    rows = [(batch, i) for batch in batches for i in range(len(batch["input_ids"]))]
    plain_step(model, [{key: x[i : i + 1] for key, x in batch.items()} for batch, i in rows])
    return model


def chosen(rank: int, runs: list[str]) -> list[Batch]:
    """The micro-batches of a dp rank."""
    return [batch for kind, batch in zip(KINDS, kinds(rank), strict=True) if kind in runs]


def outcome(name: str, reference: nn.Module, runs: list[str], loss: float, sp: int) -> tuple[str, Any]:
    """What splitting gives. Collective."""
    model = build(name)
    try:
        sequence = split(model, sp)
    except PlanError as error:
        return "refused", str(error)
    found = float(split_step(model, sequence, chosen(dist.get_rank() // sp, runs)))
    apart = max(abs(found - loss) / abs(loss), difference(model, reference))
    return "equal" if apart < 1e-12 else "near" if apart < 1e-5 else "wrong", apart


def ranks(world: int, body: Any) -> tuple[str, Any]:
    """Run ``body`` on ``world`` forks of this process; what the first returns, or how the first failed."""
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(world):
            pid = os.fork()
            if pid:
                pids.append(pid)
                continue
            try:
                dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
                result = body()
            except BaseException as error:
                result = ("failed", f"{type(error).__name__}: {str(error)[:600]}")
            Path(folder, str(rank)).write_text(json.dumps(result))
            os._exit(0)
        end = time.monotonic() + SECONDS
        left = set(pids)
        while left and time.monotonic() < end:
            left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
            time.sleep(0.02)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        results = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("[0-9]"))]
    failed = [result for result in results if result[0] == "failed"]
    return (failed or results or [("hangs", f"after {SECONDS} s")])[0]


def main(names: list[str], sp: int, dp: int) -> None:
    """Print one line for each model, and the counts."""
    counts, begin = Counter[str](), time.perf_counter()
    for name in names or causal_lms():
        try:
            if is_large(name):
                raise ValueError("over 30 million parameters")
            reference, runs, losses = plain(name, dp)
        except Exception as error:
            print(f"{name}: not built: {type(error).__name__}: {str(error)[:100]}", flush=True)
            counts["not built"] += 1
            continue
        if not runs:
            counts["does not run in one process"] += 1
            continue
        kind, detail = ranks(sp * dp, lambda: outcome(name, reference, runs, losses["all"], sp))  # noqa: B023  run at once
        if kind == "near":
            detail, own = (f"{each:.1e}" for each in (detail, difference(reordered(name, runs, dp), reference)))
            kind = "rounds" if float(detail) < 10 * float(own) else kind
            detail = f"{detail}; one process row by row {own}"
        counts[kind] += 1
        missing = "" if len(runs) == len(KINDS) else f" (only {', '.join(runs)})"
        print(f"{name}: {kind}{missing}: {detail}", flush=True)
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
