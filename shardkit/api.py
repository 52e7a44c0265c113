"""The front door: plan a model, or plan it and shard it."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from shardkit.apply.fit import check_unsharded
from shardkit.apply.mesh import spec_of
from shardkit.apply.shard import apply_decided, given_plan
from shardkit.errors import PlanError, listing, message
from shardkit.plan import MeshSpec, ShardingPlan
from shardkit.plan.table import nbytes
from shardkit.planning.build import Settings, build_plan
from shardkit.planning.rules import Rule, only_tiles, select
from shardkit.planning.tree import ModelTree

logger = logging.getLogger("shardkit")
LARGE_REPLICA, LARGE_SHARE = 64 * 2**20, 0.01  # warn if more bytes, and a larger part of the model, are replicated
P = ParamSpec("P")
R = TypeVar("R")


def plan_model(
    model: nn.Module,
    *,
    units: Rule | Sequence[Rule] | None = None,
    mesh: DeviceMesh | MeshSpec | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  never changed
    ignored_params: Iterable[nn.Parameter | str] | None = None,
    checkpoint_activations: bool = False,
    compile: bool = False,
    prefetch: int = 0,
    forward_methods: Iterable[str] = (),
    example_batch: Any = None,
) -> ShardingPlan:
    """Plan how ``shard_model`` would shard ``model``, as plain data that prints as a table.

    Pure and local: nothing of the model changes, and it may be on the meta device. With a MeshSpec no process group
    is needed, so the plan for a cluster can be read on a laptop.

    Args:
        model: the whole model.
        units: which modules share one all-gather: a rule or a list of rules (``by_class``, ``by_name``,
            ``by_size``, ``group``, a module class, an FQN glob, or a callable ``(fqn, module)`` that returns a bool
            or a dict of settings); the first matching rule wins, and the root takes the rest.
            None, or only rules with ``tiles=``, is the default rule: blocks, the input embedding, and ``[norm, head]``.
        mesh: one axis shards (FSDP), two replicate and shard (HSDP), ``(n, 1)`` only replicates; a MeshSpec, a
            DeviceMesh, a sub-mesh beside tensor-parallel axes, or None for all ranks in one axis.
        reshard_after_forward: True frees the gathered parameters of each unit after its forward and gathers them
            again in backward, which saves memory; False keeps them, which saves an all-gather; an int keeps them
            sharded over that many ranks, a divisor of the shard axis, such as the ranks of one host; as in torch, 1 is
            False, and the size of the shard axis is True. None is True, but False for ``[norm, head]`` and the root,
            which backward needs at once.
        mp_policy: dtypes to compute and reduce in; its ``output_dtype`` is applied to the root only.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and optimizer state on the CPU.
        ignored_params: parameters, or their FQNs, to leave alone; their gradients are not reduced. Scalars and empty
            parameters need not be: FSDP2 cannot shard them, so they are replicated and their gradients reduced.
        checkpoint_activations: recompute the blocks' forwards in backward instead of keeping their activations.
            Blocks are units of one module that has submodules, other than the root.
        compile: ``torch.compile`` the forward of the blocks.
        prefetch: the number of units to all-gather ahead explicitly; 0 leaves it to torch, which gathers one ahead.
        forward_methods: methods besides ``forward`` that are called from outside and gather what they need, such as
            ``"encode"``, or ``"vae.encode"`` where ``vae`` is a unit. ``generate`` is among them where there is one.
        example_batch: one rank's micro-batch, for a dry run: a mapping of keyword arguments, a tuple of positional
            arguments, or a single argument. One forward on fake tensors finds every parameter that is used while its
            unit is not gathered. The default rule leaves such units out, with a note; in your own rules they are an
            error. Units that are not called get a note. Only shapes and dtypes are read.

    Raises:
        PlanError: what cannot be sharded as asked; all offenders are listed. With ``example_batch`` also a parameter
            used outside of its unit, or a model that does not run on fake tensors.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        >>> len(plan_model(model, mesh=MeshSpec.sharded(4)).units)
        3
    """
    given = (units, mesh, reshard_after_forward, mp_policy, offload_policy, ignored_params, checkpoint_activations)
    return _decide(model, *given, compile, prefetch, forward_methods, example_batch)[0]


def _refuse_fsdp1_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Say what replaces an argument of FSDP1, where Python would call it unexpected."""
    known = inspect.signature(function).parameters.keys()

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not kwargs.keys() <= known:
            from shardkit.replacements import ARGUMENTS

            names = [name for name in kwargs if name not in known and name in ARGUMENTS]
            if names:
                rule = "Instead of " + "; instead of ".join(f"{name}, pass {ARGUMENTS[name].use}" for name in names)
                fix = "Or call shardkit.shard_like_fsdp1(model, ...) with FSDP1's arguments as they are"
                raise PlanError(message(function.__name__, f"got FSDP1 arguments: {listing(names)}", rule, fix))
        return function(*args, **kwargs)

    return checked


