"""The hub's layout of weights: transformers' own conversions, applied to one group of tensors at a
time.

transformers 5 renames, stacks, splits and permutes weights as it loads them, and undoes that as it
saves. A :class:`Group` is what one of its converters takes and returns: the experts of a layer, for
example. Tensors that are only renamed need none: a rank reads and writes its own bytes of them.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardkit.checkpoint.byte_ranges import Part, full_box, part_of
from shardkit.checkpoint.format import DTYPES, Entry, Spec
from shardkit.checkpoint.source import Contents, Safetensors, Stored, read_values
from shardkit.errors import CheckpointError, listing
from shardkit.shards import inside
from shardkit.state.model import WRAPPERS, clean_name

_FLOAT8 = {dtype for dtype in DTYPES.values() if dtype.is_floating_point and dtype.itemsize == 1}
# the attribute in which transformers records the conversions of a load, to undo them
USED = "_weight_conversions"


def is_pretrained(model: nn.Module) -> bool:
    """Whether transformers 5 would convert weights for this model; with transformers 4 names are
    those of the files.
    """
    found = sys.modules.get("transformers")
    is_new = found is not None and not found.__version__.startswith("4.")
    return is_new and isinstance(unwrapped(model), found.PreTrainedModel)  # type: ignore[union-attr]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers that clean FQNs leave out."""
    while inner := next(
        (each for name in WRAPPERS if (each := model._modules.get(name)) is not None), None
    ):
        model = inner
    return model


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class from which ``fully_shard`` made the module's."""
    classes = (each for each in type(module).__mro__ if issubclass(each, nn.Module))
    return next(each for each in classes if not issubclass(each, FSDPModule))


def _transformers(module: str) -> Any:
    return importlib.import_module(f"transformers.{module}")


class _Unsharded:
    """A model whose modules show the classes from before ``fully_shard``, by which conversions are
    looked up.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self._model.named_modules():
            shown = object.__new__(plain_class(module))
            shown.__dict__ = module.__dict__
            yield clean_name(name), shown


# ---- groups --------------------------------------------------------------------------------------


@dataclass
class Group:
    """The tensors that one conversion takes, and those it returns."""

    converter: Any  # a WeightConverter
    model: Any
    # names, each with the converter's pattern, in order
    sources: list[tuple[str, str]] = field(default_factory=list)
    targets: dict[str, Tensor] = field(default_factory=dict)  # on meta, by name

    def convert(
        self, name: str, read: Callable[[str], Tensor], rows: slice = slice(None)
    ) -> dict[str, Tensor]:
        """Convert what ``read`` returns to a first target ``name``; ``rows`` are those of stacked
        sources.
        """
        one, by_pattern = copy.deepcopy(self.converter), dict[str, list[str]]()
        for source, pattern in self.sources:
            by_pattern.setdefault(pattern, []).append(source)
        for pattern, sources in by_pattern.items():
            for source in sources[rows]:
                one.add_tensor(name, source, pattern, read(source))
        made = one.convert(name, model=self.model, config=self.model.config)
        return {
            target: value[0] if isinstance(value, list) else value for target, value in made.items()
        }

    def load(self, parts: Mapping[str, Part], read: Callable[[str], Tensor]) -> None:
        """Fill parts of the targets. Local; where sources are stacked, only this rank's rows of
        them are read.
        """
        first, *others = self.converter.operations
        core = _transformers("core_model_loading")
        is_stack = isinstance(first, core.MergeModulelist) and first.dim == 0
        is_stack = is_stack and all(
            isinstance(op, core.Concatenate) and op.dim > 0 for op in others
        )
        rows = {box[0] for _, box in parts.values()} if is_stack else set()
        start, count = rows.pop() if len(rows) == 1 else (0, sys.maxsize)
        if not count:
            return
        made = self.convert(next(iter(self.targets)), read, slice(start, start + count))
        for name, (values, box) in parts.items():
            lies = full_box(made[name].shape)
            if values.numel():
                values.copy_(
                    inside(made[name], ((start, count), *lies[1:]) if start else lies, box)
                )


def _grouped(
    converters: list[Any],
    named: Iterable[tuple[str, str, str]],
    model: Any,
    specs: Mapping[str, Spec],
) -> list[Group]:
    """Return groups of tensors with the same first target and the converter of the same pattern."""
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    groups: dict[str, Group] = {}
    for name, target, pattern in named:
        groups.setdefault(target, Group(by_pattern[pattern], model)).sources.append((name, pattern))
    for target, group in groups.items():
        group.targets = group.convert(
            target, lambda s: torch.empty(specs[s].shape, dtype=specs[s].dtype, device="meta")
        )
    return list(groups.values())


# ---- loading -------------------------------------------------------------------------------------


def check_float8(found: Mapping[str, Entry], tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise for float8 weights with scales that the model does not have. Local."""
    scaled = []
    for name, at in found.items():
        scales = {f"{name}_scale_inv", f"{name}_scale"} & found.keys()
        if at.dtype in _FLOAT8 and scales - tensors.keys():
            scaled.append(name)
    if scaled:
        raise CheckpointError(
            f"{where} has float8 weights with scales: {listing(scaled, 3)}. load_pretrained does "
            "not apply the scales of quantized weights. Load it with transformers and "
            "FineGrainedFP8Config(dequantize=True), and save that."
        )


