"""The hub's layout of weights: transformers' own conversions, applied to one group of tensors at a time.

transformers 5 renames, stacks, splits and permutes weights as it loads them, and undoes that as it saves. A
:class:`Group` is what one of its converters takes and returns: the experts of a layer, for example. Tensors that are
only renamed need none: a rank reads and writes its own bytes of them.
"""

from __future__ import annotations

import copy
import importlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardkit.checkpoint import manifest
from shardkit.checkpoint.chunks import Part, full_box, inside, part_of
from shardkit.checkpoint.format import DTYPES, Spec
from shardkit.checkpoint.read import Located, read_parts
from shardkit.checkpoint.source import Contents, Stored
from shardkit.errors import CheckpointError, listing, message
from shardkit.state.names import WRAPPERS, clean_name

logger = logging.getLogger("shardkit")

_FLOAT8 = {dtype for dtype in DTYPES.values() if dtype.is_floating_point and dtype.itemsize == 1}
USED = "_weight_conversions"  # the attribute in which transformers records the conversions of a load, to undo them


def is_pretrained(model: nn.Module) -> bool:
    """Whether transformers 5 would convert weights for this model."""
    core = _transformers("core_model_loading")
    return core is not None and isinstance(unwrapped(model), sys.modules["transformers"].PreTrainedModel)


def is_adapted(model: nn.Module) -> bool:
    """Whether it is a peft model."""
    return "peft" in sys.modules and isinstance(unwrapped(model), sys.modules["peft"].PeftModel)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers that clean FQNs leave out."""
    while inner := next((each for name in WRAPPERS if (each := model._modules.get(name)) is not None), None):
        model = inner
    return model


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class from which ``fully_shard`` made the module's."""
    classes = (each for each in type(module).__mro__ if issubclass(each, nn.Module))
    return next(each for each in classes if not issubclass(each, FSDPModule))


def _transformers(module: str) -> Any:
    """Return a module of transformers 5, if the program has imported transformers; else None."""
    try:
        return importlib.import_module(f"transformers.{module}") if "transformers" in sys.modules else None
    except ImportError:  # transformers 4, whose models have the names of their files
        return None


class _Unsharded:
    """A model whose modules show the classes from before ``fully_shard``, by which conversions are looked up."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self._model.named_modules():
            shown = object.__new__(plain_class(module))
            shown.__dict__ = module.__dict__
            yield clean_name(name), shown


# ---- groups ----------------------------------------------------------------------------------------------------


@dataclass
class Group:
    """The tensors that one conversion takes, and those it returns."""

    converter: Any  # a WeightConverter
    model: Any
    sources: list[tuple[str, str]] = field(default_factory=list)  # names, each with the converter's pattern, in order
    targets: dict[str, Tensor] = field(default_factory=dict)  # on meta, by name

    def convert(self, read: Callable[[str], Tensor], rows: range | None = None, name: str = "") -> dict[str, Tensor]:
        """Convert the sources that ``read`` returns; only those of a range of rows, if it :attr:`stacks` them."""
        one = copy.deepcopy(self.converter)
        name = name or next(iter(self.targets))
        for source, pattern in self._of_rows(rows):
            one.add_tensor(name, source, pattern, read(source))
        made = one.convert(name, model=self.model, config=self.model.config)
        return {target: value[0] if isinstance(value, list) else value for target, value in made.items()}

    def find_targets(self, name: str, specs: Mapping[str, Spec]) -> None:
        """Convert tensors on meta to find what this returns; ``name`` is the first. In place."""
        self.targets = self.convert(
            lambda s: torch.empty(specs[s].shape, dtype=specs[s].dtype, device="meta"), name=name
        )

    def _of_rows(self, rows: range | None) -> list[tuple[str, str]]:
        by_pattern: dict[str, list[tuple[str, str]]] = {}
        for each in self.sources:
            by_pattern.setdefault(each[1], []).append(each)
        chosen = (own if rows is None else own[rows.start : rows.stop] for own in by_pattern.values())
        return [each for own in chosen for each in own]

    @property
    def stacks(self) -> bool:
        """Whether each row of the targets comes from sources of its own, such as one expert."""
        first, *others = self.converter.operations
        core = _transformers("core_model_loading")
        is_stack = isinstance(first, core.MergeModulelist) and first.dim == 0
        return is_stack and all(isinstance(op, core.Concatenate) and op.dim > 0 for op in others)

    @property
    def unstacks(self) -> bool:
        """Whether each row of the sources becomes targets of its own."""
        *others, last = self.converter.operations
        is_split = isinstance(last, _transformers("core_model_loading").SplitModulelist) and last.dim == 0
        return is_split and all(getattr(op, "dim", 0) > 0 for op in others)

    def rows_of(self, parts: Mapping[str, Part]) -> range | None:
        """Return the rows that all parts have, to convert them alone; None where all sources are needed."""
        rows = {box[0] for _, box in parts.values()}
        if not self.stacks or len(rows) > 1:
            return None
        ((start, count),) = rows
        return range(start, start + count)

    def load(self, parts: Mapping[str, Part], read: Callable[[str], Tensor]) -> None:
        """Fill parts of the targets. Local; one conversion in memory."""
        rows = self.rows_of(parts)
        if rows is not None and not rows:
            return
        made = self.convert(read, rows)
        for name, (values, box) in parts.items():
            lies = full_box(made[name].shape)
            lies = lies if rows is None else ((rows.start, len(rows)), *lies[1:])
            if values.numel():
                values.copy_(inside(made[name], lies, box))


def _grouped(converters: list[Any], named: Iterable[tuple[str, str, str]], model: Any) -> dict[str, Group]:
    """Return groups by their first target, of tensors with that and the converter's pattern."""
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    groups: dict[str, Group] = {}
    for name, target, pattern in named:
        groups.setdefault(target, Group(by_pattern[pattern], model)).sources.append((name, pattern))
    return groups


