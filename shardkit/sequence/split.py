"""Split the sequences of transformers models over ranks, in place."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardkit.errors import ShardkitError, message
from shardkit.ranks import collective_device

if TYPE_CHECKING:  # transformers is needed when a model is split only
    from shardkit.sequence.attention import Attention

# The tensors of a batch with a value for each token, and what padding gets; padded position ids count from 0.
PADDING = {
    **dict.fromkeys(("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "mm_token_type_ids"), 0),
    **dict.fromkeys(("labels", "shift_labels"), -100),
    "position_ids": 0,
}


def split_sequence(model: nn.Module, mesh: DeviceMesh) -> SplitSequence:
    """Let each rank of ``mesh`` compute a part of every sequence, in place, by exchanging heads for tokens (Ulysses).

    For models of transformers whose attention goes through its registry, alone or inside of another module (PEFT),
    with sdpa or eager attention; flash and flex attention take the same path, and are untested. A module's own method
    ``_attn(query, key, value, mask)`` serves too. Vision-language models split the text; each rank encodes all images.
    The model must be sharded over these ranks too, since gradients are summed by FSDP's reduction.

    **Collective** over all ranks of the model. Two short forwards without gradients, one whole and one split, compare
    logits, so a model that mixes tokens elsewhere than in attention is refused. Each forward of the split model then
    runs four all-to-alls an attention layer, and each backward four more, or eight where the layer is recomputed.

    Args:
        model: sharded, with its weights loaded; in a fake world, for estimates, as it is.
        mesh: one axis, such as ``training_mesh(sp=2)["sp"]``. Its size must divide the number of query heads; key
            heads may be fewer than ranks.

    Returns:
        What splits batches.

    Raises:
        PlanError: the model cannot be split: it has layers that mix tokens otherwise (Mamba, linear attention,
            convolutions), a mask that cannot be rebuilt, or too few heads; or it is not sharded over these ranks. The
            model is unchanged.
    """
    from shardkit.sequence import fit, hooks, probe
    from shardkit.sequence.attention import Attention

    group = fit.group_of(mesh)
    inner = fit.pretrained(model)
    fit.check(model, inner, group)

    config = fit.text_config(inner)
    pad = getattr(config, "pad_token_id", None) or 0
    attention = Attention(group, pad, config is inner.config, fit.takes_positions(inner))
    sequence = SplitSequence(attention)
    probe.check(model, inner.config, sequence, partial(hooks.attach, model, inner, attention))
    return sequence


class SplitSequence:
    """Splits batches for a model that :func:`split_sequence` has changed.

    Attributes:
        group: the ranks that share each sequence.
        attention: what was found of the model.
    """

    def __init__(self, attention: Attention) -> None:
        self.group, self.attention = attention.group, attention
        self._ranks, self._rank = self.group.size(), dist.get_rank(self.group)

    def split(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of ``batch``, for ``model(**part)``; pure.

        Sequences are padded at the end to a multiple of the ranks, labels are shifted by one, so that those of a part
        are of the same tokens as its logits, and both are cut. The part of a vision-language model keeps whole
        inputs, which the model cuts when images are in their places.

        **Collective** over the group: one all-reduce of 48 bytes, on the CPU if the group has a backend there, which
        compares the ranks' batches. Split before moving a batch to an accelerator.

        Args:
            batch: the whole batch, equal on all ranks of the group: ``input_ids`` or ``inputs_embeds``, and any of
                ``attention_mask`` (batch, tokens), ``position_ids`` (which begin anew with each packed document),
                ``labels`` as for the model itself, ``shift_labels``. What has no value for each token stays as it is.

        Returns:
            A dict of the same keys, ``position_ids``, and ``sequence``, which tells attention of the whole batch.
            Compute the loss from logits and ``part.pop("labels")`` as from any batch; or let the model do it: the
            mean of its ``loss`` over the ranks is that of the whole batch.

        Raises:
            ShardkitError: the batches differ, the attention mask has not two dims, or a tensor that this function
                does not know has a value for each token: use :meth:`cut`.
        """
        from shardkit.sequence.whole import Whole, pad

        inputs = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
        length = inputs.shape[1]
        self._check_batch(batch, inputs)
        by = -length % self._ranks
        full = {name: value for name, value in batch.items() if value is not None}
        attention = self.attention
        if attention.cuts_inputs and attention.takes_positions and "position_ids" not in full:
            full["position_ids"] = attention.place(inputs, full.get("attention_mask"), attention.pad)
        if "labels" in full:
            full["labels"] = pad(full["labels"][:, 1:], 1, 1, PADDING["labels"])
        full = {name: pad(x, by, _dim(name), PADDING[name]) if name in PADDING else x for name, x in full.items()}
        ids = full.get("position_ids")
        if by and ids is not None:
            ids[..., length:] = torch.arange(by, device=ids.device)  # a document of its own
        labels = full.get("labels")
        targets = None if labels is None else (labels != PADDING["labels"]).sum() / self._ranks
        positions = ids if ids is None or ids.ndim == 2 else ids[0] if len(ids) == 4 else None
        packs = attention.packs if batch.get("position_ids") is not None else False
        highest = None if ids is None else ids.max()
        whole = Whole(length, length + by, positions, full.get("attention_mask"), targets, highest, packs)
        cut = set(PADDING) if attention.cuts_inputs else {"labels", "shift_labels"}
        part = {name: self._part(x, _dim(name)) if name in cut else x for name, x in full.items()}
        return part | {"sequence": whole}

    def cut(self, x: Tensor, dim: int = 1, value: float = 0) -> Tensor:
        """Return this rank's part of any tensor with a value for each token, such as weights of the loss; local, pure.

        Args:
            x: of the whole batch. Shift it yourself if it goes with labels.
            dim: of the tokens.
            value: for padding.
        """
        from shardkit.sequence.whole import pad

        return self._part(pad(x, -x.shape[dim] % self._ranks, dim, value), dim)

    @torch.no_grad()
    def gather(self, part: Tensor, dim: int = 1) -> Tensor:
        """Return the parts of all ranks in order along ``dim``, with padding; without gradients. Collective.

        For evaluation and scoring: ``sequence.gather(log_probs)[:, :length]``.
        """
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self._ranks)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim)

    @property
    def layers(self) -> list[str]:
        """FQNs of the attention modules that the last forward ran, in order, for ``plan.collectives``."""
        return [call.layer for call in self.attention.calls]

    def traffic(self, tokens: int) -> int:
        """Return the bytes that each rank sends in one forward's all-to-alls, four for each of :attr:`layers`; local.

        A layer sends ``(ranks - 1) / ranks * tokens / ranks`` times the elements of a token's query, key, value and
        output, with keys and values repeated where their heads are fewer than ranks. A backward costs as much, and a
        recomputed forward once more.

        Args:
            tokens: of the whole batch with padding: rows times a multiple of the ranks.
        """
        sizes = sum(call.elements * call.dtype.itemsize for call in self.attention.calls)
        return sizes * tokens * (self._ranks - 1) // self._ranks**2

    def _part(self, x: Tensor, dim: int) -> Tensor:
        return x.chunk(self._ranks, dim)[self._rank].contiguous()

    def _check_batch(self, batch: Mapping[str, Any], inputs: Tensor) -> None:
        """Raise on all ranks if a rank's batch cannot be split, or is not the others'."""
        problem = _unknown(batch, inputs.shape[:2])
        content = inputs.detach().flatten(1).sum(1).mul(torch.arange(1, len(inputs) + 1, device=inputs.device)).sum()
        content = content.double().nan_to_num(0, 0, 0).clamp(-(2**53), 2**53)  # int(nan) raises, on this rank alone
        code = [*inputs.shape[:2], int(bool(problem)), int(content)]
        highest = torch.tensor([*code, *(-x for x in code)], device=collective_device(self.group))
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.group)
        if problem:
            raise ShardkitError(problem)
        if highest[:4].tolist() != (-highest[4:]).tolist():
            shown = f"its inputs, {tuple(inputs.shape[:2])} here, are not the same on all ranks that share a sequence"
            rule = "Each of these ranks cuts its part from the same batch"
            fix = 'Read data by mesh["dp"].get_local_rank(), as with DistributedSampler(rank=, num_replicas=)'
            raise ShardkitError(message("batch", shown, rule, fix))


def _dim(name: str) -> int:
    return -1 if name == "position_ids" else 1


def _unknown(batch: Mapping[str, Any], shape: torch.Size) -> str:
    """Return what is wrong with a batch, or nothing."""
    mask = batch.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        problem = f"of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        rule = "It must be of shape (batch, tokens); masks of pairs of tokens cannot be rebuilt"
        return message("attention_mask", problem, rule, "Pass position_ids that restart at each document")
    tensors = {name: x for name, x in batch.items() if isinstance(x, Tensor) and name not in PADDING}
    names = [name for name, x in tensors.items() if x.shape[:2] == shape]
    if not names:
        return ""
    rule = "split cannot tell whether it belongs to tokens, or to labels, which are shifted"
    fix = f'Cut it: part["{names[0]}"] = sequence.cut({names[0]})'
    return message(f"batch[{names[0]!r}]", "has a value for each token, and an unknown name", rule, fix)
