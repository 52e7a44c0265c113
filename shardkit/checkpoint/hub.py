"""The hub's layout of a model's weights: transformers' own conversions, applied to :class:`Moved` tensors.

transformers 5 renames, fuses and splits weights as it loads them, and undoes that as it saves. Its functions are called
here with tensors that only say where they lie, and with a copy of the module tree that holds no memory.
"""

from __future__ import annotations

import copy
import importlib
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardkit.checkpoint import manifest
from shardkit.checkpoint.format import DTYPES, Spec
from shardkit.checkpoint.moved import Moved
from shardkit.checkpoint.read import Located
from shardkit.errors import CheckpointError, listing, message
from shardkit.state.names import WRAPPERS, clean_name

logger = logging.getLogger("shardkit")

_FLOAT8 = {dtype for dtype in DTYPES.values() if dtype.is_floating_point and dtype.itemsize == 1}
USED = "_weight_conversions"  # where transformers notes on a model what a load converted, for the save that undoes it


def _transformers(module: str) -> Any:
    """A module of transformers 5, where the program has imported transformers; None without. No types."""
    try:
        return importlib.import_module(f"transformers.{module}") if "transformers" in sys.modules else None
    except ImportError:  # transformers 4 loads what its files have, under the same names
        return None


def is_pretrained(model: nn.Module) -> bool:
    """Whether transformers 5 would convert weights for this model."""
    core = _transformers("core_model_loading")
    return core is not None and isinstance(unwrapped(model), sys.modules["transformers"].PreTrainedModel)


def is_adapted(model: nn.Module) -> bool:
    """Whether it is a model of peft."""
    return "peft" in sys.modules and isinstance(unwrapped(model), sys.modules["peft"].PeftModel)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without the wrappers that its clean FQNs leave out."""
    while inner := next((each for name in WRAPPERS if (each := model._modules.get(name)) is not None), None):
        model = inner
    return model


def skeleton(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The module tree again, of the classes that ``fully_shard`` renamed, with empty tensors on meta. Local.

    Attributes are shared with the model, except for parameters, buffers and hooks. Ties stay.
    """
    modules = {clean_name(name): module for name, module in model.named_modules(remove_duplicate=False)}
    bare = {id(module): _bare_module(module) for module in modules.values()}
    for name, module in modules.items():
        if name:
            parent, _, own = name.rpartition(".")
            bare[id(modules[parent])]._modules[own] = bare[id(module)]
    empty = {id(tensor): _empty(tensor) for tensor in tensors.values()}
    for name, tensor in tensors.items():
        parent, _, own = name.rpartition(".")
        home = bare[id(modules[parent])]
        registry: dict[str, Any] = home._parameters if isinstance(tensor, nn.Parameter) else home._buffers
        registry[own] = empty[id(tensor)]
    for name, buffer in ((clean_name(name), buffer) for name, buffer in model.named_buffers()):
        if name not in tensors:
            parent, _, own = name.rpartition(".")
            bare[id(modules[parent])].register_buffer(own, _empty(buffer), persistent=False)
    return bare[id(modules[""])]


def _bare_module(module: nn.Module) -> nn.Module:
    cls = _plain_class(module)
    made = cls.__new__(cls)
    nn.Module.__init__(made)
    own = {name: value for name, value in vars(module).items() if name not in vars(made)}
    vars(made).update(own, training=module.training)
    return made


def _plain_class(module: nn.Module) -> type[nn.Module]:
    """The class that ``fully_shard`` made another of."""
    classes = (each for each in type(module).__mro__ if issubclass(each, nn.Module))
    return next(each for each in classes if not issubclass(each, FSDPModule))


def _empty(tensor: Tensor) -> Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


# ---- loading ---------------------------------------------------------------------------------------------------


