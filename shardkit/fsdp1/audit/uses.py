"""Find the uses of FSDP1 in a program, and those that are arguments of other uses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, TypeAlias

from shardkit.fsdp1.audit.flow import Flow
from shardkit.fsdp1.audit.names import (
    CONFIGURED,
    PARTIAL,
    STATICS,
    UNIQUE_ATTRIBUTES,
    UNIQUE_CALLS,
    imported,
    is_fsdp2,
    other_row,
    public_name,
)
from shardkit.fsdp1.audit.syntax import arguments_of, classes_of, read_by_getattr
from shardkit.fsdp1.audit.values import FOREIGN, OTHER, WRAPPED, WRAPPER, Value
from shardkit.replacements import ATTRIBUTES, FSDP, MEMBERS, NAMES, Row

Kind: TypeAlias = Literal["call", "partial", "mention", "check", "subclass", "configuration", "string"]
STRATEGY = re.compile(r"(full_shard|shard_grad_op|no_shard|_?hybrid_shard(_zero2)?)( |$)", re.IGNORECASE)
LIGHTNING = re.compile(r"fsdp(_native)?(_cpu_offload|_full_shard_offload)?$")
CONFIGURES = re.compile(r"(Arguments|Config|Trainer|Args)$")

_UNNAMED = Row("decision", "not a public name of FSDP1", topic="internals")
_NORM = Row(
    "decision",
    "a gradient is a DTensor, whose norm is that of the full gradient: do not add it up over ranks. With inf, "
    "clip_grad_norm_ from shardkit returns the norm of all and clips nothing",
    'clip_grad_norm_(model, float("inf"))',
    "loop",
)
INITIALIZERS = ("reset_parameters", "init_weights", "_init_weights", "initialize_weights")
_INITIALIZER = Row(
    "decision",
    "call it before sharding, or by materialize: after sharding, values depend on the number of ranks",
    topic="wrapping",
)
_FILTER = Row(
    "decision", "FSDP2 adds no prefix to names, so all names give the same: remove the condition", topic="names"
)
_SUBCLASS = Row(
    "decision",
    "FSDP2 has no class to derive from: turn overridden methods into functions, or methods of the model",
    topic="wrapping",
)


@dataclass
class Use:
    """One use of FSDP1.

    Attributes:
        node: the expression; for a call, the whole call.
        name: its name in torch: ``FullyShardedDataParallel.no_sync`` for a member, the dotted path for a private name.
        row: its replacement.
        kind: how it is used.
        member: what follows the name, such as FULL_SHARD.
        receiver: the model that a method is called on.
        likely: only the name suggests FSDP1, or it is FSDP1 only on some paths through the program.
        call: the call, or the call that a partial makes.
        children: the inner expressions that may be uses too.
        parts: the uses in its arguments that are reported with it.
        state: the ``state_dict_type`` call of the ``with`` around it.
        around: the enclosing nodes, outermost first.
        is_kept: it is reported with the use that it is an argument of.
    """

    node: ast.expr
    name: str
    row: Row
    kind: Kind
    member: str = ""
    receiver: ast.expr | None = None
    likely: bool = False
    call: ast.Call | None = None
    children: list[ast.expr] = field(default_factory=list)
    parts: list[Use] = field(default_factory=list)
    state: ast.Call | None = None
    around: tuple[ast.AST, ...] = ()
    is_kept: bool = False

    @property
    def wraps(self) -> bool:
        """Return whether it makes a wrapped model."""
        return self.name == FSDP and self.kind in ("call", "partial")

    @property
    def is_part(self) -> bool:
        """Return whether, as an argument of another use, it is reported with it: a setting, a class, a policy."""
        makes = self.kind == "call" and self.name in (FSDP, "wrap", "enable_wrap", "ShardedGradScaler")
        return self.name in NAMES and not makes and self.kind not in ("partial", "subclass")


class Uses:
    """The uses and imports of FSDP1 in a program, and whether the program names FSDP2."""

    def __init__(self, tree: ast.Module, flow: Flow) -> None:
        self.found: list[Use] = []
        self.imports: list[tuple[ast.Import | ast.ImportFrom, list[str], bool]] = []
        self.names_fsdp2 = False
        self._flow = flow
        self._around: list[ast.AST] = []
        self._state: ast.Call | None = None
        self._wraps = any(WRAPPED in flow.values(node) for node in ast.walk(tree))
        self._walk(tree, None)

    def _walk(self, node: ast.AST, parts: list[Use] | None) -> None:
        if isinstance(node, ast.expr_context):  # Load, Store or Del
            return
        use = self._use_at(node)
        self._around.append(node)
        if use is None:
            for child in self._children(node):
                self._walk(child, None if isinstance(node, ast.Lambda) else parts)
        else:
            use.state, use.around = self._state, tuple(self._around)
            for child in use.children:
                self._walk(child, use.parts)
            if parts is not None and use.is_part:
                use.is_kept = True
                parts += [use, *use.parts]
            else:
                self.found.append(use)
        self._around.pop()

    def _children(self, node: ast.AST) -> Iterable[ast.AST]:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
            return ()
        if isinstance(node, (ast.With, ast.AsyncWith)):
            return self._with(node)
        if node in self._flow.annotations:
            return (self._flow.annotations[node],)
        if isinstance(node, ast.Call) and _is_of_fsdp2(node):
            return arguments_of(node)
        return ast.iter_child_nodes(node)

    def _with(self, node: ast.With | ast.AsyncWith) -> Iterator[ast.AST]:
        around = self._state
        for item in node.items:
            yield item
            use = self._use_at(item.context_expr)
            if use is not None and use.name == f"{FSDP}.state_dict_type":
                self._state = use.call
        yield from node.body
        self._state = around

    def _use_at(self, node: ast.AST) -> Use | None:
        """Return the use of FSDP1 that starts at ``node``, or None."""
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self._mention(node, node)
        if isinstance(node, ast.Compare) and (checked := self._flow.checked(node)):
            return Use(node, FSDP, NAMES[FSDP], "check", children=checked)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in self._flow.annotations:
            return _string(node, node.value, self._around[-1])
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node)
        return None

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        names = [*imported(node)]
        paths = [each.name for each in node.names] if isinstance(node, ast.Import) else [path for _, path, _ in names]
        self.names_fsdp2 |= any(map(is_fsdp2, paths))
        uses = [path for path in paths if public_name(path) or other_row(path) not in (None, CONFIGURED)]
        if uses:
            likely = {path for _, path, is_likely in names if is_likely}
            self.imports.append((node, uses, likely.issuperset(uses)))

    # --- Names --------------------------------------------------------------------------------------------------------

    def _mention(self, node: ast.expr, read: ast.Name | ast.Attribute) -> Use | None:
        """Return the use of FSDP1 that ``node`` is by reading ``read``, or None."""
        values = self._flow.values(node)
        paths = [value for value in values if value.kind == "path"]
        if isinstance(read.ctx, ast.Store):
            return None
        if paths or isinstance(read, ast.Name):
            self.names_fsdp2 |= isinstance(read, ast.Attribute) and any(is_fsdp2(value.of) for value in paths)
            use = self._named(node, [value for value in paths if not value.kept])
            around = self._around[-1]
            is_base = isinstance(around, ast.ClassDef) and node in around.bases and use is not None and use.name == FSDP
            return replace(use, row=_SUBCLASS, kind="subclass") if is_base and use is not None else use
        name, owner = read.attr, self._flow.values(read.value)
        if any(self._flow.defines(value, name) for value in owner):
            return None
        row = (MEMBERS | ATTRIBUTES).get(name) if WRAPPED in owner else None
        if name in UNIQUE_ATTRIBUTES and not any(value.kind == "path" for value in owner):
            row = ATTRIBUTES[name]
        is_likely = WRAPPED not in owner or OTHER in owner
        return row and Use(node, f"{FSDP}.{name}", row, "mention", "", read.value, is_likely, children=[read.value])

    def _named(self, node: ast.expr, values: Iterable[Value]) -> Use | None:
        """Return a use for the possible values of an expression; names of torch's FSDP1 come first."""
        uses = [use for value in values if (use := self._of_value(node, value)) is not None]
        return min(uses, key=lambda use: use.name.partition(".")[0] not in NAMES, default=None)

    def _of_value(self, node: ast.expr, value: Value) -> Use | None:
        if value.kind == "class" and self._flow.is_constructor(value):
            return Use(node, FSDP, NAMES[FSDP], "mention")
        if value.kind != "path":
            return None
        found = public_name(value.of)
        if found is None:
            row = other_row(value.of)
            return row and Use(node, value.of, row, "mention", likely=value.likely)
        name, member = found
        method = member.partition(".")[0]
        if name == FSDP and method:
            row = (MEMBERS | ATTRIBUTES).get(method, _UNNAMED)
            return Use(node, f"{FSDP}.{method}", row, "mention", likely=value.likely)
        return Use(node, name, NAMES[name], "mention", member, likely=value.likely)

    # --- Calls --------------------------------------------------------------------------------------------------------

    def _call(self, node: ast.Call) -> Use | None:
        checked = self._flow.checked(node)
        if checked:
            others = [each for each in classes_of(node) if not self._flow.is_class(each)]
            return Use(node, FSDP, NAMES[FSDP], "check", children=[*checked, *others])
        values = self._flow.values(node.func)
        if node.args and any(value.of in PARTIAL for value in values):
            made = self._named(node.args[0], self._flow.values(node.args[0]))
            if made is not None:
                kind: Kind = "partial" if made.name == FSDP else "call"
                call = ast.Call(node.args[0], node.args[1:], node.keywords)
                return replace(made, node=node, kind=kind, call=call, children=arguments_of(call))
        if any(value.kind == "class" and self._flow.is_constructor(value) for value in values):
            return Use(node, FSDP, _SUBCLASS, "subclass", children=arguments_of(node))
        use = None if _is_of_fsdp2(node) else self._named(node.func, values)
        if use is not None and WRAPPER not in values:  # a partial is reported where it is made
            return replace(use, node=node, kind="call", call=node, children=arguments_of(node))
        if isinstance(node.func, ast.Attribute) and (use := self._method(node, node.func)) is not None:
            return use
        if _is_configuration(node):
            return Use(node, "configuration", CONFIGURED, "configuration", children=[node.func, *arguments_of(node)])
        read = read_by_getattr(node)
        use = self._mention(node, read) if read is not None else None
        return replace(use, children=[node.args[0], *node.args[2:]]) if use else self._of_sharded(node)

    def _of_sharded(self, node: ast.Call) -> Use | None:
        """Return the use if a call computes with, or sets, values of which each rank of FSDP2 has a shard."""
        children = [node.func, *arguments_of(node)]
        if self._wraps and _is_norm_of_gradients(node) and not any(map(_is_norm_of_gradients, self._around)):
            return Use(node, "norm of gradients", _NORM, "call", likely=True, children=children)
        function = node.func
        if not isinstance(function, ast.Attribute) or function.attr not in INITIALIZERS:
            return None
        model = function.value
        while isinstance(model, (ast.Attribute, ast.Subscript)) and not self._flow.values(model):
            model = model.value  # of which it is a part
        items = [item for each in self._around if isinstance(each, ast.With) for item in each.items]
        if WRAPPED not in self._flow.values(model) or any("summon" in ast.unparse(each) for each in items):
            return None
        return Use(node, f"{FSDP}.{function.attr}", _INITIALIZER, "call", children=children)

    def _method(self, node: ast.Call, function: ast.Attribute) -> Use | None:
        """Return the use if this calls a method of a wrapped model, or one that only FSDP1 has."""
        name, owner = function.attr, self._flow.values(function.value)
        if name not in MEMBERS or name == "module" or any(self._flow.defines(value, name) for value in owner):
            return None
        is_known = WRAPPED in owner
        is_other = FOREIGN in owner or _is_for_xla(self._around)
        is_unique = name in UNIQUE_CALLS and not is_other and not any(value.kind == "path" for value in owner)
        if not is_known and (not is_unique or (name == "clip_grad_norm_" and not _is_clipping_by_norm(node))):
            return None
        receiver = None if name in STATICS else function.value
        is_likely, children = not is_known or OTHER in owner or FOREIGN in owner, [function.value, *arguments_of(node)]
        return Use(node, f"{FSDP}.{name}", MEMBERS[name], "call", "", receiver, is_likely, node, children)


