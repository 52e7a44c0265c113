"""Activation checkpointing of one module's forward, full or selective, where buffers advance
once.
"""

from __future__ import annotations

import functools
import itertools
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardkit._torch.dispatch import schema, version_of
from shardkit.errors import ShardkitError

_RECORD = "_shardkit_record"  # the attribute of a module with the list of its next forward
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::_grouped_mm", "aten::_scaled_mm")


def checkpoint_and_compile(module: nn.Module, fqn: str, policy: bool | str, compiles: bool) -> None:
    """Checkpoint the forward of a module by a policy, if there is one; compile it if asked. In
    place.

    ``forward`` is replaced, so that FQNs stay and the hooks of ``fully_shard`` stay outside: a
    recomputed forward does not unshard again, and compiled code has no graph breaks.
    """
    # torch's compiler takes checkpointing into its graph, and then advances buffers twice (2.13): a
    # module with buffers is compiled first.
    compile_first = compiles and any(True for _ in module.buffers())
    if compile_first:
        module.forward = torch.compile(module.forward)
    if policy:
        to_compile = compiles and not compile_first
        module.forward = checkpointed(module, fqn, policy, to_compile)
    if compiles and not compile_first:
        module.forward = torch.compile(module.forward)


def checkpointed(
    module: nn.Module, fqn: str, policy: bool | str = True, to_compile: bool = False
) -> Callable[..., Any]:
    """Return the module's present forward, recomputed in backward instead of keeping its
    activations.

    A recomputation starts from the same buffers as the forward, and what it writes to them is
    dropped: running statistics and counters advance once. A policy of True recomputes all, others
    are as :func:`policy_of` takes them. ``to_compile`` says that it has no buffers and will be
    compiled: the compiler takes torch's selective contexts only.
    """
    forward = module.forward
    run = functools.partial(checkpoint, forward, use_reentrant=False)
    if not to_compile:
        run = functools.partial(run, context_fn=functools.partial(_contexts, module, policy))
    elif isinstance(policy, str):
        run = functools.partial(run, context_fn=functools.partial(_selective_contexts, policy))

    @functools.wraps(forward)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        for argument in (*args, *kwargs.values()):
            if hasattr(argument, "get_seq_length") and hasattr(argument, "update"):
                raise ShardkitError(
                    f"{fqn} is checkpointed, and was called with a {type(argument).__name__}. The "
                    "recomputation in backward would append to the cache twice. Pass "
                    "use_cache=False to the model, or set model.config.use_cache = False."
                )
        return run(*args, **kwargs)

    return checked


def policy_of(name: str) -> Callable[..., CheckpointPolicy]:
    """Return what ``create_selective_checkpoint_contexts`` takes, for one forward of one module.

    ``"selective"`` saves attention and every other matrix product, as torchtitan's per-op policy
    does. Attention with dropout is not saved: what draws random numbers after it would draw others
    again. Another name is that of a policy, ``"package.module:function"``.
    """
    if name != "selective":
        return pkgutil.resolve_name(name)  # type: ignore[no-any-return]
    # Of the forward, and again of the recomputation, for which torch asks before 2.13.
    is_saved = {again: itertools.cycle([True, False]) for again in (False, True)}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saves = op.name() in _PRODUCTS and next(is_saved[context.is_recompute])
        if "attention" in op.name() or "attn" in op.name():  # torch's, and FlashAttention's own
            names = [argument.name for argument in schema(op).arguments]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            saves = not given.get("dropout_p")
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def keep_record(module: nn.Module) -> None:
    """Give each later forward of a module a list, for :func:`take_record`. In place."""
    vars(module)[_RECORD] = []


def take_record(module: nn.Module) -> list[Any]:
    """Return the list of the forward that begins: an empty one, which the forward may fill.

    In a recomputation it is that of the first forward, as that has filled it.
    """
    record: list[Any] = vars(module)[_RECORD]
    keep_record(module)
    return record


def _selective_contexts(policy: str) -> Any:
    return create_selective_checkpoint_contexts(policy_of(policy))  # type: ignore[no-untyped-call]


def _contexts(
    module: nn.Module, policy: bool | str
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of the first forward and of its recomputation, which a retained graph
    repeats.
    """
    first, again = nullcontext(), nullcontext()
    if isinstance(policy, str):
        first, again = _selective_contexts(policy)
    recomputation = _Recomputation(module, again)
    return recomputation.first_forward(first), recomputation


class _Recomputation(AbstractContextManager[None]):
    """Gives a module the buffers that its forward started from, and drops what is written to them
    again.

    Also the list of :func:`take_record`. ``inner`` is entered last.
    """

    def __init__(self, module: nn.Module, inner: AbstractContextManager[Any]) -> None:
        self._inner = inner
        # Where buffers and lists are, and what is there at the start of the forward.
        self._starts: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for submodule in module.modules():
            attributes = vars(submodule)
            if submodule._buffers:
                self._starts.append((submodule._buffers, dict(submodule._buffers)))
            if _RECORD in attributes:
                self._starts.append((attributes, {_RECORD: attributes[_RECORD]}))
        self._values = {buffer: buffer.detach().clone() for buffer in module.buffers()}
        self._versions = {buffer: version_of(buffer) for buffer in self._values}

    @contextmanager
    def first_forward(self, inner: AbstractContextManager[Any]) -> Iterator[None]:
        """Keep copies only of what the forward wrote to; batch norm's statistics have no versions,
        and are not read.
        """
        with inner:
            yield
        for buffer, version in self._versions.items():
            if version_of(buffer) == version:
                self._values[buffer] = buffer

    def __enter__(self) -> None:
        self._before = []
        fresh = {buffer: value.detach().clone() for buffer, value in self._values.items()}
        for place, start in self._starts:
            self._before.append((place, {name: place[name] for name in start}))
            for name, value in start.items():
                place[name] = fresh[value] if isinstance(value, torch.Tensor) else value
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        for place, values in self._before:
            place.update(values)
