"""The command ``python -m shardkit plan MODEL``: does it fit, and how."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardkit.errors import PlanError
from shardkit.memory.allocations import OPTIMIZERS, OptimizerBytes
from shardkit.memory.budget import choose, limit_of
from shardkit.memory.strategies import Step, estimates
from shardkit.plan import MeshSpec
from shardkit.planning.build import build_plan, named_model
from shardkit.planning.selection import Overrides
from shardkit.planning.tree import ModelTree

_DTYPES = ("bfloat16", "float16", "float32")


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Return the parser of the command, added to ``commands``, the result of
    ``ArgumentParser.add_subparsers``.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="show whether a model fits, and with which plan",
        description="Print whether a model fits, the plan, and the memory of every strategy on one "
        "rank. Needs no GPU and no weights: one forward and backward runs on fake tensors. Exits "
        "with 1 if nothing fits.",
        epilog="example: "
        "python -m shardkit plan config.json --world 64 --batch 1x4096 --budget 80GiB",
    )
    parser.add_argument(
        "model",
        help="config.json of transformers, or package.module:factory, called without arguments",
    )
    parser.add_argument(
        "--world",
        type=positive,
        default=8,
        metavar="RANKS",
        help="all ranks (default: %(default)s)",
    )
    parser.add_argument(
        "--ranks-per-node", type=positive, default=8, metavar="RANKS", help="default: %(default)s"
    )
    parser.add_argument(
        "--batch",
        type=_batch,
        metavar="BxS",
        help="sequences x tokens of one rank's micro-batch, for models of token ids: 1x4096; for "
        "other inputs call plan_model(model, memory_budget=..., example_batch=...)",
    )
    parser.add_argument(
        "--budget",
        metavar="BYTES",
        help="memory of one GPU, such as 80GiB; needs --batch; a tenth stays free",
    )
    parser.add_argument(
        "--param-dtype",
        choices=_DTYPES,
        default="bfloat16",
        help="dtype of compute and all-gather (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="dtype of parameters, gradients and optimizer state (default: float32 for a "
        "config.json, the model's own for a factory)",
    )
    parser.add_argument(
        "--optimizer",
        choices=tuple(OPTIMIZERS),
        default="adamw",
        metavar="NAME",
        help=f"whose state is counted: {', '.join(OPTIMIZERS)} (default: %(default)s)",
    )
    return parser


def run(options: argparse.Namespace) -> int:
    """Print the answer and its tables."""
    if options.budget and options.batch is None:
        raise PlanError(
            "--budget needs --batch. Activations depend on the batch. "
            "Pass one rank's micro-batch, such as --batch 1x4096."
        )
    model = named_model(options.model)
    if options.dtype:
        model = model.to(getattr(torch, options.dtype))
    dtypes = {str(param.dtype).removeprefix("torch.") for param in model.parameters()}
    print(
        f"parameters in {', '.join(sorted(dtypes))} (--dtype), "
        f"computed with in {options.param_dtype} (--param-dtype)\n"
    )
    policy = MixedPrecisionPolicy(getattr(torch, options.param_dtype), torch.float32)
    mesh = MeshSpec.sharded(options.world)
    plan = build_plan(ModelTree(model), mesh, settings=Overrides(mp_policy=policy))
    if options.batch is None:
        print(plan)
        print("\nFor the memory of a step pass --batch 1x4096, one rank's micro-batch.")
        return 0
    optimizer = OptimizerBytes.of(options.optimizer)
    batch: Any = torch.empty(options.batch, dtype=torch.long, device="meta")
    if hasattr(model, "config"):  # a model of transformers
        batch = {"input_ids": batch, "labels": batch}
    step = Step(model, plan, batch)  # its traces, which take longest, serve both answers
    rows = estimates(step, optimizer, options.ranks_per_node)
    if not options.budget:
        print(rows["ZeRO-3"].plan, rows, sep="\n\n")
        print("\nTo find a plan that fits, pass --budget 80GiB (one GPU).")
        return 0
    choice = choose(step, optimizer, limit_of(options.budget))
    print(choice, choice.plan, rows, sep="\n\n")
    print(
        f'\nIn the script: shard_model(model, memory_budget="{options.budget}", '
        "example_batch=batch, "
        f"mp_policy=MixedPrecisionPolicy(torch.{options.param_dtype}, torch.float32))"
    )
    return 0


def _batch(text: str) -> tuple[int, int]:
    rows, _, columns = text.lower().partition("x")
    if not (rows.isdigit() and columns.isdigit()):
        raise argparse.ArgumentTypeError(
            f"must be sequences x tokens, such as 1x4096, got {text!r}"
        )
    return int(rows), int(columns)


def positive(text: str) -> int:
    """Parse an argument that is a positive number."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number
