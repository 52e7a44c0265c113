"""What the drop-in says once: the plan that a program runs by, and the code that makes do without the drop-in."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FSDPModule, MixedPrecision

from shardkit.errors import listing
from shardkit.fsdp1.dropin.record import WRAPPED, Record, inner_of, is_wrapper, record_of, without_wrappers, wrappers_of
from shardkit.fsdp1.translate.arguments import device_of
from shardkit.fsdp1.translate.strategy import parse_strategy
from shardkit.plan import ShardingPlan
from shardkit.plan.python import quoted

QUIET = "SHARDKIT_FSDP1_QUIET"
MOST = 4  # modules that are spelled one by one

# What FSDP2 does its own way whatever they say, so that code for FSDP2 leaves them out.
_WITHOUT_EFFECT = ("backward_prefetch", "limit_all_gathers", "use_orig_params")
_PLAIN = ("mapped", "implied")

logger = logging.getLogger("shardkit")
_said = False


def announce(root: nn.Module) -> None:
    """Prints to stderr how a model runs, on rank 0, once in a process, unless ``SHARDKIT_FSDP1_QUIET`` is set.

    Never raises, and never writes to stdout, which programs parse. Local.

    Args:
        root: a wrapper that has just been found to be a root, with all that is wrapped below it.
    """
    global _said
    if _said or os.environ.get(QUIET, "0") not in ("", "0") or (dist.is_initialized() and dist.get_rank() != 0):
        return
    _said = True
    try:
        print(announcement(root), file=sys.stderr, flush=True)
    except Exception:  # a program must not fail because of its announcement
        logger.debug("the drop-in's announcement failed", exc_info=True)


def announcement(root: nn.Module) -> str:
    """Return the text; pure."""
    notes = [f"- {note}" for note in record_of(root).translation.notes if note.fate not in _PLAIN]
    code = "\n".join(f"    {line}".rstrip() for line in replacement(root))
    parts = [
        f"shardkit.fsdp1: FullyShardedDataParallel runs on fully_shard. Shown once; set {QUIET}=1 to silence.",
        str(whole_plan(root)),
        *(["What differs in FSDP2:\n" + "\n".join(notes)] if notes else []),
        f"The same without the wrapper, before the optimizer is built:\n\n{code}",
        "As plain torch code: print(shardkit.fsdp1.translate_fsdp1(model, ...).plan.to_python()), with the same "
        "arguments. For the rest of the program: python -m shardkit audit FILES",
    ]
    return "\n\n".join(parts)


def whole_plan(root: nn.Module) -> ShardingPlan:
    """Return the plan of a model that was wrapped in one call, or by hand in several: then theirs together. Pure."""
    places = _places(root)
    if len(places) == 1:
        return record_of(root).translation.plan
    plans = {fqn: _renamed(fqn, record) for fqn, record in places.items()}
    units = [unit for plan in plans.values() for unit in plan.units]
    units.sort(key=lambda unit: -max(len(fqn.split(".")) if fqn else 0 for fqn in unit.modules))  # children first
    # An outer call sees parameters that an inner one has sharded: the inner one knows what they were.
    specs = {spec.fqn: spec for plan in plans.values() for spec in plan.params}
    owned = {name for unit in units for name in unit.params}
    return dataclasses.replace(
        plans[""],
        units=tuple(units),
        params=tuple(specs.values()),
        ignored=tuple(name for name in plans[""].ignored if name not in owned),
        notes=tuple(note for plan in plans.values() for note in plan.notes if WRAPPED not in note),
    )


def replacement(root: nn.Module) -> Iterator[str]:
    """Yield lines of code that shard the plain model in the same way, without the drop-in."""
    arguments = dict(_spelled(root, record_of(root)))
    kinds = [name for name in ("CPUOffload", "MixedPrecision") if any(name in text for text in arguments.values())]
    yield from ["import torch"] * any("torch." in text for text in arguments.values())
    yield f"from shardkit.fsdp1 import {', '.join([*kinds, 'shard_like_fsdp1'])}"
    yield ""
    if arguments.get("auto_wrap_policy") == "auto_wrap_policy":
        named = [(name, each) for name, each in root.named_modules() if is_wrapper(each) and each is not root]
        yield f"# auto_wrap_policy is one that wraps {listing([without_wrappers(name) for name, _ in named], MOST)}"
    keywords = [f"{name}={text}" for name, text in arguments.items()]
    if len(keywords) < 2:
        yield f"model = shard_like_fsdp1({', '.join(['model', *keywords])})"
    else:
        yield from ["model = shard_like_fsdp1(", "    model,", *(f"    {keyword}," for keyword in keywords), ")"]


def _places(root: nn.Module) -> dict[str, Record]:
    """Return the wrappers that constructor calls made, by their FQN in the plain model, parents first."""
    named = {id(module): name for name, module in root.named_modules()}
    made = [wrapper for wrapper in wrappers_of(root) if wrapper is root or record_of(wrapper).top]
    return {without_wrappers(named[id(wrapper)]): record_of(wrapper) for wrapper in made}


def _renamed(prefix: str, record: Record) -> ShardingPlan:
    """Return the plan of one constructor call, by the names of the whole model, where it may not be the root."""

    def whole(fqn: str) -> str:
        return without_wrappers(f"{prefix}.{fqn}".strip("."))

    plan = record.translation.plan
    units = []
    for unit in plan.units:
        if unit.modules == ("",):  # which the call took for the root
            casts = record.casts_inputs if record.mixed_precision.param_dtype else unit.mp_policy.cast_forward_inputs
            policy = dataclasses.replace(unit.mp_policy, cast_forward_inputs=casts)
            unit = dataclasses.replace(unit, reshard_after_forward=record.reshards, mp_policy=policy)
        modules, owned = tuple(map(whole, unit.modules)), tuple(map(whole, unit.params))
        units.append(dataclasses.replace(unit, modules=modules, params=owned))
    params = tuple(spec._replace(fqn=whole(spec.fqn)) for spec in plan.params)
    return dataclasses.replace(plan, units=tuple(units), params=params, ignored=tuple(map(whole, plan.ignored)))


def _spelled(root: nn.Module, record: Record) -> Iterator[tuple[str, str]]:
    """FSDP1's arguments that have an effect, as source; what cannot be written is the name of the argument."""
    given = record.given.changed()
    is_wrapped = any(wrapper is not root for wrapper in wrappers_of(root))
    for name in (item.name for item in dataclasses.fields(record.given)):
        if (name in given or (name == "auto_wrap_policy" and is_wrapped)) and name not in _WITHOUT_EFFECT:
            yield name, _source(root, name, given.get(name))