# ---- loading ---------------------------------------------------------------------------------------------------


def check_files(found: Mapping[str, Located], tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise for float8 weights with scales that the model does not have, and for an adapter's files. Local."""
    scales = [(name, f"{name}{end}") for name in found for end in ("_scale_inv", "_scale")]
    scaled = [
        f"{name} ({found[name].entry.dtype}, with {scale})"
        for name, scale in scales
        if found[name].entry.dtype in _FLOAT8 and scale in found and scale not in tensors
    ]
    if scaled:
        rule = "load_pretrained does not apply the scales of quantized weights"
        fix = "Load it with transformers and FineGrainedFP8Config(dequantize=True), and save that"
        raise CheckpointError(message(where, f"is quantized: {listing(scaled, 3)}", rule, fix))
    beside = {at.file.parent / "adapter_config.json" for at in found.values()}
    if found.keys().isdisjoint(tensors) and any(file.is_file() for file in beside):
        rule = "load_pretrained reads the weights of a whole model"
        fix = "Load the base model, then peft's load_adapter"
        raise CheckpointError(message(where, f"has the files of an adapter: {listing(found, 3)}", rule, fix))


def converted(model: nn.Module, tensors: Mapping[str, Tensor], found: Mapping[str, Located]) -> HubFiles | None:
    """Return the files of a transformers model as a source; None for other models and checkpoints of ours. Local."""
    directories = {at.file.parent for at in found.values()}
    if not is_pretrained(model) or any((each / manifest.NAME).is_file() for each in directories):
        return None
    return HubFiles(unwrapped(model), tensors, found)


class HubFiles:
    """The files of a transformers model as a source, converted to the names of the model.

    Args:
        model: of transformers 5.
        tensors: its state, by name.
        found: the tensors of the files.

    Raises:
        CheckpointError: a conversion fails on the shapes in the files.
    """

    def __init__(self, model: Any, tensors: Mapping[str, Tensor], found: Mapping[str, Located]) -> None:
        core, self._found = _transformers("core_model_loading"), found
        mapping = _transformers("conversion_mapping").get_model_conversion_mapping(_Unsharded(model))
        renamings = [each for each in mapping if isinstance(each, core.WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, core.WeightConverter)]
        prefix = model.base_model_prefix
        self._renamed: dict[str, str] = {}  # names in the files, by names in the model
        grouped: list[tuple[str, str, str]] = []
        for name in sorted(found, key=core.dot_natural_key):
            new, pattern = core.rename_source_key(name, renamings, converters, prefix, tensors)
            if new not in tensors and name in tensors:
                new, pattern = core.rename_source_key(name, [], [], prefix, tensors)
            if pattern is None:
                self._renamed[new] = name
            else:
                grouped.append((name, new, pattern))
        self._specs: dict[str, Spec] = {name: at.entry for name, at in found.items()}
        groups = _grouped(converters, grouped, model)
        self._groups = [self._checked(name, group) for name, group in groups.items() if name in tensors]
        lost = [new for new in groups if new not in tensors]
        self.used = [each for each in mapping if each.was_used()]  # for the save that undoes them
        specs = {new: self._specs[name] for new, name in self._renamed.items() if new in tensors}
        specs |= {n: Spec(t.dtype, t.shape) for group in self._groups for n, t in group.targets.items()}
        self.contents = Contents({name: Stored(each.dtype, each.shape, name) for name, each in specs.items()})
        lost += [new for new in self._renamed if new not in tensors]
        unexpected = SimpleNamespace(missing_keys=set(), unexpected_keys=set(lost))
        getattr(model, "_adjust_missing_and_unexpected_keys")(unexpected)  # noqa: B009  leaves out old buffers
        self.others = {name: Spec(torch.uint8, torch.Size([0])) for name in sorted(unexpected.unexpected_keys)}

    def _checked(self, name: str, group: Group) -> Group:
        try:
            group.find_targets(name, self._specs)
        except Exception as error:  # whatever a conversion raises
            rule = "The files must match transformers' conversions for the model; nothing was changed"
            problem = f"cannot be converted from {listing((each for each, _ in group.sources), 3)} ({error})"
            raise CheckpointError(message(name, problem, rule, "Fetch the files again, or pass key_map=")) from error
        return group

    def describe(self, key: str) -> str:
        """Return what must be equal on all ranks that read a tensor."""
        return repr(self._specs[self._renamed[key]] if key in self._renamed else self.contents.model[key])

    def read(self, targets: Iterable[tuple[str, Tensor]]) -> None:
        """Fill each target: renamed tensors from this rank's own bytes, a group's as :meth:`Group.load`. Local."""
        wanted = dict(targets)
        parts = {name: part_of(target) for name, target in wanted.items()}
        jobs = [(self._found[self._renamed[name]], part) for name, part in parts.items() if name in self._renamed]
        groups = [(group, {n: parts[n] for n in group.targets if n in parts}) for group in self._groups]
        read_parts(jobs)
        for group, own in groups:
            if own:
                group.load(own, self._read_full)
        torch.autograd.graph.increment_version(list(wanted.values()))

    def _read_full(self, source: str) -> Tensor:
        at = self._found[source]
        full = torch.empty(at.entry.shape, dtype=at.entry.dtype)
        read_parts([(at, (full, full_box(full.shape)))])
        return full


# ---- saving ----------------------------------------------------------------------------------------------------


def plan_save(model: Any, tensors: Mapping[str, Tensor]) -> tuple[dict[str, str], list[tuple[Group, dict[str, str]]]]:
    """Return the hub's name of each tensor that is renamed, and groups with the hub's names of their targets. Local.

    Args:
        model: of transformers 5, unwrapped.
        tensors: what to save, by the model's names.
    """
    core, mapping = _transformers("core_model_loading"), getattr(model, USED, None)
    if mapping is None:  # not loaded from files, which might have had a prefix
        found = _transformers("conversion_mapping").get_model_conversion_mapping(_Unsharded(model), add_legacy=False)
        mapping = [each for each in found if not isinstance(each, core.PrefixChange)]
    reverse = [each.reverse_transform() for each in mapping[::-1]]
    renamings = [each for each in reverse if isinstance(each, core.WeightRenaming)]
    converters = [each for each in reverse if isinstance(each, core.WeightConverter)]
    renamed: dict[str, str] = {}
    grouped: list[tuple[str, str, str]] = []
    for name in sorted(tensors, key=core.dot_natural_key):
        new, pattern = core.apply_converters(name, converters)
        if pattern is None:
            renamed[name] = core.apply_renamings(name, renamings)
        else:
            grouped.append((name, new, pattern))
    specs = {name: Spec(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    groups: list[tuple[Group, dict[str, str]]] = []
    for name, group in _grouped(converters, grouped, model).items():
        group.find_targets(name, specs)
        groups.append((group, {each: core.apply_renamings(each, renamings) for each in group.targets}))
    return renamed, groups


def described_config(model: nn.Module, dtype: torch.dtype | None = None) -> Any:
    """Copy a model's configuration, with the class that ``from_pretrained`` and inference engines look for."""
    config: Any = copy.copy(vars(model)["config"])
    config.architectures = [plain_class(model).__name__]
    if dtype is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    return config


def config_text(model: nn.Module) -> str:
    """Return ``config.json`` for a model with a configuration like transformers', else an empty string. Local."""
    model = unwrapped(model)
    if is_adapted(model) or not callable(getattr(vars(model).get("config"), "to_json_string", None)):
        return ""
    try:
        return str(described_config(model).to_json_string())
    except Exception as error:  # any object may be called config, and must not stop the save
        problem, rule = f"cannot be written ({type(error).__name__}: {error})", "config.json is left out"
        logger.warning(message("model.config", problem, rule, "Save it with config.save_pretrained"))
        return ""
