"""The hub's layout of weights: transformers' own conversions, applied to one group of tensors at a
time.

transformers 5 renames, stacks, splits and permutes weights as it loads them, and undoes that as it
saves. A :class:`Group` is what one of its converters takes and returns: the experts of a layer, for
example. Tensors that are only renamed need none: a rank reads and writes its own bytes of them.
"""

from __future__ import annotations

import copy
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardkit.checkpoint.byte_ranges import Part, full_box, part_of
from shardkit.checkpoint.format import Location, Spec
from shardkit.checkpoint.source import Contents, Safetensors, Stored, read_values
from shardkit.errors import CheckpointError, listing
from shardkit.shards import inside
from shardkit.state.model import WRAPPERS, clean_name

# the attribute in which transformers records the conversions of a load, to undo them
USED = "_weight_conversions"
# what peft puts into the names of a tensor that it adapts
_ADAPTED = re.compile(r"(\.token_adapter)?\.(base_layer|original_module)\.")


def is_pretrained(model: nn.Module) -> bool:
    """Whether transformers 5 would convert weights for this model; with transformers 4 names are
    those of the files.
    """
    transformers: Any = sys.modules.get("transformers")
    if transformers is None or transformers.__version__.startswith("4."):
        return False
    return isinstance(unwrapped(model), transformers.PreTrainedModel)


def unsaved_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names that a transformers model leaves out of its files. Local, pure."""
    return tuple(getattr(unwrapped(model), "_keys_to_ignore_on_save", None) or ())


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers that clean FQNs leave out."""
    for name in WRAPPERS:
        inner = model._modules.get(name)
        if inner is not None:
            return unwrapped(inner)
    return model


