"""Record initializers, the user's ``init`` or the modules' own methods, like a construction.

They write to full-size tensors although the model is sharded: meta stand-ins replace the parameters during the call,
and the tape records what happens to them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardkit.errors import ShardkitError, listing, message
from shardkit.meta.context import recording
from shardkit.meta.tape import View

Initializer = Callable[[nn.Module], Any]

_RESET = ("reset_parameters", "_reset_parameters")
_WHOLE_MODEL = ("init_weights", "initialize_weights", "_init_weights")


def record_initializers(
    model: nn.Module, known: dict[int, View], missing: set[int], init: Initializer | None
) -> dict[int, View]:
    """Record the initialization of the missing tensors, and with ``init`` also of the known ones.

    ``known`` is what was recorded, by ``id`` of the model's tensor: ``init`` starts from these values, as
    ``model.apply(init)`` does after construction. ``missing`` has the ``id`` of each meta tensor without a recording.
    """
    registries: list[dict[str, Any]] = [
        tensors for module in model.modules() for tensors in (module._parameters, module._buffers)
    ]
    before = [(tensors, dict(tensors)) for tensors in registries]
    slots = [(tensors, name, tensor) for tensors, old in before for name, tensor in old.items() if tensor is not None]
    with recording() as recorder, torch.no_grad():
        storages = recorder.tape.storages
        stand_ins = {id(tensor): _like(tensor, torch.empty(tensor.shape, dtype=tensor.dtype)) for _, _, tensor in slots}
        for tensor in (each for _, _, each in slots if init is not None and id(each) in known):
            view = known[id(tensor)]
            stand_ins[id(tensor)] = _like(tensor, view.of(storages[view.storage]).to(tensor.dtype))
        try:
            for tensors, name, tensor in slots:
                tensors[name] = stand_ins[id(tensor)]
            if init is not None:
                model.apply(init)
            else:
                _run_native(model, {id(tensors) for tensors, _, tensor in slots if id(tensor) in missing})
            # By place, not by stand-in: an initializer may assign a new tensor.
            wanted = missing | known.keys() if init is not None else missing
            places = [(id(tensor), tensors[name]) for tensors, name, tensor in reversed(slots) if id(tensor) in wanted]
            return {key: recorder.view(tensor) for key, tensor in places}
        finally:
            for tensors, old in before:
                tensors.clear()
                tensors.update(old)


def _like(tensor: Tensor, stand_in: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        stand_in = nn.Parameter(stand_in, requires_grad=tensor.requires_grad)
    stand_in.__dict__.update(tensor.__dict__)  # marks that initializers look for
    return stand_in


def _run_native(model: nn.Module, registries: set[int]) -> None:
    """Call ``reset_parameters`` of modules that own these dicts of tensors, then initializers of whole models."""
    owners = {each for each in model.modules() if {id(each._parameters), id(each._buffers)} & registries}
    _check_resets(model, owners)

    def reset(module: nn.Module) -> None:
        method = _method(module, _RESET)
        if module in owners and method is not None and _num_required(method) == 0:
            method()

    model.apply(reset)
    _initialize_whole(model)


def _check_resets(model: nn.Module, owners: set[nn.Module]) -> None:
    """Raise for missing tensors below a module whose initializer takes arguments that only its constructor knew."""
    unknown = {}
    for name, module in model.named_modules():
        methods = [each for each in dir(type(module)) if each.startswith("reset_") and each.endswith("_parameters")]
        method = next((each for each in methods if _num_required(getattr(module, each))), None)
        if method is not None and not owners.isdisjoint(module.modules()):
            unknown[name or "(root)"] = method
    if unknown:
        problem = f"is initialized by {listing(dict.fromkeys(unknown.values()))}, which takes arguments, as in PEFT"
        rule = "Its values under torch.device('meta') are lost, and materialize does not guess values"
        fix = "Build model and adapters inside init_on_meta(), or pass materialize(model, init=...)"
        raise ShardkitError(message(listing(unknown), problem, rule, fix))


def _initialize_whole(module: nn.Module) -> None:
    """Call the outermost ``init_weights()``, or ``_init_weights(module)`` on all modules below it."""
    method = _method(module, _WHOLE_MODEL)
    if method is None or _num_required(method) > 1:
        for child in module.children():
            _initialize_whole(child)
    elif _num_required(method) == 0:
        method()
    else:
        module.apply(method)


def _method(module: nn.Module, names: tuple[str, ...]) -> Callable[..., Any] | None:
    return next((method for name in names if callable(method := getattr(module, name, None))), None)


def _num_required(method: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(method).parameters.values()
    return sum(p.default is inspect.Parameter.empty and p.kind in kinds for p in parameters)
