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
from shardkit.errors import PlanError, ShardkitError
from shardkit.sequence.batch import ADVICE, Attention, current, running
from shardkit.sequence.heads import Heads, deal, exchange, to_heads

# From a part's position ids to the whole's: flash attention reads documents from them, also in a
# checkpointed block.
_positions: Any = WeakIdKeyDictionary()
_MaskFunction: TypeAlias = Callable[..., Any]
_OWN_LOSS = 'Compute it from the logits and labels = part.pop("labels").'


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
        configs: dict[int, Any] = {}
        for module in decoder.modules():
            config: Any = getattr(module, "config", None)
            if hasattr(config, "_attn_implementation"):
                configs[id(config)] = config
        for config in configs.values():
            name = config._attn_implementation
            # A dict with the key "" sets it without the configs inside.
            undo.callback(setattr, config, "_attn_implementation", {"": name})
            config._attn_implementation = {"": _register(name)}
        undo.callback(setattr, inner, "loss_function", inner.loss_function)
        inner.loss_function = functools.partial(_loss, inner.loss_function)
        enter = functools.partial(_enter, attention)
        handles = [
            model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
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
        raise ShardkitError(
            f"{type(module).__name__} has the config of a model that is split. Give each model its "
            "own config, since split_sequence changes it."
        )
    if query.shape[2] != key.shape[2]:
        raise PlanError(
            f"{type(module).__name__} has {query.shape[2]} queries that attend to {key.shape[2]} "
            "keys. Queries and keys must be the same tokens, so no cross-attention and no cache. "
            f"{ADVICE}"
        )
    group = attention.group
    rank = dist.get_rank(group)
    total = query.shape[1]
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
    raise PlanError(
        f"attention gets {name} of shape {tuple(given.shape)}. Of its tensors only position_ids "
        f"and those of one value for each head can be passed on. {ADVICE}"
    )


@contextmanager
def _share_of_heads(module: nn.Module, total: int, heads: Heads, rank: int) -> Iterator[None]:
    """Show the module's attributes and per-head parameters as for this rank's heads."""
    params: dict[str, Any] = module._parameters
    before = dict(params)
    for name, param in before.items():
        if param is not None and param.shape == (total,):
            params[name] = param.narrow(0, rank * heads.queries, heads.queries)
    groups: Any = getattr(module, "num_key_value_groups", None)
    if groups is not None:
        module.num_key_value_groups = heads.queries // heads.keys  # type: ignore[assignment]
    try:
        yield
    finally:
        params.update(before)
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
    raise PlanError(
        f"{type(module).__name__} has no eager_attention_forward in the file that defines it. "
        'Call model.set_attn_implementation("sdpa") first.'
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
        if mask is not None:
            mask = mask.to(device, torch.bool)
        kwargs["attention_mask"] = mask
        mask_function = _of_whole(mask_function, mask)
        # As transformers, which ignores positions where there is a mask.
        if whole.packs and whole.positions is not None and mask is None:
            positions = whole.positions.to(device).expand(rows, -1)
            # Causal attention never sees the padding behind a row, so a row of one document needs
            # no mask.
            if masking_utils.find_packed_sequence_indices(positions[:, : whole.length]) is not None:
                mask_function = _within_documents(mask_function, positions)
                kwargs["allow_is_causal_skip"] = False
    # A mask function takes the whole for these lengths; there is no cache, so no offset.
    kwargs |= {"q_length": whole.padded, "kv_length": whole.padded, "q_offset": 0, "kv_offset": 0}
    mask = make(mask_function=mask_function, **kwargs)
    # In eager attention a row without any key attends to all of them, but not to split's padding.
    if isinstance(mask, Tensor) and mask.is_floating_point():
        mask[..., : whole.length, whole.length :] = -torch.inf
    return mask


def _within_documents(function: _MaskFunction, positions: Tensor) -> _MaskFunction:
    """Return a mask function that also masks the tokens of other documents."""
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
    maker = _maker(function)
    variables = inspect.getclosurevars(function).nonlocals
    if maker in ("and_masks", "or_masks"):
        rebuilt = []
        for inner in variables["mask_functions"]:
            if _maker(inner) != "packed_sequence_mask_function":
                rebuilt.append(_of_whole(inner, mask))
        combine: Callable[..., _MaskFunction] = getattr(masking_utils, maker)
        return rebuilt[0] if len(rebuilt) == 1 else combine(*rebuilt)
    if maker == "remap_positions_for_packed_sequence":
        return _of_whole(variables["mask_function"], mask)
    if maker == "chunked_overlay":
        padding = torch.zeros_like(variables["left_padding"])
        if mask is not None:
            padding = (mask.cumsum(-1) == 0).sum(-1)
        return masking_utils.chunked_overlay(variables["chunk_size"], padding)
    if maker is None or any(isinstance(value, Tensor) for value in variables.values()):
        name = getattr(function, "__qualname__", function)
        raise PlanError(
            f"mask {name} masks attention by what a rank knows of its own part. A mask must follow "
            "from positions, attention_mask and position_ids, so that each rank can rebuild it. "
            f"{ADVICE}"
        )
    return function


def _maker(function: _MaskFunction) -> str | None:
    """Return the name of transformers' function that made a mask function, or that it is."""
    own = getattr(function, "__module__", None) == masking_utils.__name__
    return function.__qualname__.partition(".")[0] if own else None


# What a forward gets.


def _enter(
    attention: Attention, model: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Take ``sequence`` out of a part, before FSDP unshards anything."""
    kwargs = dict(kwargs)
    current.set(kwargs.pop("sequence", None))
    whole = running()
    if kwargs.get("past_key_values") is not None:
        raise ShardkitError(
            "past_key_values was given to a split model. Keys and values of earlier tokens are "
            "not split. Generate with a model that is not split."
        )
    if isinstance(kwargs.get("position_ids"), Tensor):
        _positions[kwargs["position_ids"]] = whole.positions
    attention.dtypes.clear()
    return args, kwargs | {"use_cache": False}


def _leave(model: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
    whole = current.get()
    current.set(None)
    if output is None or whole is None or kwargs.get("labels") is None:
        return  # forward failed, or computed no loss
    if not whole.loss_called:
        raise ShardkitError(
            f"labels are shifted by {type(model).__name__} itself. A loss that shifts labels "
            f"itself shifts those of a part twice. {_OWN_LOSS}"
        )


def _add_highest(
    rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Show the whole's highest position to rotary embeddings whose frequencies depend on it, behind
    those of a part.
    """
    highest = running().highest

    def with_highest(x: Any) -> Any:
        if highest is None or not isinstance(x, Tensor) or x.is_floating_point():
            return x
        return torch.cat([x, highest.to(x).expand(*x.shape[:-1], 1)], -1)

    args = tuple(with_highest(x) for x in args)
    return args, {name: with_highest(x) for name, x in kwargs.items()}


def _drop_highest(rotary: nn.Module, args: Any, output: Any) -> Any:
    if running().highest is None:
        return output
    return tree_map(lambda x: x[..., :-1, :], output)


def _cut(
    attention: Attention, decoder: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Cut what the text model of a vision-language model gets, when images are in their places."""
    whole = running()
    ranks, rank = attention.group.size(), dist.get_rank(attention.group)
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

    dims_of_tokens = {"position_ids": (-1,), "inputs_embeds": (1,)}
    for name, given in kwargs.items():
        if not isinstance(given, Tensor):
            continue
        for dim in dims_of_tokens.get(name, (1, 0)):
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
        raise ShardkitError(
            "loss_function must take shifted labels as shift_labels, got "
            f"{getattr(loss, '__name__', loss)}. {_OWN_LOSS}"
        )
    if kwargs.get("num_items_in_batch") is None and whole.targets is not None:
        kwargs["num_items_in_batch"] = whole.targets.clamp(min=torch.finfo(torch.float32).tiny)
    return loss(**kwargs | {"shift_labels": kwargs["labels"]})
