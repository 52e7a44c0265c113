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
from shardkit.planning.rules import Rule
from shardkit.planning.tree import ModelTree

logger = logging.getLogger("shardkit")
LARGE_REPLICA, LARGE_SHARE = 64 * 2**20, 0.01  # bytes, and of the model's: what is replicated beyond is worth a warning
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
    """Plans how ``shard_model`` would shard ``model``, as plain data that prints as a table.

    Pure and local: nothing of the model changes, and it may be on the meta device. With a MeshSpec no process group
    is needed, so the plan for a cluster can be read on a laptop.

    Args:
        model: the whole model.
        units: which modules share one all-gather: a rule or a list of rules (``by_class``, ``by_name``,
            ``by_size``, ``group``, a module class, an FQN glob, or a callable ``(fqn, module)`` that returns a bool
            or a dict of settings); the first matching rule wins, and the root takes the rest.
            None is the default rule: blocks, the input embedding, and ``[norm, head]``.
        mesh: one axis shards (FSDP), two replicate and shard (HSDP), ``(n, 1)`` only replicates; a MeshSpec, a
            DeviceMesh, a sub-mesh beside tensor-parallel axes, or None for all ranks in one axis.
        reshard_after_forward: True frees the gathered parameters of each unit after its forward and gathers them
            again in backward, which saves memory; False keeps them, which saves an all-gather; an int keeps them
            sharded over that many ranks, a divisor of the shard axis, as the ranks of one host; 1 is False, and
            all of them True, as torch takes them. None is True, but False for ``[norm, head]`` and the root, which
            backward needs at once.
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
            ones, or the only one. One forward on fake tensors finds every parameter that is used while its unit is
            not gathered. The default rule leaves such units out, with a note; for your own it is an error. Units that
            are not called get a note. Only shapes and dtypes count.

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


def _names_fsdp1(function: Callable[P, R]) -> Callable[P, R]:
    """Name what takes the place of FSDP1's arguments, where Python would call them unexpected."""
    known = inspect.signature(function).parameters.keys()

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not kwargs.keys() <= known:
            _refuse_fsdp1(function.__name__, [name for name in kwargs if name not in known])
        return function(*args, **kwargs)

    return checked


def _refuse_fsdp1(function: str, unexpected: list[str]) -> None:
    from shardkit.fsdp1.instead import ARGUMENTS

    names = [name for name in unexpected if name in ARGUMENTS]
    if names:
        rule = "Pass " + "; ".join(f"for {name}, {ARGUMENTS[name].use}" for name in names)
        fix = "Or call shardkit.shard_like_fsdp1(model, ...) with FSDP1's arguments as they are"
        raise PlanError(message(function, f"{listing(names)}: arguments of FSDP1", rule, fix))


