"""What a checkpoint is that is open for reading, whatever program wrote it.

Each kind of file is a class with these two members (:class:`Source`), used by ``load_checkpoint``
and ``convert``:

- ``contents``, a :class:`Contents`: everything that is not a tensor, and a :class:`Stored` (dtype,
  shape, key) for each tensor. It is complete when the source is opened, and its tensors are not
  read yet.
- ``read(targets)``: fill each ``(key, tensor)``, converted to the dtype of the target. Local.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit._torch import has_own_dispatch
from shardkit._torch.dispatch import tree_leaves, tree_map
from shardkit.checkpoint.byte_ranges import part_of, read_parts
from shardkit.checkpoint.format import Location, Spec
from shardkit.errors import CheckpointError, listing
from shardkit.shards import local_value
from shardkit.state.load import LoadPlan, Request, check_ties, unwritten
from shardkit.state.model import is_extra
from shardkit.state.optimizer import renamed_state

# The keys under which programs save a model and an optimizer.
MODEL_NAMES = ("model", "model_state_dict", "model_state", "state_dict", "module")
OPTIMIZER_NAMES = (
    *("optimizer", "optim", "optimizer_state_dict"),
    *("optim_state_dict", "optimizer_state", "optim_state"),
)
WRAPPER_NAMES = ("app", "state", "app_state")  # around both, as in torch's own DCP tutorial


@dataclass(frozen=True)
class Stored(Spec):
    """A tensor in a checkpoint, and its key in the source: a :class:`Location` in safetensors
    files, else a name.
    """

    key: Any = field(repr=False)  # not in the repr, by which ranks compare what they see


@dataclass(frozen=True)
class Quantized:
    """A tensor of an optimizer's state of which each rank saved its shard, with its own blocks."""

    key: str  # in the shards that a rank saved


@dataclass
class Contents:
    """Everything in a checkpoint, with a :class:`Stored` in place of each tensor."""

    model: dict[str, Any]  # by FQN
    # {"state": {fqn: {name: value}}, "param_groups": [{"params": [fqn, ...], ...}]}, or with
    # numbers instead of FQNs; None if there is none.
    optimizer: dict[str, Any] | None = None
    scheduler: Any = None  # its state dict
    trainable_only: bool = False  # whether frozen parameters were left out
    # other names of tied tensors, each with the stored one
    ties: dict[str, str] = field(default_factory=dict)


class Source(Protocol):
    """An open checkpoint."""

    contents: Contents

    def read(self, targets: Iterable[tuple[Any, Tensor]]) -> None:
        """Fill each target from the tensor with its key: the local part of a DTensor, or all of a
        plain tensor.
        """


class Safetensors:
    """Safetensors files as a source."""

    def __init__(self, locations: Mapping[str, Location]) -> None:
        self.contents = Contents({})
        for name, location in locations.items():
            self.contents.model[name] = Stored(location.dtype, location.shape, location)

    def read(self, targets: Iterable[tuple[Any, Tensor]]) -> None:
        """Fill each target from the tensor with its key, straight from the file. Local."""
        wanted = list(targets)
        read_parts([(location, part_of(tensor)) for location, tensor in wanted])
        torch.autograd.graph.increment_version([tensor for _, tensor in wanted])


def read_values(source: Source, tree: Any) -> Any:
    """Return nested values with their tensors read. Local."""
    targets: list[tuple[Any, Tensor]] = []

    def memory_for(leaf: Any) -> Any:
        if not isinstance(leaf, Stored):
            return leaf
        memory = torch.empty(leaf.shape, dtype=leaf.dtype)
        targets.append((leaf.key, memory))
        return memory

    values = tree_map(memory_for, tree)
    source.read(targets)
    return values


def check_stored_ties(
    source: Source, plan: LoadPlan, tensors: Mapping[str, Tensor], request: Request
) -> None:
    """Raise, or warn, if a source has different values for one tied tensor, in this rank's part of
    it. Local.
    """

    def are_equal(name: str, one: str, other: str) -> bool:
        values = []
        for stored_name in (one, other):
            memory = unwritten(tensors[name], tensors[name].dtype, torch.device("cpu"))
            source.read([(source.contents.model[stored_name].key, memory)])
            values.append(local_value(memory))
        return torch.equal(*values)

    check_ties(plan, are_equal, request)


