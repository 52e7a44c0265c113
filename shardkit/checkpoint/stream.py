"""The full tensors of a sharded model one after the other, by its own names or the hub's: for inference engines."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Literal

import torch
from torch import Tensor, nn

from shardkit.checkpoint.pretrained import plan_export
from shardkit.errors import ShardkitError, message
from shardkit.ranks import groups_of, together
from shardkit.state.boxes import BUCKET, gather, model_group
from shardkit.state.model import checked_state, first_names


def named_full_tensors(
    model: nn.Module,
    *,
    names: Literal["model", "hub"] = "model",
    bucket_bytes: int = BUCKET,
    rank0_only: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name, full tensor)`` for all parameters and persistent buffers, for example to an inference engine.

    The tensors are copies, in the model's order. Besides what was yielded, one bucket is held, or what one conversion
    takes and makes, such as the experts of a layer. **Collective**, once a bucket: every rank must iterate to the end,
    or stop at the same tensor.

    Args:
        model: any module, sharded or not; for ``names="hub"`` of transformers 5 or peft.
        names: ``"model"``: FQNs, tied tensors under each of theirs. ``"hub"``: the names and the tensors of the files
            that the plain model's ``save_pretrained`` would write, as vLLM and SGLang expect them; each once.
        bucket_bytes: how much is gathered at once, by default 64 MiB; a larger tensor is gathered by itself.
        rank0_only: yield only on the lowest rank that holds a part of the model; the others must iterate too.
        device: the device of the tensors; None: where they are gathered, the device of the shards or of their mesh.
        dtype: of floating-point tensors; None keeps theirs. Cast before sending if that is smaller.

    Raises:
        ShardkitError: on every rank, as :func:`full_state_dict` and, for ``names="hub"``, :func:`save_pretrained`.

    Example:
        >>> for name, tensor in named_full_tensors(model, names="hub", dtype=torch.bfloat16):
        ...     engine.update_weight(name, tensor)
    """
    with together(groups_of(model), call="named_full_tensors") as poll:
        if names not in ("model", "hub"):
            raise ShardkitError(message("names", f'must be "model" or "hub", got {names!r}', "", ""))
        same = {"names": names, "bucket_bytes": bucket_bytes, "rank0_only": rank0_only, "dtype": str(dtype)}
        state = checked_state(model, poll, **same)
        export = plan_export(model) if names == "hub" else None
    tensors, labels = state.tensors, dict[str, list[str]]()
    if export is not None:
        tensors, labels = export.sources, {name: [new] for name, new in export.renamed.items()}
    for name, first in first_names(tensors).items() if export is None else ():
        labels.setdefault(first, []).append(name)
    groups = [] if export is None else export.groups
    group_of = {name: each for each in groups for name, _ in each[0].sources}
    members = {name: [source for source, _ in group.sources] for name, (group, _) in group_of.items()}
    order = dict.fromkeys(chain.from_iterable(members.get(name, [name]) for name in tensors))
    listed = [(name, tensors[name]) for name in order if name in labels or name in group_of]
    ranks, home = model_group(tensors.values()), None if device is None else torch.device(device)
    waiting: dict[str, Tensor] = {}
    for name, full in gather(
        listed, ranks, everywhere=not rank0_only, dtype=dtype, device=home, bucket_bytes=bucket_bytes
    ):
        waiting[name] = full
        del full
        if name in labels:
            yield from zip(labels[name], [waiting.pop(name)] * len(labels[name]), strict=True)
        elif waiting.keys() == set(members[name]):
            group, new = group_of[name]
            made = group.convert(next(iter(new)), waiting.pop)
            while made:
                target = next(iter(made))
                yield new[target], made.pop(target).contiguous()
