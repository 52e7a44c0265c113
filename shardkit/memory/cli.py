"""``python -m shardkit plan MODEL``: whether a model fits, by which plan, and at what cost."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardkit.errors import PlanError, message
from shardkit.memory.budget import BudgetPlan, Search, parse_bytes, parse_reserve
from shardkit.memory.estimate import Measured, StrategyEstimate, base_plan, buffer_bytes, estimates
from shardkit.memory.report import plot_timeline
from shardkit.memory.speed import HARDWARE, scaling_table
from shardkit.memory.timeline import OPTIMIZERS, OptimizerBytes
from shardkit.planning.named import named_model


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Return the parser of the command, added to ``commands``, the result of ``ArgumentParser.add_subparsers``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="show whether a model fits, with which plan, and at what cost",
        description="Print the answer, the plan, and the memory of every strategy on one rank. Runs one forward and "
        "backward on fake tensors. Times are model estimates for ranking plans. Exits with 1 if nothing fits.",
    )
    parser.add_argument("model", help="package.module:factory, or a config.json of transformers")
    parser.add_argument("--world", type=positive, default=8, metavar="RANKS", help="default: %(default)s")
    parser.add_argument("--ranks-per-node", type=positive, default=8, metavar="RANKS", help="default: %(default)s")
    parser.add_argument("--budget", help="memory of each rank's GPU, such as 80GiB")
    reserve = "part of the budget kept for fragmentation, NCCL and CUDA's context, such as 6GiB (default: 10%%)"
    parser.add_argument("--reserve", default="10%", help=reserve)
    parser.add_argument("--batch", type=_batch, metavar="BxS", help="token ids of one micro-batch, such as 2x4096")
    parser.add_argument(
        "--param-dtype", type=_dtype, default=torch.bfloat16, help="of compute and all-gather (default: bfloat16)"
    )
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adamw", help="default: %(default)s")
    parser.add_argument("--hardware", choices=tuple(HARDWARE), default="h100", help="default: %(default)s")
    parser.add_argument("--plot", metavar="FILE", help="draw the memory of a step of the plan, such as step.png")
    parser.add_argument("--scaling", action="store_true", help="also print a table for 8 to 16,384 ranks")
    return parser


def run(options: argparse.Namespace) -> int:
    """Print the answer and its tables."""
    if options.budget and options.batch is None:
        fix = "Pass one rank's micro-batch, such as --batch 1x4096"
        raise PlanError(message("--budget", "given without --batch", "Activations depend on the batch", fix))
    model = named_model(options.model)
    batch = None if options.batch is None else token_batch(model, options.batch)
    policy = MixedPrecisionPolicy(param_dtype=options.param_dtype, reduce_dtype=torch.float32)
    plan = base_plan(model, None, options.world, None, policy)
    measured = None if batch is None else Measured(model, plan, batch, None)  # shared, since tracing takes longest
    optimizer = OptimizerBytes.of(options.optimizer)
    rows = estimates(plan, optimizer, options.ranks_per_node, buffer_bytes(model), measured)
    shown: StrategyEstimate | BudgetPlan = rows["ZeRO-3"]
    hardware = replace(HARDWARE[options.hardware], ranks_per_node=options.ranks_per_node)
    if options.budget and measured:
        budget = parse_bytes(options.budget)
        reserved = parse_reserve(options.reserve, budget)
        choice = Search(measured, optimizer, hardware, budget - reserved, reserved).choose(keep_units=False)
        plan, shown = choice.plan, choice
        print(choice, end="\n\n")
    if options.plot:
        plot_timeline(shown, options.plot, budget=options.budget)
    print(plan, end="\n\n")
    print(rows)
    if options.scaling and batch is not None:
        print("", scaling_table(model, plan, batch, hardware), sep="\n")
    return 0


def token_batch(model: nn.Module, shape: tuple[int, int]) -> Any:
    """Return a batch of token ids on the meta device, with labels for models of transformers."""
    ids = torch.empty(shape, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids} if hasattr(model, "config") else ids


def _batch(text: str) -> tuple[int, int]:
    rows, _, columns = text.lower().partition("x")
    return positive(rows), positive(columns)


def _dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"{text} is not a dtype of torch")
    return dtype


def positive(text: str) -> int:
    """Parse an argument that is a positive number."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number
