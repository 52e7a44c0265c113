"""What changes in a model that is split: its attention implementation, its loss, and what it gets."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardkit.errors import PlanError, ShardkitError, message
from shardkit.sequence.attention import Attention, known, positions, register
from shardkit.sequence.fit import ADVICE, class_name, decoder_of, text_config
from shardkit.sequence.whole import current, running


def attach(model: nn.Module, inner: PreTrainedModel, group: dist.ProcessGroup) -> tuple[Attention, Callable[[], None]]:
    """Split ``inner`` in place; return what its attention shares, and what undoes all of it."""
    before, loss = text_config(inner)._attn_implementation, inner.loss_function
    attention = Attention(group, getattr(text_config(inner), "pad_token_id", None) or 0)
    set_attention(inner, register(before))
    inner.loss_function = functools.partial(_loss, loss)
    known.update((module, attention) for module in inner.modules())
    handles = [
        model.register_forward_pre_hook(_enter, with_kwargs=True, prepend=True),
        model.register_forward_hook(_leave, with_kwargs=True, always_call=True),
    ]
    if text_config(inner) is not inner.config:
        cut = functools.partial(_cut, group)
        handles.append(decoder_of(inner).register_forward_pre_hook(cut, with_kwargs=True))

    def undo() -> None:
        for handle in handles:
            handle.remove()
        inner.loss_function = loss
        set_attention(inner, before)

    return attention, undo


def set_attention(inner: PreTrainedModel, name: str) -> None:
    """Set the attention implementation of the part that is split.

    Raises:
        PlanError: the model does not use transformers' registry.
    """
    config = text_config(inner)
    keys = [key for key in inner.config.sub_configs if getattr(inner.config, key, None) is config]
    inner.set_attn_implementation(dict.fromkeys(keys, name) if keys else name)
    if config._attn_implementation != name:
        problem = f"its attention stays {config._attn_implementation!r}"
        rule = "Attention must go through transformers' AttentionInterface"
        raise PlanError(message(class_name(inner), problem, rule, ADVICE))


def _enter(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Take ``sequence`` out of a part, before FSDP gathers anything."""
    kwargs = dict(kwargs)
    current.set(kwargs.pop("sequence", None))
    whole = running()
    if kwargs.get("past_key_values") is not None:
        rule = "Keys and values of earlier tokens are not split"
        fix = "Generate with a model that is not split"
        raise ShardkitError(message("past_key_values", "given to a split model", rule, fix))
    if isinstance(kwargs.get("position_ids"), Tensor):
        positions[kwargs["position_ids"]] = whole.positions
    return args, kwargs | {"use_cache": False}


def _leave(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
    whole = current.get()
    current.set(None)
    if output is not None and whole is not None and kwargs.get("labels") is not None and not whole.loss_called:
        rule = "A loss that shifts labels itself shifts those of a part twice"
        fix = 'Compute it from the logits and labels = part.pop("labels")'
        raise ShardkitError(message("labels", f"{class_name(model)} computes its own loss", rule, fix))


def _loss(loss: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Compute the model's loss of labels that are shifted; its mean over the ranks is the whole batch's mean."""
    whole = running()
    whole.loss_called = True
    kwargs |= dict(zip(("logits", "labels", "vocab_size"), args, strict=False))
    if "shift_labels" not in inspect.signature(loss).parameters:
        rule = "The loss of a part must take labels that are shifted, as shift_labels"
        fix = 'Compute it from the logits and labels = part.pop("labels")'
        raise ShardkitError(message("loss_function", f"is {getattr(loss, '__name__', loss)}", rule, fix))
    if kwargs.get("num_items_in_batch") is None and whole.targets is not None:
        kwargs["num_items_in_batch"] = whole.targets.clamp(min=torch.finfo(torch.float32).tiny)
    return loss(**kwargs | {"shift_labels": kwargs["labels"]})


def _cut(
    group: dist.ProcessGroup, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cut what the text model of a vision-language model gets, when images are in their places."""
    whole, ranks, rank = running(), group.size(), dist.get_rank(group)
    kwargs = dict(kwargs)
    if kwargs.get("position_ids") is None:
        embeds = kwargs["inputs_embeds"]
        kwargs["position_ids"] = torch.arange(whole.padded, device=embeds.device).expand(len(embeds), -1)

    def part(name: str, x: Any) -> Any:
        dims = [-1] if name == "position_ids" else [1, 0] if name != "inputs_embeds" else [1]
        for dim in dims:
            if isinstance(x, Tensor) and -x.ndim <= dim < min(x.ndim, 2) and x.shape[dim] == whole.padded:
                return x.chunk(ranks, dim)[rank]
        return x

    visual = kwargs.get("visual_pos_masks")
    if visual is not None and kwargs.get("deepstack_visual_embeds") is not None:  # one row for each visual token
        here = torch.zeros_like(visual)
        here.chunk(ranks, 1)[rank].fill_(True)
        kwargs["deepstack_visual_embeds"] = [x[here[visual]] for x in kwargs["deepstack_visual_embeds"]]
    return args, {name: part(name, x) for name, x in kwargs.items()}
