"""Forward hooks on the root of a sharded model, for what FSDP2 leaves to its user.

A unit called before the whole model would become the root. A first forward under ``inference_mode``
would leave parameters that cannot be trained. An evaluation, or a frozen teacher, leaves units
unsharded: an optimizer built then would hold copies, and an average would meet them. A backward
with ``create_graph=True`` ends in SIGSEGV.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from shardkit._fsdp import (
    FSDPUnit,
    both_require_grad,
    fsdp_units,
    initialize,
    is_in_use,
    keep_requires_grad,
    not_compiled,
)
from shardkit.errors import ShardkitError, listing
from shardkit.runtime.stepping import check_awake

_Hook = Callable[..., None]
# units whose parameters stay unsharded: in the contexts ``double_backward`` and ``full_params``
_staying: list[FSDPUnit] = []


def install_hooks(root: nn.Module, methods: Iterable[str] = ()) -> None:
    """Support other entries than the root's forward, reshard after one without backward, refuse
    ``create_graph``.

    For any FSDP2 model, before its first forward. Local, in place. In a training step one hook runs
    after the root's forward, and one when backward begins.

    Args:
        root: the outermost FSDP module.
        methods: unshard like ``forward`` from now on: dotted names from ``root``, of methods of
            FSDP modules.
    """
    begin = _begin_as_root(root)
    # One item for each of ``methods`` that is running, innermost last: whether to reshard at its
    # end, because a forward without backward ended inside. Methods call forwards and each other.
    reshard_at_end: list[bool] = []
    units = fsdp_units(root)
    refuse_create_graph = functools.partial(_refuse_create_graph, units)
    # Whether the two forms of each parameter of units left unsharded required grad at the last
    # forward. Where that changes, requires_grad_() was called on one of them.
    last_flags: list[tuple[bool, bool]] = []

    @not_compiled
    def after_forward(module: nn.Module, args: object, kwargs: object, output: Any) -> None:
        # Autocast keeps converted parameters for the next forward in the same context. Their
        # gradients would then arrive through this forward's graph, after FSDP2 has reduced.
        torch.clear_autocast_cache()
        error = sys.exc_info()[1]
        if output is None and error is not None:  # forward failed
            from shardkit.runtime.advice import add_advice

            add_advice(error)
            return
        if torch.is_grad_enabled():
            flags: list[tuple[bool, bool]] = []
            for unit in units:
                if unit.is_unsharded:
                    flags += map(both_require_grad, unit.fsdp_params)
            if flags != last_flags:
                keep_requires_grad(units)
                last_flags[:] = flags
            tensors = [output] if isinstance(output, Tensor) else list(_tensors(output))
            if set(units).isdisjoint(_staying):
                for tensor in tensors:
                    if tensor.grad_fn is not None:  # a parameter would keep the hooks of all steps
                        tensor.register_hook(refuse_create_graph)  # type: ignore[no-untyped-call]
            if not tensors or tensors[0].requires_grad:
                return  # a backward follows, and reshards
            # It may follow too where only another output, an input or a parameter requires grad.
            # Where none does, as of a frozen teacher, there is none: reshard now.
            for tensor in chain(tensors, _tensors((args, kwargs)), root.parameters()):
                if tensor.requires_grad:
                    return
        if reshard_at_end:
            reshard_at_end[-1] = True
        else:
            reshard(root)

    root.register_forward_hook(after_forward, with_kwargs=True, always_call=True)
    for name in methods:
        _register(root, name, begin, after_forward, reshard_at_end)


@contextmanager
def allowing_create_graph(units: list[FSDPUnit]) -> Iterator[None]:
    """In this context the parameters of these units stay for a second backward. Local."""
    _staying.extend(units)
    try:
        yield
    finally:
        for unit in units:
            _staying.remove(unit)


def reshard(model: nn.Module) -> None:
    """Reshard every unit of the model. Local."""
    units = fsdp_units(model)
    keep_requires_grad(units)
    for unit in units:
        unit.reshard()


def _begin_as_root(root: nn.Module) -> _Hook:
    """Make ``root`` the FSDP root whichever of its units runs first; the hooks remove themselves
    then.

    Not before that forward: until then users may cast the model, add modules, or shard a module
    around it.
    """
    handles: list[Any] = []

    @not_compiled
    def begin(*_: object) -> None:
        if not handles or is_in_use(root):  # type: ignore[arg-type]
            return  # in full_params FSDP2's hooks do nothing, so this is not the first forward
        meta = [fqn for fqn, param in root.named_parameters() if param.is_meta]
        if meta:  # torch's own error would leave the root half made
            raise ShardkitError(
                f"model has {listing(meta, 6)} on meta. A forward needs values. Call "
                "shardkit.materialize(model), or load_pretrained, before the first forward."
            )
        check_awake(root.parameters())
        while handles:
            handles.pop().remove()
        is_inference = torch.is_inference_mode_enabled()
        with torch.inference_mode(False), torch.no_grad():
            initialize(root)  # type: ignore[arg-type]
            if is_inference:
                # FSDP2 keeps what it first unshards into, and inference tensors could not be
                # trained with.
                for module in root.modules():
                    if isinstance(module, FSDPModule):
                        module.unshard()
                        module.reshard()

    for module in root.modules():
        if isinstance(module, FSDPModule):
            handles.append(module.register_forward_pre_hook(begin, prepend=True))
    return begin


def _register(
    root: nn.Module, name: str, begin: _Hook, after_forward: _Hook, reshard_at_end: list[bool]
) -> None:
    """Let a method unshard, except inside of its module's own forward, and reshard after it without
    backward.
    """
    fqn, _, method = name.rpartition(".")
    module = root.get_submodule(fqn)
    original = getattr(module, method)
    register_fsdp_forward_method(module, method)
    unsharding = getattr(module, method)

    @functools.wraps(original.__func__ if isinstance(original, MethodType) else original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_in_use(self):
            return original(*args, **kwargs)
        begin()
        reshard_at_end.append(not torch.is_grad_enabled())
        try:
            output = unsharding(*args, **kwargs)
            after_forward(self, args, kwargs, output)
            return output
        finally:
            # Only after the outermost one: the others are followed by more of its work.
            if reshard_at_end.pop() and not reshard_at_end:
                reshard(root)

    setattr(module, method, MethodType(not_compiled(call, recursive=False), module))


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested dicts, lists and tuples; of no other iterable: a generator can be
    read once only.
    """
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (dict, list, tuple)):
        for item in output.values() if isinstance(output, dict) else output:
            yield from _tensors(item)


def _refuse_create_graph(units: list[FSDPUnit], gradient: Tensor) -> None:
    # enabled in a backward only with create_graph
    if torch.is_grad_enabled() and set(units).isdisjoint(_staying):
        raise ShardkitError(
            "backward cannot run with create_graph=True, as torch.func.grad, vjp and jacrev do, on "
            "a sharded model. FSDP2 frees the unsharded parameters that the graph of this backward "
            "needs. Run the forward and both backwards inside "
            "`with shardkit.double_backward(model):`."
        )
