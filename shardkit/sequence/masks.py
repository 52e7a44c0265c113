"""The masks of all tokens, rebuilt by each rank where transformers makes that of a part."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from shardkit.errors import PlanError, message
from shardkit.sequence.batch import running

MaskFunction = Callable[..., Any]


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