def base_of(
    model: nn.Module, tensors: dict[str, Tensor], stored: Mapping[str, object]
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the base of a ``PeftModel`` whose files these are, with the tensors by the names in
    them; or else the model. Local, pure.
    """
    bare: Any = unwrapped(model)
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(bare, peft.PeftModel) or tensors.keys() & stored.keys():
        return bare, tensors
    base = bare.get_base_model()
    prefix = "base_model." if base is bare.base_model else "base_model.model."
    return base, {_ADAPTED.sub(".", fqn.removeprefix(prefix)): tensors[fqn] for fqn in tensors}


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class from which ``fully_shard`` made the module's."""
    for kind in type(module).__mro__:
        if issubclass(kind, nn.Module) and not issubclass(kind, FSDPModule):
            return kind
    raise TypeError(type(module))


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
    first: str  # the name of the first target
    # names, each with the converter's pattern, in order
    sources: list[tuple[str, str]] = field(default_factory=list)
    targets: dict[str, Tensor] = field(default_factory=dict)  # on meta, by name
    hub_names: dict[str, str] = field(default_factory=dict)  # of the targets, for a save

    def convert(
        self, read: Callable[[str], Tensor], rows: slice = slice(None)
    ) -> dict[str, Tensor]:
        """Convert what ``read`` returns to the targets; ``rows`` are those of stacked sources."""
        converter = copy.deepcopy(self.converter)
        by_pattern: dict[str, list[str]] = {}
        for source, pattern in self.sources:
            by_pattern.setdefault(pattern, []).append(source)
        for pattern, sources in by_pattern.items():
            for source in sources[rows]:
                converter.add_tensor(self.first, source, pattern, read(source))
        made = converter.convert(self.first, model=self.model, config=self.model.config)
        for target, value in made.items():
            if isinstance(value, list):
                made[target] = value[0]
        return made  # type: ignore[no-any-return]

    def load(self, parts: Mapping[str, Part], read: Callable[[str], Tensor]) -> None:
        """Fill parts of the targets. Local; where sources are stacked, only this rank's rows of
        them are read.
        """
        core = _transformers("core_model_loading")
        first, *others = self.converter.operations
        is_stack = isinstance(first, core.MergeModulelist) and first.dim == 0
        for operation in others:
            is_stack = is_stack and isinstance(operation, core.Concatenate) and operation.dim > 0
        start, count = 0, sys.maxsize
        row_ranges = {box[0] for _, box in parts.values()} if is_stack else set()
        if len(row_ranges) == 1:
            start, count = row_ranges.pop()
        if not count:
            return
        made = self.convert(read, slice(start, start + count))
        for name, (values, box) in parts.items():
            _, *other_dims = full_box(made[name].shape)
            made_box = ((start, len(made[name])), *other_dims)
            if values.numel():
                values.copy_(inside(made[name], made_box, box))


def _grouped(
    converters: list[Any],
    converted: Iterable[tuple[str, str, str]],
    model: Any,
    specs: Mapping[str, Spec],
) -> list[Group]:
    """Return groups of tensors with the same first target and the converter of the same pattern."""
    by_pattern: dict[str, Any] = {}
    for converter in converters:
        by_pattern |= dict.fromkeys(converter.source_patterns, converter)
    groups: dict[str, Group] = {}
    for name, target, pattern in converted:
        group = groups.setdefault(target, Group(by_pattern[pattern], model, target))
        group.sources.append((name, pattern))

    def on_meta(name: str) -> Tensor:
        return torch.empty(specs[name].shape, dtype=specs[name].dtype, device="meta")

    for group in groups.values():
        group.targets = group.convert(on_meta)
    return list(groups.values())


# ---- loading -------------------------------------------------------------------------------------


def check_8bit(
    locations: Mapping[str, Location], tensors: Mapping[str, Tensor], where: str
) -> None:
    """Raise for 8-bit weights with scales that the model does not have. Local."""
    scaled = []
    for name, location in locations.items():
        scales = {f"{name}_scale_inv", f"{name}_scale"} & locations.keys()
        if location.dtype.itemsize == 1 and scales - tensors.keys():
            scaled.append(name)
    if scaled:
        raise CheckpointError(
            f"{where} has 8-bit weights with scales: {listing(scaled, 3)}. load_pretrained does "
            "not apply the scales of quantized weights. Load it with transformers (float8 with "
            "FineGrainedFP8Config(dequantize=True)), and save that."
        )


class HubFiles:
    """The files of a transformers model as a source, by the names of the model's ``tensors``."""

    def __init__(
        self, model: Any, tensors: Mapping[str, Tensor], locations: Mapping[str, Location]
    ) -> None:
        core, self._files = _transformers("core_model_loading"), Safetensors(locations)
        self._stored = self._files.contents.model
        conversions = _transformers("conversion_mapping").get_model_conversion_mapping(
            _Unsharded(model)
        )
        renamings, converters = _by_kind(conversions)
        prefix = model.base_model_prefix
        self._renamed: dict[str, str] = {}  # names in the files, by names in the model
        converted: list[tuple[str, str, str]] = []
        unknown: set[str] = set()
        for name in sorted(locations, key=core.dot_natural_key):
            new, pattern = core.rename_source_key(name, renamings, converters, prefix, tensors)
            if new not in tensors and name in tensors:
                new, pattern = name, None
            if new not in tensors:
                unknown.add(new)
            elif pattern is None:
                self._renamed[new] = name
            else:
                converted.append((name, new, pattern))
        self._groups = _grouped(converters, converted, model, self._stored)
        # those that took part, for the save that undoes them
        self.used = [conversion for conversion in conversions if conversion.was_used()]

        specs: dict[str, Any] = {new: self._stored[name] for new, name in self._renamed.items()}
        for group in self._groups:
            specs |= group.targets
        keys = SimpleNamespace(missing_keys=set(), unexpected_keys=unknown)
        # which leaves out old buffers
        getattr(model, "_adjust_missing_and_unexpected_keys")(keys)  # noqa: B009
        for name in sorted(keys.unexpected_keys):
            specs[name] = torch.empty(0, device="meta")
        self.contents = Contents({})
        for name, spec in specs.items():
            self.contents.model[name] = Stored(spec.dtype, spec.shape, name)

    def read(self, targets: Iterable[tuple[str, Tensor]]) -> None:
        """Fill each target: renamed tensors from this rank's own bytes, a group's as
        :meth:`Group.load`. Local.
        """
        wanted = dict(targets)
        renamed = {name: source for name, source in self._renamed.items() if name in wanted}
        self._files.read([(self._stored[renamed[name]].key, wanted[name]) for name in renamed])
        for group in self._groups:
            parts = {name: part_of(wanted[name]) for name in group.targets if name in wanted}
            if parts:
                group.load(parts, lambda source: read_values(self._files, self._stored[source]))
        torch.autograd.graph.increment_version(list(wanted.values()))


def _by_kind(conversions: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Return the conversions that rename tensors, and those that change them."""
    core = _transformers("core_model_loading")
    renamings, converters = [], []
    for conversion in conversions:
        if isinstance(conversion, core.WeightRenaming):
            renamings.append(conversion)
        elif isinstance(conversion, core.WeightConverter):
            converters.append(conversion)
    return renamings, converters


# ---- saving --------------------------------------------------------------------------------------


def plan_save(model: Any, tensors: Mapping[str, Tensor]) -> tuple[dict[str, str], list[Group]]:
    """Return the hub's name of each tensor that is renamed, and groups of the others. Local."""
    core, conversions = _transformers("core_model_loading"), getattr(model, USED, None)
    if conversions is None:  # not loaded from files, which might have had a prefix
        mapping = _transformers("conversion_mapping").get_model_conversion_mapping(
            _Unsharded(model), add_legacy=False
        )
        conversions = [one for one in mapping if not isinstance(one, core.PrefixChange)]
    renamings, converters = _by_kind(
        conversion.reverse_transform() for conversion in conversions[::-1]
    )

    def hub_name(name: str) -> str:
        new: str = core.rename_source_key(name, renamings, [])[0]
        return new

    renamed: dict[str, str] = {}
    converted: list[tuple[str, str, str]] = []
    for name in sorted(tensors, key=core.dot_natural_key):
        new, pattern = core.rename_source_key(name, [], converters)
        if pattern is None:
            renamed[name] = hub_name(name)
        else:
            converted.append((name, new, pattern))
    specs = {name: Spec(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    groups = _grouped(converters, converted, model, specs)
    for group in groups:
        group.hub_names = {name: hub_name(name) for name in group.targets}
    return renamed, groups
