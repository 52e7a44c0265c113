"""The line that replaces each use, filled in with the program's own arguments; and what is seen through."""

import re
import textwrap
import time

import pytest

import shardkit
from shardkit import replacements
from shardkit.fsdp1.audit import Finding
from shardkit.fsdp1.audit.names import PUBLIC
from shardkit.fsdp1.audit.program import findings_of

HEAD = """
import functools, torch
from torch.distributed.fsdp import *
from torch.distributed.fsdp.wrap import *
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
model = FSDP(net)
"""


def findings(code: str) -> list[Finding]:
    """What is found in the lines of ``code`` below ``HEAD``."""
    found, _ = findings_of("program.py", HEAD + textwrap.dedent(code))
    return [finding for finding in found if finding.line > HEAD.count("\n")]


def only(code: str) -> Finding:
    (finding,) = findings(code)
    return finding


LINES = [
    # what is written, and what replaces it
    (
        "FSDP(model, sharding_strategy=ShardingStrategy.HYBRID_SHARD, use_orig_params=True)",
        'shard_like_fsdp1(model, sharding_strategy="HYBRID_SHARD")',
    ),
    ("FSDP(net, None, ShardingStrategy.NO_SHARD)", 'shard_like_fsdp1(net, sharding_strategy="NO_SHARD")'),
    ("FSDP(net, backward_prefetch=BackwardPrefetch.BACKWARD_PRE)", "shard_like_fsdp1(net)"),
    ("FSDP(module=net, device_id=rank)", "shard_like_fsdp1(net, device_id=rank)"),
    ("FSDP(net, **kwargs)", "shard_like_fsdp1(net, **kwargs)"),
    ("FSDP(net, *args, use_orig_params=x)", "shard_like_fsdp1(net, *args, use_orig_params=x)"),
    (
        "FSDP(net, None, limit_all_gathers=True, sync_module_states=False)",
        "shard_like_fsdp1(net)",
    ),
    ("functools.partial(FSDP, device_id=0)", "functools.partial(shard_like_fsdp1, device_id=0)"),
    (
        "FSDP(net, mixed_precision=MixedPrecision(param_dtype=torch.float16))",
        "shard_like_fsdp1(net, mixed_precision=MixedPrecision(param_dtype=torch.float16))",
    ),
    ("MixedPrecision(torch.float16, buffer_dtype=None)", "MixedPrecisionPolicy(param_dtype=torch.float16)"),
    ("CPUOffload(offload_params=True)", "CPUOffloadPolicy()"),
    ("CPUOffload()", "OffloadPolicy()"),
    ("CPUOffload(args.offload)", "CPUOffloadPolicy() if args.offload else OffloadPolicy()"),
    ("functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={A, b.C})", "units=by_class(A, b.C)"),
    ("functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)", "units=by_class(*classes)"),
    ("ModuleWrapPolicy([A])", "units=by_class(A)"),
    ("functools.partial(size_based_auto_wrap_policy, min_num_params=int(1e6))", "units=by_size(int(1e6))"),
    ("CustomPolicy(f)", "units=lambda fqn, module: f(module)"),
    ("model.clip_grad_norm_(0.5, norm_type=2)", "clip_grad_norm_(model, 0.5, norm_type=2)"),
    ("FSDP.clip_grad_norm_(m, 1.0, norm_type=2)", "clip_grad_norm_(m, 1.0, norm_type=2)"),
    ("model.clip_grad_norm_()", "clip_grad_norm_(model)"),
    ("model.no_sync()", "no_sync(model)"),
    ("model.no_sync", "functools.partial(no_sync, model)"),
    ("model.clip_grad_norm_", "functools.partial(clip_grad_norm_, model)"),
    ("model.forward", "model"),
    ("model.module", "model"),
    ("isinstance(model, FSDP)", "isinstance(model, FSDPModule)"),
    ("isinstance(model, (A, FSDP))", "isinstance(model, (A, FSDPModule))"),
    ("type(model) is FSDP", "isinstance(model, FSDPModule)"),
    ("model.__class__ != FSDP", "not isinstance(model, FSDPModule)"),
    ("FSDP.fsdp_modules(model)", "[m for m in model.modules() if isinstance(m, FSDPModule)]"),
    ("FSDP.summon_full_params(model)", "full_params(model, writeback=True)"),
    ("FSDP.summon_full_params(model, True, False, True)", "full_params(model, rank0_only=True)"),
    ("FSDP.summon_full_params(module=m, writeback=w, with_grads=True)", "full_params(m, writeback=w, with_grads=True)"),
    ("model.state_dict()", "full_state_dict(model, rank0_only=False)"),
    ("model.load_state_dict(s, strict=False)", 'load_full_state_dict(model, s, strict=False, src="all")'),
    ("FSDP.optim_state_dict(model, o)", "full_optimizer_state_dict(model, o, rank0_only=False)"),
    (
        "FSDP.optim_state_dict_to_load(model=model, optim_state_dict=s, optim=o)",
        'load_full_optimizer_state_dict(model, o, s, src="all")',
    ),
    ("FSDP.shard_full_optim_state_dict(s, model, optim=o)", 'load_full_optimizer_state_dict(model, o, s, src="all")'),
    ("FSDP.scatter_full_optim_state_dict(s, model)", "load_full_optimizer_state_dict(model, ..., s)"),
    ("FSDP.sharded_optim_state_dict(model, o)", "sharded_optimizer_state_dict(model, o)"),
    ("torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler(enabled=x)", "GradScaler(enabled=x)"),  # shardkit's
    ("ShardingStrategy._HYBRID_SHARD_ZERO2", '"_HYBRID_SHARD_ZERO2"'),
]


