"""Activation checkpointing of one module's forward, where recomputing changes no buffer or attribute a second time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardkit._torch import version_of
from shardkit.errors import ShardkitError, message


def recomputed(module: nn.Module, fqn: str, to_compile: bool) -> Callable[..., Any]:
    """Return the module's forward, recomputed in backward instead of keeping its activations.

    The recomputation starts from the same buffers and attributes as the first forward, and what it writes to them is
    dropped: running statistics, counters and power iterations advance once. What a forward changes inside lists or in
    objects that it is given is not undone.

    Args:
        module: its present ``forward`` is what runs.
        fqn: its name, for errors.
        to_compile: it will be compiled, and has no buffers. The compiler takes no contexts, and runs eagerly with them.

    Raises:
        ShardkitError: in forward, if the module is given a key-value cache, which it would fill twice.
    """
    forward = module.forward
    settings: dict[str, Any] = {"use_reentrant": False}
    if not to_compile:
        settings["context_fn"] = functools.partial(_contexts, module)

    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            _refuse_caches(fqn, (*args, *kwargs.values()))
            return checkpoint(forward, *args, **settings, **kwargs)
        return forward(*args, **kwargs)

    return checkpointed


def _refuse_caches(fqn: str, arguments: tuple[Any, ...]) -> None:
    """Models of transformers fill a key-value cache in training too; recomputing a block would fill it twice."""
    for each in arguments:
        if hasattr(each, "get_seq_length") and hasattr(each, "update"):
            problem = f"is recomputed in backward, and was called with a {type(each).__name__}"
            rule = "A recomputed block would append to the cache twice"
            fix = "Pass use_cache=False to the model, or set model.config.use_cache = False"
            raise ShardkitError(message(fqn, problem, rule, fix))


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of the first forward and of its recomputation, which a retained graph enters several times."""
    recomputation = _Recomputation(module)
    return recomputation.first_forward(), recomputation


class _Recomputation(AbstractContextManager[None]):
    """Gives a module the buffers and attributes that a forward started from, and restores the present ones after."""

    def __init__(self, module: nn.Module) -> None:
        self._mappings = [mapping for each in module.modules() for mapping in (vars(each), each._buffers)]
        self._start = [_values(mapping) for mapping in self._mappings]
        self._buffers = {id(each): (each, version_of(each), each.detach().clone()) for each in module.buffers()}
        self._now: list[dict[str, Any]] = []

    @contextmanager
    def first_forward(self) -> Iterator[None]:
        """Run the first forward, and then keep copies only of buffers that it wrote to."""
        try:
            yield
        finally:
            for key, (buffer, before, _) in self._buffers.items():
                if version_of(buffer) == before:
                    self._buffers[key] = buffer, before, buffer

    def __enter__(self) -> None:
        self._now = [_values(mapping) for mapping in self._mappings]
        new = {key: copy.detach().clone() for key, (*_, copy) in self._buffers.items()}  # will be written to
        self._put([{name: new.get(id(value), value) for name, value in start.items()} for start in self._start])

    def __exit__(self, *error: object) -> None:
        self._put(self._now)
        self._now = []

    def _put(self, contents: list[dict[str, Any]]) -> None:
        for mapping, values in zip(self._mappings, contents, strict=True):
            for name in _values(mapping).keys() - values.keys():
                del mapping[name]
            mapping.update(values)


def _values(mapping: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name not in ("_parameters", "_buffers", "_modules")}
