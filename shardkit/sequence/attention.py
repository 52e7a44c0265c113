"""Ulysses in transformers' registries: an attention and a mask function for each implementation it wraps.

An attention function gets all tokens of this rank's heads, and a mask of all tokens, which each rank rebuilds.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from shardkit.errors import PlanError, ShardkitError, message
from shardkit.sequence.batch import Attention, Call, current, running
from shardkit.sequence.exchange import Heads, deal, exchange, to_heads

PREFIX = "ulysses_"
# From a part's position ids to the whole's: flash attention reads documents from them, also in a checkpointed block.
positions: Any = WeakIdKeyDictionary()
MaskFunction: TypeAlias = Callable[..., Any]


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
    for base in type(module).__mro__:  # FSDP2's class is the first
        modeling = sys.modules.get(base.__module__)
        registry, eager = (
            getattr(modeling, name, None) for name in ("ALL_ATTENTION_FUNCTIONS", "eager_attention_forward")
        )
        if registry is not None and (eager is not None or inner != "eager"):
            return registry.get_interface(inner, eager)(module, *args, **kwargs)  # type: ignore[no-any-return]
    problem = "has no eager_attention_forward in the file that defines it"
    raise PlanError(message(type(module).__name__, problem, "", 'Call model.set_attn_implementation("sdpa") first'))


# Masks.


def mask_of_whole(make: Callable[..., Any], *, q_length: int, mask_function: MaskFunction, **kwargs: Any) -> Any:
    """Return the mask of all tokens where transformers asks ``make`` for that of a part."""
    whole = running()
    if q_length != whole.padded:  # else the model saw all tokens when it made the mask
        device, rows = kwargs["device"], kwargs["batch_size"]
        mask = whole.mask
        if mask is None and "allow_is_bidirectional_skip" in kwargs and whole.padded > whole.length:
            mask = torch.arange(whole.padded).expand(rows, -1) < whole.length
        kwargs["attention_mask"] = mask = None if mask is None else mask.to(device, torch.bool)
        whole.packs = _packs(mask_function) if whole.packs is None else whole.packs
        mask_function = _of_whole(mask_function, mask)
        if whole.packs and whole.positions is not None and mask is None:  # as transformers, which ignores one of both
            positions = whole.positions.to(device).expand(rows, -1)
            # Causal attention never sees the padding behind a row, so a row of one document needs no mask.
            if masking_utils.find_packed_sequence_indices(positions[:, : whole.length]) is not None:
                mask_function = _apart(mask_function, positions)
                kwargs["allow_is_causal_skip"] = False
    # A mask function takes the whole for these lengths; there is no cache, so no offset.
    kwargs |= {"q_length": whole.padded, "kv_length": whole.padded, "q_offset": 0, "kv_offset": 0}
    return make(mask_function=mask_function, **kwargs)


def _apart(function: MaskFunction, positions: Tensor) -> MaskFunction:
    """Return a mask function that keeps documents apart too."""
    documents: Any = masking_utils.find_packed_sequence_indices(positions)
    combine = getattr(masking_utils, "packed_sequence_compatibility_function", None)
    if combine is not None:
        return combine(function, positions, documents)  # type: ignore[no-any-return]
    # transformers 5.20, the newest for Python 3.10
    return masking_utils.and_masks(function, masking_utils.packed_sequence_mask_function(documents))


def _of_whole(function: MaskFunction, mask: Tensor | None) -> MaskFunction:
    """Return a mask function of transformers with what it holds of a part replaced by the whole's, or left out.

    Raises:
        PlanError: it is not one of transformers' own, or holds tensors that only the model knows.
    """
    maker, held = _maker(function), inspect.getclosurevars(function).nonlocals
    if maker in ("and_masks", "or_masks"):
        inside = [each for each in held["mask_functions"] if _maker(each) != "packed_sequence_mask_function"]
        rebuilt = [_of_whole(each, mask) for each in inside]
        combine: Callable[..., MaskFunction] = getattr(masking_utils, maker)
        return rebuilt[0] if len(rebuilt) == 1 else combine(*rebuilt)
    if maker == "remap_positions_for_packed_sequence":
        return _of_whole(held["mask_function"], mask)
    if maker == "chunked_overlay":
        padding = torch.zeros_like(held["left_padding"]) if mask is None else (mask.cumsum(-1) == 0).sum(-1)
        return masking_utils.chunked_overlay(held["chunk_size"], padding)
    if maker is None or any(isinstance(value, Tensor) for value in held.values()):
        problem = f"{getattr(function, '__qualname__', function)} masks attention by what a rank knows of its own part"
        rule = "A mask must follow from positions, attention_mask and position_ids, so that each rank can rebuild it"
        raise PlanError(message("mask", problem, rule, "Do not split this model's sequences"))
    return function


def _packs(function: MaskFunction) -> bool:
    if _maker(function) not in ("and_masks", "or_masks"):
        return _maker(function) == "packed_sequence_mask_function"
    return any(map(_packs, inspect.getclosurevars(function).nonlocals["mask_functions"]))


def _maker(function: MaskFunction) -> str | None:
    own = getattr(function, "__module__", None) == masking_utils.__name__
    return function.__qualname__.partition(".")[0] if own else None