@pytest.mark.parametrize(("code", "line"), LINES, ids=[code for code, _ in LINES])
def test_the_replacement_has_the_programs_arguments(code, line):
    found = only(code)
    assert found.replacement == line
    assert found.code == code


STATES = [
    # around it, what is written, and what replaces it
    ("FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)", "model.state_dict()", "full_state_dict(model)"),
    ("FULL_STATE_DICT, FullStateDictConfig()", "model.state_dict()", "full_state_dict(model, rank0_only=False)"),
    ("FULL_STATE_DICT, state_dict_config=config", "model.state_dict()", "full_state_dict(model)"),
    ("FULL_STATE_DICT, None, other", "FSDP.optim_state_dict(model, o)", "full_optimizer_state_dict(model, o)"),
    (
        "FULL_STATE_DICT, config",
        "FSDP.optim_state_dict(model, o)",
        "full_optimizer_state_dict(model, o, rank0_only=False)",
    ),
    ("SHARDED_STATE_DICT", "model.state_dict()", "model.state_dict()"),
    ("SHARDED_STATE_DICT", "FSDP.optim_state_dict(model, o)", "sharded_optimizer_state_dict(model, o)"),
    (
        "SHARDED_STATE_DICT",
        "FSDP.optim_state_dict_to_load(model, o, s)",
        "load_sharded_optimizer_state_dict(model, o, s)",
    ),
]


@pytest.mark.parametrize(("around", "code", "line"), STATES, ids=[f"{a}: {code}" for a, code, _ in STATES])
def test_the_state_dict_type_around_a_call_decides_its_replacement(around, code, line):
    setup = "config = FullStateDictConfig(rank0_only=True); other = FullOptimStateDictConfig(rank0_only=True)\n"
    found = findings(f"{setup}with FSDP.state_dict_type(model, StateDictType.{around}):\n    {code}")
    assert [finding.replacement for finding in found if finding.code == code] == [line]


