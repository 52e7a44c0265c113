"""An optimizer's state by number made one by name, and back, of models of any kind."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType
from torch.optim import Optimizer

from shardkit.errors import listing, message
from shardkit.fsdp1.dropin.optim_keys import OptimStateError, UnknownKeys, check_is_optimizer_state, keys_of


def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """The same state by parameter number, as plain optimizers have it, or by name, as FSDP has it. Local.

    The tensors are those of the dict. A dict that is of the wanted kind already is returned itself.

    Args:
        optim_state_dict: ``{"state": ..., "param_groups": ...}``.
        optim_state_key_type: PARAM_ID or PARAM_NAME.
        model: sharded or not.
        optim_input: what the optimizer was made from; deprecated.
        optim: whose numbers are meant; without, and without ``optim_input``, those of ``model.parameters()``.

    Raises:
        ValueError: no state of an optimizer, or numbers and names in one.
        KeyError: parameters that the optimizer or the model does not have, all listed.
    """
    if optim_input is not None:
        text = "The `optim_input` argument is deprecated. Leave it out, and pass optim."
        warnings.warn(text, FutureWarning, stacklevel=2)
    if optim_state_key_type not in (OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID):
        problem = f"is {optim_state_key_type!r}"
        raise OptimStateError(message("optim_state_key_type", problem, "There are PARAM_ID and PARAM_NAME", "Pass one"))
    check_is_optimizer_state(optim_state_dict)
    _check_alike(optim_state_dict["state"])
    to_names = optim_state_key_type is OptimStateKeyType.PARAM_NAME
    groups = optim_state_dict.get("param_groups")
    present = [*optim_state_dict["state"], *(key for group in groups or () for key in group["params"])]
    if all(isinstance(key, str if to_names else int) for key in present):
        return optim_state_dict
    keys = keys_of(optim, optim_input, model)
    new: dict[Any, Any] = dict(keys.names) if to_names else dict(keys.by_name)
    if strangers := [str(key) for key in dict.fromkeys(present) if key not in new]:
        rule = "They are those that the optimizer was given"
        fix = "Pass the optim that the state belongs to"
        raise UnknownKeys(message("optim_state_dict", f"{listing(strangers)} is no parameter", rule, fix))
    state = {new[key]: entry for key, entry in optim_state_dict["state"].items()}
    if groups is None:
        return {"state": state}
    rekeyed = [{**copy.deepcopy(group), "params": sorted(new[key] for key in group["params"])} for group in groups]
    return {"state": state, "param_groups": rekeyed}


def _check_alike(state: dict[Any, Any]) -> None:
    kinds = {type(key) for key in state}
    if len(kinds) > 1 and kinds & {int, str}:
        problem = f"Invalid parameter keys: {listing(map(str, state))}"
        rule = "They are all numbers, or all names"
        fix = "Take out what is no parameter's, and put it back afterwards"
        raise OptimStateError(message("optim_state_dict", problem, rule, fix))
