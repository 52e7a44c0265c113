"""A model's state, sharded, full at once or tensor by tensor, read without changing the model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from shardkit import _torch
from shardkit.errors import ShardkitError, message
from shardkit.ranks import Groups, any_true, groups_of, together
from shardkit.state.complete import check_complete
from shardkit.state.names import ModelState, first_names, model_state, refuse_meta
from shardkit.state.routes import routes_of
from shardkit.state.transfer import Want, gather_bucket, gathered, gathers


def sharded_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's state as it is sharded, by clean FQN. Local.

    As ``model.state_dict()``: live memory, not copies; DTensors where parameters are sharded; tied tensors under all
    their names, persistent buffers, ``_extra_state``. Names are without ``_orig_mod`` and
    ``_checkpoint_wrapped_module``. This is what ``torch.distributed.checkpoint`` saves and loads in place.

    Units that a forward left unsharded are resharded first, as ``model.state_dict()`` does; the next forward
    gathers them again.
    """
    state = model_state(model)
    values = {**{name: tensor.detach() for name, tensor in state.tensors.items()}, **state.others}
    return _in_order(values, state)


def full_state_dict(
    model: nn.Module,
    *,
    rank0_only: bool = True,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Plain, full tensors by clean FQN: what ``state_dict()`` of the unsharded model gives.

    Works for any model: sharded by FSDP2 alone or with tensor parallelism, replicated (HSDP), with plain parameters
    (each rank's own), or with no DTensor at all. Same keys, order, ties (one tensor under both names),
    persistent buffers, ``_extra_state`` and version metadata as ``nn.Module.state_dict``, whose hooks run on the
    shards. Names are without ``_orig_mod`` and ``_checkpoint_wrapped_module``. All tensors are copies.

    **Collective**: every rank calls it. Shards go straight into place in the full tensors; those below 256 KiB are
    packed, by buckets of 64 MiB of full tensors. With ``rank0_only`` a rank sends its own part once and receives
    nothing; in HSDP only one replica sends. Beyond the result, the most that is held is one bucket, or the largest
    tensor where it must be moved or cast.

    Args:
        model: any module, sharded or not; the first dimension need not divide among ranks.
        rank0_only: give the result to the lowest rank that holds a part of the model, and ``{}`` to all others.
            False gives it to all ranks.
        device: where the result is.
        dtype: of floating-point tensors in the result; None keeps each one's. Cast before sending where that makes
            the message smaller.

    Raises:
        ShardkitError: on every rank, if a tensor is on the meta device, two names differ by wrappers only, or the state
            has a quantised weight without its scales.

    Example:
        >>> state = full_state_dict(model, dtype=torch.bfloat16)
        >>> if state:
        ...     torch.save(state, "model.pt")
    """
    state = model_state(model)
    with together(groups_of(model), call="full_state_dict"):
        refuse_meta(state.tensors.items())
        check_complete(model, state)
    routes = routes_of(state.tensors.values())
    want = Want(not rank0_only, torch.device(device), dtype)
    first = first_names(state.tensors)
    fulls = dict(gathered(((name, state.tensors[name]) for name in dict.fromkeys(first.values())), routes, want))
    if rank0_only and not routes.is_root:
        return {}
    return _in_order({**{name: fulls[first[name]] for name in state.tensors}, **state.others}, state)


def named_full_tensors(
    model: nn.Module,
    *,
    rank0_only: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(fqn, full tensor)`` for all parameters and persistent buffers, such as an inference engine is given.

    Tensors are gathered in buckets of 64 MiB, so no rank ever holds the whole model; tied tensors are yielded under
    every name. The tensors are copies, and yours to keep. Tensors of one layout come in the model's order.

    **Collective**, bucket by bucket: every rank must iterate to the end, in its own time. When a rank stops earlier
    (``break``, an error, ``close()``), closing its iterator tells the others, at the end of their bucket: they then
    raise, unless they stop in the same one. If the iterator is kept alive in a variable, they wait for the rank.

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
    routes = routes_of(state.tensors.values())
    want = Want(not rank0_only, None if device is None else torch.device(device), dtype)
    names: dict[str, list[str]] = {}
    for name, first in first_names(state.tensors).items():
        names.setdefault(first, []).append(name)
    left = gathers(((name, state.tensors[name]) for name in names), routes, want)
    while left:
        full = gather_bucket(left.pop(0), routes, want)
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


def _in_order(values: Mapping[str, object], state: ModelState) -> dict[str, Tensor]:
    ordered = OrderedDict((name, values[name]) for name in state.order)
    return _torch.with_state_dict_metadata(ordered, dict(state.metadata))  # type: ignore[no-any-return]
