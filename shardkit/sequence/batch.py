"""Batches of a split model: the part of each rank, and what it has to know of the whole."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardkit.errors import ShardkitError
from shardkit.ranks import check_equal

ADVICE = "Do not split this model's sequences; shorten them, or checkpoint its blocks."
# The tensors of a batch with a value for each token, and what padding gets; padded position ids
# count from 0.
PADDING = {
    "input_ids": 0,
    "inputs_embeds": 0,
    "attention_mask": 0,
    "token_type_ids": 0,
    "mm_token_type_ids": 0,
    "position_ids": 0,
    "labels": -100,
    "shift_labels": -100,
}


@dataclass
class Attention:
    """What the modules of a split model share."""

    group: dist.ProcessGroup  # the ranks that share a sequence
    # Whether batches are cut, or by the model's text part, when images are in their places.
    cuts_inputs: bool
    # Whether masks keep documents apart where position ids begin anew; gpt-oss's do not.
    packs: bool = True
    dtypes: set[torch.dtype] = field(default_factory=set)  # of attention in the last forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Attention:
        return self  # a copy of the model is split as the model


@dataclass
class Whole:
    """The batch that a part was cut from; ``part["sequence"]``."""

    length: int  # tokens of each sequence, without the padding that makes the parts equal
    padded: int  # with it; a multiple of the ranks
    # position ids of all tokens, (batch, padded); None if the text model makes them
    positions: Tensor | None
    mask: Tensor | None  # the attention mask of all tokens, (batch, padded); None if there was none
    # labels of all ranks that count in the loss, divided by the number of ranks
    targets: Tensor | None
    highest: Tensor | None  # the highest position id of all tokens
    packs: bool  # as of ``Attention``
    loss_called: bool = False  # whether the model's own loss went through ``loss_function``

    def to(self, *args: Any, **kwargs: Any) -> Whole:
        """Return a copy on another device, as for a tensor; so a loop may move each value of a
        part.
        """
        moved: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                moved[name] = value.to(*args, **kwargs)
        return replace(self, **moved)


current: ContextVar[Whole | None] = ContextVar("whole", default=None)  # of the forward that runs


def running() -> Whole:
    """Return the whole batch of the forward that runs; ShardkitError if the forward did not get a
    part.
    """
    whole = current.get()
    if whole is None:
        raise ShardkitError(
            "batch is not from sequence.split. A model whose sequences are split needs its "
            "'sequence'. Call model(**sequence.split(batch))."
        )
    return whole


class SplitSequence:
    """Splits batches for a model that :func:`split_sequence` has changed; ``group`` are the ranks
    of each sequence.
    """

    def __init__(self, attention: Attention) -> None:
        self.group, self.attention = attention.group, attention
        self._ranks, self._rank = self.group.size(), dist.get_rank(self.group)

    def split(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of ``batch``, for ``model(**part)``; pure.

        Sequences are padded at the end to a multiple of the ranks, labels are shifted by one, so
        that those of a part are of the same tokens as its logits, and both are cut. The part of a
        vision-language model keeps whole inputs, which the model cuts when images are in their
        places.

        **Collective** over the group: one all-reduce of 24 bytes, on the CPU if the group has a
        backend there, which compares the ranks' batches. Split before moving a batch to an
        accelerator.

        Args:
            batch: the whole batch, equal on all ranks of the group: ``input_ids`` or
                ``inputs_embeds``, and any of ``attention_mask`` (batch, tokens), ``position_ids``
                (which begin anew with each packed document), ``labels`` as for the model itself,
                ``shift_labels``. What has no value for each token stays as it is.

        Returns:
            A dict of the same keys, ``position_ids``, and ``sequence``, which tells attention of
            the whole batch. Compute the loss from logits and ``part.pop("labels")`` as from any
            batch; or let the model do it: the mean of its ``loss`` over the ranks is that of the
            whole batch.

        Raises:
            ShardkitError: the batches differ, the attention mask has not two dims, or a tensor that
                this function does not know has a value for each token: use :meth:`cut`.
        """
        full = {name: value for name, value in batch.items() if value is not None}
        inputs = full["input_ids"] if "input_ids" in full else full["inputs_embeds"]
        self._check(full, inputs.shape[:2])
        length = inputs.shape[1]
        added = -length % self._ranks
        if self.attention.cuts_inputs and "position_ids" not in full:
            positions = torch.arange(length, device=inputs.device)
            full["position_ids"] = positions.expand(len(inputs), -1)
        if "labels" in full:
            full["labels"] = pad(full["labels"][:, 1:], 1, 1, PADDING["labels"])
        for name, value in PADDING.items():
            if name in full:
                full[name] = pad(full[name], added, _dim(name), value)
        ids: Tensor | None = full.get("position_ids")
        if added and ids is not None:
            ids[..., length:] = torch.arange(added, device=ids.device)  # a document of its own
        whole = Whole(
            length=length,
            padded=length + added,
            positions=_of_text(ids),
            mask=full.get("attention_mask"),
            targets=None,
            highest=None if ids is None else ids.max(),
            packs=self.attention.packs,
        )
        if "labels" in full:
            whole.targets = (full["labels"] != PADDING["labels"]).sum() / self._ranks
        cut = set(PADDING) if self.attention.cuts_inputs else {"labels", "shift_labels"}
        for name in cut & set(full):
            full[name] = self._part(full[name], _dim(name))
        return full | {"sequence": whole}

    def cut(self, x: Tensor, dim: int = 1, value: float = 0) -> Tensor:
        """Return this rank's part of any tensor with a value for each token, such as weights of the
        loss; local, pure.

        Args:
            x: of the whole batch. Shift it yourself if it goes with labels.
            dim: of the tokens.
            value: for padding.
        """
        return self._part(pad(x, -x.shape[dim] % self._ranks, dim, value), dim)

    @torch.no_grad()
    def gather(self, part: Tensor, dim: int = 1) -> Tensor:
        """Return the parts of all ranks in order along ``dim``, with padding; without gradients.
        Collective.

        For evaluation and scoring: ``sequence.gather(log_probs)[:, :length]``.
        """
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self._ranks)]
        dist.all_gather(parts, part, group=self.group)
        return torch.cat(parts, dim)

    def _part(self, x: Tensor, dim: int) -> Tensor:
        return x.chunk(self._ranks, dim)[self._rank].contiguous()

    def _check(self, batch: Mapping[str, Any], shape: torch.Size) -> None:
        """Raise on all ranks if a rank's batch cannot be split, or is not the others'."""
        problem = ""
        values = {}
        for name, x in batch.items():
            if not isinstance(x, Tensor):
                continue
            values[name] = _digest(x)
            if not problem and name not in PADDING and x.shape[:2] == shape:
                problem = (
                    f"batch[{name!r}] has a value for each token, and an unknown name. split "
                    "cannot tell whether it belongs to tokens, or to labels, which are shifted. "
                    f'Cut it: part["{name}"] = sequence.cut({name}).'
                )
        mask = batch.get("attention_mask")
        if mask is not None and getattr(mask, "ndim", 0) != 2:
            problem = (
                "attention_mask must have the shape (batch, tokens), got "
                f"{getattr(mask, 'shape', type(mask).__name__)}. Masks of pairs of tokens cannot "
                "be rebuilt. Pass position_ids that restart at each document."
            )
        fix = (
            'Read data by mesh["dp"].get_local_rank(), as with DistributedSampler(rank=, '
            "num_replicas=)"
        )
        check_equal({**values, "problem": problem}, [self.group], fix=fix)
        if problem:
            raise ShardkitError(problem)


def _digest(x: Tensor) -> str:
    data = x.detach().cpu().contiguous()
    content = ""
    if data.nbytes:
        memory = (ctypes.c_char * data.nbytes).from_address(data.data_ptr())
        content = hashlib.sha256(memory).hexdigest()[:16]
    return f"{x.dtype} {tuple(x.shape)} {content}"


def _dim(name: str) -> int:
    return -1 if name == "position_ids" else 1


def _of_text(ids: Tensor | None) -> Tensor | None:
    """Return position ids of (batch, tokens); None if they are only of time, height and width."""
    if ids is None or ids.ndim == 2:
        return ids
    return ids[0] if len(ids) == 4 else None


def pad(x: Tensor, by: int, dim: int, value: float) -> Tensor:
    """Return ``x`` with ``by`` more elements of ``value`` at the end of ``dim``."""
    if not by:
        return x
    return F.pad(x.movedim(dim, -1), (0, by), value=value).movedim(-1, dim)
