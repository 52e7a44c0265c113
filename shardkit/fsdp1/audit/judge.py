"""A use of FSDP1 to a finding: what becomes of it, and the line that replaces it, with the program's own arguments."""

from __future__ import annotations

import ast
import collections
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from torch.distributed.fsdp import FullyShardedDataParallel

from shardkit.fsdp1.audit.names import CLASS_CALLS, FATES, FSDP, Fate, Topic
from shardkit.fsdp1.audit.resolve import classes_of, is_constructor, keyword_entries, value_of
from shardkit.fsdp1.audit.uses import Use
from shardkit.fsdp1.audit.values import Path, Scope, Setting, public_name
from shardkit.fsdp1.instead import ARGUMENTS, FIELDS

Text = Callable[[ast.expr], str]

_ORDER = list(FATES)
_IMPLIED = {  # what FSDP2 does unasked, as written
    "backward_prefetch": "BackwardPrefetch.BACKWARD_PRE",
    "limit_all_gathers": "True",
    "use_orig_params": "True",
}
_FULL_PARAMS = ("writeback", "rank0_only", "offload_to_cpu", "with_grads")  # which full_params takes as FSDP1 did
_HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


class Verdict(NamedTuple):
    """What becomes of a use.

    Attributes:
        fate: the worst of its arguments'.
        replacement: one line of code, or empty.
        why: sentences.
        topic: of the row.
    """

    fate: Fate
    replacement: str
    why: str
    topic: Topic


class Argument(NamedTuple):
    """An argument of a call: its name, its expression, and whether it stands in the call itself."""

    name: str
    value: ast.expr
    is_written: bool


def judge(use: Use, parts: Iterable[Use], scope: Scope, state: ast.Call | None, text: Text, is_inner: bool) -> Verdict:
    """What becomes of ``use``.

    Args:
        parts: the uses in its arguments, which it speaks for; the worst one counts.
        scope: the names around it.
        state: the call of ``state_dict_type`` around it.
        text: an expression as written.
        is_inner: whether it wraps a part of a model.
    """
    own = _own(use, scope, state, text, is_inner)
    fate, whys = own.fate, [own.why]
    for part in parts:
        verdict = _own(part, scope, state, text, False)
        if part.name in own.replacement or _ORDER.index(verdict.fate) > _ORDER.index("note"):
            fate = worst(fate, verdict.fate)
            whys.append(verdict.why if verdict.fate != "exact" else "")
    return own._replace(fate=fate, why="; ".join(dict.fromkeys(why for why in whys if why)))


def worst(*fates: Fate) -> Fate:
    """The worst one."""
    return max(fates, key=_ORDER.index)


def _own(use: Use, scope: Scope, state: ast.Call | None, text: Text, is_inner: bool) -> Verdict:
    if use.name == FSDP and use.kind in ("call", "partial") and isinstance(use.node, ast.Call):
        return _wrapping(use, use.node, scope, text, is_inner)
    if use.name == FSDP and use.kind == "isinstance":
        return _check(use, scope, text)
    plain = Verdict(use.row.fate, _filled(use, state, scope, text), use.row.why, use.row.topic)
    special = _SPECIAL.get(use.name.removeprefix(f"{FSDP}."))
    return plain if special is None else special(use, plain, scope, state, text)


# --- FullyShardedDataParallel(...) ------------------------------------------------------------------------------------


def _wrapping(use: Use, call: ast.Call, scope: Scope, text: Text, is_inner: bool) -> Verdict:
    arguments = _constructor_arguments(use, call, scope)
    fate: Fate = "exact"
    whys: list[str] = []
    shown: list[str] = []
    if arguments is None or any(isinstance(each, ast.Starred) for each in call.args):
        fate, whys = "decision", ["its arguments are not written here, so look at them with the table of arguments"]
    for argument in arguments or _written(use, call):
        judged, why = _argument(argument, text)
        fate = worst(fate, judged)
        whys.append(f"{argument.name}: {why}" if why else "")
        if argument.is_written and not _is_dropped(argument, text):
            shown.append(_shown(argument, scope, text))
    if _counts_ranks({argument.name: argument.value for argument in arguments or ()}, scope):
        fate = worst(fate, "note")
        whys.append("ranks_per_node is torchrun's LOCAL_WORLD_SIZE, where FSDP1 counted devices")
    if is_inner:
        fate = "decision"
        whys.append("a part of a model: leave it, and name it in units= of one call on the whole model")
    stars = [f"**{text(keyword.value)}" for keyword in call.keywords if keyword.arg is None]
    replacement = _call_text(use, call, [*shown, *stars], text)
    return Verdict(fate, replacement, "; ".join(why for why in whys if why), "wrapping")


