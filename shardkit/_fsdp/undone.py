"""FSDP modules whose hooks do nothing, for full parameters; and what they hold gathered, for measured memory.

Private names of torch 2.13 to 2.15, like the rest of ``_fsdp``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

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


def gathered_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return the flat buffers that parameters are gathered into, with empty storages where resharded. Local, pure.

    memory: those resharded over fewer ranks too. Between two all-gathers torch 2.13 to 2.15 have no public way to them.
    """
    params = [param for unit in fsdp_units(model) for param in unit.fsdp_params]
    kept = [getattr(param, "_sharded_post_forward_param_data", None) for param in params]  # set by the first forward
    return [tensor for param in params for tensor in param.all_gather_outputs] + [t for t in kept if t is not None]
