"""Convert weights from and to the hub's layout, with transformers' own conversions on :class:`Moved` tensors.

transformers 5 renames, fuses and splits weights as it loads them, and undoes that as it saves. Its functions are called
here with tensors that only record where their values lie, and with a copy of the module tree without memory.
"""

from __future__ import annotations

import copy
import importlib
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardkit.checkpoint import manifest
from shardkit.checkpoint.chunks import full_box, inside, part_of
from shardkit.checkpoint.format import DTYPES, Spec
from shardkit.checkpoint.moved import Moved
from shardkit.checkpoint.read import Located, read_parts
from shardkit.checkpoint.source import Contents, Stored
from shardkit.checkpoint.transfer import Progress
from shardkit.errors import CheckpointError, listing, message
from shardkit.state.names import WRAPPERS, clean_name

logger = logging.getLogger("shardkit")

_FLOAT8 = {dtype for dtype in DTYPES.values() if dtype.is_floating_point and dtype.itemsize == 1}
USED = "_weight_conversions"  # the attribute in which transformers records the conversions of a load, to undo them


def _transformers(module: str) -> Any:
    """Return a module of transformers 5, if the program has imported transformers; else None."""
    try:
        return importlib.import_module(f"transformers.{module}") if "transformers" in sys.modules else None
    except ImportError:  # transformers 4, whose models have the names of their files
        return None


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


