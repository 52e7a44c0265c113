"""What the drop-in prints once: the plan that a program runs by, and code that does the same without the drop-in."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Iterable, Iterator
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
MOST = 4  # modules that are written out one by one

# Arguments that FSDP2 handles in its own way whatever their value, so code for FSDP2 leaves them out.
_WITHOUT_EFFECT = ("backward_prefetch", "limit_all_gathers", "use_orig_params")

logger = logging.getLogger("shardkit")
_shown = False


def announce(root: nn.Module) -> None:
    """Print to stderr how a model runs, on rank 0, once in a process, unless ``SHARDKIT_FSDP1_QUIET`` is set.

    Never raises, and never writes to stdout, which programs parse. Local.

    Args:
        root: a wrapper that has just become a root, with all that is wrapped below it.
    """
    global _shown
    if _shown or os.environ.get(QUIET, "0") not in ("", "0") or (dist.is_initialized() and dist.get_rank() != 0):
        return
    _shown = True
    try:
        print("", announcement(root), sep="\n", file=sys.stderr, flush=True)  # a progress bar may have begun a line
    except Exception:  # a program must not fail because of its announcement
        logger.debug("the drop-in's announcement failed", exc_info=True)


def announcement(root: nn.Module) -> str:
    """Return the text; pure."""
    while is_wrapper(inner := inner_of(root)):  # wrapped twice: the outer one shards nothing
        root = inner
    record = record_of(root)
    told = [note for note in record.translation.notes if note.argument.partition(".")[0] in record.given.changed()]
    notes = [f"- {note}" for note in told if note.support not in ("mapped", "implied")]
    code = "\n".join(f"    {line}".rstrip() for line in replacement(root))
    parts = [
        f"shardkit.fsdp1: FullyShardedDataParallel runs on fully_shard. Shown once; set {QUIET}=1 to silence.",
        str(whole_plan(root)),
        *(["What differs in FSDP2:\n" + "\n".join(notes)] if notes else []),
        f"The same without the wrapper, before the optimizer is built:\n\n{code}",
        "As plain torch code: print(translate_fsdp1(model, ...).plan.to_python()), from shardkit.fsdp1, with the same "
        "arguments. For the rest of the program: "
        "python -m shardkit audit FILES",
    ]
    return "\n\n".join(parts)


def whole_plan(root: nn.Module) -> ShardingPlan:
    """Return the plan of a model that was wrapped in one call, or the union of the plans of several. Pure."""
    calls = _calls(root)
    if len(calls) == 1:
        return record_of(root).translation.plan
    plans = [_with_full_names(fqn, record) for fqn, record in calls.items()]
    units = [unit for plan in plans for unit in plan.units]
    units.sort(key=lambda unit: -max(len(fqn.split(".")) if fqn else 0 for fqn in unit.modules))  # children first
    # An outer call sees parameters that an inner one has sharded: the inner one knows what they were.
    specs = {spec.fqn: spec for plan in plans for spec in plan.params}
    owned = {name for unit in units for name in unit.params}
    return dataclasses.replace(
        plans[0],
        units=tuple(units),
        params=tuple(specs.values()),
        ignored=tuple(name for name in plans[0].ignored if name not in owned),
        notes=tuple(note for plan in plans for note in plan.notes if WRAPPED not in note),
    )


def _calls(root: nn.Module) -> dict[str, Record]:
    """Return the records of constructor calls by the FQN of their module in the plain model, parents first."""
    named = {id(module): name for name, module in root.named_modules()}
    made = [wrapper for wrapper in wrappers_of(root) if wrapper is root or record_of(wrapper).top]
    return {without_wrappers(named[id(wrapper)]): record_of(wrapper) for wrapper in made}


def _with_full_names(prefix: str, record: Record) -> ShardingPlan:
    """Return the plan of one constructor call by the names of the full model, in which it may not be the root."""

    def names(fqns: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(without_wrappers(f"{prefix}.{fqn}".strip(".")) for fqn in fqns)

    plan = record.translation.plan
    units = []
    for unit in plan.units:
        if unit.modules == ("",):  # which the call took for the root
            casts = record.casts_inputs if record.mixed_precision.param_dtype else unit.mp_policy.cast_forward_inputs
            policy = dataclasses.replace(unit.mp_policy, cast_forward_inputs=casts)
            unit = dataclasses.replace(unit, reshard_after_forward=record.reshards, mp_policy=policy)
        units.append(dataclasses.replace(unit, modules=names(unit.modules), params=names(unit.params)))
    params = tuple(spec._replace(fqn=names((spec.fqn,))[0]) for spec in plan.params)
    return dataclasses.replace(plan, units=tuple(units), params=params, ignored=names(plan.ignored))


# The code that makes do without the drop-in.


def replacement(root: nn.Module) -> Iterator[str]:
    """Yield lines of code that shard the plain model in the same way, without the drop-in."""
    arguments = dict(_arguments(root))
    kinds = [name for name in ("CPUOffload", "MixedPrecision") if any(name in text for text in arguments.values())]
    yield from ["import torch"] * any("torch." in text for text in arguments.values())
    yield f"from shardkit.fsdp1 import {', '.join([*kinds, 'shard_like_fsdp1'])}"
    if arguments.get("auto_wrap_policy", "").startswith("{"):
        yield from _imports(_wrapped_classes(root))
    yield ""
    for name in (name for name, text in arguments.items() if text == name):
        yield f"{name} = ...  # the program's own{_what_it_wraps(root) if name == 'auto_wrap_policy' else ''}"
    keywords = [f"{name}={text}" for name, text in arguments.items()]
    if len(keywords) < 2:
        yield f"model = shard_like_fsdp1({', '.join(['model', *keywords])})"
    else:
        yield from ["model = shard_like_fsdp1(", "    model,", *(f"    {keyword}," for keyword in keywords), ")"]


def _arguments(root: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield FSDP1's arguments that have an effect, as source, or as their own name where they cannot be written."""
    record = record_of(root)
    given = record.given.changed()
    for name in (item.name for item in dataclasses.fields(record.given)):
        has_inner = name == "auto_wrap_policy" and len(wrappers_of(root)) > 1
        if (name in given or has_inner) and name not in _WITHOUT_EFFECT:
            yield name, _source(root, name, given.get(name)) or name


