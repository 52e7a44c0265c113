"""An FSDP module without what FSDP2 adds to it: for full parameters, copies and measured memory.

Private names of torch 2.13 to 2.15, like the rest of ``_fsdp``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule

from shardkit._fsdp import fsdp_units, states_of
from shardkit._torch import units_of


@contextmanager
def without_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """In this context FSDP2's hooks do nothing: forwards of these modules neither gather nor reshard nor cast.

    A hook is recognized by the state that it, or what it wraps (``fully_shard([a, b])``), is bound to, and keeps its
    place. Methods registered by ``register_fsdp_forward_method`` call the state itself. After
    ``load_state_dict`` torch 2.13 to 2.15 take what a module holds for its shard (``reset_sharded_param``).
    """
    states = states_of(modules)
    found = [
        (hooks, number, hook)
        for state in states
        for module in state._modules
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        for number, hook in hooks.items()
        if _is_bound_to(hook, state)
    ]
    before = [(state, dict(vars(state))) for state in states]
    for hooks, number, _ in found:
        hooks[number] = lambda *args, **kwargs: None
    for state in states:
        state._pre_forward = lambda module, args, kwargs: (args, kwargs)
        state._post_forward = lambda module, args, output: output
    params = [param for state in states for unit in units_of(state) for param in unit.fsdp_params]
    for param in params:
        vars(param)["reset_sharded_param"] = lambda: None
    try:
        yield
    finally:
        for param in params:
            vars(param).pop("reset_sharded_param", None)  # the root lists those of inner units too
        for state, attributes in before:
            for name in ("_pre_forward", "_post_forward"):
                vars(state).pop(name)
                vars(state).update({name: attributes[name]} if name in attributes else {})
        for hooks, number, hook in found:
            hooks[number] = hook


def _is_bound_to(hook: Any, state: Any) -> bool:
    while hook is not None and getattr(hook, "__self__", None) is not state:
        hook = getattr(hook, "__wrapped__", None)
    return hook is not None


def as_it_was(module: nn.Module) -> tuple[type[nn.Module], dict[str, Any]]:
    """Return the class and the attributes that an FSDP module would have without ``fully_shard``. Local, pure.

    fsdp1: to copy a model, which FSDP2 refuses. ``fully_shard`` derives a class from ``FSDPModule`` and the module's
    own, and adds hooks, methods that gather, and two keys of ``torch.distributed._composable`` to the attributes (torch
    2.13 to 2.15). shardkit adds hooks of its own.
    """
    attributes = dict(vars(module))
    is_sharded = isinstance(module, FSDPModule)
    kind = type(module).__bases__[1] if is_sharded else type(module)
    state: Any = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
    for key in (STATE_KEY, REGISTRY_KEY) if is_sharded else ():
        attributes.pop(key, None)
    for name, value in vars(module).items() if is_sharded else ():
        if isinstance(value, MethodType) and value.__self__ is module:
            original: Any = value  # below the methods that FSDP2 and shardkit put in its place to gather
            while _defined_in(getattr(original, "__func__", None), "shardkit.", "torch.distributed.fsdp."):
                original = original.__wrapped__
            attributes[name] = original
            if getattr(original, "__func__", None) is getattr(kind, name, None):
                del attributes[name]
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        attributes[name] = OrderedDict(
            (k, hook)
            for k, hook in attributes[name].items()
            if not _is_bound_to(hook, state) and not _defined_in(_unwrapped(hook), "shardkit.")
        )
    kept = attributes["_forward_pre_hooks"].keys() | attributes["_forward_hooks"].keys()
    for name in ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
        attributes[name] = OrderedDict((k, flag) for k, flag in attributes[name].items() if k in kept)
    return kind, attributes


def _unwrapped(hook: Any) -> Any:
    return getattr(hook, "func", None) or getattr(hook, "__wrapped__", hook)


def _defined_in(function: Any, *packages: str) -> bool:
    return str(getattr(function, "__globals__", {}).get("__name__")).startswith(packages)


def gathered_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return the flat buffers that parameters are gathered into, with empty storages where resharded. Local, pure.

    memory: those resharded over fewer ranks too. Between two all-gathers torch 2.13 to 2.15 have no public way to them.
    """
    params = [param for unit in fsdp_units(model) for param in unit.fsdp_params]
    kept = [getattr(param, "_sharded_post_forward_param_data", None) for param in params]  # set by the first forward
    return [tensor for param in params for tensor in param.all_gather_outputs] + [t for t in kept if t is not None]