def _counts_ranks(arguments: Mapping[str, ast.expr], scope: Scope) -> bool:
    """Whether the call leaves to FSDP1 how many ranks shard together."""
    strategy = _member_of(arguments.get("sharding_strategy"), "ShardingStrategy", scope)
    return strategy in _HYBRID and not {"process_group", "device_mesh"} & set(arguments)


def _constructor_arguments(use: Use, call: ast.Call, scope: Scope) -> list[Argument] | None:
    entries = keyword_entries(call, scope)
    if entries is None:
        return None
    written = _written(use, call)
    names = {argument.name for argument in written}
    return written + [Argument(name, value, False) for name, value in entries if name not in names]


def _written(use: Use, call: ast.Call) -> list[Argument]:
    positional = call.args[1:] if use.kind == "partial" else call.args
    named = [Argument(keyword.arg, keyword.value, True) for keyword in call.keywords if keyword.arg is not None]
    return [Argument(name, value, True) for name, value in zip(ARGUMENTS, positional, strict=False)] + named


def _argument(argument: Argument, text: Text) -> tuple[Fate, str]:
    name, value = argument.name, argument.value
    if name not in ARGUMENTS:
        return "decision", "no argument of torch's FSDP1"
    row = ARGUMENTS[name]
    written = text(value)
    if row.fate == "refused":
        return "impossible", row.sentence
    noted = {"False", "None"} if row.fate == "implied" else set()
    if row.fate == "noted" or written in noted or written.endswith("BACKWARD_POST"):
        return "note", row.sentence
    return "exact", ""


def _is_dropped(argument: Argument, text: Text) -> bool:
    """Whether it says what FSDP2 does anyway, or FSDP1's default."""
    written = text(argument.value)
    if argument.name in _IMPLIED:
        return ".".join(written.split(".")[-2:]) == _IMPLIED[argument.name]
    default = inspect.signature(FullyShardedDataParallel.__init__).parameters.get(argument.name)
    return default is not None and written == repr(default.default)


def _shown(argument: Argument, scope: Scope, text: Text) -> str:
    written = text(argument.value)
    if argument.name == "module":
        return written
    if argument.name == "sharding_strategy":
        strategy = _member_of(argument.value, "ShardingStrategy", scope)
        written = written if strategy is None or not written.endswith(strategy) else f'"{strategy}"'
    return f"{argument.name}={written}"


def _member_of(value: ast.expr | None, enum: str, scope: Scope) -> str | None:
    """The member of one of FSDP1's enums that is written there."""
    found = value_of(value, scope) if value is not None else None
    named = public_name(found.dotted) if isinstance(found, Path) else None
    return named[1] if named is not None and named[0] == enum and named[1].isidentifier() else None


def _call_text(use: Use, call: ast.Call, shown: list[str], text: Text) -> str:
    if use.kind != "partial":
        return f"shard_like_fsdp1({', '.join(shown)})"
    return f"{text(call.func)}({', '.join(['shard_like_fsdp1', *shown])})"


def _check(use: Use, scope: Scope, text: Text) -> Verdict:
    if isinstance(use.node, ast.Call):
        call = use.node
        names = ["FSDPModule" if is_constructor(value_of(each, scope)) else text(each) for each in classes_of(call)]
        classes = f"({', '.join(names)})" if isinstance(call.args[1], ast.Tuple) else names[0]
        return Verdict("exact", f"{text(call.func)}({text(call.args[0])}, {classes})", "", "names")
    assert isinstance(use.node, ast.Compare)
    no = "not " if isinstance(use.node.ops[0], (ast.IsNot, ast.NotEq)) else ""
    why = "a sharded model keeps a class of its own, which is derived from FSDPModule"
    return Verdict("note", f"{no}isinstance({text(use.children[0])}, FSDPModule)", why, "names")


# --- Other names ------------------------------------------------------------------------------------------------------


def _filled(use: Use, state: ast.Call | None, scope: Scope, text: Text) -> str:
    """The template of the row with the arguments as written; ``...`` for what is not there."""
    call = use.node if isinstance(use.node, ast.Call) and use.kind == "call" else None
    values: dict[str, str] = collections.defaultdict(lambda: "...")
    values["member"] = use.member
    values.update(_who_holds(use, state, scope))
    if use.receiver is not None:
        values["receiver"] = text(use.receiver)
    if call is not None:
        values["args"] = ", ".join([*map(text, call.args), *map(functools.partial(_keyword, text), call.keywords)])
        values.update(_bound(use, call, text))
    elif use.receiver is None or use.kind == "mention":
        values["args"] = "..."
    filled = use.row.replacement.format_map(values)
    return filled.replace("(, ", "(").replace(", )", ")")


