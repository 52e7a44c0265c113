"""The line that replaces each use, filled in with the program's own arguments; and what is found and what is not."""

import textwrap
from pathlib import Path

import pytest

from shardkit.fsdp1.audit import Finding, audit
from shardkit.fsdp1.audit.visit import SUPPORT, findings_of

HEAD = """
import functools, torch
from torch.distributed.fsdp import *
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
model = FSDP(net)
"""


def findings(code: str) -> list[Finding]:
    """What is found in the lines of ``code`` below ``HEAD``."""
    found = findings_of("program.py", HEAD + textwrap.dedent(code))
    return [finding for finding in found if finding.line > HEAD.count("\n")]


LINES = [  # what is written, and what replaces it
    ("FSDP(module=net, device_id=rank)", "shard_like_fsdp1(net, device_id=rank)"),
    ("FSDP(net, None, strategy)", "shard_like_fsdp1(net, process_group=None, sharding_strategy=strategy)"),
    ("FSDP(net, **kwargs)", "shard_like_fsdp1(net, **kwargs)"),
    ("model.clip_grad_norm_(0.5, norm_type=2)", "clip_grad_norm_(model, 0.5, norm_type=2)"),
    ("FSDP.clip_grad_norm_(m, 1.0, norm_type=2)", "clip_grad_norm_(m, 1.0, norm_type=2)"),
    ("model.module", "model"),
    ("FSDP.fsdp_modules(model)", "[m for m in model.modules() if isinstance(m, FSDPModule)]"),
    ("FSDP.summon_full_params(model)", "full_params(model, writeback=True)"),
    ("FSDP.summon_full_params(model, True, False, True)", "full_params(model, rank0_only=True)"),
    ("FSDP.summon_full_params(model, False)", "full_params(model, writeback=True, recurse=False)"),
    ("FSDP.summon_full_params(module=m, writeback=w, with_grads=True)", "full_params(m, writeback=w, with_grads=True)"),
    ("model.state_dict()", "full_state_dict(model)"),
    ("model.load_state_dict(s, strict=False)", "load_full_state_dict(model, s, strict=False)"),
    ("FSDP.optim_state_dict(model, o)", "full_optimizer_state_dict(model, o)"),
    (
        "FSDP.optim_state_dict_to_load(model=model, optim_state_dict=s, optim=o)",
        "load_full_optimizer_state_dict(model, o, s)",
    ),
    ("FSDP.scatter_full_optim_state_dict(s, model)", "load_full_optimizer_state_dict(model, ..., s)"),
    ("torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler(enabled=x)", "GradScaler(enabled=x)"),
    ("ShardingStrategy._HYBRID_SHARD_ZERO2", '"_HYBRID_SHARD_ZERO2"'),
    ("größe = 'äöü'; model.no_sync()", "no_sync(model)"),
]


@pytest.mark.parametrize(("code", "line"), LINES, ids=[code for code, _ in LINES])
def test_the_replacement_has_the_programs_arguments(code, line):
    (found,) = findings(code)
    assert (found.replacement, found.column) == (line, 16 if code[0] == "g" else 1)


DECIDED = [
    ("FSDP(net, sharding_strategy=ShardingStrategy.HYBRID_SHARD)", "noted", "LOCAL_WORLD_SIZE"),
    ("FSDP(net, (a, b), ShardingStrategy.HYBRID_SHARD)", "mapped", ""),
    ("FSDP(net, use_orig_params=False)", "noted", "use_orig_params: "),
    ("FSDP(net, backward_prefetch=None)", "noted", "backward_prefetch: "),
    ("FSDP(net, flatten_parameters=True)", "decision", "not an argument of torch's FSDP1"),
    ("FSDP(net, **unknown)", "decision", "not in this call"),
    ("FSDP.optim_state_dict(model, *rest)", "decision", "not in this call"),
    ('"_fsdp_wrapped_module" not in name', "decision", "the same for all"),
    ("FullStateDictConfig(rank0_only=CPU)", "decision", "rank0_only is not known"),
    ("FullStateDictConfig(True, CPU)", "decision", "rank0_only is not known"),
    ("FullStateDictConfig(rank0_only=True)", "noted", "rank0_only=..."),
    ("StateDictType.LOCAL_STATE_DICT", "refused", "flat"),
    ("type(model) is FSDP", "decision", "isinstance(model, FSDPModule)"),
    ("torch.distributed.fsdp._anything.name()", "refused", "no counterpart"),
    ("FSDP.rekey_optim_state_dict({}, key, model)", "decision", ""),
    ("size_based_auto_wrap_policy(min_num_params=9)", "noted", ""),
    ("print(FlatParameter)", "refused", ""),
]