def skeleton(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Copy the module tree, with the classes from before ``fully_shard`` and with empty tensors on meta. Local.

    Attributes are shared with the model, except for parameters, buffers and hooks. Ties stay.
    """
    modules = {clean_name(name): module for name, module in model.named_modules(remove_duplicate=False)}
    bare: dict[int, nn.Module] = {}
    for module in modules.values():
        if id(module) not in bare:
            cls = _plain_class(module)
            bare[id(module)] = made = cls.__new__(cls)
            nn.Module.__init__(made)
            own = {name: value for name, value in vars(module).items() if name not in vars(made)}
            vars(made).update(own, training=module.training)

    def split(name: str) -> tuple[nn.Module, str]:
        parent, _, own = name.rpartition(".")
        return bare[id(modules[parent])], own

    for name, module in modules.items():
        if name:
            parent, own_name = split(name)
            parent._modules[own_name] = bare[id(module)]
    empty = {id(tensor): _empty(tensor) for tensor in tensors.values()}
    for name, tensor in tensors.items():
        if name.rpartition(".")[0] not in modules:
            continue  # scales of a quantized weight, such as bitsandbytes', which no module registers
        parent, own_name = split(name)
        registry: dict[str, Any] = parent._parameters if isinstance(tensor, nn.Parameter) else parent._buffers
        registry[own_name] = empty[id(tensor)]
    for name, buffer in ((clean_name(name), buffer) for name, buffer in model.named_buffers()):
        if name not in tensors:
            parent, own_name = split(name)
            parent.register_buffer(own_name, _empty(buffer), persistent=False)
    return bare[id(modules[""])]


def _plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class from which ``fully_shard`` made the module's."""
    classes = (each for each in type(module).__mro__ if issubclass(each, nn.Module))
    return next(each for each in classes if not issubclass(each, FSDPModule))


def _empty(tensor: Tensor) -> Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


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
        raise CheckpointError(message(where, f"quantized: {listing(scaled, 3)}", rule, fix))
    beside = {at.file.parent / "adapter_config.json" for at in found.values()}
    if found.keys().isdisjoint(tensors) and any(file.is_file() for file in beside):
        rule = "load_pretrained reads the weights of a whole model"
        fix = "Load the base model, then peft's load_adapter"
        raise CheckpointError(message(where, f"the files of an adapter: {listing(found, 3)}", rule, fix))


class Converted:
    """The files of a transformers model as a source, converted to its names.

    Args:
        tensors: the results of the conversions.
        others: tensors that the model does not have, or has in another shape.
        used: transformers' record of the conversions, for the save that undoes them.
    """

    def __init__(self, tensors: dict[str, Moved], others: dict[str, Spec], used: Any) -> None:
        self._tensors, self.others, self.used = tensors, others, used
        self.contents = Contents({name: Stored(each.dtype, each.shape, name) for name, each in tensors.items()})

    def describe(self, key: str) -> str:
        """Return what must be equal on all ranks that read a tensor."""
        pieces = self._tensors[key].pieces
        return repr([(each.where, each.box, each.dims, getattr(each.source, "entry", None)) for each in pieces])

    def read(self, targets: Iterable[tuple[str, Tensor]], progress: Progress | None = None) -> None:
        """Fill each target from the boxes of files that it comes from; computed tensors are read whole. Local."""
        wanted = list(targets)
        parts = [each for key, target in wanted for each in self._tensors[key].sources_of(part_of(target))]
        read_parts([(source, part) for source, part in parts if isinstance(source, Located)], progress)
        for source, (values, box) in parts:
            if isinstance(source, Moved):
                full = source.value(_read_whole)
                values.copy_(inside(full, full_box(full.shape), box))
        torch.autograd.graph.increment_version([target for _, target in wanted])


def _read_whole(source: Located) -> Tensor:
    full = torch.empty(source.entry.shape, dtype=source.entry.dtype)
    read_parts([(source, (full, full_box(full.shape)))])
    return full


def converted(model: nn.Module, tensors: Mapping[str, Tensor], found: Mapping[str, Located]) -> Converted | None:
    """Convert the hub's files for a transformers model; None for other models and for checkpoints of shardkit. Local.

    Raises:
        CheckpointError: a conversion failed.
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
        rule = "The files must match transformers' conversions for the model; nothing was changed"
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
    """Hide transformers' progress bar, which would count tensors that are not read yet."""
    bars = _transformers("utils.logging")
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


# ---- saving ----------------------------------------------------------------------------------------------------


class Export(NamedTuple):
    """A model in the hub's layout."""

    name: str  # the start of the names of its files
    tensors: dict[str, Moved]  # by the hub's names; their sources are the model's names
    bare: Any  # its skeleton

    def write_configs(self, place: Path, dtype: torch.dtype | None) -> None:
        """Write the JSON files that tell how to build the model. Local."""
        bare = self.bare
        if self.name == "adapter_model":
            config, base = copy.copy(next(iter(bare.peft_config.values()))), bare.get_base_model()
            config.base_model_name_or_path = config.base_model_name_or_path or vars(base).get("name_or_path") or None
            config.inference_mode = True
            auto = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
            config.save_pretrained(place, auto_mapping_dict=auto if config.task_type is None else None)
            return
        config = described_config(bare, dtype or bare.dtype)
        config.save_pretrained(place)
        if bare.can_generate():
            bare.generation_config.save_pretrained(place)
        if bare.is_remote_code():
            _transformers("dynamic_module_utils").custom_object_save(bare, place, config=config)


def exported(model: nn.Module, tensors: Mapping[str, Tensor]) -> Export:
    """Convert a transformers or peft model to the hub's layout. Local, pure.

    Raises:
        CheckpointError: it is another model, is quantized, or has several adapters.
    """
    bare: Any = unwrapped(skeleton(model, tensors))
    tied = getattr(bare, "all_tied_weights_keys", None) or {}  # names that transformers ties to others, which are kept
    kept_first = sorted(tensors.items(), key=lambda item: item[0] in tied)
    first = {id(tensor): name for name, tensor in reversed(kept_first)}
    sources = {n: Moved.of(n, t.dtype, t.shape) for n, t in tensors.items() if first[id(t)] == n}
    if is_adapted(model):
        sources = {n: Moved.of(n, t.dtype, t.shape) for n, t in tensors.items()}  # VeRA's are shared by all layers
        if len(bare.peft_config) != 1:
            problem, rule = f"it has the adapters {', '.join(bare.peft_config)}", "A directory holds one adapter"
            raise CheckpointError(message("model", problem, rule, "Delete all but one, and save"))
        _lend_prompts(bare, sources)
        found = sys.modules["peft"].get_peft_model_state_dict(bare, sources, next(iter(bare.peft_config)))
        return Export("adapter_model", dict(found), bare)
    if not is_pretrained(model) or getattr(bare, "_hf_peft_config_loaded", False):
        rule = "It must be a model of transformers 5, or of peft"
        raise CheckpointError(message("model", f"it is a {type(bare).__name__}", rule, "Use save_checkpoint"))
    if getattr(bare, "hf_quantizer", None) is not None:
        rule = "Only transformers knows the layout of its quantized weights"
        fix = "Save the parameters that train, with peft"
        raise CheckpointError(message("model", "it is quantized by transformers", rule, fix))
    for name in getattr(bare, "_keys_to_ignore_on_save", None) or ():
        sources.pop(name, None)
    return Export("model", _transformers("core_model_loading").revert_weight_conversion(bare, sources), bare)


def _lend_prompts(bare: Any, sources: Mapping[str, Moved]) -> None:
    """Let a skeleton compute the prompts that peft saves (prefix and prompt tuning) from their sources. In place."""
    for name, tensor in sources.items():
        if name.startswith("prompt_encoder."):
            parent, _, own_name = name.rpartition(".")
            bare.get_submodule(parent)._parameters[own_name] = tensor
    tokens = vars(bare).get("prompt_tokens", {})
    bare.prompt_tokens = {name: Moved.constant(each) for name, each in tokens.items()}


def described_config(model: nn.Module, dtype: torch.dtype | None = None) -> Any:
    """Copy a model's configuration, with the class that ``from_pretrained`` and inference engines look for."""
    config: Any = copy.copy(vars(model)["config"])
    config.architectures = [_plain_class(model).__name__]
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
        problem, rule = f"it cannot be written ({type(error).__name__}: {error})", "config.json is left out"
        logger.warning(message("model.config", problem, rule, "Save it with config.save_pretrained"))
        return ""