def _keyword(text: Text, keyword: ast.keyword) -> str:
    return f"{keyword.arg}={text(keyword.value)}" if keyword.arg else f"**{text(keyword.value)}"


def _bound(use: Use, call: ast.Call, text: Text) -> dict[str, str]:
    """The arguments of a call of FSDP1's statics by their names in torch."""
    name = use.name.removeprefix(f"{FSDP}.")
    if name not in CLASS_CALLS and name != "wrap":
        return {}
    method = getattr(FullyShardedDataParallel, name, None)
    names = list(inspect.signature(method).parameters) if method is not None else ["module"]
    found = {name: text(value) for name, value in zip(names, call.args, strict=False)}
    found |= {keyword.arg: text(keyword.value) for keyword in call.keywords if keyword.arg}
    return {"model": found.get("module", "..."), **found}


def _who_holds(use: Use, state: ast.Call | None, scope: Scope) -> dict[str, str]:
    """The arguments that keep a full state on the ranks that FSDP1 gave it to, or took it from."""
    index, name = (3, "optim_state_dict_config") if "optim" in use.name else (2, "state_dict_config")
    given = (
        [] if state is None else [*state.args[index : index + 1], *(k.value for k in state.keywords if k.arg == name)]
    )
    config = value_of(given[0], scope) if given else None
    on_rank0 = isinstance(config, Setting) and _is_rank0_only(config.node)
    return {"rank0_only": "" if on_rank0 else ", rank0_only=False", "src": "" if on_rank0 else ', src="all"'}


def _is_rank0_only(config: ast.Call) -> bool:
    given = {keyword.arg: keyword.value for keyword in config.keywords}
    only = given.get("rank0_only", ast.Constant(False))
    return isinstance(only, ast.Constant) and bool(only.value)


def _state_type(call: ast.Call | None, scope: Scope) -> str | None:
    """FULL_STATE_DICT and so on, where the call says it."""
    if call is None:
        return None
    given = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "state_dict_type")]
    return _member_of(given[0], "StateDictType", scope) if given else None


def _state_setting(use: Use, plain: Verdict, scope: Scope, state: ast.Call | None, text: Text) -> Verdict:
    call = use.node if isinstance(use.node, ast.Call) else None
    kind = _state_type(call, scope)
    if kind == "LOCAL_STATE_DICT":
        return plain._replace(fate="impossible", why="FSDP2 has no flat local parameters; use the sharded state")
    if kind is None:
        return plain._replace(fate="decision", why=f"which type it sets is not written here; {plain.why}")
    return plain


def _state_access(use: Use, plain: Verdict, scope: Scope, state: ast.Call | None, text: Text) -> Verdict:
    kind = _state_type(state, scope)
    if kind == "LOCAL_STATE_DICT":
        return plain._replace(fate="impossible", why="FSDP2 has no flat local parameters; use the sharded state")
    if kind == "SHARDED_STATE_DICT":
        return _sharded(use, plain, text)
    if kind is None and use.name.endswith("state_dict"):
        return plain._replace(why=f"full, as FSDP1's default; where it was set to sharded, it is as it is; {plain.why}")
    return plain


def _sharded(use: Use, plain: Verdict, text: Text) -> Verdict:
    """Inside ``state_dict_type(model, SHARDED_STATE_DICT)``."""
    if "optim" in use.name:
        line = plain.replacement.replace("full_optimizer", "sharded_optimizer")
        return plain._replace(replacement=line.replace(", rank0_only=False", "").replace(', src="all"', ""))
    return plain._replace(replacement=text(use.node), why="as it is; its values are DTensors")


def _summon(use: Use, plain: Verdict, scope: Scope, state: ast.Call | None, text: Text) -> Verdict:
    if use.kind != "call" or not isinstance(use.node, ast.Call):
        return plain
    given = {"writeback": "True", **_bound(use, use.node, text)}  # True is FSDP1's default, and False is full_params'
    kept = [f"{name}={given[name]}" for name in _FULL_PARAMS if given.get(name, "False") != "False"]
    replacement = f"full_params({', '.join([given['model'], *kept])})"
    if given.get("recurse", "True") == "True":
        return plain._replace(replacement=replacement)
    why = f"it gathers the inner units too, which recurse=False left; {plain.why}"
    return plain._replace(fate="note", replacement=replacement, why=why)


def _strategy_name(use: Use, plain: Verdict, scope: Scope, state: ast.Call | None, text: Text) -> Verdict:
    name = use.member.partition(".")[0]
    if name.strip("_").isupper():
        return plain._replace(replacement=f'"{name}"')
    return plain._replace(replacement="", why="shard_like_fsdp1 takes it as it is, and its names as strings")