SUPPORT = [
    ("FSDP(net)", "exact", ""),
    ("FSDP(net, sharding_strategy=ShardingStrategy.HYBRID_SHARD)", "note", "LOCAL_WORLD_SIZE"),
    ("FSDP(net, (a, b), ShardingStrategy.HYBRID_SHARD)", "exact", ""),
    ("FSDP(net, use_orig_params=False)", "note", "use_orig_params: "),
    ("FSDP(net, backward_prefetch=None)", "note", "backward_prefetch: "),
    ("FSDP(net, limit_all_gathers=False)", "note", "limit_all_gathers: "),
    ("FSDP(net, mixed_precision=MixedPrecision(keep_low_precision_grads=True))", "note", "keep_low_precision_grads"),
    ("FSDP(net, flatten_parameters=True)", "decision", "not an argument of torch's FSDP1"),
    ("FSDP(net, **unknown)", "decision", "not in this call"),
    ("FSDP(*arguments)", "decision", "not in this call"),
    ("FSDP.optim_state_dict(model, *rest)", "decision", "not in this call"),
    ("model.clip_grad_norm_(*limits)", "exact", ""),
    ("MixedPrecision(torch.float16, buffer_dtype=x)", "note", "leaves out buffer_dtype and FSDP1's casts"),
    ("MixedPrecision(**precision)", "decision", "not in this call"),
    ("FSDP(net, mixed_precision=MixedPrecision(torch.float16))", "exact", ""),
    ("sum(p.grad.data.norm(2) for p in ps)", "decision", "do not add it up over ranks"),
    ("torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in ps]))", "decision", "do not add it up"),
    ("model.reset_parameters()", "decision", "before sharding"),
    ("model._init_weights()", "decision", "before sharding"),
    ("model.layers[0].reset_parameters()", "decision", "before sharding"),
    ('"_fsdp_wrapped_module" not in name', "decision", "all names give the same"),
    ('name.startswith("_fsdp_wrapped_module.")', "decision", "all names give the same"),
    ("layers[i] = FSDP(layers[i])", "decision", "part of a model"),
    ("setattr(parent, name, FSDP(child))", "decision", "part of a model"),
    ("BackwardPrefetch.BACKWARD_PRE", "exact", ""),
    ("BackwardPrefetch.BACKWARD_POST", "note", "always prefetches"),
    ("StateDictType.LOCAL_STATE_DICT", "impossible", "flat"),
    ("FSDP.summon_full_params(model)", "exact", ""),
    ("FSDP.summon_full_params(model, recurse=False)", "note", "inner units"),
    ("FSDP.state_dict_type(model, chosen)", "decision", "not in this call"),
    ("FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, LocalStateDictConfig())", "impossible", "flat"),
    ("model._flat_param", "impossible", "DTensor"),
    ("torch.distributed.fsdp._anything.name()", "impossible", "no counterpart"),
]


@pytest.mark.parametrize(("code", "support", "why"), SUPPORT, ids=[code for code, _, _ in SUPPORT])
def test_arguments_decide_what_becomes_of_a_call(code, support, why):
    found = only(code)
    assert found.support == support
    assert why in found.why


