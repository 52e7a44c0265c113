"""``python -m shardkit plan MODEL``: does it fit, by which plan, and what does it cost."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardkit.errors import PlanError, message
from shardkit.memory.budget import plan_for_budget
from shardkit.memory.estimate import base_plan, estimate
from shardkit.memory.speed import HARDWARE, scaling_table
from shardkit.memory.timeline import OPTIMIZERS
from shardkit.planning.named import named_model


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The parser of the command, added to ``commands``, which ``ArgumentParser.add_subparsers`` returned."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="does a model fit, by which plan, and what does it cost",
        description="Answer first, then the plan and the bytes of every strategy on one rank. Nothing runs but one "
        "forward and backward on tensors without memory. Times are model estimates for ranking plans.",
    )
    parser.add_argument("model", help="package.module:factory, or a config.json of transformers")
    parser.add_argument("--world", type=_positive, default=8, metavar="RANKS", help="default: %(default)s")
    parser.add_argument("--ranks-per-node", type=_positive, default=8, metavar="RANKS", help="default: %(default)s")
    parser.add_argument("--budget", help="memory on each rank, such as 80GiB")
    parser.add_argument("--batch", type=_batch, metavar="BxS", help="token ids of one micro-batch, such as 2x4096")
    parser.add_argument("--param-dtype", type=_dtype, default=torch.bfloat16, help="computes in (default: bfloat16)")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adamw", help="default: %(default)s")
    parser.add_argument("--hardware", choices=tuple(HARDWARE), default="h100", help="default: %(default)s")
    parser.add_argument("--scaling", action="store_true", help="and a table of 8 to 16,384 ranks")
    return parser


def run(options: argparse.Namespace) -> int:
    """Print the answer and its tables; the exit code is 1 when nothing fits."""
    if options.budget and options.batch is None:
        fix = "Pass --batch 1x4096, one rank's micro-batch"
        raise PlanError(message("--budget", "given without --batch", "Activations depend on the batch", fix))
    model = named_model(options.model)
    batch = None if options.batch is None else token_batch(model, options.batch)
    policy = MixedPrecisionPolicy(param_dtype=options.param_dtype, reduce_dtype=torch.float32)
    plan = base_plan(model, None, options.world, None, policy)
    rows = estimate(model, plan=plan, batch=batch, optimizer=options.optimizer, ranks_per_node=options.ranks_per_node)
    hardware = replace(HARDWARE[options.hardware], ranks_per_node=options.ranks_per_node)
    if options.budget:
        choice = plan_for_budget(
            model, options.budget, plan=plan, batch=batch, optimizer=options.optimizer, hardware=hardware
        )
        plan = choice.plan
        print(choice, end="\n\n")
    print(plan, end="\n\n")
    print(rows)
    if options.scaling and batch is not None:
        print("", scaling_table(model, plan, batch, hardware), sep="\n")
    return 0


def token_batch(model: nn.Module, shape: tuple[int, int]) -> Any:
    """A batch of token ids as the model takes it, on the meta device: with labels for models of transformers."""
    ids = torch.empty(shape, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids} if hasattr(model, "config") else ids


def _batch(text: str) -> tuple[int, int]:
    rows, _, columns = text.lower().partition("x")
    return _positive(rows), _positive(columns)


def _dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"{text} is not a dtype of torch")
    return dtype


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number
