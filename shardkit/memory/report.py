"""Compare a prediction with what a rank holds after a step; and the command ``python -m shardkit plan``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from shardkit._fsdp.states import gathered_tensors
from shardkit._torch import local_tensor, named_sharded_parameters
from shardkit._torch.dispatch import tree_leaves
from shardkit.errors import PlanError, message
from shardkit.memory.budget import choose, parse_bytes
from shardkit.memory.estimate import Step, base_plan, estimates
from shardkit.memory.timeline import OPTIMIZERS, OptimizerBytes, Point, Prediction
from shardkit.plan.text import aligned
from shardkit.plan.types import nbytes
from shardkit.planning.build import named_model

_HELD = ("parameters", "gradients", "optimizer", "unsharded")


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on this rank, measured and predicted; prints as a table.

    Attributes:
        measured: by category: "parameters", "gradients", "optimizer" and "unsharded" on the device, and "on the CPU"
            what of the first three is offloaded; on an accelerator also "allocated", "reserved" and "peak" (the most
            that was allocated) of torch's allocator.
        predicted: the same categories after a step, and the peak, as predicted; empty without a prediction.
        peak: the stretch of the predicted peak.
    """

    measured: Mapping[str, int]
    predicted: Mapping[str, int]
    peak: Point | None

    def __str__(self) -> str:
        rows = [["bytes on this rank", "predicted", "measured", "off by"]]
        for name in (*_HELD, "on the CPU", "allocated", "reserved", "peak"):
            predicted, measured = self.predicted.get(name), self.measured.get(name)
            if predicted is None or measured is None or predicted == measured == 0:
                off = "-"
            else:
                off = f"{(measured - predicted) / predicted:+.1%}" if predicted else nbytes(measured)
            rows.append([name, *("-" if size is None else nbytes(size) for size in (predicted, measured)), off])
        return "\n".join([*aligned(rows), *([f"predicted peak: {self.peak.where}"] if self.peak else [])])


def memory_report(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, predicted: Prediction | None = None
) -> MemoryReport:
    """Report what this rank holds of ``model`` and ``optimizer``, beside a prediction. Local; changes nothing.

    Call it after ``optimizer.step()`` and before ``zero_grad()``, in the second step or a later one: the prediction is
    for that moment. Works on any FSDP2 model, whoever sharded it, and on a plain one. Each storage counts once, with
    the padding of its shard. torch's allocator counts everything that the process has on the device, other models
    included, and its peak since ``torch.accelerator.reset_peak_memory_stats()``.

    Args:
        model: the whole model. Its device is that of its first gathered or plain parameter.
        optimizer: its state is counted; None counts none.
        predicted: a row of :func:`shardkit.memory.estimate` or the result of :func:`shardkit.memory.plan_for_budget`,
            made before the model was sharded, because activations are measured on the plain model. It is the
            prediction for rank 0, which holds the most.
    """
    params = [param for _, param in named_sharded_parameters(model)]
    first = next(iter(params), torch.empty(0))
    # The shards of a DTensor may be offloaded: it computes on its mesh.
    device = first.device_mesh.device_type if isinstance(first, DTensor) else first.device.type
    state = optimizer.state.values() if optimizer is not None else []
    tensors: dict[str, Iterable[Any]] = {
        "parameters": [*params, *model.buffers()],
        "gradients": [param.grad for param in params],
        "optimizer": [leaf for entry in state for leaf in tree_leaves(entry)],
        "unsharded": gathered_tensors(model),
    }
    storages = {name: _storages(found) for name, found in tensors.items()}
    measured = {name: sum(s.nbytes() for s in found if s.device.type == device) for name, found in storages.items()}
    measured["on the CPU"] = sum(s.nbytes() for found in storages.values() for s in found if s.device.type != device)
    if device != "cpu":
        of = torch.accelerator
        measured |= {"allocated": of.memory_allocated(), "reserved": of.memory_reserved()}
        measured["peak"] = of.max_memory_allocated()
    if predicted is None:
        return MemoryReport(measured, {}, None)
    expected = {name: getattr(predicted.timeline[-1], name) for name in _HELD}
    expected["optimizer"] = predicted.timeline[0].optimizer  # without what the step itself makes and frees
    expected |= {"allocated": sum(expected.values()), "peak": predicted.peak.total}
    return MemoryReport(measured, expected, predicted.peak)


