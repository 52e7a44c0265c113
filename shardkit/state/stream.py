"""named_full_tensors: full tensors one after the other, for weight transfer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shardkit.errors import ShardkitError, message
from shardkit.ranks import Groups, any_true, groups_of, together
from shardkit.state.gather import Want, buckets, gather_bucket
from shardkit.state.model import first_names, refuse_meta
from shardkit.state.names import model_state
from shardkit.state.routes import find_lead


def named_full_tensors(
    model: nn.Module,
    *,
    rank0_only: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(fqn, full tensor)`` for all parameters and persistent buffers, such as an inference engine is given.

    Tensors are gathered in buckets of 64 MiB, so no rank ever holds the whole model; of tied tensors every name is
    yielded, with the same tensor. The tensors are copies, and yours to keep. Tensors of one layout come in the model's
    order.

    **Collective**, bucket by bucket: every rank must ask for the first tensor, and then go on to the end, in its own
    time. A rank that stops earlier (``break``, an error, ``close()``) says so when its iterator is closed, which
    waits for the others to come to the end of their bucket: they then raise, unless they stop in the same one.
    Without that, such as when the iterator is kept alive in a variable, they would wait for the rank.

    Args:
        model: any module, sharded or not.
        rank0_only: yield on the lowest rank that holds a part of the model alone; others must iterate too, and get
            nothing.
        device: where the tensors are; None: where they are gathered, the device of the shards or of their mesh.
        dtype: of floating-point tensors; None keeps each one's. Cast before sending where that is smaller.

    Raises:
        ShardkitError: on every rank, a tensor is on the meta device; on the others, a rank stopped before the end.

    Example:
        >>> for name, tensor in named_full_tensors(model, dtype=torch.bfloat16):
        ...     engine.update_weight(name, tensor)
    """
    state, groups = model_state(model), groups_of(model)
    with together(groups, call="named_full_tensors"):
        refuse_meta(state.tensors.items())
    lead = find_lead(state.tensors.values())
    want = Want(not rank0_only, None if device is None else torch.device(device), dtype)
    names: dict[str, list[str]] = {}
    for name, first in first_names(state.tensors).items():
        names.setdefault(first, []).append(name)
    left = buckets(((name, state.tensors[name]) for name in names), lead, want)
    while left:
        full = gather_bucket(left.pop(0), lead, want)
        try:
            for first, tensor in full:
                yield from ((name, tensor) for name in names[first])
        except GeneratorExit:
            if left:
                any_true(True, groups)
            raise
        del full  # before the next bucket takes its memory
        if left:
            _check_all_go_on(groups)


def _check_all_go_on(groups: Groups) -> None:
    if any_true(False, groups):
        rule = "All ranks must take all tensors, since each takes part in gathering"
        fix = "Iterate to the end, or stop at the same tensor everywhere"
        raise ShardkitError(message("named_full_tensors", "another rank stopped before the end", rule, fix))
