"""What changes in a model of transformers that is split: its attention and masks, its loss, and
what it gets.

An attention function gets all tokens of this rank's heads, and a mask of all tokens, which each
rank rebuilds. Both are in transformers' registries, for each implementation that is wrapped.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, PreTrainedModel, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from shardkit._torch.dispatch import tree_map
from shardkit.errors import PlanError, ShardkitError, message
from shardkit.sequence.batch import ADVICE, Attention, current, running
from shardkit.sequence.exchange import Heads, deal, exchange, to_heads

# From a part's position ids to the whole's: flash attention reads documents from them, also in a
# checkpointed block.
_positions: Any = WeakIdKeyDictionary()
_MaskFunction: TypeAlias = Callable[..., Any]
_OWN_LOSS = 'Compute it from the logits and labels = part.pop("labels")'


def attach(model: nn.Module, inner: PreTrainedModel, attention: Attention) -> Callable[[], None]:
    """Split ``inner`` in place; return what undoes all of it."""
    # A vision-language model's text model, or the model.
    decoder: nn.Module = inner
    if not attention.cuts_inputs:
        decoder = inner.get_decoder()  # type: ignore[no-untyped-call]
    with ExitStack() as undo:
        for module in model.modules():
            vars(module)["split_attention"] = attention
            undo.callback(vars(module).pop, "split_attention")
        found: list[Any] = [getattr(module, "config", None) for module in decoder.modules()]
        for config in {
            id(each): each for each in found if hasattr(each, "_attn_implementation")
        }.values():
            name = config._attn_implementation
            # without the configs inside
            undo.callback(setattr, config, "_attn_implementation", {"": name})
            config._attn_implementation = {"": _register(name)}
        undo.callback(setattr, inner, "loss_function", inner.loss_function)
        inner.loss_function = functools.partial(_loss, inner.loss_function)
        handles = [
            model.register_forward_pre_hook(
                functools.partial(_enter, attention), with_kwargs=True, prepend=True
            ),
            model.register_forward_hook(_leave, with_kwargs=True, always_call=True),
        ]
        if not attention.cuts_inputs:
            cut = functools.partial(_cut, attention)
            handles.append(decoder.register_forward_pre_hook(cut, with_kwargs=True))
        for module in decoder.modules():
            if re.search("dynamic|longrope", str(getattr(module, "rope_type", ""))):
                handles.append(module.register_forward_pre_hook(_add_highest, with_kwargs=True))
                handles.append(module.register_forward_hook(_drop_highest))
        for handle in handles:
            undo.callback(handle.remove)
        return undo.pop_all().close


def _register(inner: str) -> str:
    """Register Ulysses around the implementation ``inner``; return the name to set. Models not
    split are unaffected.
    """
    name = "ulysses_" + inner
    AttentionInterface.register(name, functools.partial(_attend, inner))
    make = ALL_MASK_ATTENTION_FUNCTIONS[inner]
    AttentionMaskInterface.register(name, functools.partial(_mask_of_whole, make))
    return name


# Attention.


def _attend(
    inner: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend to all tokens with this rank's heads; (batch, heads, tokens, dim) to (batch, tokens,
    heads, dim).
    """
    attention: Attention | None = vars(module).get("split_attention")
    if attention is None:
        fix = "Give each model its own config, since split_sequence changes it"
        raise ShardkitError(
            message(type(module).__name__, "has the config of a model that is split", "", fix)
        )
    if query.shape[2] != key.shape[2]:
        problem = f"has {query.shape[2]} queries that attend to {key.shape[2]} keys"
        rule = "Queries and keys must be the same tokens, so no cross-attention and no cache"
        raise PlanError(message(type(module).__name__, problem, rule, ADVICE))
    group, total, rank = attention.group, query.shape[1], dist.get_rank(attention.group)
    heads = deal(total, key.shape[1], group.size())
    if "flash" not in inner:
        kwargs.pop("position_ids", None)  # others read documents from the mask
    arguments = {name: _argument(name, given, total, heads, rank) for name, given in kwargs.items()}
    attention.dtypes.add(query.dtype)
    query, key, value = to_heads(query, key, value, group, heads=1, sequence=2)
    with _share_of_heads(module, total, heads, rank):
        out, _ = _function(inner, module)(module, query, key, value, attention_mask, **arguments)
    return exchange(out, group, split=1, concat=2), None


def _argument(name: str, given: Any, total: int, heads: Heads, rank: int) -> Any:
    """Return a further argument of attention for all tokens of this rank's heads."""
    if not isinstance(given, Tensor) or not given.ndim:
        return given
    if name == "position_ids" and given in _positions:
        return _positions[given]
    if given.shape == (total,):  # one value for each head, as gpt-oss's sinks
        return given.narrow(0, rank * heads.queries, heads.queries)
    problem = f"gets {name} of shape {tuple(given.shape)}"
    rule = "Of its tensors only position_ids and those of one value for each head can be passed on"
    raise PlanError(message("attention", problem, rule, ADVICE))


