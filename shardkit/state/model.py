"""A model's state: live tensors by clean FQN, sharded or full."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit._torch import named_sharded_parameters, state_dict_metadata, with_state_dict_metadata
from shardkit.boxes import gather, model_group, refuse_quantized
from shardkit.errors import ShardkitError, listing
from shardkit.ranks import Poll, check_module, groups_of, together

# Of torch.compile, checkpoint_wrapper, and FSDP1 and its drop-in.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")

_live: ContextVar[bool] = ContextVar("live", default=False)


@dataclass(frozen=True)
class ModelState:
    """The result of ``nn.Module.state_dict``, by clean FQN."""

    # the parameters and persistent buffers themselves; tied ones are one object
    tensors: dict[str, Tensor]
    others: dict[str, object]  # ``_extra_state``, and other values that are not tensors
    order: tuple[str, ...]  # all names
    # the versions of the modules, by which old checkpoints are upgraded
    metadata: Mapping[str, object]


def clean_name(name: str) -> str:
    """Return an FQN without the wrappers of ``torch.compile``, ``checkpoint_wrapper`` and FSDP1."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def is_extra(name: str) -> bool:
    """Whether the value of this name comes from a module's ``get_extra_state``."""
    return name.rpartition(".")[2] == "_extra_state"


@contextmanager
def live_tensors() -> Iterator[None]:
    """In this context ``state_dict()`` returns a model's own tensors: FSDP1's wrapper asks
    ``wants_live()`` first.
    """
    before = _live.set(True)
    try:
        yield
    finally:
        _live.reset(before)


wants_live = _live.get


def model_state(model: nn.Module) -> ModelState:
    """Return the state of a model. Local; reshards units that a forward left unsharded, as
    ``state_dict()`` does.

    It is ``model.state_dict(keep_vars=True)``, so its hooks have run. Ties are recognized by
    identity, since a rank's shard may have no memory.
    """
    check_module(model)
    with live_tensors():
        found = model.state_dict(keep_vars=True)
    names = [clean_name(name) for name in found]
    state = dict(zip(names, found.values(), strict=True))
    tensors = {
        n: value for n, value in state.items() if isinstance(value, Tensor) and not is_extra(n)
    }
    others = {name: value for name, value in state.items() if name not in tensors}
    metadata = {clean_name(name): entry for name, entry in state_dict_metadata(found).items()}
    return ModelState(tensors, others, tuple(names), metadata)


def trainable_state(state: ModelState) -> ModelState:
    """Return the state of trainable parameters, with the buffers and extra state of the modules
    that hold them.
    """
    kept = {name for name, tensor in state.tensors.items() if tensor.requires_grad}
    if not kept:
        raise ShardkitError(
            "model has no parameter that trains. trainable_only=True keeps parameters that have "
            "requires_grad. Pass trainable_only=False."
        )
    modules = {name.rpartition(".")[0] for name in kept}
    kept |= {name for name in state.order if name.rpartition(".")[0] in modules}
    kept -= {
        n for n, t in state.tensors.items() if isinstance(t, nn.Parameter) and not t.requires_grad
    }
    tensors = {name: tensor for name, tensor in state.tensors.items() if name in kept}
    others = {name: value for name, value in state.others.items() if name in kept}
    return ModelState(
        tensors, others, tuple(name for name in state.order if name in kept), state.metadata
    )


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return each parameter's first clean FQN, also where an unsharded one is registered in its
    place.
    """
    check_module(model)
    return {param: clean_name(name) for name, param in named_sharded_parameters(model)}


def first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return for each name the first name of its tensor."""
    first: dict[Tensor, str] = {}
    return {name: first.setdefault(tensor, name) for name, tensor in tensors.items()}


