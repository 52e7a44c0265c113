"""Read the call in a program that configures FSDP: TrainingArguments(...), FullyShardedDataParallelPlugin(...)."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import Any

from shardkit.errors import TranslationError, listing, message

PLUGIN = "FullyShardedDataParallelPlugin"
# Keywords of the plugin that accelerate's file calls otherwise, and objects, for which it has no keys.
_RENAMED = {"cpu_offload": "offload_params", "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap"}
_CONFIGS = ("state_dict_config", "optim_state_dict_config")
_OBJECTS = ("mixed_precision_policy", "ignored_modules", "param_init_fn", *_CONFIGS)
_TEXTS = ("fsdp_config", "transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap")  # where any text would do
_OFFLOADS = {f"CPUOffload({given}{value})": value for given in ("", "offload_params=") for value in (True, False)}
_OFFLOADS |= {"CPUOffload()": False, "CPUOffloadPolicy()": True}


def read_program(file: Path, text: str) -> dict[str, Any]:
    """Return the keys and values of the one call in a program that configures FSDP, as a file of the tool has them.

    Names that are assigned once and never changed are looked up. What is no literal stays text, and is refused where
    its value is needed. Nothing is imported.

    Raises:
        TranslationError: it is not Python, or has no such call, several, or one whose arguments are elsewhere.
    """
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError) as error:
        raise TranslationError(message(str(file), f"is not valid Python: {error}", "", "Fix the syntax")) from None
    known = _constants(nodes)
    calls = [node for node in nodes if isinstance(node, ast.Call) and _configures(node)]
    if len(calls) != 1:
        problem = f"has {len(calls)} calls that configure FSDP"
        problem += f", in lines {listing(str(call.lineno) for call in calls)}" if calls else ""
        rule = f"It has one call with fsdp= or fsdp_config=, such as TrainingArguments(...), or {PLUGIN}(...)"
        raise TranslationError(message(str(file), problem, rule, "Give the file that has it, or a configuration file"))
    given = _keywords(calls[0], known)
    if _name(calls[0]) != PLUGIN:
        return given
    if objects := [key for key in _OBJECTS if given.pop(key, None) is not None]:
        rule, fix = "Objects cannot be read from a program", "Leave them out, and pass them to shard_model"
        raise TranslationError(message(PLUGIN, f"has {listing(objects)}", rule, fix))
    found: dict[str, Any] = {"distributed_type": "FSDP"}
    for accelerator in (node for node in nodes if isinstance(node, ast.Call) and _name(node) == "Accelerator"):
        found |= {str(k.arg): _value(k.value, known) for k in accelerator.keywords if k.arg == "mixed_precision"}
    return found | {"fsdp_config": {_RENAMED.get(key, key): value for key, value in given.items()}}


def _constants(nodes: list[ast.AST]) -> dict[str, ast.expr]:
    """Return what names are assigned, of those that nothing else binds, and whose attributes and items are not used."""
    places = [node for node in nodes if isinstance(node, (ast.Name, ast.Attribute))]
    bound = Counter(ast.unparse(node) for node in places if not isinstance(node.ctx, ast.Load))
    bound.update(node.arg for node in nodes if isinstance(node, ast.arg))
    bound.update(node.asname or node.name for node in nodes if isinstance(node, ast.alias))
    changed = {ast.unparse(node.value) for node in nodes if isinstance(node, (ast.Attribute, ast.Subscript))}
    assigned = [(ast.unparse(node.targets[0]), node.value) for node in nodes if isinstance(node, ast.Assign)]
    return {name: value for name, value in assigned if bound[name] == 1 and name not in changed}


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _configures(call: ast.Call) -> bool:
    return _name(call) == PLUGIN or any(each.arg in ("fsdp", "fsdp_config") for each in call.keywords)


def _keywords(call: ast.Call, known: dict[str, ast.expr]) -> dict[str, Any]:
    spread = [f"**{ast.unparse(each.value)}" for each in call.keywords if each.arg is None]
    first = [] if _name(call) == PLUGIN else ["output_dir"]  # the parameter of a positional argument
    own = dict(zip(first, call.args, strict=False))
    if hidden := [*map(ast.unparse, call.args[len(own) :]), *spread]:
        rule, fix = "Only keywords in the call can be read", "Write its keywords in the call"
        raise TranslationError(message(f"line {call.lineno}", f"{_name(call)} is given {listing(hidden)}", rule, fix))
    own |= {str(each.arg): each.value for each in call.keywords}
    return {key: _given(key, node, known) for key, node in own.items()}


def _given(key: str, node: ast.expr, known: dict[str, ast.expr]) -> Any:
    node = known.get(ast.unparse(node), node)
    value = _value(node, known)
    if key in _TEXTS and value == ast.unparse(node):  # the text of a string has quotes
        rule, fix = "Literals can be read, and names that are assigned once and never changed", "Write the value"
        raise TranslationError(message(key, f"{value}: its value is not in the program", rule, fix))
    return value


def _items(node: ast.expr) -> dict[Any, ast.expr] | None:
    """Return the items of ``{"version": 2}`` or ``dict(version=2)``, None for all else."""
    if isinstance(node, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]  # None: **others
        pairs = [*zip(keys, node.values, strict=True)]
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "dict" and not node.args:
        pairs = [(each.arg, each.value) for each in node.keywords]
    else:
        return None
    return None if any(name is None for name, _ in pairs) else dict(pairs)


def _value(node: ast.expr, known: dict[str, ast.expr]) -> Any:
    node = known.get(ast.unparse(node), node)
    if (items := _items(node)) is not None:
        return {name: _given(name, value, known) for name, value in items.items()}
    try:
        return ast.literal_eval(node)
    except ValueError:
        return _OFFLOADS.get(ast.unparse(node), ast.unparse(node))
