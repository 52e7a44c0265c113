"""A plan as JSON-ready data, and back."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardkit.errors import PlanError, message

if TYPE_CHECKING:
    from shardkit.plan.types import ShardingPlan

VERSION = 1


def plan_to_dict(plan: ShardingPlan) -> dict[str, Any]:
    """The plan as strings, numbers, lists and dicts; keys are the field names."""
    return {
        "version": VERSION,
        "mesh": {"shape": list(plan.mesh.shape), "axis_names": list(plan.mesh.axis_names)},
        "units": [
            {
                "modules": list(unit.modules),
                "params": list(unit.params),
                "reshard_after_forward": unit.reshard_after_forward,
                "mp_policy": mp_policy_to_dict(unit.mp_policy),
                "offload_policy": offload_policy_to_dict(unit.offload_policy),
                "checkpoint_activations": unit.checkpoint_activations,
                "compile": unit.compile,
            }
            for unit in plan.units
        ],
        "params": [
            [
                spec.fqn,
                list(spec.shape),
                dtype_name(spec.dtype),
                spec.trainable,
                list(spec.aliases),
                spec.tensor_parallel,
            ]
            for spec in plan.params
        ],
        "ignored": list(plan.ignored),
        "replicated": list(plan.replicated),
        "prefetch": plan.prefetch,
        "forward_methods": list(plan.forward_methods),
        "notes": list(plan.notes),
    }


def plan_from_dict(data: dict[str, Any]) -> ShardingPlan:
    """The plan that ``plan_to_dict`` wrote; PlanError when it is not one."""
    try:
        return _read_plan(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(
            message(
                "plan",
                f"cannot be read ({type(error).__name__}: {error})",
                f"It is what ShardingPlan.to_dict() wrote, version {VERSION}",
                "Write it again with this version of shardkit",
            )
        ) from error


def _read_plan(data: dict[str, Any]) -> ShardingPlan:
    from shardkit.plan.types import MeshSpec, ParamSpec, ShardingPlan, ShardUnit  # types imports this module

    known = {"version", "mesh", "units", "params", "ignored", "replicated", "prefetch", "forward_methods", "notes"}
    if set(data) != known or data["version"] != VERSION:
        raise ValueError(f"keys {sorted(data)}, version {data.get('version')!r}")
    units = tuple(
        ShardUnit(
            modules=tuple(unit["modules"]),
            params=tuple(unit["params"]),
            reshard_after_forward=unit["reshard_after_forward"],
            mp_policy=_mp_policy_from_dict(unit["mp_policy"]),
            offload_policy=_offload_policy_from_dict(unit["offload_policy"]),
            checkpoint_activations=unit["checkpoint_activations"],
            compile=unit["compile"],
        )
        for unit in data["units"]
    )
    params = tuple(
        ParamSpec(fqn, tuple(shape), dtype_from_name(dtype), trainable, tuple(aliases), tensor_parallel)
        for fqn, shape, dtype, trainable, aliases, tensor_parallel in data["params"]
    )
    mesh = MeshSpec(tuple(data["mesh"]["shape"]), tuple(data["mesh"]["axis_names"]))
    return ShardingPlan(
        units=units,
        mesh=mesh,
        params=params,
        ignored=tuple(data["ignored"]),
        replicated=tuple(data["replicated"]),
        prefetch=data["prefetch"],
        forward_methods=tuple(data["forward_methods"]),
        notes=tuple(data["notes"]),
    )


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """``"bfloat16"`` as ``torch.bfloat16``; ValueError when there is none of that name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no torch dtype is called {name!r}")
    return dtype


def mp_policy_to_dict(policy: MixedPrecisionPolicy) -> dict[str, Any]:
    """The fields that differ from torch's defaults, dtypes by name."""
    default = MixedPrecisionPolicy()
    names = [item.name for item in dataclasses.fields(policy)]
    changed = {name: getattr(policy, name) for name in names if getattr(policy, name) != getattr(default, name)}
    return {name: dtype_name(value) if isinstance(value, torch.dtype) else value for name, value in changed.items()}


def _mp_policy_from_dict(data: dict[str, Any]) -> MixedPrecisionPolicy:
    fields: dict[str, Any] = {
        name: dtype_from_name(value) if isinstance(value, str) else value for name, value in data.items()
    }
    return MixedPrecisionPolicy(**fields)


def offload_policy_to_dict(policy: OffloadPolicy) -> dict[str, Any]:
    """The fields of a CPUOffloadPolicy; empty for no offload."""
    return {"pin_memory": policy.pin_memory} if isinstance(policy, CPUOffloadPolicy) else {}


def _offload_policy_from_dict(data: dict[str, Any]) -> OffloadPolicy:
    return CPUOffloadPolicy(**data) if data else OffloadPolicy()
