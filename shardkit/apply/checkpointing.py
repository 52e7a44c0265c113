"""Activation checkpointing of one module's forward, where the recomputation advances no buffer a second time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardkit.errors import ShardkitError, message

MADE_CALLS = "_shardkit_made_calls"  # as in runtime.skippable


def checkpointed(module: nn.Module, fqn: str, to_compile: bool) -> Callable[..., Any]:
    """Return the module's present forward, recomputed in backward instead of keeping its activations.

    Args:
        module: a recomputation works on copies of its buffers, so that running statistics advance once.
        fqn: its name, for errors.
        to_compile: it will be compiled, and has no buffers. The compiler takes no contexts, and runs eagerly with them.

    Raises:
        ShardkitError: in forward, if the module is given a key-value cache, which it would fill twice. Models of
            transformers make one in training too.
    """
    forward = module.forward
    run = functools.partial(checkpoint, forward, use_reentrant=False)
    if not to_compile:
        run = functools.partial(run, context_fn=lambda: (nullcontext(), _StateApart(module)))

    @functools.wraps(forward)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        for each in (*args, *kwargs.values()):
            if hasattr(each, "get_seq_length") and hasattr(each, "update"):
                problem = f"is checkpointed, and was called with a {type(each).__name__}"
                rule = "The recomputation in backward would append to the cache twice"
                fix = "Pass use_cache=False to the model, or set model.config.use_cache = False"
                raise ShardkitError(message(fqn, problem, rule, fix))
        return run(*args, **kwargs)

    return checked


class _StateApart(AbstractContextManager[None]):
    """Gives a module copies of its buffers, and the list of calls that ``runtime.skippable`` filled at first."""

    def __init__(self, module: nn.Module) -> None:
        self._buffers = [each._buffers for each in module.modules() if each._buffers]
        lists = [vars(each) for each in module.modules() if MADE_CALLS in vars(each)]
        self._made = [(attributes, attributes[MADE_CALLS]) for attributes in lists]

    def __enter__(self) -> None:
        self._before = [(registry, dict(registry)) for registry in self._buffers]
        self._before += [(attributes, {MADE_CALLS: attributes[MADE_CALLS]}) for attributes, _ in self._made]
        for registry in self._buffers:
            registry.update({name: each if each is None else each.clone() for name, each in registry.items()})
        for attributes, made in self._made:
            attributes[MADE_CALLS] = made

    def __exit__(self, *error: object) -> None:
        for mapping, values in self._before:
            mapping.update(values)
