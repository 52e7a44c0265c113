"""Judge each use of FSDP1, and write the line that replaces it, with the program's own arguments."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple, TypeAlias

from shardkit.fsdp1.audit.flow import Flow
from shardkit.fsdp1.audit.names import STATICS, bound, other_row, parameters, public_name
from shardkit.fsdp1.audit.syntax import classes_of
from shardkit.fsdp1.audit.uses import Use
from shardkit.replacements import ARGUMENTS, FIELDS, FSDP, MEMBERS, NO_FLAT, Row, Topic

Support: TypeAlias = Literal["exact", "note", "decision", "impossible"]
SUPPORT: dict[Support, str] = {  # from good to bad
    "exact": "exact",
    "note": "with a note",
    "decision": "needs a decision",
    "impossible": "not possible",
}
_OF_ROW: dict[str, Support] = {
    "mapped": "exact",
    "implied": "exact",
    "noted": "note",
    "decision": "decision",
    "refused": "impossible",
}
_UNASKED = {
    "backward_prefetch": "BackwardPrefetch.BACKWARD_PRE",
    "limit_all_gathers": "True",
    "use_orig_params": "True",
}
_MESHES = ("process_group", "device_mesh")
_FULL_PARAMS = ("writeback", "rank0_only", "offload_to_cpu", "with_grads")  # which full_params takes as FSDP1 did
_SPREAD = "its arguments are not in this call"


class Verdict(NamedTuple):
    """The worst support of a use's parts, one line of code or nothing, sentences, and the topic."""

    support: Support
    replacement: str
    why: str
    topic: Topic


def worst(levels: Iterable[Support]) -> Support:
    """Return the worst of them; exact if there are none."""
    return max(("exact", *levels), key=list(SUPPORT).index)