@_refuse_fsdp1_arguments
def shard_model(
    model: nn.Module,
    *,
    units: Rule | Sequence[Rule] | None = None,
    mesh: DeviceMesh | MeshSpec | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  never changed
    ignored_params: Iterable[nn.Parameter | str] | None = None,
    checkpoint_activations: bool = False,
    compile: bool = False,
    prefetch: int = 0,
    forward_methods: Iterable[str] = (),
    memory_budget: int | str | None = None,
    example_batch: Any = None,
    plan: ShardingPlan | None = None,
    sync_module_states: bool = False,
) -> nn.Module:
    """Shard ``model`` in place and return it: ``apply_plan(model, plan_model(model, ...))``.

    Collective: every rank must call, with the same arguments, and with models of the same values: a sample of every
    parameter and buffer is compared before anything is changed. Under ``torchrun`` the process group is made from its
    variables; without it, a group of one process is made, so one script runs either way. Build the optimizer
    afterwards, since sharding replaces the model's parameters. Arguments that are not below are as for ``plan_model``.

    Args:
        model: the whole model.
        memory_budget: bytes of each rank's GPU, as an int or a string such as ``"80GiB"``: the plan becomes the fastest
            one whose peak fits in nine tenths of it, as chosen by :func:`shardkit.memory.plan_for_budget`, which takes
            more arguments. Rank 0 logs the choice to the logger ``shardkit``, as INFO.
        example_batch: as for ``plan_model``; a budget needs it.
        plan: a plan made before, instead of all of these except a DeviceMesh.
        sync_module_states: broadcast the parameters and buffers of the mesh's first rank to all ranks, one tensor at a
            time and before sharding, so that the models' values may differ. Ignored parameters are not broadcast.

    Raises:
        PlanError: on every rank, with the model unchanged, when it cannot be sharded as asked on any of them.
    """
    given: tuple[Any, ...] = (units, mesh, reshard_after_forward, mp_policy, offload_policy, ignored_params)
    given += (checkpoint_activations, compile, prefetch, forward_methods, example_batch)
    on = mesh if isinstance(mesh, DeviceMesh) else None

    def decide() -> tuple[ShardingPlan, ModelTree]:
        if plan is not None:
            _check_plan_alone(given, memory_budget)
            return given_plan(model, plan, on)
        decided, tree = _decide(model, *given)
        _warn_of_replicas(decided)
        if memory_budget is not None:
            decided = _within(memory_budget, model, decided, example_batch, keep_units=units is not None)
        return decided, tree

    return apply_decided(model, decide, on, sync_module_states)