@contextmanager
def _share_of_heads(module: nn.Module, total: int, heads: Heads, rank: int) -> Iterator[None]:
    """Show the module's attributes and per-head parameters as for this rank's heads."""
    own: dict[str, Any] = module._parameters
    before = {
        name: param for name, param in own.items() if param is not None and param.shape == (total,)
    }
    groups: Any = getattr(module, "num_key_value_groups", None)
    own.update(
        {
            name: param.narrow(0, rank * heads.queries, heads.queries)
            for name, param in before.items()
        }
    )
    if groups is not None:
        module.num_key_value_groups = heads.queries // heads.keys  # type: ignore[assignment]
    try:
        yield
    finally:
        own.update(before)
        if groups is not None:
            module.num_key_value_groups = groups


def _function(inner: str, module: nn.Module) -> Callable[..., Any]:
    """Return the attention function that the module would call without us; eager ones are each
    modeling file's own.
    """
    for base in type(module).__mro__:  # FSDP2's class is the first
        modeling = sys.modules.get(base.__module__)
        registry: Any = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", None)
        eager = getattr(modeling, "eager_attention_forward", None)
        if registry is not None and (eager is not None or inner != "eager"):
            return registry.get_interface(inner, eager)  # type: ignore[no-any-return]
    problem = "has no eager_attention_forward in the file that defines it"
    raise PlanError(
        message(
            type(module).__name__, problem, "", 'Call model.set_attn_implementation("sdpa") first'
        )
    )


# Masks.


def _mask_of_whole(
    make: Callable[..., Any], *, q_length: int, mask_function: _MaskFunction, **kwargs: Any
) -> Any:
    """Return the mask of all tokens where transformers asks ``make`` for that of a part."""
    whole = running()
    if q_length != whole.padded:  # else the model saw all tokens when it made the mask
        device, rows, mask = kwargs["device"], kwargs["batch_size"], whole.mask
        if mask is None and "allow_is_bidirectional_skip" in kwargs and whole.padded > whole.length:
            mask = torch.arange(whole.padded).expand(rows, -1) < whole.length
        kwargs["attention_mask"] = mask = None if mask is None else mask.to(device, torch.bool)
        mask_function = _of_whole(mask_function, mask)
        # As transformers, which ignores positions where there is a mask.
        if whole.packs and whole.positions is not None and mask is None:
            positions = whole.positions.to(device).expand(rows, -1)
            # Causal attention never sees the padding behind a row, so a row of one document needs
            # no mask.
            if masking_utils.find_packed_sequence_indices(positions[:, : whole.length]) is not None:
                mask_function = _apart(mask_function, positions)
                kwargs["allow_is_causal_skip"] = False
    # A mask function takes the whole for these lengths; there is no cache, so no offset.
    kwargs |= {"q_length": whole.padded, "kv_length": whole.padded, "q_offset": 0, "kv_offset": 0}
    made = make(mask_function=mask_function, **kwargs)
    # eager: a row without any key attends to all of them
    if isinstance(made, Tensor) and made.is_floating_point():
        made[..., : whole.length, whole.length :] = -torch.inf  # but not to what split added
    return made


def _apart(function: _MaskFunction, positions: Tensor) -> _MaskFunction:
    """Return a mask function that keeps documents apart too."""
    documents: Any = masking_utils.find_packed_sequence_indices(positions)
    combine = getattr(masking_utils, "packed_sequence_compatibility_function", None)
    if combine is not None:
        return combine(function, positions, documents)  # type: ignore[no-any-return]
    # transformers 5.20, the newest for Python 3.10
    return masking_utils.and_masks(function, masking_utils.packed_sequence_mask_function(documents))


def _of_whole(function: _MaskFunction, mask: Tensor | None) -> _MaskFunction:
    """Return a mask function of transformers with what it holds of a part replaced by the whole's,
    or left out.
    """
    maker, held = _maker(function), inspect.getclosurevars(function).nonlocals
    if maker in ("and_masks", "or_masks"):
        inside = [
            each
            for each in held["mask_functions"]
            if _maker(each) != "packed_sequence_mask_function"
        ]
        rebuilt = [_of_whole(each, mask) for each in inside]
        combine: Callable[..., _MaskFunction] = getattr(masking_utils, maker)
        return rebuilt[0] if len(rebuilt) == 1 else combine(*rebuilt)
    if maker == "remap_positions_for_packed_sequence":
        return _of_whole(held["mask_function"], mask)
    if maker == "chunked_overlay":
        padding = (
            torch.zeros_like(held["left_padding"])
            if mask is None
            else (mask.cumsum(-1) == 0).sum(-1)
        )
        return masking_utils.chunked_overlay(held["chunk_size"], padding)
    if maker is None or any(isinstance(value, Tensor) for value in held.values()):
        problem = (
            f"{getattr(function, '__qualname__', function)} masks attention by what a rank knows "
            "of its own part"
        )
        rule = (
            "A mask must follow from positions, attention_mask and position_ids, so that each "
            "rank can rebuild it"
        )
        raise PlanError(message("mask", problem, rule, ADVICE))
    return function