class Judge:
    """Judges the uses in one program.

    Args:
        flow: what its expressions may be.
        text: an expression as written.
    """

    def __init__(self, flow: Flow, text: Callable[[ast.expr], str]) -> None:
        self._flow, self.text = flow, text

    def verdict(self, use: Use) -> Verdict:
        """Judge a use. Of its parts those count that its line repeats, and those that need a decision."""
        own = self._own(use)
        parts = [(part, self._own(part)) for part in use.parts]
        told = [
            each for part, each in parts if part.name in own.replacement or each.support in ("decision", "impossible")
        ]
        whys = [own.why, *(each.why for each in told if each.support != "exact")]
        return own._replace(support=worst([own.support, *(each.support for each in told)]), why=_sentences(whys))

    def of_import(self, paths: Iterable[str], wraps: bool, kept: Iterable[str], ours: Iterable[str]) -> Verdict:
        """Judge an import. Public names are judged where they are used.

        Args:
            paths: what it imports of FSDP1.
            wraps: whether the program wraps a model.
            kept: what the lines that replace others still use, such as ``MixedPrecision as MP``.
            ours: public names of shardkit that those lines use.
        """
        rows = [row for path in paths if (row := other_row(path)) is not None]
        names = {found[0] for path in paths if (found := public_name(path)) is not None}
        public = sorted({"shard_like_fsdp1" if wraps else "FSDPModule", *ours})
        lines = [f"from shardkit import {', '.join(public)}"]
        lines += [f"from shardkit.fsdp1 import {', '.join(kept)}"] * bool(wraps and kept)  # torch's own objects too
        why = _sentences(row.sentence for row in rows if row.support != "mapped")
        topic = rows[0].topic if rows and not names else "names"
        return Verdict(
            worst(_OF_ROW[row.support] for row in rows), "; ".join(lines) if FSDP in names else "", why, topic
        )

    def _own(self, use: Use) -> Verdict:
        if use.wraps and use.call is not None:
            return self._wrapping(use, use.call)
        if use.kind == "check":
            return self._check(use)
        name, row = use.name.removeprefix(f"{FSDP}."), use.row
        plain = Verdict(_OF_ROW[row.support], self._filled(use), row.sentence, row.topic)
        own = _SPECIAL[name](self, use, plain) if name in _SPECIAL else plain
        if own.replacement and any(self.text(each) not in own.replacement for each in _spread(use.call)):
            return own._replace(support=worst([own.support, "decision"]), why=_sentences([_SPREAD, own.why]))
        return own

    # --- FullyShardedDataParallel(...) --------------------------------------------------------------------------------

    def _wrapping(self, use: Use, call: ast.Call) -> Verdict:
        given = bound(FSDP, call)
        spread = [self._flow.entries(each.value) for each in call.keywords if each.arg is None]
        hidden = {str(name): value for entries in spread for name, value in (entries or {}).items()}
        everything = given | {name: value for name, value in hidden.items() if name not in given}
        judged: list[tuple[Support, str]] = []
        if None in spread or any(isinstance(each, ast.Starred) for each in call.args):
            judged = [("decision", f"{_SPREAD}: look them up in the table of arguments")]
        judged += [self._argument(name, self.text(value)) for name, value in everything.items()]
        strategies = self._members(everything.get("sharding_strategy"), "ShardingStrategy")
        if strategies & {"HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"} and everything.keys().isdisjoint(_MESHES):
            judged.append(("note", "ranks_per_node is torchrun's LOCAL_WORLD_SIZE; FSDP1 counted devices"))
        if _is_inner(use):
            judged.append(("decision", "a part of a model: do not wrap it; name it in units of a call on the model"))
        shown = [self._shown(name, value) for name, value in given.items() if not _is_unasked(name, self.text(value))]
        shown[bool(given) :] = [*map(self.text, _starred(call)), *shown[bool(given) :]]
        shown += [f"**{self.text(each.value)}" for each in call.keywords if each.arg is None]
        line = f"shard_like_fsdp1({', '.join(shown)})"
        if use.kind == "partial" and isinstance(use.node, ast.Call):
            line = f"{self.text(use.node.func)}({', '.join(['shard_like_fsdp1', *shown])})"
        return Verdict(worst(support for support, _ in judged), line, _sentences(why for _, why in judged), "wrapping")

    def _argument(self, name: str, text: str) -> tuple[Support, str]:
        row = ARGUMENTS.get(name, Row("decision", "not an argument of torch's FSDP1"))
        is_other = row.support == "implied" and (text in ("False", "None") or text.endswith("BACKWARD_POST"))
        support = "note" if is_other else _OF_ROW[row.support]
        return support, f"{name}: {row.sentence}" if support != "exact" else ""

    def _shown(self, name: str, value: ast.expr) -> str:
        written = self.text(value)
        strategies = self._members(value, "ShardingStrategy") if name == "sharding_strategy" else ()
        named = [f'"{each}"' for each in strategies if written.endswith(each)]
        return written if name == "module" else f"{name}={named[0] if named else written}"

    def _members(self, value: ast.expr | None, enum: str) -> set[str]:
        """Return the members of an enum that an expression may be; empty if it may be something else."""
        values = self._flow.values(value) if value is not None else ()
        names = {public_name(value.of) if value.kind == "path" else None for value in values}
        return {name[1] for name in names if name} if {name and name[0] for name in names} == {enum} else set()

    def _check(self, use: Use) -> Verdict:
        if isinstance(use.node, ast.Call):
            classes = classes_of(use.node)
            names = ["FSDPModule" if self._flow.is_class(each) else self.text(each) for each in classes]
            asked = f"({', '.join(names)})" if isinstance(use.node.args[1], ast.Tuple) else names[0]
            line = f"{self.text(use.node.func)}({self.text(use.node.args[0])}, {asked})"
            return Verdict("exact", line, "", "names")
        is_negated = isinstance(use.node, ast.Compare) and isinstance(use.node.ops[0], (ast.IsNot, ast.NotEq))
        line = f"{'not ' * is_negated}isinstance({self.text(use.children[0])}, FSDPModule)"
        why = "a sharded model has its own class, derived from FSDPModule"
        return Verdict("note", line, why, "names")

    # --- Other names --------------------------------------------------------------------------------------------------

    def given(self, use: Use) -> dict[str, str]:
        """Return the arguments of a call by their names in torch, as written."""
        return {} if use.call is None else {name: self.text(each) for name, each in bound(use.name, use.call).items()}

    def _filled(self, use: Use) -> str:
        """Return the row's template with the arguments as written, ``...`` for missing ones."""
        values = {"member": use.member, "optim": "...", **self._who_holds(use)}
        if use.receiver is not None:
            values["receiver"] = self.text(use.receiver)
        if use.call is not None:
            values |= self._passed(use.call)
        if use.name.removeprefix(f"{FSDP}.") in {*STATICS, "wrap"}:
            given = self.given(use)
            values |= {"model": given.get("module", "model"), **given}
        method = use.name.removeprefix(f"{FSDP}.")
        is_uncalled = use.kind == "mention" and use.receiver is not None and method in MEMBERS and method != "module"
        row = use.row._replace(use=_uncalled(use.row.use)) if is_uncalled else use.row
        return row.line(**values).replace("(, ", "(").replace(", )", ")")

    def _passed(self, call: ast.Call) -> dict[str, str]:
        """Return the arguments of a call on one line; for a method called on the class, the first is the model."""
        args = [self.text(each) for each in call.args]
        keywords = [f"{each.arg}=" if each.arg else "**" for each in call.keywords]
        named = [key + self.text(each.value) for key, each in zip(keywords, call.keywords, strict=True)]
        on_class = isinstance(call.func, ast.Attribute) and self._flow.is_class(call.func.value)
        if on_class and call.args and not isinstance(call.args[0], ast.Starred):
            return {"receiver": args[0], "args": ", ".join([*args[1:], *named])}
        return {"args": ", ".join([*args, *named])}

    def _who_holds(self, use: Use) -> dict[str, str]:
        """Return the arguments that gather a full state to, or load it from, the same ranks as FSDP1."""
        name = "optim_state_dict_config" if "optim" in use.name else "state_dict_config"
        config = {} if use.state is None else bound(f"{FSDP}.state_dict_type", use.state)
        settings = self._flow.values(config[name]) if name in config else ()
        given = [bound("FullStateDictConfig", each.of).get("rank0_only") for each in settings if each.kind == "setting"]
        on_rank0 = any(isinstance(each, ast.Constant) and each.value for each in given)
        return {"rank0_only": "" if on_rank0 else ", rank0_only=False", "src": "" if on_rank0 else ', src="all"'}

    def state_types(self, call: ast.Call | None) -> set[str]:
        """Return FULL_STATE_DICT and so on, if a call of ``state_dict_type`` names it."""
        given = {} if call is None else bound(f"{FSDP}.state_dict_type", call)
        return self._members(given.get("state_dict_type"), "StateDictType")


