"""accelerate, and the trainers on it: transformers' Trainer, and TRL's.

On several ranks accelerate would wrap a sharded model in DDP; with FSDP2's distributed type
``prepare`` would shard it and rebuild the optimizer. All else that it does with that type is right:
``no_sync``, clipping, state dicts.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardkit._fsdp.states import compute_dtypes, show_plain_name
from shardkit.errors import ShardkitError, listing
from shardkit.optim import step_on_local_shards, step_on_whole_matrices

Runner = TypeVar("Runner")

_OURS = "of_shardkit"  # marks the plugin: accelerate's state outlives an Accelerator


def keep_sharded(runner: Runner) -> Runner:
    """Make accelerate leave sharded models as they are. In place, local, once; before anything is
    prepared.

    A model that transformers has sharded (``DistributedConfig``) is passed first, before
    ``Trainer(...)``, which would refuse to save what resuming needs: ``trainer =
    keep_sharded(Trainer(keep_sharded(model), args, ...))``.

    ``prepare`` then accepts models sharded with FSDP2 and no others, and wraps nothing around them.
    torch's element-wise optimizers step on local shards; Muon and Adafactor on whole matrices; any
    other steps DTensors. Accumulation, clipping, evaluation and ``save_state`` work as with
    accelerate's own FSDP2. Checkpoints are full: rank 0 gathers model and optimizer state in CPU
    memory. Resume on any number of ranks.

    Args:
        runner: an ``accelerate.Accelerator``, or a trainer that has one: transformers' ``Trainer``,
            TRL's; or a model.

    Returns:
        The same object.

    Raises:
        ShardkitError: accelerate is also told to shard (``fsdp=``, DeepSpeed), or runs another
            number of processes than the process group, or in fp16; the model is not sharded, or
            split in other ways too. ``prepare`` raises it for a model that is not sharded, or
            computes in another dtype than ``bf16=True`` asks for.
    """
    if isinstance(runner, nn.Module):
        _take_over(runner)
        return runner
    accelerator = _accelerator_of(runner)
    _check(runner, accelerator)
    if runner is not accelerator:
        _check_model(accelerator, runner.model)  # type: ignore[attr-defined]
        # transformers keeps what the state said at first
        runner.is_fsdp_enabled = True  # type: ignore[attr-defined]
        # By this name it knows causal models, and shifts the labels that it smooths.
        show_plain_name(runner.model)  # type: ignore[attr-defined]
    _set_fsdp2(accelerator)
    accelerator.native_amp = False  # no autocast: the plan's MixedPrecisionPolicy casts
    accelerator.prepare = partial(_prepare, accelerator)
    return runner


def _take_over(model: nn.Module) -> None:
    """Let transformers forget that it has sharded the model, so that its Trainer saves and loads as
    for ours.
    """
    if not isinstance(model, FSDPModule):
        raise ShardkitError(_not_sharded(model))
    config: Any = model.config
    sizes = getattr(config, "distributed_config", None)
    problem = ""
    if sizes is not None:
        if sizes.tp_size * sizes.pp_size * sizes.ep_size > 1:
            problem = f"is split by more than FSDP: {sizes}"
        plain = []
        for name, param in model.named_parameters():
            if param.requires_grad and not isinstance(param, DTensor):
                plain.append(name)
        if plain:
            problem = f"trains plain parameters: {listing(plain, 4)}"
    if problem:
        raise ShardkitError(
            f"{type(model).__name__} {problem}. keep_sharded leaves reductions to FSDP2. Pass a "
            "model with fsdp_size= and dp_replicate_size= alone, and adapters to shard_model."
        )
    vars(model)["_is_distributed_loading_by_transformers"] = False
    config.distributed_config = None


def _accelerator_of(runner: object) -> Any:
    from accelerate import Accelerator

    accelerator = getattr(runner, "accelerator", runner)
    if not isinstance(accelerator, Accelerator):
        raise ShardkitError(
            "runner must be an Accelerator, or a trainer that has one, got "
            f"{type(runner).__name__}. Pass Accelerator(...) or Trainer(...)."
        )
    return accelerator


def _check(runner: object, accelerator: Any) -> None:
    """Raise ShardkitError where accelerate would do something else than train FSDP2 models on all
    ranks.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    shards = accelerator.distributed_type.value in ("DEEPSPEED", "MEGATRON_LM")
    shards |= plugin is not None and not hasattr(plugin, _OURS)
    if shards or getattr(getattr(runner, "args", None), "fsdp", None):
        raise ShardkitError(
            "accelerate is told to shard too, and shard_model has sharded the model. Remove fsdp= "
            "or deepspeed= and ACCELERATE_USE_FSDP, and launch with torchrun."
        )
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if accelerator.num_processes != ranks:
        raise ShardkitError(
            f"accelerate trains on {accelerator.num_processes} processes, and the process group "
            f"has {ranks} ranks. On CPUs pass use_cpu=True to TrainingArguments, or cpu=True to "
            "Accelerator."
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ShardkitError(
            f"accelerate has mixed_precision={accelerator.mixed_precision!r}, whose scaler does "
            "not agree between ranks. Use bf16, or shardkit.GradScaler in a loop of your own."
        )


def _set_fsdp2(accelerator: Any) -> None:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    # All that matters is given, so that nothing is read from the environment.
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        cpu_offload=False,
        activation_checkpointing=False,
        cpu_ram_efficient_loading=False,
        auto_wrap_policy="NO_WRAP",
        state_dict_type="FULL_STATE_DICT",
    )
    setattr(plugin, _OURS, True)
    # Accelerator(fsdp_plugin=) has no effect on CPUs.
    for state in (PartialState(), accelerator.state):
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = plugin


