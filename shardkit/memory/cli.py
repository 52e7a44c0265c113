"""``python -m shardkit plan MODEL``: whether a model fits, and by which plan."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardkit.errors import PlanError, message
from shardkit.memory.budget import Search, parse_bytes
from shardkit.memory.estimate import Measured, base_plan, buffer_bytes, estimates
from shardkit.memory.report import plot_timeline
from shardkit.memory.timeline import OPTIMIZERS, OptimizerBytes, Prediction
from shardkit.planning.named import named_model


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Return the parser of the command, added to ``commands``, the result of ``ArgumentParser.add_subparsers``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="show whether a model fits, and with which plan",
        description="Print the answer, the plan, and the memory of every strategy on one rank. Runs one forward and "
        "backward on fake tensors. Exits with 1 if nothing fits.",
    )
    parser.add_argument("model", help="package.module:factory, or a config.json of transformers")
    parser.add_argument("--world", type=positive, default=8, metavar="RANKS", help="default: %(default)s")
    parser.add_argument("--ranks-per-node", type=positive, default=8, metavar="RANKS", help="default: %(default)s")
    parser.add_argument("--budget", help="memory of each rank's GPU, such as 80GiB")
    reserve = "part of the budget kept for fragmentation, NCCL and CUDA's context, such as 6GiB (default: 10%%)"
    parser.add_argument("--reserve", default="10%", help=reserve)
    parser.add_argument("--batch", type=_batch, metavar="BxS", help="token ids of one micro-batch, such as 2x4096")
    dtypes = ("bfloat16", "float16", "float32")
    parser.add_argument("--param-dtype", choices=dtypes, default="bfloat16", help="of compute and all-gather")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adamw", help="default: %(default)s")
    parser.add_argument("--plot", metavar="FILE", help="draw the memory of a step of the plan, such as step.png")
    return parser


def run(options: argparse.Namespace) -> int:
    """Print the answer and its tables."""
    if options.budget and options.batch is None:
        fix = "Pass one rank's micro-batch, such as --batch 1x4096"
        raise PlanError(message("--budget", "needs --batch", "Activations depend on the batch", fix))
    model = named_model(options.model)
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, options.param_dtype), reduce_dtype=torch.float32)
    plan = base_plan(model, None, options.world, None, policy)
    measured = None  # shared, since tracing takes longest
    if options.batch is not None:
        measured = Measured(model, plan, token_batch(model, options.batch), None)
    optimizer = OptimizerBytes.of(options.optimizer)
    rows = estimates(plan, optimizer, options.ranks_per_node, buffer_bytes(model), measured)
    shown: Prediction = rows["ZeRO-3"]
    if options.budget and measured:
        budget = parse_bytes(options.budget)
        reserved = parse_bytes(options.reserve, "reserve", of=budget)
        shown = Search(measured, optimizer, budget, reserved, options.ranks_per_node).choose()
        print(shown, end="\n\n")
    if options.plot:
        plot_timeline(shown, options.plot, budget=options.budget)
    print(shown.plan, end="\n\n")
    print(rows)
    return 0


def token_batch(model: nn.Module, shape: tuple[int, int]) -> Any:
    """Return a batch of token ids on the meta device, with labels for models of transformers."""
    ids = torch.empty(shape, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids} if hasattr(model, "config") else ids


def _batch(text: str) -> tuple[int, int]:
    rows, _, columns = text.lower().partition("x")
    return int(rows), int(columns)


def positive(text: str) -> int:
    """Parse an argument that is a positive number."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number
