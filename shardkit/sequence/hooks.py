"""What changes in a model that is split: its attention implementation, its loss, and what it gets."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from shardkit._torch.dispatch import tree_map
from shardkit.errors import ShardkitError, message
from shardkit.sequence.attention import attend_by_method, has_method, positions, register
from shardkit.sequence.batch import Attention, current, running

_OWN_LOSS = 'Compute it from the logits and labels = part.pop("labels")'


def attach(model: nn.Module, inner: PreTrainedModel, attention: Attention) -> Callable[[], None]:
    """Split ``inner`` in place; return what undoes all of it."""
    # A vision-language model's text model, or the model.
    decoder: nn.Module = inner if attention.cuts_inputs else inner.get_decoder()  # type: ignore[no-untyped-call]
    with ExitStack() as undo:
        for name, module in model.named_modules():
            vars(module)["split_attention"] = attention, name
            undo.callback(vars(module).pop, "split_attention")
        found: list[Any] = [getattr(module, "config", None) for module in decoder.modules()]
        for config in {id(each): each for each in found if hasattr(each, "_attn_implementation")}.values():
            name = config._attn_implementation
            undo.callback(setattr, config, "_attn_implementation", {"": name})  # without the configs inside
            config._attn_implementation = {"": register(name)}
        undo.callback(setattr, inner, "loss_function", inner.loss_function)
        inner.loss_function = functools.partial(_loss, inner.loss_function)
        enter, cut = functools.partial(_enter, attention), functools.partial(_cut, attention)
        handles = [
            model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
            model.register_forward_hook(_leave, with_kwargs=True, always_call=True),
        ]
        if not attention.cuts_inputs:
            handles.append(decoder.register_forward_pre_hook(cut, with_kwargs=True))
        for module in decoder.modules():
            if has_method(module):
                vars(module)["_attn"] = functools.partial(attend_by_method, module)
                undo.callback(vars(module).pop, "_attn")
            if re.search("dynamic|longrope", str(getattr(module, "rope_type", ""))):
                handles.append(module.register_forward_pre_hook(_add_highest, with_kwargs=True))
                handles.append(module.register_forward_hook(_drop_highest))
        for handle in handles:
            undo.callback(handle.remove)
        return undo.pop_all().close


class Preceding(DynamicCache):
    """Tells a model without ``position_ids`` how many tokens come before those of a part, and keeps nothing."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens that come before."""
        return self.tokens

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values as they are."""
        return key_states, value_states


def _enter(attention: Attention, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Take ``sequence`` out of a part, before FSDP gathers anything."""
    kwargs = dict(kwargs)
    current.set(kwargs.pop("sequence", None))
    whole = running()
    if kwargs.get("past_key_values") is not None:
        rule, fix = "Keys and values of earlier tokens are not split", "Generate with a model that is not split"
        raise ShardkitError(message("past_key_values", "was given to a split model", rule, fix))
    if isinstance(kwargs.get("position_ids"), Tensor):
        positions[kwargs["position_ids"]] = whole.positions
    if not attention.takes_positions:
        kwargs["past_key_values"] = Preceding(whole.padded // attention.group.size() * dist.get_rank(attention.group))
    attention.calls.clear()
    return args, kwargs | {"use_cache": False}


def _add_highest(rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Show the whole's highest position to rotary embeddings whose frequencies depend on it, behind those of a part."""
    highest = running().highest

    def more(x: Any) -> Any:
        if highest is None or not isinstance(x, Tensor) or x.is_floating_point():
            return x
        return torch.cat([x, highest.to(x).expand(*x.shape[:-1], 1)], -1)

    return tuple(map(more, args)), {name: more(x) for name, x in kwargs.items()}


def _drop_highest(rotary: nn.Module, args: Any, output: Any) -> Any:
    return output if running().highest is None else tree_map(lambda x: x[..., :-1, :], output)


def _leave(model: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
    whole = current.get()
    current.set(None)
    if output is not None and whole is not None and kwargs.get("labels") is not None and not whole.loss_called:
        rule = "A loss that shifts labels itself shifts those of a part twice"
        raise ShardkitError(message("labels", f"are shifted by {type(model).__name__} itself", rule, _OWN_LOSS))


def _loss(loss: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Compute the model's loss of labels that are shifted; its mean over the ranks is the whole batch's mean."""
    whole = running()
    whole.loss_called = True
    kwargs |= dict(zip(("logits", "labels", "vocab_size"), args, strict=False))
    if "shift_labels" not in inspect.signature(loss).parameters:
        problem = f"must take shifted labels as shift_labels, got {getattr(loss, '__name__', loss)}"
        raise ShardkitError(message("loss_function", problem, "", _OWN_LOSS))
    if kwargs.get("num_items_in_batch") is None and whole.targets is not None:
        kwargs["num_items_in_batch"] = whole.targets.clamp(min=torch.finfo(torch.float32).tiny)
    return loss(**kwargs | {"shift_labels": kwargs["labels"]})


def _cut(attention: Attention, decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Cut what the text model of a vision-language model gets, when images are in their places."""
    whole, ranks, rank = running(), attention.group.size(), dist.get_rank(attention.group)
    kwargs = dict(kwargs)
    if kwargs.get("position_ids") is None:
        embeds = kwargs["inputs_embeds"]
        kwargs["position_ids"] = torch.arange(whole.padded, device=embeds.device).expand(len(embeds), -1)
    whole.highest = kwargs["position_ids"][..., : whole.length].max()

    def part(name: str, x: Any) -> Any:
        for dim in [-1] if name == "position_ids" else [1, 0] if name != "inputs_embeds" else [1]:
            if isinstance(x, Tensor) and -x.ndim <= dim < min(x.ndim, 2) and x.shape[dim] == whole.padded:
                return x.chunk(ranks, dim)[rank]
        return x

    visual = kwargs.get("visual_pos_masks")
    if visual is not None and kwargs.get("deepstack_visual_embeds") is not None:  # one row for each visual token
        here = torch.zeros_like(visual)
        here.chunk(ranks, 1)[rank].fill_(True)
        kwargs["deepstack_visual_embeds"] = [x[here[visual]] for x in kwargs["deepstack_visual_embeds"]]
    return args, {name: part(name, x) for name, x in kwargs.items()}
