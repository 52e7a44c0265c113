"""Errors in a forward that sharding causes, with the name of the parameter or buffer and what to do.

A sharded parameter is used while its unit is not gathered; or a buffer was not cast by MixedPrecisionPolicy.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardkit._fsdp.params import is_gathered, own_slots
from shardkit._torch import local_tensor, named_sharded_parameters, tree_leaves
from shardkit.errors import ShardkitError, listing, message

_MIXED_TENSORS = "mixed torch.Tensor and DTensor"
_MIXED_DTYPES = ("must have the same dtype", "expected scalar type", "mixed dtype", "to have the same dtype")


def raise_named(model: nn.Module, error: Exception) -> None:
    """Raise an error that names the parameter used outside of its unit, or the buffer of another dtype. Local.

    torch's text names only an operation. The parameter is found among the arguments that the traceback still holds.

    Raises:
        ShardkitError: ``error`` is torch's about a parameter or buffer of ``model``.
    """
    frames = list(_frames(error))
    if any(text in str(error) for text in _MIXED_DTYPES):
        _raise_of_buffers(model, [frame for frame, _ in frames], error)
    if _MIXED_TENSORS not in str(error):
        return
    params = {_memory(param): fqn for fqn, param in named_sharded_parameters(model) if isinstance(param, DTensor)}
    used = dict.fromkeys(params[_memory(tensor)] for tensor in _sharded_in(frames) if _memory(tensor) in params)
    if used:
        units = listing(dict.fromkeys(_unit(model, fqn) for fqn in used))
        rule = "FSDP2 gathers the parameters of a unit only while a module of the unit is called"
        fix = f"Leave {units} out of units=, so that an outer unit gathers it, or call the module"
        problem = f"used while its unit, {units}, is not gathered"
        raise ShardkitError(message(listing(used), problem, rule, fix)) from error


def _frames(error: Exception) -> Iterator[tuple[FrameType, int]]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _raise_of_buffers(model: nn.Module, frames: list[FrameType], error: Exception) -> None:
    """Name the buffers of the innermost module that computes in another dtype than theirs. FSDP1 cast buffers."""
    names = {module: fqn for fqn, module in model.named_modules()}
    for frame in reversed(frames):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in names:
            dtypes = {param.dtype for param in module.parameters()}
            buffers = module.named_buffers(names[module], recurse=False)
            odd = {fqn: each for fqn, each in buffers if each.is_floating_point() and each.dtype not in dtypes}
            if odd:
                problem = f"in {listing({str(each.dtype): None for each in odd.values()})}, used with another dtype"
                rule = "mp_policy casts parameters and the inputs of units, never buffers"
                fix = "Cast it before shard_model, as by buffer.data = buffer.to(torch.bfloat16), or cast where forward"
                raise ShardkitError(message(listing(odd), problem, rule, f"{fix} uses it")) from error


def called_outside(fqn: str) -> Exception:
    """Return the error for a module of the root's unit that is called while its parameters are sharded."""
    rule = "FSDP2 gathers them only while the forward of the whole model runs"
    fix = f"Call the model, or the method that calls it with forward_methods=, or make it a unit: by_name({fqn!r})"
    return ShardkitError(message(fqn, "called on its own, and its parameters belong to the root's unit", rule, fix))


def refuse_calls_outside(root: nn.Module, error: Callable[[str], Exception] = called_outside) -> None:
    """Make modules of the root's own unit raise ``error`` of their FQN if they are called while sharded. Local.

    Such a call gathers nothing, and torch's text names only an operation. Adds a forward pre-hook to each.
    """
    names = {module: fqn for fqn, module in root.named_modules()}
    for module, slots in own_slots(root).items():
        module.register_forward_pre_hook(partial(_refuse_outside, partial(error, names[module]), slots))


def _refuse_outside(error: Callable[[], Exception], slots: list[Any], *_: object) -> None:
    if not (torch.compiler.is_compiling() or all(map(is_gathered, slots))):
        raise error()


def _memory(tensor: DTensor) -> int:
    """The address of the shard's storage, which its views share, such as a transpose."""
    return local_tensor(tensor).untyped_storage().data_ptr()


def _sharded_in(frames: list[tuple[FrameType, int]]) -> Iterator[DTensor]:
    """The DTensors among the arguments of torch's calls on the way to the error, or that the failing line reads."""
    of_torch = [str(frame.f_globals.get("__name__")).startswith("torch.") for frame, _ in frames]
    for (frame, line), inside, next_inside in zip(frames, of_torch, [*of_torch[1:], True], strict=True):
        if inside:
            arguments = {name: value for name, value in frame.f_locals.items() if not isinstance(value, nn.Module)}
            yield from (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, DTensor))
        elif next_inside:
            yield from _read_on(frame.f_code, line, frame.f_locals)


def _read_on(code: CodeType, line: int, variables: dict[str, Any]) -> Iterator[DTensor]:
    """The sharded parameters that a line reads as attributes of modules, such as ``self.embed.weight``.

    Operations that dispatch in C++ leave no frame with their arguments.
    """
    value: Any = None
    starts, at = dict(dis.findlinestarts(code)), 0
    for instruction in dis.get_instructions(code):
        at = starts.get(instruction.offset) or at
        given = instruction.argval
        name = (given or (None,))[-1] if isinstance(given, tuple) else given  # an empty tuple is a constant
        if instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            value = variables.get(name)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(value, nn.Module):
            value = value._modules.get(name, value._parameters.get(name))
            if at == line and isinstance(value, DTensor):
                yield value
        else:
            value = None


def _unit(model: nn.Module, fqn: str) -> str:
    """The name of the innermost FSDP module around a parameter."""
    path = fqn.split(".")[:-1]
    names = (".".join(path[:length]) for length in range(len(path), 0, -1))
    return next((name for name in names if isinstance(model.get_submodule(name), FSDPModule)), "(root)")
