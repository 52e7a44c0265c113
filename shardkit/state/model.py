"""Read a model's state: sharded, full, or tensor by tensor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from shardkit import _torch
from shardkit.errors import ShardkitError, message
from shardkit.ranks import any_true, groups_of, together
from shardkit.state.complete import check_complete
from shardkit.state.names import ModelState, first_names, model_state, refuse_meta
from shardkit.state.routes import routes_of
from shardkit.state.transfer import Want, gather_bucket, gathered, gathers


def sharded_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the sharded state of the model by clean FQN. Local.

    Like ``model.state_dict()``: live memory, not copies; DTensors where parameters are sharded; tied tensors under all
    their names, persistent buffers, ``_extra_state``. Names are without ``_orig_mod`` and
    ``_checkpoint_wrapped_module``. ``torch.distributed.checkpoint`` can save it, and load into it in place.

    Units that a forward left unsharded are resharded first, as by ``model.state_dict()``; the next forward gathers
    them again.
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
    """Return plain, full tensors by clean FQN, as ``state_dict()`` of the unsharded model.

    Works for any model: sharded by FSDP2 alone or with tensor parallelism, replicated (HSDP), with plain parameters
    (each rank's own), or without DTensors. Keys, order, ties (one tensor under both names), persistent buffers,
    ``_extra_state`` and version metadata are those of ``nn.Module.state_dict``, whose hooks run on the shards. Names
    are without ``_orig_mod`` and ``_checkpoint_wrapped_module``. All tensors are copies.

    **Collective**: every rank calls it. Shards go straight into place in the full tensors; those below 256 KiB are
    packed, in buckets of 64 MiB of full tensors. With ``rank0_only`` each rank sends its part once and receives
    nothing; in HSDP only one replica sends. Besides the result, at most one bucket is held, or the largest tensor if it
    must be moved or cast.

    Args:
        model: any module, sharded or not, evenly or not.
        rank0_only: give the result to the lowest rank that holds a part of the model, and ``{}`` to all others.
            False gives it to all ranks.
        device: the device of the result.
        dtype: of floating-point tensors in the result; None keeps theirs. Cast before sending if that makes the
            message smaller.

    Raises:
        ShardkitError: on every rank, if a tensor is on the meta device, two names differ by wrappers only, or the state
            has a quantized weight without its scales.

    Example:
        >>> state = full_state_dict(model, dtype=torch.bfloat16)
        >>> if state:
        ...     torch.save(state, "model.pt")
    """
    state = model_state(model)
    with together(groups_of(model), call="full_state_dict") as poll:
        poll.same = {"rank0_only": rank0_only, "dtype": str(dtype)}
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
    """Yield ``(fqn, full tensor)`` for all parameters and persistent buffers, for example to an inference engine.

    Tensors are gathered in buckets of 64 MiB, so no rank holds the whole model; tied tensors are yielded under every
    name. The tensors are copies. Tensors of one layout come in the model's order.

    **Collective**, once a bucket: every rank must iterate to the end. If a rank stops earlier (``break``, an error,
    ``close()``), closing its iterator notifies the others, at the end of their bucket: they raise, unless they stop in
    the same one. While the iterator is kept alive in a variable, they wait for the rank.

    Args:
        model: any module, sharded or not.
        rank0_only: yield only on the lowest rank that holds a part of the model; the others must iterate too, and get
            nothing.
        device: the device of the tensors; None: where they are gathered, the device of the shards or of their mesh.
        dtype: of floating-point tensors; None keeps theirs. Cast before sending if that is smaller.

    Raises:
        ShardkitError: on every rank, if a tensor is on the meta device; on the other ranks, if one stopped early.

    Example:
        >>> for name, tensor in named_full_tensors(model, dtype=torch.bfloat16):
        ...     engine.update_weight(name, tensor)
    """
    state, groups = model_state(model), groups_of(model)
    with together(groups, call="named_full_tensors") as poll:
        poll.same = {"rank0_only": rank0_only, "dtype": str(dtype)}
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
        if left and any_true(False, groups):
            rule = "All ranks must iterate to the end, since each sends its shards"
            fix = "Iterate to the end, or stop at the same tensor on every rank"
            raise ShardkitError(message("named_full_tensors", "another rank stopped before the end", rule, fix))


def _in_order(values: Mapping[str, object], state: ModelState) -> dict[str, Tensor]:
    ordered = OrderedDict((name, values[name]) for name in state.order)
    return _torch.with_state_dict_metadata(ordered, dict(state.metadata))  # type: ignore[no-any-return]