DDP = "from torch.nn.parallel import DistributedDataParallel as DDP"
RETURNS = "\n".join(f"def f{n}(): return f{n + 1}()" for n in range(40)) + "\ndef f40(): return model"
SEEN = [
    # code, and the names found in it
    ("kwargs = dict(device_id=0)\nFSDP(net, **kwargs)", [("FSDP", "exact")]),
    ("kwargs = {'nonsense': 0}\nFSDP(net, **{**kwargs})", [("FSDP", "decision")]),
    ("kwargs = {}\nkwargs.update(other)\nFSDP(net, **kwargs)", [("FSDP", "decision")]),
    ("for _ in x:\n    m.no_sync()\n    m = model", [("no_sync", "exact")]),
    (
        "def f():\n    global g\n    g = model\ndef h():\n    g.no_sync()",
        [("no_sync", "exact")],
    ),
    ("def f():\n    return 1, model\n_, m = f()\nm.no_sync()", [("no_sync", "exact")]),
    ("def f(a, b=None):\n    b.no_sync()\nf(1, b=model)", [("no_sync", "exact")]),
    ("(m := model).no_sync()", [("no_sync", "exact")]),
    (
        "def f(m: 'list[FSDP]', k: 'Callable[[], FSDP]'): m[0].no_sync(); k.no_sync()",
        [("FSDP", "exact"), ("FSDP", "exact"), ("no_sync", "exact")],
    ),
    ("getattr(model, 'module')", [("module", "exact")]),
    ("f = lambda m=model: model.no_sync()", [("no_sync", "exact")]),
    ("match x:\n    case 1:\n        m = model\nm.no_sync()", [("no_sync", "exact")]),
    ("try:\n    m = model\nexcept E:\n    m = None\nm.no_sync()", [("no_sync", "exact")]),
    ("model = other\nmodel.no_sync()", []),
    ("def f(model):\n    model.no_sync()", []),
    ("[model.no_sync() for model in others]", []),
    (
        "def f(m):\n    FSDP.optim_state_dict(m, o)\n    m.no_sync()",
        [("optim_state_dict", "note"), ("no_sync", "exact")],
    ),
    ("x.clip_grad_norm_(1.0)", [("clip_grad_norm_", "exact")]),
    ("x.clip_grad_norm_(y.parameters(), 1.0)\ntorch.nn.utils.clip_grad_norm_(p, 1.0)", []),
    ("from torch.nn.parallel import DistributedDataParallel as DDP\nd = DDP(net)\nd.clip_grad_norm_(1.0)", []),
    (f"{DDP}\nif isinstance(model, DDP):\n    model.no_sync()\nmodel.no_sync()", [("no_sync", "exact")]),
    (f"{DDP}\nif isinstance(x, (DDP, FSDP)):\n    x.module", [("FSDP", "exact"), ("module", "exact")]),
    ("from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as X\nX(net).clip_grad_norm_(1.0)", []),
    ("if is_torch_xla_available():\n    x.clip_grad_norm_(1.0)", []),
    ("if is_torch_xla_available():\n    pass\nelse:\n    x.clip_grad_norm_(1.0)", [("clip_grad_norm_", "exact")]),
    (f"{RETURNS}\nf0().no_sync()", [("no_sync", "exact")]),
    ("with FSDP.summon_full_params(model):\n    model.reset_parameters()", [("summon_full_params", "exact")]),
    ("model.module.lin.reset_parameters()", [("module", "exact"), ("reset_parameters", "decision")]),
    ("class Ema: pass\nmodel.ema = Ema()\nmodel.ema.reset_parameters()", []),
    ("other.lin.reset_parameters()\nother.reset_parameters()\n(g.norm() for g in grads)", []),
    ("'no _fsdp_wrapped_module here'", []),
    ("kept = '_fsdp_wrapped_module'", [("_fsdp_wrapped_module", "note")]),
    ("from mine import FSDP as Own\nOwn(net)", [("import", "exact"), ("FSDP", "exact")]),
    ("from megatron.core import FullyShardedDataParallel as FSDP\nFSDP(net)", []),
    ("o = Adam(net.parameters())\nnet = FSDP(net)", [("optimizer", "decision"), ("FSDP", "exact")]),
    ("net = FSDP(net)\no = Adam(net.parameters())", [("FSDP", "exact")]),
    ("o = Adam(other.parameters())\nnet = FSDP(net)", [("FSDP", "exact")]),
    ("x = y.module if isinstance(y, FSDP) else y", [("module", "exact"), ("FSDP", "exact")]),
    (
        "def f(cls, m):\n    return cls(m)\nf(FSDP, net).no_sync()",
        [("FSDP", "exact"), ("no_sync", "exact")],
    ),
    (
        "class T:\n    def save(self):\n        self.m.no_sync()\n    def setup(self):\n        self.m = model",
        [("no_sync", "exact")],
    ),
    ("import typing\nm = typing.cast(typ=FSDP, val=x)\nm.no_sync()", [("FSDP", "exact"), ("no_sync", "exact")]),
    ("strategy = ShardingStrategy.NO_SHARD if a else ShardingStrategy.FULL_SHARD", [("ShardingStrategy", "exact")] * 2),
]


