"""Initializers, the user's or the modules' own, recorded on meta tensors of full size."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardkit.errors import ShardkitError, listing, message
from shardkit.meta.record import recording
from shardkit.meta.tape import View

Initializer = Callable[[nn.Module], Any]


def record_initializers(
    model: nn.Module, known: dict[int, View], missing: set[int], init: Initializer | None
) -> dict[int, View]:
    """Record the initialization of the missing tensors, and with ``init`` also of the known ones, by their ``id``.

    ``known`` is what was recorded: ``init`` starts from these values, as ``model.apply(init)`` after
    construction.
    """
    registries: list[dict[str, Any]] = []
    for module in model.modules():
        registries += [module._parameters, module._buffers]
    before = [dict(tensors) for tensors in registries]
    found: dict[int, View] = {}
    stand_ins: dict[int, Tensor] = {}
    with recording() as recorder, torch.no_grad():
        try:
            for tensors, old in zip(registries, before, strict=True):
                for name, tensor in old.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in stand_ins:
                        if init is not None and id(tensor) in known:
                            view = known[id(tensor)]
                            full = view.of(recorder.tape.storages[view.storage]).to(tensor.dtype)
                        else:
                            full = torch.empty(tensor.shape, dtype=tensor.dtype)
                        stand_ins[id(tensor)] = _like(tensor, full)
                    tensors[name] = stand_ins[id(tensor)]
            if init is not None:
                model.apply(init)
            else:
                _run_native(model, {id(stand_ins[key]) for key in missing})
            # By place, not by stand-in: an initializer may assign a new tensor.
            wanted = missing | known.keys() if init is not None else missing
            for tensors, old in zip(registries, before, strict=True):
                for name, tensor in old.items():
                    if id(tensor) in wanted:
                        found.setdefault(id(tensor), recorder.view(tensors[name]))
        finally:
            for tensors, old in zip(registries, before, strict=True):
                tensors.clear()
                tensors.update(old)
    return found


def _like(tensor: Tensor, full: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        full = nn.Parameter(full, requires_grad=tensor.requires_grad)
    full.__dict__.update(tensor.__dict__)  # marks that initializers look for
    return full


def _run_native(model: nn.Module, missing: set[int]) -> None:
    """Call ``reset_parameters`` of modules that own these tensors, then initializers of whole models."""
    owners = set()
    for module in model.modules():
        own = [*module._parameters.values(), *module._buffers.values()]
        if any(id(tensor) in missing for tensor in own):
            owners.add(module)
    _refuse_unknown_arguments(model, owners)

    def reset(module: nn.Module) -> None:
        method = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
        if module in owners and callable(method) and _num_required(method) == 0:
            method()

    model.apply(reset)
    _initialize_whole(model)


def _refuse_unknown_arguments(model: nn.Module, owners: set[nn.Module]) -> None:
    """Raise for missing tensors below a module whose initializer takes what only its constructor knew."""
    unknown = {}
    for name, module in model.named_modules():
        for method in dir(type(module)):
            if method.startswith("reset_") and method.endswith("_parameters") and _num_required(getattr(module, method)):
                if not owners.isdisjoint(module.modules()):
                    unknown[name or "(root)"] = method
    if unknown:
        methods = listing(dict.fromkeys(unknown.values()))
        problem = f"is initialized by {methods}, which takes arguments, as in PEFT"
        rule = "Its values under torch.device('meta') are lost, and materialize does not guess values"
        fix = "Build model and adapters inside init_on_meta(), or pass materialize(model, init=...)"
        raise ShardkitError(message(listing(unknown), problem, rule, fix))


def _initialize_whole(module: nn.Module) -> None:
    """Call the outermost ``init_weights()``, or ``_init_weights(module)`` on all modules below it."""
    for name in ("init_weights", "initialize_weights", "_init_weights"):
        method = getattr(module, name, None)
        if callable(method) and _num_required(method) == 0:
            method()
            return
        if callable(method) and _num_required(method) == 1:
            module.apply(method)
            return
    for child in module.children():
        _initialize_whole(child)


def _num_required(method: Callable[..., Any]) -> int:
    number = 0
    for parameter in inspect.signature(method).parameters.values():
        positional = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        number += positional and parameter.default is parameter.empty
    return number
