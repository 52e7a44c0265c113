"""One short forward whole and one split: whatever else a model does between tokens shows in the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardkit.errors import PlanError, message
from shardkit.grads import reset_after_error
from shardkit.ranks import collective_device, device_type, groups_of
from shardkit.sequence.batch import SplitSequence, counted

TOKENS = 6  # of each rank
MOST_WRONG = 0.2  # of a rank's tokens, since a router's ties may fall otherwise for a few
ADVICE = "Do not split this model's sequences; shorten them, or checkpoint its blocks"


def check(model: nn.Module, config: Any, sequence: SplitSequence, split: Callable[[], Callable[[], None]]) -> None:
    """Split a model by ``split``, and undo that if its logits change. Collective, unless values are fake.

    Finds how the model counts positions.

    Raises:
        PlanError: on all ranks, the split model's logits are others; the model is unchanged.
    """
    ranks, attention = sequence.group.size(), sequence.attention
    if ranks == 1 or dist.get_backend(sequence.group) == "fake":
        split()
        return
    batches = _batches(config, ranks, attention.takes_positions)
    expected = [_logits(model, batch) for batch in batches]
    undo = split()
    try:
        for attention.place in _places(model):
            wrong = _wrong_anywhere(model, sequence, batches[0], expected[0])
            if wrong <= MOST_WRONG:
                break
        for batch, logits in zip(batches[1:], expected[1:], strict=True):
            wrong = max(wrong, _wrong_anywhere(model, sequence, batch, logits))
        if wrong > MOST_WRONG:
            problem = f"has other logits for {wrong:.0%} of the tokens when a sequence is split"
            rule = (
                "Only attention by transformers' AttentionInterface, or by a method _attn, may combine tokens, placed "
            )
            rule += "by position_ids: no state (Mamba, linear attention), convolution, or attention inside a forward"
            raise PlanError(message(type(model).__name__, problem, rule, ADVICE))
    except BaseException:
        undo()
        raise


def _batches(config: Any, ranks: int, positions: bool) -> list[dict[str, Tensor]]:
    """Return batches of two rows, the same on all ranks, of a length that needs padding.

    In the first the second row is padded on the left; the second, for models that take ``position_ids``, is of
    documents, of which each part has two.
    """
    length, device = TOKENS * ranks - 1, device_type()
    configs = [config, *(getattr(config, name) for name in config.sub_configs if getattr(config, name, None))]
    special = {x for each in configs for name, x in vars(each).items() if "token" in name and isinstance(x, int)}
    usable = [token for token in range(min(config.get_text_config().vocab_size, 997)) if token not in special]
    ids = torch.tensor([usable[index * 7919 % len(usable)] for index in range(2 * length)], device=device)
    ids = ids.view(2, length)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    documents = torch.arange(length, device=device).remainder(TOKENS - 2).repeat(2, 1)
    batches = [{"input_ids": ids, "attention_mask": mask}, {"input_ids": ids, "position_ids": documents}]
    return batches if positions else batches[:1]


def _logits(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the first output of a forward in eval mode, without gradients. Collective.

    Raises:
        PlanError: the model does not run on the batch; the error is the same on all ranks that run the same code.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            output = model(**batch, use_cache=False)
            return output if isinstance(output, Tensor) else output[0]
    except Exception as error:
        reset_after_error(model)
        if isinstance(error, PlanError):
            raise
        problem = f"does not run on {', '.join(batch)}: {type(error).__name__}: {error}"
        raise PlanError(message("model", problem, "Splitting runs the model on a few tokens", ADVICE)) from error
    finally:
        for module in training:
            module.training = True


def _wrong_anywhere(model: nn.Module, sequence: SplitSequence, batch: dict[str, Tensor], expected: Tensor) -> float:
    """Return the largest part of a rank's tokens whose logits are not ``expected``. Collective over all ranks."""
    part = sequence.split(batch)
    found = _logits(model, part)
    if "position_ids" in batch:
        sequence.attention.packs = part["sequence"].packs
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    wrong = torch.tensor(_wrong_part(sequence, found, expected, mask))
    for group in [sequence.group, *groups_of(model)]:
        wrong = wrong.to(collective_device(group))
        dist.all_reduce(wrong, dist.ReduceOp.MAX, group=group)
    return float(wrong)


def _wrong_part(sequence: SplitSequence, found: Tensor, expected: Tensor, mask: Tensor) -> float:
    calls = sequence.attention.calls
    if not calls or found.shape[1] != TOKENS:
        return 1.0
    wanted = sequence.cut(expected)
    # Eager attention in float64 gives rows that are padded on the left nan, split or not (transformers 5).
    real = sequence.cut(mask).bool() & wanted.isfinite().all(-1)
    precision = max(torch.finfo(torch.float32).eps, *(torch.finfo(call.dtype).eps for call in calls))
    error = (found - wanted).double().norm(dim=-1) / wanted.double().norm(dim=-1)
    wrong = ~(error <= precision**0.5) & real
    if (wrong.any(0) & (wrong | ~real).all(0)).any():  # at the parts' border, in all rows
        return 1.0
    return float(wrong.sum() / real.sum().clamp(min=1))


def _places(model: nn.Module) -> list[Callable[[Tensor, Tensor | None, int], Tensor]]:
    """Return how the model may count positions where a batch has none, as its table of positions shows."""
    tables = [module for name, module in model.named_modules() if "position" in name.rpartition(".")[2]]
    if any(isinstance(table, nn.Embedding) and table.padding_idx is not None for table in tables):
        return [_offset]
    below = any(getattr(table, "offset", 0) for table in tables)  # else -1 is in no table, on some ranks only
    return [counted, _masked] if below else [counted]


def _masked(inputs: Tensor, mask: Tensor | None, first: int) -> Tensor:
    """Return position ids that count what the mask shows, and are -1 for the rest, as OPT."""
    return counted(inputs, mask, first) if mask is None else mask.long().cumsum(1) * mask.long() - 1


def _offset(inputs: Tensor, mask: Tensor | None, first: int) -> Tensor:
    """Return position ids after that of padding, which count tokens that are not padding, as RoBERTa."""
    real = (inputs != first).long() if inputs.ndim == 2 else torch.ones_like(inputs[..., 0], dtype=torch.long)
    return real.cumsum(1) * real + first