def _prepare(accelerator: Any, *args: Any, device_placement: list[bool] | None = None) -> Any:
    """``Accelerator.prepare`` for sharded models, by its public methods for each kind of object.

    accelerate's own pairs the optimizer's parameters by addresses, which empty shards have in
    common.
    """
    for arg in args:
        if isinstance(arg, nn.Module):
            _check_model(accelerator, arg)
    placements: Any = device_placement or [None] * len(args)
    prepared = list(args)
    for index, (arg, place) in enumerate(zip(args, placements, strict=True)):
        if isinstance(arg, nn.Module):
            prepared[index] = accelerator.prepare_model(
                arg, device_placement=False, evaluation_mode=True
            )
        elif isinstance(arg, torch.utils.data.DataLoader):
            prepared[index] = accelerator.prepare_data_loader(arg, device_placement=place)
        elif isinstance(arg, torch.optim.Optimizer):
            optimizer = _without_dtensors(arg)
            prepared[index] = accelerator.prepare_optimizer(optimizer, device_placement=place)
    for index, arg in enumerate(args):  # last, since a scheduler looks for its prepared optimizer
        if isinstance(arg, torch.optim.lr_scheduler.LRScheduler):
            prepared[index] = accelerator.prepare_scheduler(arg)
    return tuple(prepared) if len(prepared) > 1 else prepared[0]


def _without_dtensors(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let it step without DTensors if it is known to be able to, and does not yet."""
    kind = type(optimizer)
    for way in ("steps_on_local_shards", "steps_on_whole_matrices"):
        if getattr(kind, way, False):
            return optimizer
    params: list[Any] = []
    for group in optimizer.param_groups:
        params += group["params"]
    if not any(isinstance(param, DTensor) for param in params):
        return optimizer
    is_known = kind.__module__.startswith(("torch.", "transformers."))
    with suppress(ShardkitError):  # others step on DTensors
        if is_known and kind.__name__ in ("Muon", "Adafactor"):
            return step_on_whole_matrices(optimizer)
        return step_on_local_shards(optimizer)
    return optimizer


def _check_model(accelerator: Any, model: nn.Module) -> None:
    if not isinstance(model, FSDPModule):
        raise ShardkitError(_not_sharded(model))
    dtypes = compute_dtypes(model)
    if accelerator.mixed_precision == "bf16" and torch.bfloat16 not in dtypes:
        names = ", ".join(sorted(map(str, dtypes)))
        raise ShardkitError(
            f"mixed_precision is bf16, and the model computes in {names}. The plan sets the dtype "
            "of a sharded model; accelerate's autocast is off. Pass "
            "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, "
            "reduce_dtype=torch.float32) to shard_model, or bf16=False."
        )


def _not_sharded(model: nn.Module) -> str:
    return (
        f"{type(model).__name__} is not sharded. After keep_sharded accelerate trains only models "
        "sharded with FSDP2. Call shardkit.shard_model(model) before the optimizer and prepare."
    )


def refuse_merges(model: nn.Module) -> None:
    """Make adapter layers refuse to merge or unmerge while their parameters are sharded. Local, in
    place.

    These are modules with ``merge()``, ``unmerge()`` and ``merged``, as peft's. Some methods, such
    as DoRA and IA3, assign ``weight.data``, which torch does not carry over to the shards of a
    DTensor: the result is the base.
    """
    for name, module in model.named_modules():
        kind = type(module)
        if hasattr(kind, "merge") and hasattr(kind, "unmerge") and hasattr(module, "merged"):
            for call in ("merge", "unmerge"):
                setattr(module, call, partial(_call_on_full, module, name, call))


def _call_on_full(module: nn.Module, name: str, call: str, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(param, DTensor) for param in module.parameters()):
        raise ShardkitError(
            f"{name}.{call} cannot run while its parameters are sharded. Merging assigns "
            "weight.data, which does not reach the shards of a DTensor. Call it inside `with "
            "shardkit.full_params(model, writeback=True):`, for the model or layer by layer."
        )
    return getattr(type(module), call)(module, *args, **kwargs)