@_names_fsdp1
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
    """Shards ``model`` in place and returns it: ``apply_plan(model, plan_model(model, ...))``.

    Collective: every rank must call, with the same arguments, and with models of the same values: a sample of every
    parameter and buffer is compared before anything is changed. Under ``torchrun`` the process group is made from its
    variables; alone, a group of one process is made, so one script runs either way. Build the optimizer afterwards,
    since sharding replaces the model's parameters.

    Args:
        model: the whole model.
        units, mesh, reshard_after_forward, mp_policy, offload_policy, ignored_params, checkpoint_activations,
            compile, prefetch, forward_methods: as for ``plan_model``.
        memory_budget: bytes on each rank, or such as ``"70GiB"``: the plan is changed to the fastest one whose peak
            is within it, as :func:`shardkit.memory.plan_for_budget` says, which takes more arguments. The first rank
            logs the choice to the logger ``shardkit``, as INFO.
        example_batch: as for ``plan_model``; a budget needs it.
        plan: a plan made before, instead of all of these except a DeviceMesh.
        sync_module_states: broadcast the parameters and buffers of the mesh's first rank to all, but for ignored
            parameters, one tensor at a time and before sharding; the models' values may then differ.

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
        return decided if memory_budget is None else _within(memory_budget, model, decided, example_batch), tree

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
    """What ``plan_model`` returns, and the walk over the model that it was made from."""
    tree = ModelTree(model)
    check_unsharded(tree, mesh if isinstance(mesh, DeviceMesh) else None)
    settings = Settings(reshard_after_forward, mp_policy, offload_policy, checkpoint_activations, compile)
    ignored = _ignored(tree, ignored_params)
    methods = forward_methods if isinstance(forward_methods, str) else tuple(forward_methods)

    def make() -> ShardingPlan:
        return build_plan(tree, spec_of(mesh), _rules(units), settings, ignored, prefetch, methods)

    if example_batch is None:
        return make(), tree
    from shardkit.memory.dry_run import plan_checked

    return plan_checked(tree, make, example_batch, is_default=units is None), tree


def _within(budget: int | str, model: nn.Module, plan: ShardingPlan, batch: Any) -> ShardingPlan:
    """The plan that a budget makes of ``plan``; the first rank logs how it was chosen."""
    if batch is None:
        fix = "Pass example_batch=, one rank's micro-batch as the model takes it"
        raise PlanError(message("memory_budget", "given without example_batch", "Activations depend on the batch", fix))
    from shardkit.memory import plan_for_budget

    choice = plan_for_budget(model, budget, plan=plan, batch=batch)
    choice.plan.check()
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info("%s", choice)
    return choice.plan


def _warn_of_replicas(plan: ShardingPlan) -> None:
    """Warn of large parameters that every rank holds whole although they have a shape that could be sharded."""
    replicas = [spec for spec in (plan.specs[fqn] for fqn in plan.replicated) if spec.shards]
    size, total = sum(spec.nbytes for spec in replicas), sum(spec.nbytes for spec in plan.params)
    if size > max(LARGE_REPLICA, LARGE_SHARE * total) and (not dist.is_initialized() or dist.get_rank() == 0):
        held = f"{nbytes(size)} on every rank, and as much again for gradients and each optimizer state"
        rule = "They train in another dtype than the rest of their unit, and FSDP2 reduces a unit in one dtype"
        fix = "Cast them to the dtype of the rest before shard_model, so that they are sharded"
        logger.warning(message(listing((spec.fqn for spec in replicas), 6), f"replicated, {held}", rule, fix))


def _check_plan_alone(given: tuple[Any, ...], memory_budget: int | str | None) -> None:
    parameters = list(inspect.signature(plan_model).parameters.values())[1:]
    pairs = ((each, value) for each, value in zip(parameters, given, strict=True) if each.name != "mesh")
    changed = [each.name for each, value in pairs if not (value is each.default or value == each.default)]
    changed += ["memory_budget"] * (memory_budget is not None)
    if changed:
        rule = "A ShardingPlan holds every decision, so no other one can be given beside it"
        fix = "Pass plan=plan_model(model, ...) alone"
        raise PlanError(message("plan", f"given together with {listing(changed)}", rule, fix))


def _rules(units: Rule | Sequence[Rule] | None) -> list[Rule] | None:
    if units is None:
        return None
    # A Sequence that is neither list nor tuple is refused as a rule.
    return list(units) if isinstance(units, (list, tuple)) else [units]  # type: ignore[list-item]


def _ignored(tree: ModelTree, ignored_params: Iterable[nn.Parameter | str] | None) -> set[str]:
    """The FQNs of ``ignored_params``."""
    if ignored_params is None:
        return set()
    aliases = {fqn: fqn for fqn in tree.params} | {alias: fqn for fqn, ties in tree.ties.items() for alias in ties}
    found, unknown = set(), []
    for given in ignored_params:
        fqn = aliases.get(given) if isinstance(given, str) else tree.names.get(id(given))
        if fqn is None:
            unknown.append(given if isinstance(given, str) else f"a {type(given).__name__} of {_shape(given)}")
        else:
            found.add(fqn)
    if unknown:
        rule, fix = "They are parameters of the model, or their FQNs", "Take them from model.named_parameters()"
        raise PlanError(message("ignored_params", f"{listing(unknown)} not in the model", rule, fix))
    return found


def _shape(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else "no shape"
