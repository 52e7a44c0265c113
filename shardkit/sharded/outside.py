"""What goes wrong in a forward because the model is sharded, by name, with what to do.

A sharded parameter that is used while its unit is not gathered; a buffer that MixedPrecisionPolicy did not cast.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardkit._fsdp.params import is_gathered, own_slots
from shardkit._torch import local_tensor, named_sharded_parameters, tree_leaves
from shardkit.errors import ShardkitError, listing, message

_TORCH_SAYS = "mixed torch.Tensor and DTensor"
_OF_DTYPES = ("must have the same dtype", "expected scalar type", "mixed dtype", "to have the same dtype")


def raise_named(model: nn.Module, error: Exception) -> None:
    """Raise what says which parameter was used outside of its unit, or which buffer has another dtype. Local.

    torch's text names an operation only. The parameter is found among the arguments that the traceback still holds.

    Raises:
        ShardkitError: ``error`` is torch's about a parameter or buffer of ``model``.
    """
    if any(text in str(error) for text in _OF_DTYPES):
        _raise_of_buffers(model, error)
    if _TORCH_SAYS not in str(error):
        return
    params = {_memory(param): fqn for fqn, param in named_sharded_parameters(model) if isinstance(param, DTensor)}
    used = dict.fromkeys(params[_memory(tensor)] for tensor in _sharded_in(error) if _memory(tensor) in params)
    if used:
        units = dict.fromkeys(_unit(model, fqn) for fqn in used)
        rule = "FSDP2 gathers the parameters of a unit while a module of it is called, and only then"
        fix = f"Leave {listing(units)} out of units=, so that a module around this use gathers it, or call the module"
        problem = f"used while its unit, {listing(units)}, is not gathered"
        raise ShardkitError(message(listing(used), problem, rule, fix)) from error


def _raise_of_buffers(model: nn.Module, error: Exception) -> None:
    """Name the buffers of the innermost module that computes in another dtype than theirs. FSDP1 cast buffers."""
    names, trace, found = {module: fqn for fqn, module in model.named_modules()}, error.__traceback__, dict[str, Any]()
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in names:
            dtypes = {param.dtype for param in module.parameters()}
            buffers = module.named_buffers(names[module], recurse=False)
            odd = {fqn: each for fqn, each in buffers if each.is_floating_point() and each.dtype not in dtypes}
            found = odd or found
        trace = trace.tb_next
    if found:
        dtypes = {each.dtype for each in found.values()}
        problem = f"in {listing(map(str, dtypes))}, and what it is used with is not"
        rule = "mp_policy casts parameters and the inputs of units, never buffers"
        fix = "Cast it before shard_model, as by buffer.data = buffer.to(torch.bfloat16), or cast where forward uses it"
        raise ShardkitError(message(listing(found), problem, rule, fix)) from error


def called_outside(fqn: str) -> Exception:
    """The error for a module whose parameters are the root's own, and that is called while those are sharded."""
    rule = "FSDP2 gathers them while the forward of the whole model runs, and only then"
    fix = f"Call the model, or the method that calls it with forward_methods=, or make it a unit: by_name({fqn!r})"
    return ShardkitError(message(fqn, "called on its own, and its parameters belong to the root's unit", rule, fix))


def refuse_calls_outside(root: nn.Module, error: Callable[[str], Exception] = called_outside) -> None:
    """Make modules whose parameters are the root's own raise ``error`` of their FQN when those are sharded at a call.

    Such a call gathers nothing, and torch's text names an operation only. Adds a forward pre-hook to each. Local.
    """
    names = {module: fqn for fqn, module in root.named_modules()}
    for module, slots in own_slots(root).items():
        module.register_forward_pre_hook(partial(_refuse_outside, partial(error, names[module]), slots))


def _refuse_outside(error: Callable[[], Exception], slots: list[Any], *_: object) -> None:
    if not (torch.compiler.is_compiling() or all(map(is_gathered, slots))):
        raise error()


def _memory(tensor: DTensor) -> int:
    """Where the shard lies; views of it, such as a transpose, lie there too."""
    return local_tensor(tensor).untyped_storage().data_ptr()


def _sharded_in(error: BaseException) -> Iterator[DTensor]:
    """The DTensors among the arguments of torch's calls that ``error`` went through, or that the failing line reads."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if str(frame.f_globals.get("__name__")).startswith("torch."):
            arguments = {name: value for name, value in frame.f_locals.items() if not isinstance(value, nn.Module)}
            for leaf in tree_leaves(arguments):
                if isinstance(leaf, DTensor):
                    yield leaf
        elif trace.tb_next is None or str(trace.tb_next.tb_frame.f_globals.get("__name__")).startswith("torch."):
            yield from _read_on(frame.f_code, trace.tb_lineno, frame.f_locals)
        trace = trace.tb_next


def _read_on(code: CodeType, line: int, variables: dict[str, Any]) -> Iterator[DTensor]:
    """The sharded parameters that a line reads as attributes of modules, such as ``self.embed.weight``.

    Operations that dispatch in C++ leave no frame with their arguments.
    """
    value: Any = None
    for at, instruction in _with_lines(code):
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


def _with_lines(code: CodeType) -> Iterator[tuple[int, dis.Instruction]]:
    starts, line = dict(dis.findlinestarts(code)), 0
    for instruction in dis.get_instructions(code):
        line = starts.get(instruction.offset) or line
        yield line, instruction


def _unit(model: nn.Module, fqn: str) -> str:
    """The name of the innermost FSDP module around a parameter."""
    path = fqn.split(".")[:-1]
    names = [".".join(path[:length]) for length in range(len(path), -1, -1)]
    return next((name or "(root)" for name in names if isinstance(model.get_submodule(name), FSDPModule)), "(root)")