@pytest.mark.parametrize(("code", "expected"), SEEN, ids=[code[:80] for code, _ in SEEN])
def test_names_are_followed_as_python_would(code, expected):
    found = [(finding.name.replace("FullyShardedDataParallel", "FSDP"), finding.support) for finding in findings(code)]
    assert [(name.removeprefix("FSDP."), support) for name, support in found] == expected


JOINS = [
    ("m = net\nif a:\n    m = model\nm.no_sync()", True),
    ("m = net\nif a:\n    m = model\nelse:\n    m = FSDP(net)\nm.no_sync()", False),
    ("m = None\nif a:\n    m = model\nm.no_sync()", False),
    ("for i in x:\n    m = model if i else other\n    m.no_sync()", True),
    ("if not isinstance(m, FSDP):\n    m = FSDP(m)\nm.no_sync()", False),
]


@pytest.mark.parametrize(("code", "likely"), JOINS, ids=[code for code, _ in JOINS])
def test_what_is_wrapped_on_some_paths_only_is_likely(code, likely):
    assert [finding.likely for finding in findings(code) if finding.code == "m.no_sync()"] == [likely]


def test_a_walk_along_a_tree_ends_soon():
    walk = "\n".join(f"    if a{n}: node = node.{name}" for n, name in enumerate(("left", "right", "next", "up")))
    started = time.process_time()
    assert only(f"import lib\nnode = lib.root\nwhile node:\n{walk}\nmodel.no_sync()").replacement == "no_sync(model)"
    assert time.process_time() - started < 5  # of 4 ** 12 paths


def test_lines_and_columns_count_characters_from_one():
    found = only("größe = 'äöü'; model.no_sync()")
    assert (found.line - HEAD.count("\n"), found.column, found.place) == (1, 16, f"program.py:{found.line}:16")


def test_a_form_feed_is_no_line_end_and_a_long_call_is_shortened():
    found = only("x = '\f'\nmodel.clip_grad_norm_(\n    " + "+".join(["1"] * 100) + ")")
    assert found.line - HEAD.count("\n") == 2
    assert found.code.startswith("model.clip_grad_norm_(1 + 1")
    assert found.code.endswith(" ...")
    assert len(found.code) == 100


def test_the_import_line_keeps_what_the_other_lines_still_use():
    program = """
        import torch
        from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel as FSDP, MixedPrecision as MP
        from torch.distributed.fsdp import ShardingStrategy

        model = FSDP(net, sharding_strategy=ShardingStrategy.FULL_SHARD, mixed_precision=MP(torch.float16))
    """
    found, _ = findings_of("program.py", textwrap.dedent(program))
    assert [each.replacement for each in found] == [
        "from shardkit import shard_like_fsdp1; from shardkit.fsdp1 import MixedPrecision as MP",
        "",
        'shard_like_fsdp1(net, sharding_strategy="FULL_SHARD", mixed_precision=MP(torch.float16))',
    ]


def test_the_import_line_has_what_the_other_lines_begin_to_use():
    program = """
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
        half = MixedPrecision(param_dtype=torch.bfloat16)
        model = FSDP(net, group, mixed_precision=half)
        model.clip_grad_norm_(1.0)
    """
    found, _ = findings_of("program.py", textwrap.dedent(program))  # group, the program's own, is not shardkit's rule
    assert found[0].replacement == "from shardkit import MixedPrecisionPolicy, clip_grad_norm_, shard_like_fsdp1"


def test_every_public_name_in_the_tables_can_be_imported():
    rows = {**replacements.NAMES, **replacements.MEMBERS, **replacements.ATTRIBUTES}.values()
    written = {name for row in rows for name in re.findall(r"(?<![\w.])\w+", row.use)}
    assert written & set(shardkit.__all__) <= PUBLIC <= set(shardkit.__all__)
