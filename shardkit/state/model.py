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

from shardkit._torch import named_sharded_parameters
from shardkit._torch.dispatch import state_dict_metadata, with_state_dict_metadata
from shardkit.boxes import gather, model_group, refuse_quantized
from shardkit.errors import ShardkitError, listing
from shardkit.ranks import check_equal, check_module, groups_of, raise_on_all_ranks

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


def module_of(name: str) -> str:
    """Return the path of the module that holds a tensor of this name."""
    return name.rpartition(".")[0]


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
        state_dict = model.state_dict(keep_vars=True)
    tensors: dict[str, Tensor] = {}
    others: dict[str, object] = {}
    order = []
    for key, value in state_dict.items():
        name = clean_name(key)
        order.append(name)
        if isinstance(value, Tensor) and not is_extra(name):
            tensors[name] = value
        else:
            others[name] = value
    metadata = {
        clean_name(path): version for path, version in state_dict_metadata(state_dict).items()
    }
    return ModelState(tensors, others, tuple(order), metadata)


def trainable_state(state: ModelState) -> ModelState:
    """Return the state of trainable parameters, with the buffers and extra state of the modules
    that hold them.
    """
    trainable = [name for name, tensor in state.tensors.items() if tensor.requires_grad]
    if not trainable:
        raise ShardkitError(
            "model has no parameter that trains. trainable_only=True keeps parameters that have "
            "requires_grad. Pass trainable_only=False."
        )
    modules = {module_of(name) for name in trainable}
    tensors = {}
    for name, tensor in state.tensors.items():
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        if module_of(name) in modules and not is_frozen:
            tensors[name] = tensor
    others = {name: value for name, value in state.others.items() if module_of(name) in modules}
    order = tuple(name for name in state.order if name in tensors or name in others)
    return ModelState(tensors, others, order, state.metadata)


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return each parameter's first clean FQN, also where an unsharded one is registered in its
    place.
    """
    check_module(model)
    return {param: clean_name(name) for name, param in named_sharded_parameters(model)}


def first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return for each name the first name of its tensor."""
    first: dict[Tensor, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(tensor, name)
    return {name: first[tensor] for name, tensor in tensors.items()}


def refuse_meta(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise an error that names all tensors without values."""
    names = [name for name, tensor in tensors if tensor.is_meta]
    if names:
        raise ShardkitError(
            f"{listing(names)} on the meta device. Tensors on meta have no values. Materialize the "
            "model, or load weights into it, first."
        )


def check_scales(model: nn.Module, state: ModelState) -> None:
    """Raise for quantized weights of bitsandbytes without their scales, which ``fully_shard``
    leaves behind. Local.
    """
    lost = []
    for path, module in model.named_modules():
        weight, attributes = module._parameters.get("weight"), vars(module)
        is_8bit = getattr(weight, "dtype", None) == torch.int8
        is_8bit = is_8bit and hasattr(attributes.get("state"), "SCB")
        is_4bit = attributes.get("quant_state") is not None
        name = clean_name(f"{path}.weight".lstrip("."))
        if name not in state.tensors or not (is_8bit or is_4bit):
            continue
        # 4-bit weights have several, under their own name
        scales = (f"{name}.", f"{name.removesuffix('weight')}SCB")
        if not any(key.startswith(scales) for key in state.tensors):
            lost.append(name)
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
    groups = groups_of(model)
    with raise_on_all_ranks(groups, call="full_state_dict"):
        state = state_to_gather(model)
    same = {"rank0_only": rank0_only, "dtype": str(dtype)}
    check_equal({**same, **sharded_tensors(state)}, groups)
    ranks = model_group(state.tensors.values())
    first = first_names(state.tensors)
    named = [(name, state.tensors[name]) for name in dict.fromkeys(first.values())]
    fulls = dict(
        gather(named, ranks, everywhere=not rank0_only, dtype=dtype, device=torch.device(device))
    )
    if rank0_only and not ranks.is_root:
        return {}
    return _in_order({name: fulls[first[name]] for name in state.tensors}, state)


def state_to_gather(model: nn.Module) -> ModelState:
    """Return the state of a model; raise if it cannot be gathered. Local."""
    state = model_state(model)
    refuse_meta(state.tensors.items())
    refuse_quantized(state.tensors.items())
    check_scales(model, state)
    return state


def sharded_tensors(state: ModelState) -> dict[str, str]:
    """Describe the DTensors of a state, which must be the same on all ranks."""
    described = {}
    for name, tensor in state.tensors.items():
        if isinstance(tensor, DTensor):
            described[f"sharded tensor {name}"] = f"{tuple(tensor.shape)} {tensor.dtype}"
    return described


def _in_order(tensors: Mapping[str, Tensor], state: ModelState) -> dict[str, Tensor]:
    values = {**tensors, **state.others}
    ordered = OrderedDict((name, values[name]) for name in state.order)
    return with_state_dict_metadata(ordered, dict(state.metadata))  # type: ignore[no-any-return]