def _is_of_fsdp2(node: ast.Call) -> bool:
    """Return whether the call has ``fsdp_version=2``, as accelerate's plugin may."""
    given = (each.value for each in node.keywords if each.arg == "fsdp_version")
    return any(isinstance(each, ast.Constant) and each.value == 2 for each in given)


def _is_clipping_by_norm(node: ast.Call) -> bool:
    """Return whether ``clip_grad_norm_`` is FSDP1's, which takes the norm first; others take parameters or a model."""
    keywords = {keyword.arg for keyword in node.keywords}
    if not node.args:
        return "max_norm" in keywords and not keywords & {"parameters", "model", "module"}
    is_number = isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, (int, float))
    return is_number or (len(node.args) == 1 and not keywords - {"norm_type"})


def _is_configuration(node: ast.Call) -> bool:
    """Return whether a call configures FSDP1: ``TrainingArguments(fsdp=...)``, ``Trainer(strategy="fsdp")``."""
    for keyword in node.keywords:
        if keyword.arg not in ("fsdp", "fsdp_config", "strategy"):
            continue
        configures = CONFIGURES.search(ast.unparse(node.func)) is not None
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else ...
        text = value if isinstance(value, str) else ""
        if keyword.arg != "strategy":
            if STRATEGY.match(text) or (configures and value not in (None, False, "")):
                return True
        elif configures and LIGHTNING.match(text):
            return True
    return False


