"""Modules that will be units, with their settings, however they were chosen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias, get_type_hints

import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from typing_extensions import TypedDict

from shardkit.errors import PlanError, listing
from shardkit.planning.tree import ModelTree, ModuleNode, in_order, is_called


class Overrides(TypedDict, total=False):
    """The settings that a rule may give its units, each replacing the model's."""

    reshard_after_forward: bool | int
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    checkpoint_activations: bool | str | Callable[..., Any]
    compile: bool
    mesh: str
    may_skip: bool


_TYPES = get_type_hints(Overrides) | {"checkpoint_activations": object}  # policy_name checks it


@dataclass(frozen=True)
class Selection:
    """Modules that will be one unit."""

    modules: tuple[ModuleNode, ...]  # several are torch's list form
    overrides: Overrides = field(default_factory=Overrides)  # settings that a rule asked for
    reshard: bool = True  # what reshard_after_forward=None means for it
    float32: bool = False  # its modules compute in it, and cast what they are given and return


@dataclass(frozen=True)
class UnitRule:
    """What ``by_class``, ``by_name``, ``by_size`` and ``group`` return; made by them only."""

    text: str  # the call that made it, for messages
    select: Callable[[ModelTree, Set[ModuleNode]], list[Selection]]  # given what is taken


Rule: TypeAlias = UnitRule | type[nn.Module] | str | Callable[[str, nn.Module], "bool | Overrides"]


def large_modules(tree: ModelTree, min_numel: int, taken: Set[ModuleNode]) -> list[ModuleNode]:
    """Return the innermost modules with that many elements in no other one of them."""
    left: dict[ModuleNode, int] = defaultdict(int)  # elements at or below a module that no unit has
    large = []
    for node in tree.post_order:
        if node not in taken:
            left[node] = node.numel - sum(
                child.numel - left[child] for child in tree.children(node)
            )
            if node is not tree.root and left[node] >= min_numel and is_called(node):
                left[node] = 0
                large.append(node)
    return in_order(large)


def check_settings(rule: str, settings: Mapping[str, Any]) -> None:
    """Raise PlanError for an unknown setting or a value of another type than torch's.

    ``rule`` is the text of the rule that has them, "" for the whole model's. None is the default.
    """
    unknown = settings.keys() - _TYPES.keys()
    if unknown:
        raise PlanError(
            f"{rule} has an unknown setting, {listing(sorted(unknown))}. A unit's settings are "
            f"{listing(_TYPES)}."
        )
    for name, value in settings.items():
        if value is not None and not isinstance(value, _TYPES[name]):
            where = f"{name} of {rule}" if rule else name
            raise PlanError(f"{where} must be {_TYPES[name]}, got {value!r}.")
    policy_name(settings.get("checkpoint_activations"))


def policy_name(value: object) -> bool | str:
    """Return ``checkpoint_activations`` as a plan has it: a policy by its name,
    as ranks compare.
    """
    if callable(value):
        module = getattr(value, "__module__", "")
        value = f"{module}:{getattr(value, '__qualname__', '<locals>')}"
    if value in (None, False, True):
        return bool(value)
    if isinstance(value, str) and (value == "selective" or (":" in value and "<" not in value)):
        return value
    raise PlanError(
        f'checkpoint_activations must be True, False, "selective" or a policy, got {value!r}. A '
        "plan stores the name of a policy, and each rank imports it. Define the policy at the top "
        "of a module."
    )