def _uncalled(template: str) -> str:
    """Return a template for the function that a template calls, with the model as its first argument."""
    function, _, given = template.partition("(")
    is_method = not function or function.startswith("{")
    return function if is_method else f"functools.partial({function}, {given.replace(', {args}', '')}"


def _starred(call: ast.Call) -> list[ast.expr]:
    return [each for each in call.args if isinstance(each, ast.Starred)]


def _spread(call: ast.Call | None) -> list[ast.expr]:
    """Return what a call passes by ``*`` and ``**``."""
    return [] if call is None else [*_starred(call), *(each.value for each in call.keywords if each.arg is None)]


def _is_unasked(name: str, text: str) -> bool:
    """Return whether an argument has FSDP1's default, or says what FSDP2 always does."""
    if name in _UNASKED:
        return ".".join(text.split(".")[-2:]) == _UNASKED[name]
    return name in parameters(FSDP) and text == repr(parameters(FSDP)[name].default)


def _is_inner(use: Use) -> bool:
    """Return whether the result becomes a part of a module, so models are wrapped by hand, part by part."""
    *around, parent, _ = use.around
    if isinstance(parent, ast.Assign):
        bases = [ast.unparse(base) for each in around if isinstance(each, ast.ClassDef) for base in each.bases]
        if any(isinstance(target, ast.Attribute) for target in parent.targets):
            return any(base.endswith("Module") for base in bases)
        target = parent.targets[0]  # ``layers[i] = ...``; a literal key is more likely a dict of models
        return isinstance(target, ast.Subscript) and not isinstance(target.slice, ast.Constant)
    calls = [each for each in (*around, parent) if isinstance(each, ast.Call)]
    names = {ast.unparse(each.func).rpartition(".")[2] for each in calls}
    return bool(names & {"setattr", "Sequential", "ModuleList", "ModuleDict", "FSDP", FSDP, "add_module"})


def _sentences(whys: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(why for why in whys if why))


# --- Names whose arguments decide -------------------------------------------------------------------------------------


def _state_type(judge: Judge, use: Use, plain: Verdict) -> Verdict:
    """``state_dict_type``, ``set_state_dict_type``, and ``StateDictType`` itself."""
    kinds = {use.member.partition(".")[0]} if use.name == "StateDictType" else judge.state_types(use.call)
    if kinds == {"LOCAL_STATE_DICT"}:
        return plain._replace(support="impossible", why=NO_FLAT)
    if kinds and "LOCAL_STATE_DICT" not in kinds:
        return plain
    return plain._replace(support="decision", why=f"the type is not in this call; {plain.why}")


def _state(judge: Judge, use: Use, plain: Verdict) -> Verdict:
    """Saving and loading state, with the type that is set around it."""
    kinds = judge.state_types(use.state)
    if kinds == {"LOCAL_STATE_DICT"}:
        return plain._replace(support="impossible", replacement="", why=NO_FLAT)
    if kinds == {"SHARDED_STATE_DICT"} and "optim" in use.name:
        line = plain.replacement.replace("full_optimizer", "sharded_optimizer")
        return plain._replace(replacement=line.replace(", rank0_only=False", "").replace(', src="all"', ""))
    if kinds == {"SHARDED_STATE_DICT"}:
        return plain._replace(replacement=judge.text(use.node), why="unchanged; its values are DTensors")
    if kinds != {"FULL_STATE_DICT"} and use.name.endswith("state_dict"):
        return plain._replace(why=f"for FULL_STATE_DICT, the default; unchanged for SHARDED_STATE_DICT; {plain.why}")
    return plain