def _prefetch(use: Use, plain: Verdict, scope: Scope, state: ast.Call | None, text: Text) -> Verdict:
    return plain._replace(fate="exact") if use.member == "BACKWARD_PRE" else plain


def _state_type_name(use: Use, plain: Verdict, scope: Scope, state: ast.Call | None, text: Text) -> Verdict:
    local = use.member.startswith("LOCAL")
    why = "FSDP2 has no flat local parameters; use the sharded state"
    return plain._replace(fate="impossible", why=why) if local else plain


def _offload(use: Use, plain: Verdict, scope: Scope, state: ast.Call | None, text: Text) -> Verdict:
    given = [text(value) for value in _values(use, "offload_params", 0)]
    if given in ([], ["False"]):
        return plain._replace(replacement="OffloadPolicy()")
    chosen = "CPUOffloadPolicy()" if given == ["True"] else f"CPUOffloadPolicy() if {given[0]} else OffloadPolicy()"
    return plain._replace(replacement=chosen)


def _precision(use: Use, plain: Verdict, scope: Scope, state: ast.Call | None, text: Text) -> Verdict:
    if use.kind != "call" or not isinstance(use.node, ast.Call):
        return plain._replace(replacement="MixedPrecisionPolicy")
    fields = [name.partition(".")[2] for name in FIELDS if name.startswith("mixed_precision.")]
    given = dict(zip(fields, use.node.args, strict=False)) | {k.arg: k.value for k in use.node.keywords if k.arg}
    kept = [f"{name}={text(value)}" for name, value in given.items() if name in ("param_dtype", "reduce_dtype")]
    rows = {name: FIELDS[f"mixed_precision.{name}"] for name in given if f"mixed_precision.{name}" in FIELDS}
    worse = {name: row for name, row in rows.items() if row.fate != "mapped" and text(given[name]) != "False"}
    fates: list[Fate] = ["impossible" if row.fate == "refused" else "note" for row in worse.values()]
    why = "; ".join(f"{name}: {row.sentence}" for name, row in worse.items())
    replacement = f"MixedPrecisionPolicy({', '.join(kept)})"
    return plain._replace(fate=worst("exact", *fates), replacement=replacement, why=why or plain.why)


def _classes(use: Use, plain: Verdict, scope: Scope, state: ast.Call | None, text: Text) -> Verdict:
    name = "module_classes" if use.name == "ModuleWrapPolicy" else "transformer_layer_cls"
    given = _values(use, name, 0 if use.name == "ModuleWrapPolicy" else 3)
    if not given:
        return plain
    written = given[0]
    if isinstance(written, (ast.Set, ast.List, ast.Tuple)):
        return plain._replace(replacement=f"units=by_class({', '.join(map(text, written.elts))})")
    return plain._replace(replacement=f"units=by_class(*{text(written)})")


def _size(use: Use, plain: Verdict, scope: Scope, state: ast.Call | None, text: Text) -> Verdict:
    given = _values(use, "min_num_params", 3)
    return plain._replace(replacement=f"units=by_size({text(given[0]) if given else '10**8'})")


def _predicate(use: Use, plain: Verdict, scope: Scope, state: ast.Call | None, text: Text) -> Verdict:
    given = _values(use, "lambda_fn", 0 if use.name == "CustomPolicy" else 3)
    if not given or isinstance(given[0], ast.Lambda):
        return plain
    return plain._replace(replacement=f"units=lambda fqn, module: {text(given[0])}(module)")


def _values(use: Use, name: str, position: int) -> list[ast.expr]:
    """The expression that a call, or a partial, gives for an argument."""
    if not isinstance(use.node, ast.Call) or use.kind != "call":
        return []
    named = [keyword.value for keyword in use.node.keywords if keyword.arg == name]
    return named or use.node.args[position : position + 1]


Special = Callable[[Use, Verdict, Scope, "ast.Call | None", Text], Verdict]
_SPECIAL: Mapping[str, Special] = {
    "summon_full_params": _summon,
    "state_dict_type": _state_setting,
    "set_state_dict_type": _state_setting,
    "state_dict": _state_access,
    "load_state_dict": _state_access,
    "optim_state_dict": _state_access,
    "optim_state_dict_to_load": _state_access,
    "ShardingStrategy": _strategy_name,
    "BackwardPrefetch": _prefetch,
    "StateDictType": _state_type_name,
    "MixedPrecision": _precision,
    "CPUOffload": _offload,
    "transformer_auto_wrap_policy": _classes,
    "ModuleWrapPolicy": _classes,
    "size_based_auto_wrap_policy": _size,
    "lambda_auto_wrap_policy": _predicate,
    "CustomPolicy": _predicate,
}
