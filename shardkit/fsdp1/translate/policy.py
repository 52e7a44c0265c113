"""Find what FSDP1 would wrap, by calling its policies exactly as FSDP1 does, and what it would ignore.

Source: ``_auto_wrap`` and ``_recursive_wrap`` of torch 2.13, which wrap as they go; here the model does not change.
``tests/fsdp1/translate/test_fsdp1_units.py`` compares with real FSDP1 modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from shardkit._fsdp.fsdp1 import FSDP1Policy, full_precision_classes, run_fsdp1_policy
from shardkit.errors import TranslationError, message
from shardkit.planning.tree import ModelTree, ModuleNode


@dataclass(frozen=True)
class Wrapped:
    """A module that FSDP1 would wrap, other than the root.

    Attributes:
        node: its place in the ModelTree.
        arguments: those that a CustomPolicy gave for it instead of the root's.
        full_precision: whether FSDP1 runs it in float32, as it does BatchNorm under mixed precision.
    """

    node: ModuleNode
    arguments: dict[str, Any] = field(default_factory=dict)
    full_precision: bool = False


@dataclass(frozen=True)
class Ignored:
    """The modules at and below ``ignored_modules``, and the ignored parameters."""

    modules: frozenset[nn.Module] = frozenset()
    params: frozenset[nn.Parameter] = frozenset()


def wrapped_by(
    tree: ModelTree, policy: Any, mixed_precision: MixedPrecision | None, ignored: Ignored, arguments: dict[str, Any]
) -> list[Wrapped]:
    """Return the modules that FSDP1 would wrap below the root, in the model's order. Pure, except for the policy.

    ``arguments`` are FSDP1's, which are passed to a policy object. As in FSDP1, the ``_module_classes_to_ignore`` of
    mixed precision, by default BatchNorm, are wrapped separately.
    """
    if policy is None:
        return []
    classes = () if mixed_precision is None else full_precision_classes(mixed_precision)
    try:
        policy = _as_policy(policy)
        if isinstance(policy, FSDP1Policy):
            found = _ask_once(tree.root.module, policy, ignored, arguments, classes)
        else:
            apart = None if mixed_precision is None else classes
            found = {module: {} for module in _ask_each(tree.root.module, policy, ignored, apart)}
    except Exception as error:  # whatever a user's policy raises
        rule = "It is called as FSDP1 calls it: policy(module=, recurse=, nonwrapped_numel=)"
        fix = "Bind its other arguments with functools.partial"
        raise _error("auto_wrap_policy", f"{policy!r} raised {type(error).__name__}: {error}", fix, rule) from error
    wrapped = []
    for node in tree.nodes[1:]:
        if node.module in found:
            wrapped.append(Wrapped(node, found[node.module], isinstance(node.module, classes)))
    return wrapped


def _as_policy(policy: Any) -> Any:
    given = [policy] if isinstance(policy, type) else policy
    return ModuleWrapPolicy(set(given)) if isinstance(given, (set, frozenset, list, tuple)) else policy


def _ask_once(
    root: nn.Module, policy: Any, ignored: Ignored, arguments: dict[str, Any], classes: tuple[type[nn.Module], ...]
) -> dict[nn.Module, dict[str, Any]]:
    """Return the modules that a policy object names, all at once, each with the arguments that differ for it."""
    found = {
        module: {name: value for name, value in own.items() if name not in arguments or value is not arguments[name]}
        for module, own in run_fsdp1_policy(policy, root, set(ignored.modules), dict(arguments)).items()
    }
    for module in root.modules() if classes else ():
        if isinstance(module, classes) and module not in ignored.modules:
            found.setdefault(module, {})
    return found


def _ask_each(
    root: nn.Module, policy: Callable[..., bool], ignored: Ignored, apart: tuple[type[nn.Module], ...] | None
) -> Iterable[nn.Module]:
    """Return the modules that a callable wraps: it is asked whether to recurse, then on the way up whether to wrap.

    As in FSDP1, mixed precision wraps the classes ``apart`` whatever the policy says, and recurses everywhere.
    """
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        """Return how many elements of ``module`` are in a unit at or below it."""
        numel = sum(param.numel() for param in module.parameters() if param not in ignored.params)
        if not policy(module=module, recurse=True, nonwrapped_numel=numel) and apart is None:
            return 0
        taken = sum(visit(child) for child in module.children() if child not in ignored.modules)
        if module is root:
            return taken
        if policy(module=module, recurse=False, nonwrapped_numel=numel - taken) or isinstance(module, apart or ()):
            found.append(module)
            return numel
        return taken

    visit(root)
    return found


def ignored_of(ignored_modules: Any, ignored_states: Any) -> Ignored:
    """Return what FSDP1 would ignore: the modules with all below them, and their or the given parameters."""
    states = [*(ignored_modules or ()), *(ignored_states or ())]
    params = [state for state in states if isinstance(state, nn.Parameter)]
    modules = [state for state in states if not isinstance(state, nn.Parameter)]
    below = frozenset(inner for module in modules for inner in module.modules())
    return Ignored(below, frozenset(params).union(param for module in modules for param in module.parameters()))


def ignored_fqns(tree: ModelTree, ignored: Ignored) -> frozenset[str]:
    """Return the FQNs of the ignored parameters of the model."""
    return frozenset(fqn for fqn, param in tree.params.items() if param in ignored.params)


def _error(argument: str, problem: str, fix: str, rule: str = "") -> TranslationError:
    return TranslationError(message(argument, problem, rule, fix))