def _summon(judge: Judge, use: Use, plain: Verdict) -> Verdict:
    if use.call is None:
        return plain
    given = {"module": "...", "writeback": "True", **judge.given(use)}  # False is the default of full_params
    kept = [f"{name}={given[name]}" for name in _FULL_PARAMS if given.get(name, "False") != "False"]
    plain = plain._replace(replacement=f"full_params({', '.join([given['module'], *kept])})")
    if given.get("recurse", "True") == "True":
        return plain
    return plain._replace(support="note", why=f"it gathers inner units too, unlike recurse=False; {plain.why}")


def _strategy(judge: Judge, use: Use, plain: Verdict) -> Verdict:
    name = use.member.partition(".")[0]
    if name.strip("_").isupper():
        return plain._replace(replacement=f'"{name}"')
    return plain._replace(replacement="", why="shard_like_fsdp1 accepts it, and its names as strings")


def _offload(judge: Judge, use: Use, plain: Verdict) -> Verdict:
    given = judge.given(use).get("offload_params", "False")
    chosen = {"True": "CPUOffloadPolicy()", "False": "OffloadPolicy()"}
    return plain._replace(replacement=chosen.get(given, f"CPUOffloadPolicy() if {given} else OffloadPolicy()"))


def _precision(judge: Judge, use: Use, plain: Verdict) -> Verdict:
    given = judge.given(use)
    kept = [f"{name}={text}" for name, text in given.items() if name in ("param_dtype", "reduce_dtype")]
    line = f"MixedPrecisionPolicy({', '.join(kept)})" if use.call else "MixedPrecisionPolicy"
    rows = {name: FIELDS.get(f"mixed_precision.{name}") for name in given if given[name] != "False"}
    worse = {name: row for name, row in rows.items() if row is not None and _OF_ROW[row.support] != "exact"}
    whys = [f"{name}: {row.sentence}" for name, row in worse.items()]
    support = worst(_OF_ROW[row.support] for row in worse.values())
    if use.call is not None and not use.is_kept:  # the line is for shard_model; what the policy lacks gets lost
        lost = [name for name in given if name not in ("param_dtype", "reduce_dtype", *worse)]
        casts = ["FSDP1's casts of the root's inputs only"] * ("cast_forward_inputs" not in given)
        whys = [f"the policy leaves out {' and '.join([*lost, *casts])}; shard_like_fsdp1 takes all of it", *whys]
        support = worst([support, "note"])
    return Verdict(support, line, _sentences(whys) or plain.why, plain.topic)


def _units(judge: Judge, use: Use, plain: Verdict) -> Verdict:
    """Policies: what chooses the units is written in one of their arguments."""
    if use.name == "size_based_auto_wrap_policy":
        return plain._replace(replacement=f"units=by_size({judge.given(use).get('min_num_params', '10**8')})")
    given = {} if use.call is None else bound(use.name, use.call)
    value = given.get("lambda_fn", given.get("module_classes", given.get("transformer_layer_cls")))
    if value is None or isinstance(value, ast.Lambda):
        return plain
    if "lambda_fn" in given:
        return plain._replace(replacement=f"units=lambda fqn, module: {judge.text(value)}(module)")
    written = value.elts if isinstance(value, (ast.Set, ast.List, ast.Tuple)) else None
    classes = [f"*{judge.text(value)}"] if written is None else map(judge.text, written)
    return plain._replace(replacement=f"units=by_class({', '.join(classes)})")


_SPECIAL: Mapping[str, Callable[[Judge, Use, Verdict], Verdict]] = {
    **dict.fromkeys(("state_dict_type", "set_state_dict_type", "StateDictType"), _state_type),
    **dict.fromkeys(("state_dict", "load_state_dict", "optim_state_dict", "optim_state_dict_to_load"), _state),
    "summon_full_params": _summon,
    "ShardingStrategy": _strategy,
    "BackwardPrefetch": lambda _, use, plain: (
        plain._replace(support="exact") if use.member == "BACKWARD_PRE" else plain
    ),
    "CPUOffload": _offload,
    "MixedPrecision": _precision,
    **dict.fromkeys(("transformer_auto_wrap_policy", "ModuleWrapPolicy", "size_based_auto_wrap_policy"), _units),
    **dict.fromkeys(("lambda_auto_wrap_policy", "CustomPolicy"), _units),
}