def _decide(
    model: nn.Module,
    units: Rule | Sequence[Rule] | None,
    mesh: DeviceMesh | MeshSpec | None,
    reshard_after_forward: bool | int | None,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    ignored_params: Iterable[nn.Parameter | str] | None,
    checkpoint_activations: bool,
    compile: bool,
    prefetch: int,
    forward_methods: Iterable[str],
    example_batch: Any,
) -> tuple[ShardingPlan, ModelTree]:
    """Return the plan of ``plan_model``, and the tree that it was made from."""
    tree = ModelTree(model)
    check_unsharded(tree, mesh if isinstance(mesh, DeviceMesh) else None)
    policies = (
        mp_policy or MixedPrecisionPolicy(),
        offload_policy or OffloadPolicy(),
    )
    settings = Settings(reshard_after_forward, *policies, checkpoint_activations, compile)
    ignored = _ignored(tree, () if ignored_params is None else ignored_params)
    # A Sequence that is neither list nor tuple is refused as a rule.
    rules: Any = units if units is None or isinstance(units, (list, tuple)) else [units]
    methods = forward_methods if isinstance(forward_methods, str) else tuple(forward_methods)

    def make() -> ShardingPlan:
        return build_plan(tree, spec_of(mesh), rules, settings, ignored, prefetch, methods)

    if example_batch is None:
        return make(), tree
    from shardkit.memory.dry_run import plan_checked

    is_default = rules is None or only_tiles(select(tree, rules))
    return plan_checked(tree, make, example_batch, is_default), tree


def _within(budget: int | str, model: nn.Module, plan: ShardingPlan, batch: Any, *, keep_units: bool) -> ShardingPlan:
    """Return the plan that fits the budget; rank 0 logs how it was chosen."""
    if batch is None:
        fix = "Pass example_batch=, one rank's micro-batch as the model takes it"
        raise PlanError(message("memory_budget", "given without example_batch", "Activations depend on the batch", fix))
    from shardkit.memory import plan_for_budget

    choice = plan_for_budget(model, budget, plan=plan, batch=batch, keep_units=keep_units)
    choice.plan.check()
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info("%s", choice)
    return choice.plan


def _warn_of_replicas(plan: ShardingPlan) -> None:
    """Warn of large parameters that every rank replicates although their shape could be sharded."""
    replicas = [spec for spec in (plan.specs[fqn] for fqn in plan.replicated) if spec.shards]
    size, total = sum(spec.nbytes for spec in replicas), sum(spec.nbytes for spec in plan.params)
    if size > max(LARGE_REPLICA, LARGE_SHARE * total) and (not dist.is_initialized() or dist.get_rank() == 0):
        held = f"{nbytes(size)} on every rank, and as much for gradients and for each optimizer state"
        rule = "Their dtype is not that of the rest of their unit, and FSDP2 reduces a unit in one dtype"
        fix = "Cast them to that dtype before shard_model, so that they are sharded"
        logger.warning(message(listing((spec.fqn for spec in replicas), 6), f"replicated: {held}", rule, fix))


def _check_plan_alone(given: tuple[Any, ...], memory_budget: int | str | None) -> None:
    parameters = list(inspect.signature(plan_model).parameters.values())[1:]
    pairs = ((each, value) for each, value in zip(parameters, given, strict=True) if each.name != "mesh")
    changed = [each.name for each, value in pairs if not (value is each.default or value == each.default)]
    changed += ["memory_budget"] * (memory_budget is not None)
    if changed:
        rule = "A ShardingPlan contains all settings, so none can be passed with it"
        fix = "Pass plan=plan_model(model, ...) alone"
        raise PlanError(message("plan", f"given together with {listing(changed)}", rule, fix))


def _ignored(tree: ModelTree, ignored_params: Iterable[nn.Parameter | str]) -> set[str]:
    """Return the FQNs of ``ignored_params``."""
    aliases = {fqn: fqn for fqn in tree.params} | {alias: fqn for fqn, ties in tree.ties.items() for alias in ties}
    found, unknown = set(), []
    for given in ignored_params:
        fqn = aliases.get(given) if isinstance(given, str) else tree.names.get(id(given))
        if fqn is None:
            shape = f"shape {tuple(given.shape)}" if isinstance(given, torch.Tensor) else "no shape"
            unknown.append(given if isinstance(given, str) else f"a {type(given).__name__} of {shape}")
        else:
            found.add(fqn)
    if unknown:
        rule, fix = "It takes parameters of the model, or their FQNs", "Take them from model.named_parameters()"
        raise PlanError(message("ignored_params", f"{listing(unknown)} not in the model", rule, fix))
    return found