def _source(root: nn.Module, name: str, value: Any) -> str:
    if name == "sharding_strategy":
        return f'"{parse_strategy(value).name}"'
    if name == "auto_wrap_policy":
        return _classes(root) or name
    if name == "device_id":
        device = device_of(value)
        return 'torch.device("cpu")' if device and device.type == "cpu" else "torch.accelerator.current_device_index()"
    if isinstance(value, (CPUOffload, MixedPrecision)):
        return _dataclass(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _modules(root, value) or name
    return repr(value) if isinstance(value, (bool, int, str)) else name


def _dataclass(value: CPUOffload | MixedPrecision) -> str:
    items = [item for item in dataclasses.fields(value) if not item.name.startswith("_")]
    changed = {item.name: getattr(value, item.name) for item in items if getattr(value, item.name) != item.default}
    return f"{type(value).__name__}({', '.join(f'{name}={given!r}' for name, given in changed.items())})"


def _modules(root: nn.Module, values: Any) -> str | None:
    """Return a list of modules or parameters of the model; None where they are many, or not in it."""
    found = {id(param): f"model.get_parameter({quoted(name)})" for name, param in root.named_parameters()}
    for name, module in root.named_modules():
        found[id(module)] = f"model.get_submodule({quoted(without_wrappers(name))})"
    spelled = [found.get(id(value)) for value in values]
    return f"[{', '.join(map(str, spelled))}]" if None not in spelled and len(spelled) <= MOST else None


def _classes(root: nn.Module) -> str | None:
    """Return the policy as a set of classes; None where they would wrap other modules, or with other arguments."""
    wrapped = {inner_of(wrapper) for wrapper in wrappers_of(root) if wrapper is not root}
    classes = {_class_of(module) for module in wrapped}
    would = {module for module in inner_of(root).modules() if isinstance(module, tuple(classes))} - {inner_of(root)}
    alike = would == wrapped and not _has_own_arguments(_places(root))
    return f"{{{', '.join(sorted(cls.__name__ for cls in classes))}}}" if alike else None


def _class_of(module: nn.Module) -> type[nn.Module]:
    """Return its class as the program knows it: ``fully_shard`` makes a subclass of FSDPModule and of that."""
    kinds = (cls for cls in type(module).__mro__ if issubclass(cls, nn.Module))
    return next(cls for cls in kinds if not issubclass(cls, FSDPModule))


def _has_own_arguments(places: Mapping[str, Record]) -> bool:
    """Return whether a CustomPolicy, or wrapping by hand, gave some modules other arguments than the root."""
    changed = [record.given.changed() | {"auto_wrap_policy": None} for record in places.values()]
    by_policy = any(own for record in places.values() for own in record.translation.wrapped.values())
    return by_policy or any(each != changed[0] for each in changed)