class HubFiles:
    """The files ``found`` of a transformers model as a source, by the names of the model's
    ``tensors``.
    """

    def __init__(
        self, model: Any, tensors: Mapping[str, Tensor], found: Mapping[str, Entry]
    ) -> None:
        core, self._files = _transformers("core_model_loading"), Safetensors(found)
        self._stored = self._files.contents.model
        mapping = _transformers("conversion_mapping").get_model_conversion_mapping(
            _Unsharded(model)
        )
        renamings = [each for each in mapping if isinstance(each, core.WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, core.WeightConverter)]
        prefix = model.base_model_prefix
        self._renamed: dict[str, str] = {}  # names in the files, by names in the model
        grouped: list[tuple[str, str, str]] = []
        lost: set[str] = set()
        for name in sorted(found, key=core.dot_natural_key):
            new, pattern = core.rename_source_key(name, renamings, converters, prefix, tensors)
            if new not in tensors and name in tensors:
                new, pattern = core.rename_source_key(name, [], [], prefix, tensors)
            if new not in tensors:
                lost.add(new)
            elif pattern is None:
                self._renamed[new] = name
            else:
                grouped.append((name, new, pattern))
        self._groups = _grouped(converters, grouped, model, self._stored)
        self.used = [each for each in mapping if each.was_used()]  # for the save that undoes them
        specs: dict[str, Any] = {new: self._stored[name] for new, name in self._renamed.items()}
        specs |= {name: tensor for group in self._groups for name, tensor in group.targets.items()}
        self.contents = Contents(
            {name: Stored(each.dtype, each.shape, name) for name, each in specs.items()}
        )
        unexpected = SimpleNamespace(missing_keys=set(), unexpected_keys=lost)
        getattr(model, "_adjust_missing_and_unexpected_keys")(unexpected)  # noqa: B009  leaves out old buffers
        self.others = {
            name: Spec(torch.uint8, torch.Size([0])) for name in sorted(unexpected.unexpected_keys)
        }

    def read(self, targets: Iterable[tuple[str, Tensor]]) -> None:
        """Fill each target: renamed tensors from this rank's own bytes, a group's as
        :meth:`Group.load`. Local.
        """
        wanted = dict(targets)
        renamed = {
            name: self._stored[source].key
            for name, source in self._renamed.items()
            if name in wanted
        }
        self._files.read([(key, wanted[name]) for name, key in renamed.items()])
        for group in self._groups:
            if own := {name: part_of(wanted[name]) for name in group.targets if name in wanted}:
                group.load(own, lambda source: read_values(self._files, self._stored[source]))
        torch.autograd.graph.increment_version(list(wanted.values()))


# ---- saving --------------------------------------------------------------------------------------


def plan_save(
    model: Any, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, str], list[tuple[Group, dict[str, str]]]]:
    """Return the hub's name of each tensor that is renamed, and groups with the hub's names of
    their targets. Local.
    """
    core, mapping = _transformers("core_model_loading"), getattr(model, USED, None)
    if mapping is None:  # not loaded from files, which might have had a prefix
        found = _transformers("conversion_mapping").get_model_conversion_mapping(
            _Unsharded(model), add_legacy=False
        )
        mapping = [each for each in found if not isinstance(each, core.PrefixChange)]
    reverse = [each.reverse_transform() for each in mapping[::-1]]
    renamings = [each for each in reverse if isinstance(each, core.WeightRenaming)]
    converters = [each for each in reverse if isinstance(each, core.WeightConverter)]
    renamed: dict[str, str] = {}
    grouped: list[tuple[str, str, str]] = []
    for name in sorted(tensors, key=core.dot_natural_key):
        new, pattern = core.rename_source_key(name, [], converters)
        if pattern is None:
            renamed[name] = core.rename_source_key(name, renamings, [])[0]
        else:
            grouped.append((name, new, pattern))
    specs = {name: Spec(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    groups = _grouped(converters, grouped, model, specs)
    final = {
        name: core.rename_source_key(name, renamings, [])[0]
        for each in groups
        for name in each.targets
    }
    return renamed, [(each, {name: final[name] for name in each.targets}) for each in groups]
