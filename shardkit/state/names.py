"""What a model's state is: live tensors by clean FQN, in ``nn.Module.state_dict``'s order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor, nn

from shardkit import _torch
from shardkit.errors import ShardkitError, listing, message
from shardkit.ranks import check_module

# Of torch.compile, of checkpoint_wrapper, and of FSDP1 and its drop-in.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")

_live: ContextVar[bool] = ContextVar("live", default=False)


@dataclass(frozen=True)
class ModelState:
    """What ``nn.Module.state_dict`` gives, by clean FQN."""

    tensors: dict[str, Tensor]  # parameters and persistent buffers themselves; tied ones are one object
    others: dict[str, object]  # ``_extra_state``, and whatever else is not a tensor
    order: tuple[str, ...]  # all names
    metadata: Mapping[str, object]  # the versions of the modules, which old checkpoints are upgraded by


def clean_name(name: str) -> str:
    """An FQN without the wrappers of ``torch.compile``, ``checkpoint_wrapper`` and FSDP1."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def is_extra(name: str) -> bool:
    """Whether a module's ``get_extra_state`` made what has this name."""
    return name.rpartition(".")[2] == "_extra_state"


@contextmanager
def live_tensors() -> Iterator[None]:
    """In this context ``state_dict()`` gives the tensors that a model has, whatever its modules give otherwise.

    A module that gathers when asked for its state, as FSDP1's did, asks ``wants_live`` first. For this thread alone.
    """
    before = _live.set(True)
    try:
        yield
    finally:
        _live.reset(before)


def wants_live() -> bool:
    """Whether it is inside of ``live_tensors``."""
    return _live.get()


def model_state(model: nn.Module) -> ModelState:
    """The state of a model. Local; units left unsharded after a forward are resharded, as ``state_dict()`` does.

    It is ``model.state_dict(keep_vars=True)``, so its hooks have run. Ties are recognised by identity, since a rank's
    shard may have no memory. Two names that differ by wrappers only are an error.
    """
    check_module(model)
    with live_tensors():
        found = model.state_dict(keep_vars=True)
    names = [clean_name(name) for name in found]
    if twice := repeated(names):
        rule = f"Names must differ by more than the wrappers {' and '.join(WRAPPERS)}"
        raise ShardkitError(message(listing(twice), "appears twice", rule, "Rename one"))
    state = dict(zip(names, found.values(), strict=True))
    tensors = {n: value for n, value in state.items() if isinstance(value, Tensor) and not is_extra(n)}
    others = {name: value for name, value in state.items() if name not in tensors}
    metadata = {clean_name(name): entry for name, entry in _torch.state_dict_metadata(found).items()}
    return ModelState(tensors, others, tuple(names), metadata)


def trainable_state(state: ModelState) -> ModelState:
    """Of a model's state what trains: parameters, with the buffers and extra state of the modules that hold them."""
    kept = {name for name, tensor in state.tensors.items() if tensor.requires_grad}
    if not kept:
        rule = "What trains is what has requires_grad"
        raise ShardkitError(message("model", "no parameter trains", rule, "Pass trainable_only=False"))
    modules = {name.rpartition(".")[0] for name in kept}

    def accompanies(name: str) -> bool:
        return name.rpartition(".")[0] in modules

    def trains(name: str, tensor: Tensor) -> bool:
        return name in kept or (not isinstance(tensor, nn.Parameter) and accompanies(name))

    tensors = {name: tensor for name, tensor in state.tensors.items() if trains(name, tensor)}
    others = {name: value for name, value in state.others.items() if accompanies(name)}
    return ModelState(tensors, others, tuple(n for n in state.order if n in tensors or n in others), state.metadata)


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """The clean FQN of each parameter, the first one of a tied one, also where a stand-in is registered for it."""
    return {param: clean_name(name) for name, param in _torch.named_sharded_parameters(model)}


def repeated(names: Iterable[str]) -> list[str]:
    """Those that occurred before."""
    seen: set[str] = set()
    return [name for name in names if name in seen or seen.add(name)]  # type: ignore[func-returns-value]


def first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The first name of the tensor that each name stands for."""
    first: dict[Tensor, str] = {}
    return {name: first.setdefault(tensor, name) for name, tensor in tensors.items()}


def refuse_meta(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise an error that names all tensors without values."""
    names = [name for name, tensor in tensors if tensor.is_meta]
    if names:
        rule = "State has values once the model is materialized or loaded"
        raise ShardkitError(message(listing(names), "on the meta device", rule, "Materialize or load the model first"))