def _storages(tensors: Iterable[Any]) -> set[torch.UntypedStorage]:
    found = [each for each in tensors if isinstance(each, Tensor) and each.device.type != "meta"]
    return {(local_tensor(each) if isinstance(each, DTensor) else each).untyped_storage() for each in found}


# ``python -m shardkit plan MODEL``.


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Return the parser of the command, added to ``commands``, the result of ``ArgumentParser.add_subparsers``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="show whether a model fits, and with which plan",
        description="Print whether a model fits, the plan, and the memory of every strategy on one rank. Needs no GPU "
        "and no weights: one forward and backward runs on fake tensors. Exits with 1 if nothing fits.",
        epilog="example: python -m shardkit plan config.json --world 64 --batch 1x4096 --budget 80GiB",
    )
    parser.add_argument(
        "model", help="config.json of transformers, or package.module:factory, called without arguments"
    )
    parser.add_argument("--world", type=positive, default=8, metavar="RANKS", help="all ranks (default: %(default)s)")
    parser.add_argument("--ranks-per-node", type=positive, default=8, metavar="RANKS", help="default: %(default)s")
    parser.add_argument(
        "--batch", type=_batch, metavar="BxS", help="sequences x tokens of one rank's micro-batch: 1x4096"
    )
    parser.add_argument("--budget", metavar="BYTES", help="memory of one GPU, such as 80GiB; needs --batch")
    reserve = "of the budget, for fragmentation, NCCL and the CUDA context, such as 6GiB (default: 10%%)"
    parser.add_argument("--reserve", metavar="BYTES", default="10%", help=reserve)
    dtypes, computed = ("bfloat16", "float16", "float32"), "dtype of compute and all-gather (default: %(default)s)"
    parser.add_argument("--param-dtype", choices=dtypes, default="bfloat16", help=computed)
    optimizer = f"whose state is counted: {', '.join(OPTIMIZERS)} (default: %(default)s)"
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adamw", metavar="NAME", help=optimizer)
    return parser


def run(options: argparse.Namespace) -> int:
    """Print the answer and its tables."""
    if options.budget and options.batch is None:
        fix = "Pass one rank's micro-batch, such as --batch 1x4096"
        raise PlanError(message("--budget", "needs --batch", "Activations depend on the batch", fix))
    model = named_model(options.model)
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, options.param_dtype), reduce_dtype=torch.float32)
    plan, optimizer = base_plan(model, None, options.world, None, policy), OptimizerBytes.of(options.optimizer)
    batch: Any = None
    if options.batch is not None:
        ids = torch.empty(options.batch, dtype=torch.long, device="meta")
        batch = {"input_ids": ids, "labels": ids} if hasattr(model, "config") else ids  # a model of transformers
    step = Step(model, plan, batch)  # shared, since tracing takes longest
    rows = estimates(step, plan, optimizer, options.ranks_per_node)
    shown: Prediction = rows["ZeRO-3"]
    if options.budget:
        budget = parse_bytes(options.budget)
        reserved = parse_bytes(options.reserve, "reserve", of=budget)
        shown = choose(step, optimizer, budget, reserved, options.ranks_per_node)
        print(shown, end="\n\n")
    print(shown.plan, rows, sep="\n\n")
    if options.budget:
        given = f"mp_policy=MixedPrecisionPolicy(torch.{options.param_dtype}, torch.float32)"
        print(f'\nIn the script: shard_model(model, memory_budget="{options.budget}", example_batch=batch, {given})')
    else:
        missing = "" if options.batch else "--batch 1x4096 (one rank's micro-batch) and "
        print(f"\nTo find a plan that fits, pass {missing}--budget 80GiB (one GPU).")
    return 0


def _batch(text: str) -> tuple[int, int]:
    rows, _, columns = text.lower().partition("x")
    if not (rows.isdigit() and columns.isdigit()):
        raise argparse.ArgumentTypeError(f"must be sequences x tokens, such as 1x4096, got {text!r}")
    return int(rows), int(columns)


def positive(text: str) -> int:
    """Parse an argument that is a positive number."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number