def check_files(found: Mapping[str, Located], tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise for files that a model's own weights cannot be read from. Local.

    Raises:
        CheckpointError: float8 weights whose scales the model has no place for, or an adapter's files alone.
    """
    scales = [(name, f"{name}{end}") for name in found for end in ("_scale_inv", "_scale")]
    scaled = [
        f"{name} ({found[name].entry.dtype}, with {scale})"
        for name, scale in scales
        if found[name].entry.dtype in _FLOAT8 and scale in found and scale not in tensors
    ]
    if scaled:
        rule = "Such values mean nothing without their scales, which load_pretrained does not apply"
        fix = "Load it with transformers and FineGrainedFP8Config(dequantize=True), and save that"
        raise CheckpointError(message(where, f"quantised: {listing(scaled, 3)}", rule, fix))
    beside = {at.file.parent / "adapter_config.json" for at in found.values()}
    if found.keys().isdisjoint(tensors) and any(file.is_file() for file in beside):
        rule, fix = "load_pretrained reads a model's own weights", "Load the base model, then peft's load_adapter"
        raise CheckpointError(message(where, f"the files of an adapter: {listing(found, 3)}", rule, fix))


@dataclass(frozen=True)
class Converted:
    """Attributes:
    tensors: what the files have, by the model's names.
    others: what they have beside that, and what has another shape than the model's.
    used: transformers' note for the save that undoes the conversions.
    """

    tensors: dict[str, Moved]
    others: dict[str, Spec]
    used: Any


def converted(model: nn.Module, tensors: Mapping[str, Tensor], found: Mapping[str, Located]) -> Converted | None:
    """What files of the hub have for a model of transformers; None for any other, and for a checkpoint of ours. Local.

    Raises:
        CheckpointError: a conversion failed on what the files have.
    """
    directories = {at.file.parent for at in found.values()}
    if not is_pretrained(model) or any((each / manifest.NAME).is_file() for each in directories):
        return None
    bare: Any = skeleton(model, tensors)
    mapping = _transformers("conversion_mapping").get_model_conversion_mapping(bare)
    options = _transformers("modeling_utils").LoadStateDictConfig(weight_mapping=mapping)
    sources = {name: Moved.of(at, at.entry.dtype, at.entry.shape) for name, at in found.items()}
    with _no_progress():
        info, _ = _transformers("core_model_loading").convert_and_load_state_dict_in_model(bare, sources, options)
    if info.conversion_errors:
        rule = "transformers' conversions must fit what the files have; nothing was changed"
        problem = "; ".join(f"{name}: {text.splitlines()[-1]}" for name, text in info.conversion_errors.items())
        raise CheckpointError(message("transformers", problem, rule, "Fetch the files again, or pass key_map="))
    getattr(bare, "_adjust_missing_and_unexpected_keys")(info)  # noqa: B009
    state = bare.state_dict(keep_vars=True)
    fit = {name: tensor for name, tensor in state.items() if isinstance(tensor, Moved)}
    others = {name: Spec(torch.uint8, torch.Size([0])) for name in sorted(info.unexpected_keys)}
    others |= {name: Spec(tensors[name].dtype, shape) for name, shape, _ in sorted(info.mismatched_keys)}
    return Converted(fit, others, getattr(bare, USED, None))


@contextmanager
def _no_progress() -> Iterator[None]:
    """Without transformers' progress bar, which would count what is not read yet."""
    bars = _transformers("utils.logging")
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


# ---- saving ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Export:
    """What the hub has of a model.

    Attributes:
        name: what its files are called by.
        tensors: by the hub's names; their sources are the model's names.
        bare: of the model.
    """

    name: str
    tensors: dict[str, Moved]
    bare: Any

    def write_configs(self, place: Path, dtype: torch.dtype | None) -> None:
        """Write the JSON files that tell how to build the model. Local."""
        if self.name == "adapter_model":
            _write_adapter_config(self.bare, place)
            return
        config = described_config(self.bare, dtype or self.bare.dtype)
        config.save_pretrained(place)
        if self.bare.can_generate():
            self.bare.generation_config.save_pretrained(place)
        if self.bare.is_remote_code():
            _transformers("dynamic_module_utils").custom_object_save(self.bare, place, config=config)


def exported(model: nn.Module, tensors: Mapping[str, Tensor]) -> Export:
    """A model of transformers or peft as the hub has it. Local, pure.

    Raises:
        CheckpointError: it is another model, is quantised, or has several adapters.
    """
    bare: Any = unwrapped(skeleton(model, tensors))
    first = {id(tensor): name for name, tensor in reversed(_kept_first(tensors, bare))}
    sources = {n: Moved.of(n, t.dtype, t.shape) for n, t in tensors.items() if first[id(t)] == n}
    if is_adapted(model):
        return Export("adapter_model", _adapter(bare, sources), bare)
    if not is_pretrained(model) or getattr(bare, "_hf_peft_config_loaded", False):
        rule = "It is a model of transformers 5, or of peft"
        raise CheckpointError(message("model", f"a {type(bare).__name__}", rule, "Use save_checkpoint"))
    if getattr(bare, "hf_quantizer", None) is not None:
        rule = "Only transformers knows the layout of its quantised weights"
        raise CheckpointError(message("model", "quantised by transformers", rule, "Save what trains, with peft"))
    for name in getattr(bare, "_keys_to_ignore_on_save", None) or ():
        sources.pop(name, None)
    reverted = _transformers("core_model_loading").revert_weight_conversion(bare, sources)
    return Export("model", reverted, bare)


def _kept_first(tensors: Mapping[str, Tensor], bare: Any) -> list[tuple[str, Tensor]]:
    """Of tied names, those first that transformers ties the others to."""
    tied = getattr(bare, "all_tied_weights_keys", None) or {}
    return sorted(tensors.items(), key=lambda item: item[0] in tied)


def _adapter(bare: Any, sources: dict[str, Moved]) -> dict[str, Moved]:
    if len(bare.peft_config) != 1:
        rule = "The adapter files in a directory are one adapter's"
        raise CheckpointError(
            message("model", f"has the adapters {', '.join(bare.peft_config)}", rule, "Delete all but one, and save")
        )
    found = sys.modules["peft"].get_peft_model_state_dict(bare, sources, next(iter(bare.peft_config)))
    return dict(found)


def _write_adapter_config(bare: Any, place: Path) -> None:
    config = copy.copy(next(iter(bare.peft_config.values())))
    base = bare.get_base_model()
    config.base_model_name_or_path = config.base_model_name_or_path or vars(base).get("name_or_path") or None
    config.inference_mode = True
    auto = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    config.save_pretrained(place, auto_mapping_dict=auto if config.task_type is None else None)


def described_config(model: nn.Module, dtype: torch.dtype | None = None) -> Any:
    """A copy of a model's configuration that names its class, as ``from_pretrained`` and inference engines want it."""
    config: Any = copy.copy(vars(model)["config"])
    config.architectures = [_plain_class(model).__name__]
    if dtype is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    return config


def config_text(model: nn.Module) -> str:
    """``config.json`` of a model that has a configuration like transformers'; empty for others. Local."""
    model = unwrapped(model)
    if is_adapted(model) or not callable(getattr(vars(model).get("config"), "to_json_string", None)):
        return ""
    try:
        return str(described_config(model).to_json_string())
    except Exception as error:  # whatever is called config: the weights are what a save must not lose
        logger.warning(
            message("model.config", f"{type(error).__name__}: {error}", "config.json is left out", "See why")
        )
        return ""
