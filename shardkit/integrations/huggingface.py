"""accelerate, and the trainers on it: transformers' Trainer, and TRL's.

accelerate decides by its distributed type what to do with a model. Its type on several ranks is that of DDP, which a
sharded model is not; with FSDP2's, it would shard or prepare the optimizer again. What it does later with FSDP2's type
is right for any FSDP2 model: ``no_sync``, clipping, state dicts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardkit._fsdp import compute_dtypes
from shardkit.errors import ShardkitError, message
from shardkit.optim import step_on_local_shards, step_on_whole_matrices

Runner = TypeVar("Runner")
_OURS = "of_shardkit"  # marks the plugin: accelerate's state outlives an Accelerator


def keep_sharded(runner: Runner) -> Runner:
    """Make accelerate leave sharded models as they are. In place, local, once; before anything is prepared.

    From then on ``prepare`` accepts models sharded with FSDP2 and no others, wraps nothing around them and nothing
    around their forward, and leaves the optimizer's parameters alone. It lets an optimizer step on local shards or, if
    it is not element-wise, on whole matrices; one that can do neither steps DTensors, as it is. Gradient accumulation,
    clipping, evaluation and ``save_state`` work as with accelerate's own FSDP2. Checkpoints are full: rank 0 gathers
    the model and the optimizer state in CPU memory. Resume on any number of ranks.

    Args:
        runner: an ``accelerate.Accelerator``, or a trainer that has one: transformers' ``Trainer``, TRL's.

    Returns:
        The same object.

    Raises:
        ShardkitError: accelerate is also told to shard (``fsdp=``, DeepSpeed), or runs another number of processes than
            the process group, or in fp16; the trainer's model is not sharded. ``prepare`` raises it for a model that is
            not sharded, or computes in another dtype than ``bf16=True`` asks for. ``step`` raises it for an optimizer
            that fails on DTensors.
    """
    accelerator = _accelerator_of(runner)
    _check(runner, accelerator)
    if runner is not accelerator:
        _check_model(accelerator, runner.model)  # type: ignore[attr-defined]
        runner.is_fsdp_enabled = True  # type: ignore[attr-defined]  # transformers keeps what the state said at first
    _set_fsdp2(accelerator)
    accelerator.native_amp = False  # no autocast: the plan's MixedPrecisionPolicy casts
    accelerator.prepare = functools.partial(_prepare, accelerator)
    return runner


def _accelerator_of(runner: object) -> Any:
    try:
        from accelerate import Accelerator
    except ImportError as error:
        rule, fix = "keep_sharded needs it", "Run pip install accelerate"
        raise ShardkitError(message("runner", "accelerate is not installed", rule, fix)) from error
    found = getattr(runner, "accelerator", runner)
    if not isinstance(found, Accelerator):
        rule = "keep_sharded takes an Accelerator, or a trainer that has one"
        fix = "Pass Accelerator(...), or the Trainer that is to train the model"
        raise ShardkitError(message("runner", f"is a {type(runner).__name__}", rule, fix))
    return found


def _check(runner: object, accelerator: Any) -> None:
    """Raise ShardkitError where accelerate would do something else than train FSDP2 models on all ranks."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    asked = getattr(getattr(runner, "args", None), "fsdp", None)
    if asked or (plugin is not None and not hasattr(plugin, _OURS)):
        problem, rule = "tells accelerate to shard too", "The model is sharded by shard_model"
        fix = "Remove fsdp= of TrainingArguments, fsdp_plugin= of Accelerator and ACCELERATE_USE_FSDP"
        raise ShardkitError(message("fsdp", problem, rule, fix))
    kind = accelerator.distributed_type.value
    if not (kind in ("NO", "FSDP") or kind.startswith("MULTI_")):
        fix = "Launch with torchrun, without a configuration of accelerate"
        raise ShardkitError(message("accelerate", f"its distributed type is {kind}", "The model is sharded", fix))
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if accelerator.num_processes != ranks:
        problem = f"trains on {accelerator.num_processes} processes, and the process group has {ranks} ranks"
        fix = "On CPUs pass use_cpu=True to TrainingArguments, or cpu=True to Accelerator"
        raise ShardkitError(message("accelerate", problem, "Each rank must get its own batches", fix))
    if accelerator.mixed_precision not in ("no", "bf16"):
        rule = "accelerate's scaler does not agree between ranks on overflows of sharded gradients"
        fix = "Use bf16, or shardkit.GradScaler in a loop of your own"
        raise ShardkitError(message("mixed_precision", f"is {accelerator.mixed_precision}", rule, fix))


