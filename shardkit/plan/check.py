"""Check a plan by itself, without a model or a process group; one generator per rule."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardkit.errors import listing
from shardkit.plan.data import PlanData, callers, dtype_name
from shardkit.plan.types import ShardUnit, ancestors, is_world_size


def problems(plan: PlanData) -> Iterator[str]:
    """Yield one error message for each thing wrong with ``plan``; none if it can be applied."""
    yield from _whole_plan(plan)
    yield from children_first(plan)
    for unit in plan.units:
        yield from _one_trainable_dtype(plan, unit)
        yield from _world_size_to_reshard_to(plan, unit)
        yield from _shard_dims(plan, unit)
        yield from _policy(plan, unit)
    yield from _may_skip(plan)
    yield from _tiles(plan)


def _whole_plan(plan: PlanData) -> Iterator[str]:
    name = "param_dtype_override_fn"  # since torch 2.15
    overriding = [unit.name for unit in plan.units if getattr(unit.mp_policy, name, None)]
    if overriding:
        yield (
            f"mp_policy has a param_dtype_override_fn for {listing(overriding, 6)}. A plan is "
            "plain data, which ranks compare and JSON stores. Name the modules that compute in "
            'float32: float32=["**norm*"].'
        )
    if plan.replicated and not any(unit.params for unit in plan.units):
        yield (
            f"model has no parameter that can be sharded: {listing(plan.replicated, 6)} are "
            "scalars, empty or in replicate=. Train it with DistributedDataParallel."
        )


def children_first(plan: PlanData) -> Iterator[str]:
    """Yield an error for each module that would be sharded twice, or after a module around it."""
    if not plan.units or plan.units[-1].modules != ("",):
        yield (
            "units must end with the root, which is sharded last and alone. "
            'Make ShardUnit(modules=("",), ...) the last unit.'
        )
    seen: set[str] = set()
    for unit in plan.units:
        for fqn in unit.modules:
            if fqn in seen or not seen.isdisjoint(ancestors(fqn)):
                yield (
                    f"{fqn or '(root)'} appears in two units, or comes after a module around it. "
                    "fully_shard is called once for each module, children before parents. Put "
                    "inner units before outer ones."
                )
        seen.update(unit.modules)


def _one_trainable_dtype(plan: PlanData, unit: ShardUnit) -> Iterator[str]:
    first_of: dict[torch.dtype, str] = {}
    for spec in plan.specs_of(unit):
        if spec.trainable and spec.dtype not in first_of:
            first_of[spec.dtype] = spec.fqn
    if len(first_of) > 1:
        examples = listing(f"{dtype_name(dtype)}: {fqn}" for dtype, fqn in first_of.items())
        yield (
            f"{unit.name} trains parameters of {len(first_of)} dtypes, such as {examples}. The "
            "trainable parameters of a unit have one dtype, since their gradients are reduced "
            "together. Cast them to one dtype, or give the modules of one dtype a unit of their "
            "own."
        )


def _world_size_to_reshard_to(plan: PlanData, unit: ShardUnit) -> Iterator[str]:
    value = unit.reshard_after_forward
    if not is_world_size(value):
        return
    ranks = plan.mesh_of(unit).shard_size
    if value < 1 or ranks % value:
        yield (
            f"{unit.name} has reshard_after_forward={value}. As an int it must divide the {ranks} "
            f"ranks of axis {plan.mesh_of(unit).axis_names[-1]}. Use a divisor, True or False."
        )


def _shard_dims(plan: PlanData, unit: ShardUnit) -> Iterator[str]:
    if unit.shard_dims and is_world_size(unit.reshard_after_forward):
        yield (
            f"{listing(dict(unit.shard_dims), 6)} is not sharded on dim 0, with "
            f"reshard_after_forward={unit.reshard_after_forward}. torch reshards to fewer ranks on "
            "dim 0 only. Use dim 0, or reshard_after_forward=True."
        )


def _may_skip(plan: PlanData) -> Iterator[str]:
    for unit in plan.units:
        if unit.may_skip and (len(unit.modules) > 1 or unit.modules == ("",)):
            yield (
                f"{unit.name} has may_skip=True, which is for one module that another unit calls. "
                "Make the skipped module a unit of its own: by_name(..., may_skip=True)."
            )
    rule = (
        "and calls a unit with may_skip=True, or is inside of one and calls units. Skipped calls "
        "are replaced in the forward of a module that is not compiled and alone in its unit."
    )
    for unit in callers(plan):
        if unit.compile:
            yield f"{unit.name} is compiled, {rule} Pass compile=False for this unit."
        elif len(unit.modules) > 1:
            yield f"{unit.name} is a unit of several modules, {rule} Leave it out of group()."


def unit_inside(plan: PlanData, unit: ShardUnit) -> str | None:
    """Return the name of a unit that is inside of another one's modules; None without one."""
    for other in plan.units:
        for fqn in other.modules:
            if not set(unit.modules).isdisjoint(ancestors(fqn)):
                return other.name
    return None


def _policy(plan: PlanData, unit: ShardUnit) -> Iterator[str]:
    policy = unit.checkpoint_activations
    inner = unit_inside(plan, unit) if isinstance(policy, str) else None
    if inner is not None:
        yield (
            f"{unit.name} has checkpoint_activations={policy!r}, and {inner} inside is a unit. A "
            "policy would choose among the operations of its all-gather too. Pass "
            "checkpoint_activations=True for it."
        )


def _tiles(plan: PlanData) -> Iterator[str]:
    if not plan.tiles:
        return
    compiled: set[str] = set()
    modules = list(dict(plan.tiles))
    for unit in plan.units:
        modules += unit.modules
        if unit.compile:
            compiled.update(unit.modules)
    inner: dict[str, str] = {}  # by each module around, one unit or module in tiles
    for fqn in modules:
        for outer in ancestors(fqn):
            inner[outer] = fqn
    for fqn, number in plan.tiles:
        subject = f"{fqn or '(root)'} has tiles={number!r}"
        compiled_around = [name for name in (fqn, *ancestors(fqn)) if name in compiled]
        if type(number) is not int or number < 2:
            yield f"{subject}. It must be a number of tiles, at least 2. Use tiles={{...: 4}}."
        elif fqn in inner:
            yield (
                f"{subject}, and {inner[fqn]} inside, a unit or in tiles too. A unit inside would "
                "be unsharded for each tile. Select the innermost of them with tiles=."
            )
        elif compiled_around:
            yield (
                f"{subject}, and {compiled_around[0] or '(root)'} is compiled. Tiles are computed "
                "eagerly. Pass compile=False for that unit, or leave out tiles=."
            )
