"""The model that a command line names, for what can be said of it before anything runs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from shardkit.errors import PlanError, message


def named_model(given: str) -> nn.Module:
    """The model that a command line names, on the meta device: a factory, or a configuration of transformers.

    Raises:
        PlanError: it cannot be imported or built.
    """
    try:
        with torch.device("meta"):
            model = _from_transformers(given) if Path(given).exists() else _from_factory(given)
    except Exception as error:  # whatever the user's code raises
        problem = f"{given} cannot be built: {type(error).__name__}: {error}"
        rule = "It is package.module:factory, a callable without arguments, or a config.json of transformers"
        raise PlanError(message("model", problem, rule, "Check that it can be imported from here")) from error
    if not isinstance(model, nn.Module):
        problem = f"{given} gives a {type(model).__name__}"
        raise PlanError(message("model", problem, "It gives a module", "Return the model"))
    return model


def _from_factory(given: str) -> Any:
    name, _, attribute = given.partition(":")
    found: Any = importlib.import_module(name)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found()


def _from_transformers(path: str) -> Any:
    import transformers

    build_model: Any = transformers.AutoModelForCausalLM.from_config  # has no types
    return build_model(transformers.AutoConfig.from_pretrained(path))
