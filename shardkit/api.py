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
from shardkit.apply.shard import apply_decided
from shardkit.errors import PlanError, listing, message
from shardkit.plan import MeshSpec, ShardingPlan
from shardkit.planning.build import Settings, build_plan
from shardkit.planning.rules import Rule
from shardkit.planning.tree import ModelTree

logger = logging.getLogger("shardkit")
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
    """The plan by which ``shard_model`` would shard ``model``: plain data that prints as a table.

    Pure and local: nothing of the model changes, and it may be on the meta device. With a MeshSpec no process group
    is needed, so the plan for a cluster can be read on a laptop.

    Args:
        model: the whole model.
        units: which modules share one all-gather: a rule or a list of rules (``by_class``, ``by_name``,
            ``by_size``, ``group``, a module class, an FQN glob, or a callable ``(fqn, module)`` that returns a bool
            or a dict of settings), where for each module the first match wins and the root takes what is left.
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
        prefetch: how many units ahead to all-gather explicitly; 0 leaves it to torch, one ahead.
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
    tree = ModelTree(model)
    check_unsharded(tree, mesh if isinstance(mesh, DeviceMesh) else None)
    settings = Settings(reshard_after_forward, mp_policy, offload_policy, checkpoint_activations, compile)
    ignored = _ignored(tree, ignored_params)
    methods = forward_methods if isinstance(forward_methods, str) else tuple(forward_methods)

    def make() -> ShardingPlan:
        return build_plan(tree, spec_of(mesh), _rules(units), settings, ignored, prefetch, methods)

    if example_batch is None:
        return make()
    from shardkit.memory.dry_run import plan_checked

    return plan_checked(tree, make, example_batch, is_default=units is None)


# FSDP1's arguments, and what takes their place.
_OF_FSDP1 = {
    "auto_wrap_policy": "units=by_class(Block) or by_size(...), or nothing: the default rule finds the blocks",
    "sharding_strategy": "reshard_after_forward=False for SHARD_GRAD_OP, MeshSpec.hybrid(...) for HYBRID_SHARD",
    "mixed_precision": "mp_policy=MixedPrecisionPolicy(...)",
    "cpu_offload": "offload_policy=CPUOffloadPolicy()",
    "ignored_modules": "ignored_params=[*module.parameters()]",
    "ignored_states": "ignored_params=",
    "param_init_fn": "init_on_meta() and materialize(model, init=...)",
    "process_group": "mesh=",
    "device_mesh": "mesh=",
    "device_id": "nothing: the model goes to the mesh's device",
    "use_orig_params": "nothing: it is always so",
    "backward_prefetch": "prefetch=",
    "forward_prefetch": "prefetch=",
    "limit_all_gathers": "nothing: it is always so",
}


def _names_fsdp1(function: Callable[P, R]) -> Callable[P, R]:
    """Name what takes the place of FSDP1's arguments, where Python would call them unexpected."""

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        given = [f"for {name}, {_OF_FSDP1[name]}" for name in kwargs if name in _OF_FSDP1]
        if given:
            problem, rule = f"{listing(name for name in kwargs if name in _OF_FSDP1)}: arguments of FSDP1", "Pass "
            fix = "Or call shardkit.shard_like_fsdp1(model, ...) with FSDP1's arguments as they are"
            raise PlanError(message(function.__name__, problem, rule + "; ".join(given), fix))
        return function(*args, **kwargs)

    return checked


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
    arguments: dict[str, Any] = {
        "units": units,
        "reshard_after_forward": reshard_after_forward,
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "ignored_params": ignored_params,
        "checkpoint_activations": checkpoint_activations,
        "compile": compile,
        "prefetch": prefetch,
        "forward_methods": forward_methods,
    }

    def decide() -> ShardingPlan:
        if plan is not None:
            _check_plan_alone(plan, arguments | {"memory_budget": memory_budget, "example_batch": example_batch})
            return plan
        decided = plan_model(model, mesh=mesh, **arguments, example_batch=example_batch)
        return decided if memory_budget is None else _within(memory_budget, model, decided, example_batch)

    return apply_decided(model, decide, mesh if isinstance(mesh, DeviceMesh) else None, sync_module_states)


def _within(budget: int | str, model: nn.Module, plan: ShardingPlan, batch: Any) -> ShardingPlan:
    """The plan that a budget makes of ``plan``; the first rank logs how it was chosen."""
    if batch is None:
        fix = "Pass example_batch=, one rank's micro-batch as the model takes it"
        raise PlanError(message("memory_budget", "given without example_batch", "Activations depend on the batch", fix))
    from shardkit.memory import plan_for_budget

    choice = plan_for_budget(model, budget, plan=plan, batch=batch)
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info("%s", choice)
    return choice.plan


def _check_plan_alone(plan: ShardingPlan, arguments: dict[str, Any]) -> None:
    defaults = {name: parameter.default for name, parameter in inspect.signature(plan_model).parameters.items()}
    given = [
        name for name, value in arguments.items() if value is not defaults.get(name) and value != defaults.get(name)
    ]
    if given:
        raise PlanError(
            message(
                "plan",
                f"given together with {listing(given)}",
                "A ShardingPlan holds every decision, so no other one can be given beside it",
                "Pass plan=plan_model(model, ...) alone",
            )
        )


def _rules(units: Rule | Sequence[Rule] | None) -> list[Rule] | None:
    if units is None or isinstance(units, (list, tuple)):
        return None if units is None else list(units)
    return [units]  # type: ignore[list-item]  # a Sequence that is neither list nor tuple is refused as a rule


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
        raise PlanError(
            message(
                "ignored_params",
                f"{listing(unknown)} not in the model",
                "They are parameters of the model, or their FQNs",
                "Take them from model.named_parameters()",
            )
        )
    return found


def _shape(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else "no shape"
