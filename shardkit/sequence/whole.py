"""What a part has to know of the whole batch, and the masks of all tokens that are rebuilt from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import masking_utils

from shardkit.errors import PlanError, ShardkitError, message

MaskFunction = Callable[..., Any]


@dataclass
class Whole:
    """The batch that a part was cut from; ``part["sequence"]``.

    Attributes:
        length: tokens of each sequence, without the padding that makes the parts equal.
        padded: with it; a multiple of the ranks.
        positions: position ids of all tokens, (batch, padded); None if the model computes them.
        mask: the attention mask of all tokens, (batch, padded); None if there was none.
        targets: labels of all ranks that count in the loss, divided by the number of ranks; None without labels.
        highest: the highest position id of all tokens; None if the model has none.
        packs: whether the model's masks keep documents apart; None until a part with several shows it.
        loss_called: whether the model's own loss went through ``loss_function``.
    """

    length: int
    padded: int
    positions: Tensor | None
    mask: Tensor | None
    targets: Tensor | None
    highest: Tensor | None
    packs: bool | None
    loss_called: bool = False

    def to(self, *args: Any, **kwargs: Any) -> Whole:
        """Return a copy on another device, as for a tensor; so a loop may move each value of a part."""
        moved: dict[str, Any] = {name: x.to(*args, **kwargs) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **moved)


current: ContextVar[Whole | None] = ContextVar("whole", default=None)  # of the forward that runs


def running() -> Whole:
    """Return the whole batch of the forward that runs.

    Raises:
        ShardkitError: the forward did not get a part.
    """
    whole = current.get()
    if whole is None:
        rule = "A model whose sequences are split needs what split returns, with its entry 'sequence'"
        raise ShardkitError(message("batch", "not from sequence.split", rule, "Call model(**sequence.split(batch))"))
    return whole


def mask_of_whole(make: Callable[..., Any], *, q_length: int, mask_function: MaskFunction, **kwargs: Any) -> Any:
    """Return the mask of all tokens where transformers asks ``make`` for that of a part."""
    whole = running()
    if q_length != whole.padded:  # else the model saw all tokens when it made the mask
        device = kwargs["device"]
        mask = whole.mask
        if mask is None and "allow_is_bidirectional_skip" in kwargs and whole.padded > whole.length:
            mask = torch.arange(whole.padded).expand(kwargs["batch_size"], -1) < whole.length
        if mask is not None:
            mask = mask.to(device, torch.bool)
        kwargs["attention_mask"] = mask
        whole.packs = _packs(mask_function) if whole.packs is None else whole.packs
        mask_function = _of_whole(mask_function, mask)
        if whole.packs and whole.positions is not None and mask is None:  # as transformers, which ignores one of both
            positions = whole.positions.to(device).expand(kwargs["batch_size"], -1)
            documents = _documents(positions, whole.length)
            if documents is not None:
                if hasattr(masking_utils, "packed_sequence_compatibility_function"):
                    mask_function = masking_utils.packed_sequence_compatibility_function(
                        mask_function, positions, documents
                    )
                else:  # transformers 5.20, the newest for Python 3.10
                    apart = masking_utils.packed_sequence_mask_function(documents)
                    mask_function = masking_utils.and_masks(mask_function, apart)
                kwargs["allow_is_causal_skip"] = False
    # A mask function takes the whole for these lengths; there is no cache, so no offset.
    kwargs |= {"q_length": whole.padded, "kv_length": whole.padded, "q_offset": 0, "kv_offset": 0}
    return make(mask_function=mask_function, **kwargs)


def _documents(positions: Tensor, length: int) -> Tensor | None:
    """Return the document of each token, or None if each row is one: causal attention never sees padding behind it."""
    if masking_utils.find_packed_sequence_indices(positions[:, :length]) is None:
        return None
    found: Tensor | None = masking_utils.find_packed_sequence_indices(positions)
    return found


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


def counted(inputs: Tensor, mask: Tensor | None, first: int) -> Tensor:
    """Return position ids by place, as most models count them."""
    return torch.arange(inputs.shape[1], device=inputs.device).expand(len(inputs), -1)


def masked(inputs: Tensor, mask: Tensor | None, first: int) -> Tensor:
    """Return position ids that count what the mask shows, and are -1 for the rest, as OPT."""
    return counted(inputs, mask, first) if mask is None else mask.long().cumsum(1) * mask.long() - 1


def offset(inputs: Tensor, mask: Tensor | None, first: int) -> Tensor:
    """Return position ids after that of padding, which count tokens that are not padding, as RoBERTa."""
    real = (inputs != first).long() if inputs.ndim == 2 else torch.ones_like(inputs[..., 0], dtype=torch.long)
    return real.cumsum(1) * real + first


def pad(x: Tensor, by: int, dim: int, value: float) -> Tensor:
    """Return ``x`` with ``by`` more elements of ``value`` at the end of ``dim``."""
    if not by:
        return x
    return F.pad(x.movedim(dim, -1), (0, by), value=value).movedim(-1, dim)
