"""Deep copies of a wrapped model, which ``fully_shard`` refuses: an average of weights starts from one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit import _fsdp
from shardkit._fsdp import fsdp1 as _fsdp1
from shardkit.apply.shard import carry_out
from shardkit.fsdp1.dropin import roots
from shardkit.fsdp1.dropin.construct import put_in_place
from shardkit.fsdp1.dropin.record import Record, inner_of, is_wrapper, record_of, without_wrappers, wrappers_of
from shardkit.fsdp1.translate.notes import REDUCES_UNUSED
from shardkit.meta.shards import install
from shardkit.state.place import new_memory
from shardkit.state.routes import local_of

Wrap = Callable[[nn.Module, Record], nn.Module]


def copied(wrapper: nn.Module, memo: dict[int, Any], wrap: Wrap) -> nn.Module:
    """Return a copy of a wrapper and all below it, sharded alike, with memory of its own. Local.

    The plain modules are copied with parameters on meta, sharded as the originals were, and given the values of this
    rank's shards; so no parameter is ever whole. Gradients are not copied, as ``copy.deepcopy`` copies none.

    ``wrapper`` was constructed by itself, not by a policy; ``wrap`` makes a wrapper around what is sharded already.
    """
    roots.reshard(wrapper)
    inner = _plain(inner_of(wrapper), memo, wrap)
    record = record_of(wrapper)
    carry_out(inner, record.translation.plan, record.mesh, groups=())
    if REDUCES_UNUSED:
        _fsdp1.reduce_unused_beside_used(inner)
    _fill(inner, inner_of(wrapper))
    roots.attend_to(inner, record.strategy)
    below = [each for each in wrappers_of(wrapper) if record_of(each).translation is record.translation]
    put_in_place(inner, {memo[id(each)]: _fresh(record_of(each), memo) for each in below if each is not wrapper}, wrap)
    new = memo[id(wrapper)] = wrap(inner, _fresh(record, memo))
    return new


def _plain(module: nn.Module, memo: dict[int, Any], wrap: Wrap) -> nn.Module:
    """The copy of a module without what FSDP did to it; wrappers inside that were constructed by hand are kept."""
    if id(module) in memo:
        return memo[id(module)]  # type: ignore[no-any-return]
    if is_wrapper(module):
        if record_of(module).top:
            return copied(module, memo, wrap)
        memo[id(module)] = new = _plain(inner_of(module), memo, wrap)
        return new
    kind, attributes = _fsdp.as_it_was(module)
    new = kind.__new__(kind)
    memo[id(module)] = new
    for param in module.parameters(recurse=False):
        if isinstance(param, DTensor) and id(param) not in memo:
            memo[id(param)] = _on_meta(param)
    for child in module.children():
        _plain(child, memo, wrap)
    vars(new).update(copy.deepcopy(attributes, memo))
    return new


def _on_meta(param: nn.Parameter) -> nn.Parameter:
    """Return a parameter of the same full shape."""
    new = nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device="meta"), param.requires_grad)
    vars(new).update(vars(param))
    return new


def _fill(inner: nn.Module, original: nn.Module) -> None:
    """Gives parameters that are sharded on meta the values of the original's shards."""
    originals = {without_wrappers(name): param for name, param in original.named_parameters()}
    pairs = [(param, originals[without_wrappers(name)]) for name, param in inner.named_parameters() if param.is_meta]
    values = {id(param): own for param, own in pairs}
    targets = new_memory(inner, {id(param): param.dtype for param, _ in pairs})
    with torch.no_grad():
        for target in targets:
            assert target.value is not None, "made by new_memory"
            local_of(target.value).copy_(local_of(values[id(target.tensor)]))
    install(inner, targets)


def _fresh(record: Record, memo: dict[int, Any]) -> Record:
    """Of a wrapper that is not a root yet, nor summoned; with the original dtypes of buffers that are cast already."""
    buffers = {(memo.get(id(module), module), name): dtype for (module, name), dtype in record.buffer_dtypes.items()}
    return replace(record, root=None, summoned=False, buffer_dtypes=buffers)