def _maker(function: _MaskFunction) -> str | None:
    own = getattr(function, "__module__", None) == masking_utils.__name__
    return function.__qualname__.partition(".")[0] if own else None


# What a forward gets.


def _enter(
    attention: Attention, model: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Take ``sequence`` out of a part, before FSDP gathers anything."""
    kwargs = dict(kwargs)
    current.set(kwargs.pop("sequence", None))
    whole = running()
    if kwargs.get("past_key_values") is not None:
        rule, fix = (
            "Keys and values of earlier tokens are not split",
            "Generate with a model that is not split",
        )
        raise ShardkitError(message("past_key_values", "was given to a split model", rule, fix))
    if isinstance(kwargs.get("position_ids"), Tensor):
        _positions[kwargs["position_ids"]] = whole.positions
    attention.dtypes.clear()
    return args, kwargs | {"use_cache": False}


def _leave(model: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
    whole = current.get()
    current.set(None)
    if (
        output is not None
        and whole is not None
        and kwargs.get("labels") is not None
        and not whole.loss_called
    ):
        rule = "A loss that shifts labels itself shifts those of a part twice"
        raise ShardkitError(
            message("labels", f"are shifted by {type(model).__name__} itself", rule, _OWN_LOSS)
        )


def _add_highest(
    rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Show the whole's highest position to rotary embeddings whose frequencies depend on it, behind
    those of a part.
    """
    highest = running().highest

    def more(x: Any) -> Any:
        if highest is None or not isinstance(x, Tensor) or x.is_floating_point():
            return x
        return torch.cat([x, highest.to(x).expand(*x.shape[:-1], 1)], -1)

    return tuple(map(more, args)), {name: more(x) for name, x in kwargs.items()}


def _drop_highest(rotary: nn.Module, args: Any, output: Any) -> Any:
    return output if running().highest is None else tree_map(lambda x: x[..., :-1, :], output)


def _cut(
    attention: Attention, decoder: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Cut what the text model of a vision-language model gets, when images are in their places."""
    whole, ranks, rank = running(), attention.group.size(), dist.get_rank(attention.group)
    kwargs = dict(kwargs)
    if kwargs.get("position_ids") is None:
        embeds = kwargs["inputs_embeds"]
        positions = torch.arange(whole.padded, device=embeds.device)
        kwargs["position_ids"] = positions.expand(len(embeds), -1)
    whole.highest = kwargs["position_ids"][..., : whole.length].max()

    visual = kwargs.get("visual_pos_masks")
    features = kwargs.get("deepstack_visual_embeds")
    if visual is not None and features is not None:  # one row for each visual token
        here = torch.zeros_like(visual)
        here.chunk(ranks, 1)[rank].fill_(True)
        kwargs["deepstack_visual_embeds"] = [rows[here[visual]] for rows in features]

    for name, given in kwargs.items():
        dims = {"position_ids": (-1,), "inputs_embeds": (1,)}.get(name, (1, 0))
        for dim in dims if isinstance(given, Tensor) else ():
            if -given.ndim <= dim < given.ndim and given.shape[dim] == whole.padded:
                kwargs[name] = given.chunk(ranks, dim)[rank]
                break
    return args, kwargs


def _loss(loss: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Compute the model's loss of labels that are shifted; its mean over the ranks is the whole
    batch's mean.
    """
    whole = running()
    whole.loss_called = True
    kwargs |= dict(zip(("logits", "labels", "vocab_size"), args, strict=False))
    if "shift_labels" not in inspect.signature(loss).parameters:
        problem = f"must take shifted labels as shift_labels, got {getattr(loss, '__name__', loss)}"
        raise ShardkitError(message("loss_function", problem, "", _OWN_LOSS))
    if kwargs.get("num_items_in_batch") is None and whole.targets is not None:
        kwargs["num_items_in_batch"] = whole.targets.clamp(min=torch.finfo(torch.float32).tiny)
    return loss(**kwargs | {"shift_labels": kwargs["labels"]})