@pytest.mark.parametrize(("code", "support", "why"), DECIDED, ids=[code for code, _, _ in DECIDED])
def test_arguments_decide_what_becomes_of_a_call(code, support, why):
    (found,) = findings(code)
    assert found.support == support
    assert why in found.why


def test_a_config_that_is_not_known_is_found_in_the_call_that_it_is_given_to():
    code = "with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=CPU)): pass"
    assert [(found.name.rpartition(".")[2], found.support) for found in findings(code)] == [
        ("state_dict_type", "noted"),
        ("FullStateDictConfig", "decision"),
    ]


SEEN = [  # code, and the names found in it, with a mark where only the name of a method suggests FSDP1
    ("class T:\n def a(self): self.m = FSDP(x)\n def b(self): self.m.no_sync()", "FSDP no_sync?"),
    ("m = FSDP(a).to('cuda'); k = b\nm.no_sync(); k.no_sync()", "FSDP no_sync?"),
    ("def f(m: 'list[int]', k: FSDP): m.no_sync(); k.no_sync()", "FSDP no_sync?"),
    ("def f(m: 'FSDP | None', ms: list[FSDP]):\n for each in ms: each.clip_grad_norm_(1)", "FSDP clip_grad_norm_?"),
    ("def f(x):\n    x.module\n    x = FSDP(x)\n    x.module", "FSDP module?"),
    ("def train(model): model.clip_grad_norm_(1); model.state_dict()", "clip_grad_norm_? state_dict?"),
    ("W = functools.partial(FSDP, auto_wrap_policy=p)\nm = W(net)\nm.no_sync()", "FSDP"),
    ("W = FullyShardedDataParallel\nm = torch.compile(W(net))\nm.clip_grad_norm_(1)", "FSDP clip_grad_norm_?"),
    ("FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT)", "state_dict_type StateDictType"),
    ("x.clip_grad_norm_(y.parameters(), 1.0)\ntorch.nn.utils.clip_grad_norm_(p, 1.0)", ""),
    ("from megatron.core import FullyShardedDataParallel as Own\nOwn(net)", ""),
    ("m = fully_shard(net, mp_policy=MixedPrecisionPolicy())\nisinstance(m, FSDPModule)", ""),
    ("m = torch.nn.parallel.DistributedDataParallel(net)\nm.no_sync(); m.module; m.register_comm_hook(a, b)", ""),
    ("o = Adam(net.parameters())\nnet = FSDP(net)", "optimizer FSDP"),
    ("o = Adam(reward_net.parameters())\nnet = FSDP(net)", "FSDP"),
    ("def f(net): return Adam(net.parameters())\ndef g(net): return FSDP(net)", "FSDP"),
    ("'no _fsdp_wrapped_module here'", ""),
]


@pytest.mark.parametrize(("code", "expected"), SEEN, ids=[code[:80] for code, _ in SEEN])
def test_names_are_followed_within_the_file(code, expected):
    names = [finding.name.rpartition(".")[2] + "?" * finding.likely for finding in findings(code)]
    assert " ".join(names).replace("FullyShardedDataParallel", "FSDP") == expected


def test_whole_programs_are_read_and_their_wrappers_found():
    found = audit(Path(__file__).parents[1] / "dropin" / "programs")
    assert not found.unread
    wrapping = {finding.path for finding in found.findings if finding.name == "FullyShardedDataParallel"}
    assert len(wrapping) > 8
    assert {finding.support for finding in found.findings} == SUPPORT.keys()


def test_the_import_of_the_class_names_what_replaces_it():
    (found, *_) = findings_of("program.py", HEAD.replace("import *", "import ShardingStrategy"))
    assert (found.name, found.replacement) == ("import", "")
    (line,) = {f.replacement for f in findings_of("p.py", HEAD) if f.name == "import" and f.replacement}
    names = {}
    exec(line, names)
    assert {"shard_like_fsdp1", "FSDPModule"} <= names.keys()
