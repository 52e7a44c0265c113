"""Build the model that a command line names, on the meta device."""

from __future__ import annotations

import importlib
import operator
from pathlib import Path

import torch
import torch.nn as nn

from shardkit.errors import PlanError, message


def named_model(given: str) -> nn.Module:
    """Return the model that a command line names, on the meta device: of a factory, or of a transformers config.

    Raises:
        PlanError: it cannot be imported or built.
    """
    try:
        with torch.device("meta"):
            if Path(given).exists():
                import transformers

                config = transformers.AutoConfig.from_pretrained(given)
                return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return, no-untyped-call]
            name, _, attribute = given.partition(":")
            model: nn.Module = operator.attrgetter(attribute)(importlib.import_module(name))()
            return model
    except Exception as error:  # whatever the user's code raises
        problem = f"{given} cannot be built ({type(error).__name__}: {error})"
        rule = "It must be package.module:factory, a callable without arguments, or a config.json of transformers"
        raise PlanError(message("model", problem, rule, "Check that it can be imported from here")) from error