def refuse_subclasses(tensors: Mapping[str, Tensor]) -> None:
    """Raise for tensors of subclasses that are not memory of their own, such as
    NF4 weights. Local.
    """
    refused = []
    for name, tensor in tensors.items():
        kind = type(local_value(tensor))
        if has_own_dispatch(kind):
            refused.append(f"{name} ({kind.__name__})")
    if refused:
        raise CheckpointError(
            f"tensors cannot be of a subclass: {listing(refused)}. Of subclasses, only float8 "
            "training weights are saved. Save with trainable_only=True, and quantize the base "
            "again from its own files."
        )


# ---- what other programs save: nested dicts ------------------------------------------------------


def contents_of(tree: Mapping[Any, Any]) -> Contents:
    """Find model and optimizer in the nested dicts that a program saved."""
    for name in WRAPPER_NAMES:
        inner = tree.get(name)
        if len(tree) == 1 and isinstance(inner, Mapping):
            tree = inner
    model = _section(tree, MODEL_NAMES)
    optimizer = _section(tree, OPTIMIZER_NAMES)
    if optimizer is None and "param_groups" in tree and "state" in tree:
        return Contents({}, _optimizer(tree))
    if model is None and optimizer is None:
        model = {key: value for key, value in tree.items() if isinstance(key, str)}
    flat = dict(_flattened(model or {}))
    return Contents(flat, None if optimizer is None else _optimizer(optimizer))


def _section(tree: Mapping[Any, Any], names: Iterable[str]) -> Mapping[Any, Any] | None:
    for name in names:
        section = tree.get(name)
        if isinstance(section, Mapping):
            return section
    return None


def _flattened(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        # an extra state may be a dict, and is one value
        if isinstance(value, Mapping) and not is_extra(str(key)):
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _optimizer(tree: Mapping[Any, Any]) -> dict[str, Any]:
    if "state" in tree or not any(str(key).startswith("state.") for key in tree):
        groups = tree.get("param_groups", [])
        if isinstance(groups, Mapping):  # DCP saves a list as a dict with numbers as keys
            groups = [groups[number] for number in sorted(groups)]
        return {
            "state": dict(tree.get("state", {})),
            "param_groups": [dict(group) for group in groups],
        }
    # torch's flatten_optimizer_state_dict: "state.<fqn>.<name>" and "param_groups.<fqn>.<option>"
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in tree.items():
        part, _, rest = key.partition(".")
        fqn, _, name = rest.rpartition(".")
        section = state if part == "state" else options
        section.setdefault(fqn, {})[name] = value
    groups = [own_options | {"params": [fqn]} for fqn, own_options in options.items()]
    return {"state": state, "param_groups": groups}


def by_name(optimizer: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return an optimizer's state by FQN; parameters that are numbered count ``names``."""
    params = list(optimizer["state"])
    for group in optimizer["param_groups"]:
        params += group["params"]
    numbers = [param for param in params if type(param) is int]
    if not numbers:
        return optimizer
    if max(numbers) >= len(names):
        raise CheckpointError(
            f"optimizer: its parameters are numbered up to {max(numbers)}, and the model has "
            f"{len(names)}. Numbers count the model's parameters in order. Save the state by name, "
            "with FSDP.rekey_optim_state_dict."
        )
    return renamed_state(optimizer, lambda param: names[param] if type(param) is int else param)


# ---- plain data: files of torch.save that load with weights_only=True ----------------------------


_PLAIN: list[Any] = [bytes, frozenset]  # for b"" and frozensets, in addition to what torch loads


def pack(value: Any, name: str) -> bytes:
    """Return plain data as ``torch.save`` writes it; raise unless it loads without running code.
    Local.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        with torch.serialization.safe_globals(_PLAIN):
            problem = listing(torch.serialization.get_unsafe_globals_in_checkpoint(buffer))
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves(value)):
            problem = "a DTensor"
    except RecursionError:
        problem = "itself"
    except Exception as error:  # of pickle, for example for a local function
        problem = str(error)
    if problem:
        raise CheckpointError(
            f"{name} cannot be saved, since it holds {problem}. A checkpoint holds plain data and "
            "plain tensors, so that loading runs no code. Save its state_dict(), or call "
            "full_tensor()."
        )
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """Return what :func:`pack` packed, with tensors on the CPU. Runs no code from it."""
    with warnings.catch_warnings(), torch.serialization.safe_globals(_PLAIN):
        warnings.simplefilter("ignore")
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