def refuse_meta(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise an error that names all tensors without values."""
    if names := [name for name, tensor in tensors if tensor.is_meta]:
        raise ShardkitError(
            f"{listing(names)} on the meta device. Tensors on meta have no values. Materialize the "
            "model, or load weights into it, first."
        )


def check_scales(model: nn.Module, state: ModelState) -> None:
    """Raise for quantized weights of bitsandbytes without their scales, which ``fully_shard``
    leaves behind. Local.
    """
    lost = []
    for prefix, module in model.named_modules():
        weight, found = module._parameters.get("weight"), vars(module)
        is_8bit = (
            weight is not None and weight.dtype == torch.int8 and hasattr(found.get("state"), "SCB")
        )
        name = clean_name(f"{prefix}.weight".lstrip("."))
        # 4-bit weights have several, under their own name
        scales = (f"{name}.", f"{name.removesuffix('weight')}SCB")
        if is_8bit or found.get("quant_state") is not None:
            lost += [name] * (
                name in state.tensors and not any(key.startswith(scales) for key in state.tensors)
            )
    if lost:
        raise ShardkitError(
            f"{listing(lost)} has no scales in state_dict(). A quantized weight is its packed "
            "values and their scales, and state_dict() has only the values. Save with "
            "trainable_only=True and quantize the base again from its own files, or shard with "
            "shard_model."
        )


# ---- for users -----------------------------------------------------------------------------------


def sharded_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the sharded state of the model by clean FQN. Local.

    It is ``model.state_dict()``, live memory, with names without wrappers such as ``_orig_mod``.
    ``torch.distributed.checkpoint`` can save it, and load into it in place. Units that a forward
    left unsharded are resharded first.
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

    Keys, order, ties (one tensor under both names), persistent buffers, ``_extra_state`` and
    version metadata are those of ``nn.Module.state_dict``, whose hooks run on the shards; names are
    without wrappers such as ``_orig_mod``. All tensors are copies; of plain parameters each rank
    gives its own.

    **Collective**. Shards go straight into place in the full tensors, in buckets of 64 MiB. Besides
    the result, at most one bucket is held, or the largest tensor if it must be moved or cast.

    Args:
        model: any module, sharded or not.
        rank0_only: give the result to the lowest rank that holds a part of the model, and ``{}`` to
            all others.
        device: the device of the result.
        dtype: of floating-point tensors in the result; None keeps theirs. Cast before sending if
            that is smaller.

    Raises:
        ShardkitError: on every rank, if a tensor is on the meta device, or is quantized.

    Examples:
        >>> state = full_state_dict(model, dtype=torch.bfloat16)
        >>> if state:
        ...     torch.save(state, "model.pt")
    """
    with together(groups_of(model), call="full_state_dict") as poll:
        state = checked_state(model, poll, rank0_only=rank0_only, dtype=str(dtype))
    ranks = model_group(state.tensors.values())
    first = first_names(state.tensors)
    listed = [(name, state.tensors[name]) for name in dict.fromkeys(first.values())]
    fulls = dict(
        gather(listed, ranks, everywhere=not rank0_only, dtype=dtype, device=torch.device(device))
    )
    if rank0_only and not ranks.is_root:
        return {}
    return _in_order({name: fulls[first[name]] for name in state.tensors}, state)


def checked_state(model: nn.Module, poll: Poll, **same: object) -> ModelState:
    """Return the state of a model; raise if it cannot be gathered. Local; arguments are compared by
    the poll.
    """
    state = model_state(model)
    sharded = {name: each for name, each in state.tensors.items() if isinstance(each, DTensor)}
    poll.same = {
        **same,
        "sharded tensors": {n: f"{tuple(t.shape)} {t.dtype}" for n, t in sharded.items()},
    }
    refuse_meta(state.tensors.items())
    refuse_quantized(state.tensors.items())
    check_scales(model, state)
    return state


def _in_order(tensors: Mapping[str, Tensor], state: ModelState) -> dict[str, Tensor]:
    values = {**tensors, **state.others}
    ordered = OrderedDict((name, values[name]) for name in state.order)
    return with_state_dict_metadata(ordered, dict(state.metadata))  # type: ignore[no-any-return]
