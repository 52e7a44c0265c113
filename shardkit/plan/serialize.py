"""Convert a plan to JSON-ready data, and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardkit.errors import PlanError, message
from shardkit.plan.data import PlanData
from shardkit.plan.types import MeshSpec, ParamSpec, ShardUnit

VERSION = 1
_NAMES = ("ignored", "replicated", "forward_methods", "notes")  # of a plan, each a tuple of strings


def plan_to_dict(plan: PlanData) -> dict[str, Any]:
    """Return the plan as strings, numbers, lists and dicts; keys are the field names."""
    return {"version": VERSION, **_plain(plan)}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, MixedPrecisionPolicy):
        return mp_policy_to_dict(value)
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    assert dataclasses.is_dataclass(value)
    return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}


def fields_of_plan(data: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for ``ShardingPlan``; PlanError unless :func:`plan_to_dict` wrote ``data``."""
    try:
        keys = {"version", "mesh", "units", "params", "prefetch", "tiles", *_NAMES}
        if data.keys() != keys or data["version"] != VERSION:
            raise ValueError(f"keys {sorted(data)}, version {data.get('version')!r}")
        fields: dict[str, Any] = {"prefetch": data["prefetch"], **{key: tuple(data[key]) for key in _NAMES}}
        fields["tiles"] = dict(data["tiles"])
        fields["mesh"] = _read(MeshSpec, data["mesh"], shape=tuple, axis_names=tuple)
        readers = {"modules": tuple, "params": tuple, "mp_policy": _mp_policy, "offload_policy": _offload_policy}
        fields["units"] = tuple(_read(ShardUnit, each, shard_dims=dict, **readers) for each in data["units"])
        fields["params"] = tuple(
            ParamSpec(fqn, tuple(shape), dtype_from_name(dtype), trainable, tuple(aliases), *others)
            for fqn, shape, dtype, trainable, aliases, *others in data["params"]
        )
        return fields
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"cannot be read ({type(error).__name__}: {error})"
        rule = f"It must be what ShardingPlan.to_dict() wrote, version {VERSION}"
        raise PlanError(message("plan", problem, rule, "Write it again with this version of shardkit")) from error


def _read(cls: Any, data: dict[str, Any], **readers: Any) -> Any:
    """Return a dataclass from exactly its fields; ``readers`` convert those that JSON stores in another form."""
    names = {field.name for field in dataclasses.fields(cls)}
    if data.keys() != names:
        raise ValueError(f"{cls.__name__} with the keys {sorted(data)}")
    return cls(**{name: readers[name](value) if name in readers else value for name, value in data.items()})


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """Return ``torch.bfloat16`` for ``"bfloat16"``; ValueError if torch has no such dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no torch dtype is called {name!r}")
    return dtype


def mp_policy_to_dict(policy: MixedPrecisionPolicy) -> dict[str, Any]:
    """Return the fields that differ from torch's defaults, dtypes by name."""
    default = MixedPrecisionPolicy()
    fields = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    return {name: _plain(value) for name, value in fields.items() if value != getattr(default, name)}


def _mp_policy(data: dict[str, Any]) -> MixedPrecisionPolicy:
    fields: dict[str, Any] = {k: dtype_from_name(v) if isinstance(v, str) else v for k, v in data.items()}
    return MixedPrecisionPolicy(**fields)


def _offload_policy(data: dict[str, Any]) -> OffloadPolicy:
    return CPUOffloadPolicy(**data) if data else OffloadPolicy()