def _source(root: nn.Module, name: str, value: Any) -> str | None:
    if name == "sharding_strategy":
        return f'"{parse_strategy(value).name}"'
    if name == "auto_wrap_policy":
        return _classes(root)
    if name == "device_id":
        device = device_of(value)
        return 'torch.device("cpu")' if device and device.type == "cpu" else "torch.accelerator.current_device_index()"
    if name == "process_group" and value is dist.group.WORLD:
        return "torch.distributed.group.WORLD"
    if isinstance(value, (CPUOffload, MixedPrecision)):
        fields = [(item, getattr(value, item.name)) for item in dataclasses.fields(value) if item.name[0] != "_"]
        changed = [f"{item.name}={found!r}" for item, found in fields if found != item.default]
        return f"{type(value).__name__}({', '.join(changed)})"
    if isinstance(value, (list, tuple, set, frozenset)):
        return _members(root, value)
    return repr(value) if isinstance(value, (bool, int, str)) else None


def _members(root: nn.Module, values: Any) -> str | None:
    """Return a list of modules or parameters of the model as source; None if it is long, or not of the model."""
    found = {id(param): f"model.get_parameter({quoted(name)})" for name, param in root.named_parameters()}
    for name, module in root.named_modules():
        found[id(module)] = f"model.get_submodule({quoted(without_wrappers(name))})"
    spelled = [found.get(id(value)) for value in values]
    return f"[{', '.join(map(str, spelled))}]" if None not in spelled and len(spelled) <= MOST else None


def _what_it_wraps(root: nn.Module) -> str:
    named = [name for name, each in root.named_modules() if is_wrapper(each) and each is not root]
    return f", which wraps {listing(map(without_wrappers, named), MOST)}" if named else ""


def _wrapped_classes(root: nn.Module) -> list[type]:
    """Return the classes of the modules that are wrapped below the root, by name."""
    wrapped = dict.fromkeys(inner_of(wrapper) for wrapper in wrappers_of(root) if wrapper is not root)
    # fully_shard makes a subclass of FSDPModule and of the program's class.
    kinds = ([kind for kind in type(each).__mro__ if not issubclass(kind, FSDPModule)] for each in wrapped)
    return sorted({own[0] for own in kinds}, key=lambda cls: cls.__name__)


def _imports(classes: Iterable[type]) -> Iterator[str]:
    """Yield the imports of classes, but for those of the program itself and those inside of functions."""
    for cls in classes:
        if cls.__module__ != "__main__" and getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls:
            yield f"from {cls.__module__} import {cls.__name__}"


def _classes(root: nn.Module) -> str | None:
    """Return the policy as a set of classes; None where they would wrap other modules, or with other arguments."""
    wrapped = {inner_of(wrapper) for wrapper in wrappers_of(root) if wrapper is not root}
    classes = _wrapped_classes(root)
    would = {module for module in inner_of(root).modules() if isinstance(module, tuple(classes))} - {inner_of(root)}
    records = list(_calls(root).values())
    changed = [record.given.changed() | {"auto_wrap_policy": None} for record in records]
    by_policy = any(own for record in records for own in record.translation.wrapped.values())
    names = [cls.__name__ for cls in classes]
    if would != wrapped or by_policy or any(each != changed[0] for each in changed) or len({*names}) < len(names):
        return None
    return f"{{{', '.join(names)}}}"
