"""Ulysses in transformers' registries: an attention and a mask function for each implementation it wraps."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from shardkit.errors import PlanError, ShardkitError, message
from shardkit.sequence.batch import Attention, Call, current
from shardkit.sequence.exchange import Heads, deal, exchange, to_heads
from shardkit.sequence.masks import mask_of_whole

PREFIX = "ulysses_"
# From a part's position ids to the whole's: flash attention reads documents from them, also in a checkpointed block.
positions: Any = WeakIdKeyDictionary()


def register(inner: str) -> str:
    """Register Ulysses around the implementation ``inner``; return the name to set. Models not split are unaffected."""
    name = PREFIX + inner
    AttentionInterface.register(name, functools.partial(_registered, inner))
    make = ALL_MASK_ATTENTION_FUNCTIONS[inner]
    AttentionMaskInterface.register(name, functools.partial(mask_of_whole, make))
    return name


def _registered(inner: str, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    if "position_ids" in kwargs and "flash" not in inner:
        kwargs["position_ids"] = None  # others read documents from the mask
    return _attend(functools.partial(_call, inner), module, *args, **kwargs)


def has_method(module: nn.Module) -> bool:
    """Return whether a module computes attention by a method of its own, ``_attn(query, key, value, mask)``."""
    method = getattr(type(module), "_attn", None)
    return method is not None and list(inspect.signature(method).parameters)[1:4] == ["query", "key", "value"]


def attend_by_method(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, None]:
    """Exchange heads around a module's own ``_attn(query, key, value, mask)``."""

    def inner(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return type(module)._attn(module, *args, **kwargs)[0].transpose(1, 2), None

    return _attend(inner, module, query, key, value, mask)[0].transpose(1, 2), None


def _attend(
    inner: Callable[..., tuple[Tensor, Any]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend to all tokens with this rank's heads; (batch, heads, tokens, dim) to (batch, tokens, heads, dim)."""
    if "split_attention" not in vars(module):
        fix = "Give each model its own config, since split_sequence changes it"
        raise ShardkitError(message(type(module).__name__, "has the config of a model that is split", "", fix))
    attention: Attention
    attention, fqn = vars(module)["split_attention"]
    group, total, rank = attention.group, query.shape[1], dist.get_rank(attention.group)
    if query.shape[2] != key.shape[2]:
        problem = f"has {query.shape[2]} queries that attend to {key.shape[2]} keys"
        rule = "Queries and keys must be the same tokens, so no cross-attention and no cache"
        raise PlanError(message(type(module).__name__, problem, rule, "Do not split this model's sequences"))
    heads = deal(total, key.shape[1], group.size())
    arguments = {name: _argument(name, given, total, heads, rank) for name, given in kwargs.items()}
    if current.get() is not None:  # not a checkpointed forward that runs again
        elements = total * (query.shape[-1] + value.shape[-1])  # of the output too
        elements += heads.keys * group.size() * (key.shape[-1] + value.shape[-1])
        attention.calls.append(Call(fqn, elements, query.dtype))
    query, key, value = to_heads(query, key, value, group, heads=1, sequence=2)
    with _share_of_heads(module, total, heads, rank):
        out, _ = inner(module, query, key, value, attention_mask, **arguments)
    return exchange(out, group, split=1, concat=2), None


def _argument(name: str, given: Any, total: int, heads: Heads, rank: int) -> Any:
    """Return a further argument of attention for all tokens of this rank's heads."""
    if not isinstance(given, Tensor) or not given.ndim:
        return given
    if name == "position_ids" and given in positions:
        return positions[given]
    if given.shape == (total,):  # one value for each head, as gpt-oss's sinks
        return given.narrow(0, rank * heads.queries, heads.queries)
    problem = f"gets {name} of shape {tuple(given.shape)}"
    rule = "Of its tensors only position_ids and those of one value for each head can be passed on"
    raise PlanError(message("attention", problem, rule, "Do not split this model's sequences"))


@contextmanager
def _share_of_heads(module: nn.Module, total: int, heads: Heads, rank: int) -> Iterator[None]:
    """Show the module's attributes and per-head parameters as for this rank's heads."""
    own: dict[str, Any] = module._parameters
    before = {name: param for name, param in own.items() if param is not None and param.shape == (total,)}
    groups: Any = getattr(module, "num_key_value_groups", None)
    own.update({name: param.narrow(0, rank * heads.queries, heads.queries) for name, param in before.items()})
    if groups is not None:
        module.num_key_value_groups = heads.queries // heads.keys  # type: ignore[assignment]
    try:
        yield
    finally:
        own.update(before)
        if groups is not None:
            module.num_key_value_groups = groups


def _call(inner: str, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """Call the attention function that the module would call without us; eager ones are each modeling file's own."""
    for modeling in files_of(module):
        eager = getattr(modeling, "eager_attention_forward", None)
        if uses_registry(modeling) and (eager is not None or inner != "eager"):
            return modeling.ALL_ATTENTION_FUNCTIONS.get_interface(inner, eager)(module, *args, **kwargs)  # type: ignore[no-any-return]
    problem = "has no eager_attention_forward in the file that defines it"
    raise PlanError(message(type(module).__name__, problem, "", 'Call model.set_attn_implementation("sdpa") first'))


def files_of(module: nn.Module) -> list[ModuleType]:
    """Return the Python modules of a module's class and its bases; FSDP2's class is the first."""
    return [sys.modules[base.__module__] for base in type(module).__mro__ if base.__module__ in sys.modules]


def uses_registry(modeling: ModuleType) -> bool:
    """Return whether the attention of a file goes through transformers' registry."""
    return hasattr(modeling, "ALL_ATTENTION_FUNCTIONS")
