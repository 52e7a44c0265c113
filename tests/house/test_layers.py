"""The rules of the source tree: who imports whom, and who may touch torch's insides.

Each rule is a function from a file's name and source to its violations.
"""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "shardkit").rglob("*.py"))

# What each module or package may import of shardkit, in reading order. _torch is free for all but
# errors. A new module at the top needs a line here: put it where its imports allow.
DECIDING = {"errors", "plan", "planning"}
CORE = DECIDING | {"ranks", "shards", "references", "runtime", "apply", "api", "_fsdp"}
STATE = {"errors", "ranks", "shards", "boxes", "_fsdp"}
ANY_FSDP2_MODEL = {"runtime", "meta", "grads", "optim", "state", "checkpoint"}
EVERYTHING = CORE | ANY_FSDP2_MODEL | {"memory", "watching", "fsdp1"}
ALLOWED = {
    "errors": set(),
    "_torch": {"errors"},
    "_fsdp": set(),
    "plan": {"errors"},
    "planning": {"errors", "plan"},
    "references": set(),
    "shards": set(),
    "ranks": {"errors"},
    "boxes": {"errors", "ranks", "shards"},
    "tiles": {"errors", "_fsdp"},
    "runtime": {"errors", "ranks", "_fsdp", "shards", "activations"},
    "activations": {"errors"},
    "memory": DECIDING | {"shards", "_fsdp", "tiles", "activations", "runtime"},
    "apply": DECIDING
    | {"ranks", "references", "runtime", "_fsdp", "shards", "tiles", "activations"},
    "api": DECIDING | {"apply"},
    # These work on any FSDP2 model, whoever sharded it, so they never see a plan, nor what imports
    # one.
    "meta": STATE | {"references"},
    "grads": STATE | {"runtime"},
    "optim": STATE | {"runtime", "state"},
    "state": STATE | {"meta", "runtime"},
    "checkpoint": STATE | {"state", "meta"},
    "sequence": STATE
    | {"plan"}
    | {"grads", "apply"},  # any FSDP2 model; the core and the rest never import it
    "watching": {"errors", "ranks", "shards", "grads", "_fsdp"},
    "fsdp1": EVERYTHING - {"fsdp1"},
    # other trainers, for any FSDP2 model; nothing imports it
    "integrations": {"errors", "_fsdp", "optim"},
    "__init__": {"_torch"},
    "testing": {"errors", "plan", "_fsdp", "api"},
    "demo": EVERYTHING | {"__init__"},
    "__main__": {"errors"},
}
# What it may import besides inside of functions, and for types.
LATER = {
    "api": {"memory"},
    "plan": {"runtime"},  # whose source is in the code of a plan
    "apply": {"watching", "integrations"},
    "__init__": EVERYTHING,
}
PRIVATE_NAMES = ("_torch", "_fsdp")  # of torch, only in files whose names begin so

# Underscored attributes that may be used elsewhere.
PUBLIC_UNDERSCORES = {
    "_exit": "os._exit, documented by Python",
    "_replace": "of every named tuple, documented by Python",
    "_parameters": "nn.Module's registry, the only place that tells a registered None from nothing",
    "_current_frames": "of sys, documented by Python",
    "_buffers": "likewise",
    "_modules": "likewise",
    "_attn_implementation": "of transformers' configs, which have no public name for it",
}

MESH_BUILDERS = {"DeviceMesh", "init_device_mesh", "from_group"}


def layer_of(path):
    """The name in ``ALLOWED`` of a file, given by its path below ``shardkit/``."""
    return path.split("/")[0].removesuffix(".py")


def nodes(tree, functions, types):
    """The nodes of a module, with those inside of functions and of ``if
    TYPE_CHECKING`` or without.
    """
    for node in ast.iter_child_nodes(tree):
        for_types = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        if (functions or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))) and (
            types or not for_types
        ):
            yield node
            yield from nodes(node, functions, types)


def imports_of(path, source, functions=True, types=True):
    """The dotted names that a file imports."""
    package = ["shardkit", *path.split("/")[:-1]]
    for node in nodes(ast.parse(source), functions, types):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)


def forbidden_imports(path, source):
    layer = layer_of(path)
    if layer not in ALLOWED:
        return [f"{path}: the layer {layer!r} is not in ALLOWED. Add it, with what it may import"]
    at_once = ALLOWED[layer] | {layer} | (set() if layer == "errors" else {"_torch"})
    found = dict.fromkeys(imports_of(path, source, functions=False, types=False), at_once)
    found = {name: at_once | LATER.get(layer, set()) for name in imports_of(path, source)} | found
    parts = {name: [*name.split("."), "__init__"][:2] for name in found}
    layers = {
        name: part if part in ALLOWED else "__init__"
        for name, (top, part) in parts.items()
        if top == "shardkit"
    }
    return [
        f"{path}: {layer} must not import {to}"
        for name, to in layers.items()
        if to not in found[name]
    ]


def circle(sources):
    """Modules that import each other in a circle, or none; ``sources`` by path below ``shardkit/``.

    Also through functions and for types, which only hide it.
    """
    stems = {
        path: path.removesuffix(".py").removesuffix("__init__").rstrip("/") for path in sources
    }
    modules = {
        path: ".".join(["shardkit", *stem.split("/")]).rstrip(".") for path, stem in stems.items()
    }
    graph = {}
    for path, source in sources.items():
        names = imports_of(path, source)
        found = {name if name in modules.values() else name.rpartition(".")[0] for name in names}
        graph[modules[path]] = (found & {*modules.values()}) - {modules[path]}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def private_torch_names(path, source):
    if path.startswith(PRIVATE_NAMES):
        return []
    return [
        f"{path}:{line}: {name} belongs in _torch/" for line, name in underscored(ast.parse(source))
    ]


def underscored(tree):
    """Underscored parts of imports from torch, and underscored attributes of anything but self and
    cls.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names] if not node.level else []
            )
        elif (
            isinstance(node, ast.Attribute)
            and is_private(node.attr)
            and node.attr not in PUBLIC_UNDERSCORES
        ):
            if ast.unparse(node.value) not in ("self", "cls"):
                yield node.lineno, ast.unparse(node)
            continue
        else:
            continue
        for name in names:
            if name.startswith("torch.") and any(map(is_private, name.split("."))):
                yield node.lineno, name


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def calls_of(names, owners):
    """The rule that only ``owners``, modules or packages by their paths, call these functions."""

    def rule(path, source):
        if path.removesuffix(".py") in owners or layer_of(path) in owners:
            return []
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        called = [(node.lineno, ast.unparse(node.func).split(".")[-1]) for node in calls]
        return [
            f"{path}:{line}: only {sorted(owners)} may call {name}"
            for line, name in called
            if name in names
        ]

    return rule


only_apply_shards = calls_of({"fully_shard"}, {"apply/shard"})
only_mesh_builds_meshes = calls_of(
    MESH_BUILDERS, {"apply/mesh", "fsdp1/translate/shard", "testing"}
)


@pytest.mark.parametrize(
    "rule",
    [forbidden_imports, private_torch_names, only_apply_shards, only_mesh_builds_meshes],
)
def test_the_library_keeps_the_rule(rule):
    assert len(SOURCES) > 10  # found the library
    violations = [
        v
        for path in SOURCES
        for v in rule(path.relative_to(ROOT / "shardkit").as_posix(), path.read_text())
    ]
    assert not violations, "\n".join(violations)


def test_no_modules_import_each_other_in_a_circle():
    sources = {path.relative_to(ROOT / "shardkit").as_posix(): path.read_text() for path in SOURCES}
    assert not circle(sources)
