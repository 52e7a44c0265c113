"""A model's state, full or sharded, read without changing the model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from shardkit import _torch
from shardkit.errors import ShardkitError, listing, message
from shardkit.ranks import groups_of, together
from shardkit.state.complete import check_complete
from shardkit.state.gather import Want, gathered
from shardkit.state.names import ModelState, model_state
from shardkit.state.routes import find_lead


def sharded_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The model's state as it lies on the ranks, by clean FQN. Local.

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
    beside (each rank's own), or with no DTensor at all. Same keys, order, ties (one tensor under both names),
    persistent buffers, ``_extra_state`` and version metadata as ``nn.Module.state_dict``, whose hooks run on the
    shards. Names are without ``_orig_mod`` and ``_checkpoint_wrapped_module``. All tensors are copies.

    **Collective**: every rank calls it. Shards go straight into place in the full tensors, in messages between two
    ranks; shards below 256 KiB are packed, by buckets of 64 MiB of full tensors. With ``rank0_only`` a rank sends its
    own part once and receives nothing; in HSDP only the ranks beside rank 0 send. Beyond the result, the most that is
    held is one bucket, or the largest tensor where it must be moved or cast.

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
    lead = find_lead(state.tensors.values())
    want = Want(not rank0_only, torch.device(device), dtype)
    first = first_names(state.tensors)
    fulls = dict(gathered(((name, state.tensors[name]) for name in dict.fromkeys(first.values())), lead, want))
    if rank0_only and not lead.is_here:
        return {}
    return _in_order({**{name: fulls[first[name]] for name in state.tensors}, **state.others}, state)


def first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The first name of the tensor that each name stands for."""
    first: dict[Tensor, str] = {}
    return {name: first.setdefault(tensor, name) for name, tensor in tensors.items()}


def refuse_meta(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if a tensor has no values.

    Raises:
        ShardkitError: naming all of those.
    """
    names = [name for name, tensor in tensors if tensor.is_meta]
    if names:
        rule = "State has values once the model is materialized or loaded"
        raise ShardkitError(message(listing(names), "on the meta device", rule, "Materialize or load the model first"))


def _in_order(values: Mapping[str, object], state: ModelState) -> dict[str, Tensor]:
    ordered = OrderedDict((name, values[name]) for name in state.order)
    return _torch.with_state_dict_metadata(ordered, dict(state.metadata))  # type: ignore[no-any-return]
