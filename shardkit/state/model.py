"""Read a model's state: sharded, full, or tensor by tensor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit._torch import with_state_dict_metadata
from shardkit.ranks import groups_of, together
from shardkit.state.boxes import ModelGroup, gather, model_group
from shardkit.state.names import ModelState, check_scales, first_names, model_state, refuse_meta


def sharded_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the sharded state of the model by clean FQN. Local.

    Like ``model.state_dict()``: live memory, not copies; DTensors where parameters are sharded; tied tensors under all
    their names, persistent buffers, ``_extra_state``. Names are without ``_orig_mod`` and
    ``_checkpoint_wrapped_module``. ``torch.distributed.checkpoint`` can save it, and load into it in place.

    Units that a forward left unsharded are resharded first, as by ``model.state_dict()``; the next forward gathers
    them again.
    """
    state = model_state(model)
    return _in_order({name: tensor.detach() for name, tensor in state.tensors.items()}, state)


def full_state_dict(
    model: nn.Module,
    *,
    rank0_only: bool = True,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Return plain, full tensors by clean FQN, as ``state_dict()`` of the unsharded model.

    Works for any model, sharded on any meshes or not at all; of plain parameters each rank gives its own. Keys, order,
    ties (one tensor under both names), persistent buffers, ``_extra_state`` and version metadata are those of
    ``nn.Module.state_dict``, whose hooks run on the shards. Names are without ``_orig_mod`` and
    ``_checkpoint_wrapped_module``. All tensors are copies.

    **Collective**: every rank calls it. Shards go straight into place in the full tensors; those below 256 KiB are
    packed, in buckets of 64 MiB of full tensors. With ``rank0_only`` each rank of one replica sends its part once.
    Besides the result, at most one bucket is held, or the largest tensor if it must be moved or cast.

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
    state, ranks = _checked(model, "full_state_dict", rank0_only, dtype)
    first = first_names(state.tensors)
    listed = [(name, state.tensors[name]) for name in dict.fromkeys(first.values())]
    fulls = dict(gather(listed, ranks, everywhere=not rank0_only, dtype=dtype, device=torch.device(device)))
    if rank0_only and not ranks.is_root:
        return {}
    return _in_order({name: fulls[first[name]] for name in state.tensors}, state)


def named_full_tensors(
    model: nn.Module,
    *,
    rank0_only: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(fqn, full tensor)`` for all parameters and persistent buffers, for example to an inference engine.

    Tensors are gathered in buckets of 64 MiB, so no rank holds the whole model; tied tensors are yielded under every
    name, one after the other. The tensors are copies, in the model's order.

    **Collective**, once a bucket: every rank must iterate to the end, or stop at the same tensor.

    Args:
        model: any module, sharded or not.
        rank0_only: yield only on the lowest rank that holds a part of the model; the others must iterate too, and get
            nothing.
        device: the device of the tensors; None: where they are gathered, the device of the shards or of their mesh.
        dtype: of floating-point tensors; None keeps theirs. Cast before sending if that is smaller.

    Raises:
        ShardkitError: on every rank, as :func:`full_state_dict`.

    Example:
        >>> for name, tensor in named_full_tensors(model, dtype=torch.bfloat16):
        ...     engine.update_weight(name, tensor)
    """
    state, ranks = _checked(model, "named_full_tensors", rank0_only, dtype)
    names: dict[str, list[str]] = {}
    for name, first in first_names(state.tensors).items():
        names.setdefault(first, []).append(name)
    home = None if device is None else torch.device(device)
    listed = ((first, state.tensors[first]) for first in names)
    for first, tensor in gather(listed, ranks, everywhere=not rank0_only, dtype=dtype, device=home):
        yield from ((name, tensor) for name in names[first])


def _checked(model: nn.Module, call: str, rank0_only: bool, dtype: torch.dtype | None) -> tuple[ModelState, ModelGroup]:
    """Return the model's state and the ranks that hold it; raise if it cannot be gathered. Collective."""
    state = model_state(model)
    with together(groups_of(model), call=call) as poll:
        poll.same = {"rank0_only": rank0_only, "dtype": str(dtype)}
        sharded = {name: each for name, each in state.tensors.items() if isinstance(each, DTensor)}
        poll.same |= {"sharded tensors": {n: f"{tuple(t.shape)} {t.dtype}" for n, t in sharded.items()}}
        refuse_meta(state.tensors.items())
        check_scales(model, state)
    return state, model_group(state.tensors.values())


def _in_order(tensors: Mapping[str, Tensor], state: ModelState) -> dict[str, Tensor]:
    values = {**tensors, **state.others}
    ordered = OrderedDict((name, values[name]) for name in state.order)
    return with_state_dict_metadata(ordered, dict(state.metadata))  # type: ignore[no-any-return]