def _is_norm_of_gradients(node: ast.AST) -> bool:
    """Return whether it is ``p.grad.norm()``, ``torch.norm(p.grad)``, or a norm of several of them."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] not in ("norm", "vector_norm"):
        return False
    inner = [each for part in (node.func, *node.args[:1]) for each in ast.walk(part)]
    return any(isinstance(each, ast.Attribute) and each.attr == "grad" for each in inner)


def _is_for_xla(around: list[ast.AST]) -> bool:
    """Return whether it is in the body of an ``if`` that names XLA, whose FSDP has methods of the same names."""
    pairs = pairwise(around)
    return any(isinstance(a, ast.If) and b in a.body and "xla" in ast.unparse(a.test).lower() for a, b in pairs)


def _string(node: ast.Constant, text: str, around: ast.AST) -> Use | None:
    found = next((name for name in UNIQUE_ATTRIBUTES if name in text), None)
    if found is None:
        return None
    asks = getattr(getattr(around, "func", None), "attr", "") in ("startswith", "endswith")
    if found == "_fsdp_wrapped_module" and (asks or isinstance(around, ast.Compare)):
        return Use(node, f"{FSDP}.{found}", _FILTER, "string")
    why = "FSDP2 adds no prefix to names" if found == "_fsdp_wrapped_module" else ATTRIBUTES[found].sentence
    return Use(node, f"{FSDP}.{found}", Row("noted", why, topic="names"), "string")