def _set_fsdp2(accelerator: Any) -> None:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(  # what matters of what it would read from the environment
        fsdp_version=2,
        reshard_after_forward=True,
        cpu_offload=False,
        auto_wrap_policy="NO_WRAP",
        activation_checkpointing=False,
        cpu_ram_efficient_loading=False,
        state_dict_type="FULL_STATE_DICT",
    )
    setattr(plugin, _OURS, True)
    for state in (PartialState(), accelerator.state):  # the constructor's fsdp_plugin= has no effect on CPUs
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = plugin


def _prepare(accelerator: Any, *args: Any, device_placement: list[bool] | None = None) -> Any:
    """``Accelerator.prepare`` for sharded models, by its public methods for each kind of object.

    accelerate's own finds the optimizer's parameters again by their addresses, which empty shards have in common, and
    takes no model without an optimizer, as for evaluation.
    """
    for each in args:
        if isinstance(each, nn.Module):
            _check_model(accelerator, each)
    placements: Sequence[bool | None] = device_placement or [None] * len(args)
    prepared = [_prepare_one(accelerator, each, place) for each, place in zip(args, placements, strict=True)]
    for index, each in enumerate(prepared):
        if isinstance(each, torch.optim.lr_scheduler.LRScheduler):  # last: it looks for its prepared optimizer
            prepared[index] = accelerator.prepare_scheduler(each)
    return tuple(prepared) if len(prepared) > 1 else prepared[0]


def _prepare_one(accelerator: Any, given: Any, device_placement: bool | None) -> Any:
    if isinstance(given, nn.Module):
        return accelerator.prepare_model(given, device_placement=False, evaluation_mode=True)
    if isinstance(given, torch.utils.data.DataLoader):
        return accelerator.prepare_data_loader(given, device_placement=device_placement)
    if isinstance(given, torch.optim.Optimizer):
        return _prepare_optimizer(accelerator, given, device_placement)
    return given


def _prepare_optimizer(accelerator: Any, optimizer: torch.optim.Optimizer, device_placement: bool | None) -> Any:
    """Let it step without DTensors where it can: many cannot step those, such as Adafactor and bitsandbytes'."""
    is_ready = _steps_plain_tensors(optimizer)
    prepared = accelerator.prepare_optimizer(optimizer, device_placement=device_placement)
    if not is_ready:
        prepared.step = MethodType(_step_dtensors, prepared)
    return prepared


def _steps_plain_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it steps on plain tensors, from now on at the latest. In place."""
    ways = ("steps_on_local_shards", "steps_on_whole_matrices")
    params = (param for group in optimizer.param_groups for param in group["params"])
    if any(getattr(type(optimizer), way, False) for way in ways) or not any(isinstance(p, DTensor) for p in params):
        return True
    for step_on in (step_on_local_shards, step_on_whole_matrices):
        with suppress(ShardkitError):
            step_on(optimizer)
            return True
    return False


def _step_dtensors(self: Any, closure: Any = None) -> Any:
    """The step of a prepared optimizer, whose errors of DTensors name it."""
    try:
        return type(self).step(self, closure)
    except RuntimeError as error:
        if not any(word in str(error) for word in ("DTensor", "harding")):  # sharding propagation, a sharding strategy
            raise
        kind = type(self.optimizer)
        problem = f"is {kind.__module__}.{kind.__qualname__}, whose step failed on DTensors: {error}"
        rule = "It can step neither on local shards nor on whole matrices"
        fix = "Use another, such as adamw_torch or adafactor; step_on_whole_matrices(optimizer) says what is in the way"
        raise ShardkitError(message("optimizer", problem, rule, fix)) from error


def _check_model(accelerator: Any, model: nn.Module) -> None:
    if not isinstance(model, FSDPModule):
        rule = "After keep_sharded accelerate trains only models sharded with FSDP2"
        fix = "Call shardkit.shard_model(model) before the optimizer and prepare"
        raise ShardkitError(message("model", f"{type(model).__name__} is not sharded", rule, fix))
    dtypes = compute_dtypes(model)
    if accelerator.mixed_precision == "bf16" and torch.bfloat16 not in dtypes:
        problem = f"bf16 was asked for, and the model computes in {', '.join(sorted(map(str, dtypes)))}"
        rule = "The dtype of a sharded model is that of its plan; accelerate's autocast is off"
        policy = "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        raise ShardkitError(message("mixed_precision", problem, rule, f"Pass shard_model {policy}, or bf16=False"))
