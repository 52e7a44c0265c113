"""The line that replaces each use, filled in with the program's own arguments; and what is found and what is not."""

import builtins
import json
import os
import re
import textwrap
import types
from pathlib import Path

import pytest
import torch.distributed.fsdp as fsdp
from torch.distributed.fsdp import FullyShardedDataParallel, api, fully_sharded_data_parallel, sharded_grad_scaler, wrap

import shardkit
import shardkit.fsdp1
import shardkit.grads
import shardkit.state
from shardkit import replacements
from shardkit.__main__ import main
from shardkit.fsdp1.audit import Finding, audit, visit
from shardkit.fsdp1.audit.visit import MODULES, SUPPORT, findings_of

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


# The table.


ROWS = replacements.NAMES | replacements.MEMBERS | replacements.ATTRIBUTES | replacements.PRIVATE | visit.OTHERS
INHERITED = {"state_dict", "load_state_dict"}  # of nn.Module; every other member is FSDP1's own


def public_of_fsdp1() -> set[str]:
    """What torch offers in public, less FSDP2's: what is listed, and what is only imported into the package."""
    modules = (wrap, api, fully_sharded_data_parallel)
    found = {name: value for name, value in vars(fsdp).items() if not name.startswith("_")}
    found["ShardedGradScaler"] = sharded_grad_scaler.ShardedGradScaler
    found |= {name: getattr(module, name) for module in (fsdp, *modules) for name in module.__all__}
    own = {name: value for name, value in found.items() if not isinstance(value, types.ModuleType)}
    return {name for name, value in own.items() if getattr(fsdp._fully_shard, name, None) is not value}


def test_every_public_name_of_fsdp1_has_a_row_and_no_row_is_of_no_name():
    assert replacements.NAMES.keys() == public_of_fsdp1()


def test_every_public_method_of_the_wrapper_has_a_row():
    own = {name for name in vars(FullyShardedDataParallel) if not name.startswith("_")}
    assert replacements.MEMBERS.keys() == own | INHERITED


def test_a_module_that_torch_adds_is_noticed():
    found = {name for name, value in vars(fsdp).items() if isinstance(value, types.ModuleType) and name[0] != "_"}
    assert found == set(MODULES)


# What a replacement may call besides methods of the model: torch's, of three modules, and shardkit's.
OFFERED = [shardkit, shardkit.fsdp1, shardkit.grads, shardkit.state, fsdp, builtins]


def called(template: str) -> set[str]:
    """The plain names that a replacement calls."""
    code = re.sub(r"\{(\w+)\}", r"\1", template.replace("{{", "(").replace("}}", ")"))
    return set(re.findall(r"(?<![\w.])([A-Za-z_]\w*)\(", code)) - {"receiver"}


def test_every_row_says_something_and_what_it_calls_exists():
    assert [name for name, row in ROWS.items() if not row.use and not row.sentence] == []
    calls = {name for row in ROWS.values() for name in called(row.use)}
    assert {"full_state_dict", "clip_grad_norm_", "by_class", "no_sync"} <= calls
    missing = {name for name in calls if not any(hasattr(module, name) for module in OFFERED)}
    assert missing == set()


def test_the_private_names_are_torchs():
    """A row for a name that torch never had helps nobody."""
    modules = [value for value in vars(fsdp).values() if isinstance(value, types.ModuleType)]
    assert [
        name for name in replacements.PRIVATE if not any(hasattr(module, name) for module in (fsdp, *modules))
    ] == []


# Files and the command.


USE = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\nmodel = FSDP(net)\n"


@pytest.fixture
def tree(tmp_path):
    """A directory with programs where they are read and where they are not."""
    for name in ("a.py", "b/c.py", "b/tests/d.py", ".git/e.py", "env/lib/f.py", "node_modules/g.py", "h.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(USE)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "plain.py").write_text("print(1)")
    return tmp_path


def paths(found, root):
    found = dict.fromkeys(finding.path for finding in found.findings)
    return [os.path.relpath(path, root).replace(os.sep, "/") for path in found]


def test_directories_are_read_in_order_and_environments_left_out(tree):
    found = audit(tree)
    assert paths(found, tree) == ["a.py", "b/c.py", "b/tests/d.py"]
    assert found.read == 4  # and plain.py
    assert audit(tree / "h.txt").findings  # a file is read whatever its name

    assert audit(tree / "a.py", tree).read == 4  # once


@pytest.mark.parametrize(("exclude", "left"), [("tests", ["a.py", "b/c.py"]), ("b/*", ["a.py"]), ("*.py", [])])
def test_what_matches_is_left_out(tree, exclude, left):
    assert paths(audit(tree, exclude=[exclude]), tree) == left


UNREAD = [
    (b"import fsdp\nprint 'two'\n", "Missing parentheses in call to 'print'"),
    (b"# coding: nonsense\nimport fsdp\n", "unknown encoding"),
    (b"fsdp = '\xff'\n", "invalid or missing encoding declaration"),
    (b"fsdp = " + b"-" * 20000 + b"1", ""),
]


@pytest.mark.parametrize(("content", "reason"), UNREAD, ids=["python2", "encoding", "bytes", "deep"])
def test_what_cannot_be_read_is_said_with_the_reason(tmp_path, content, reason):
    (tmp_path / "odd.py").write_bytes(content)
    found = audit(tmp_path)
    assert len(found.unread) == 1
    assert reason in found.unread[str(tmp_path / "odd.py")]
    assert not found.is_settled


@pytest.mark.parametrize("encoding", ["utf-8-sig", "latin-1"])
def test_other_encodings_are_read(tmp_path, encoding):
    cookie = "" if encoding.startswith("utf") else f"# coding: {encoding}\n"
    code = f"{cookie}x = 'ä'; import torch.distributed.fsdp as f; f.wrap.wrap(x)\n"
    (tmp_path / "odd.py").write_bytes(code.encode(encoding))
    found = audit(tmp_path)
    assert [finding.code for finding in found.findings] == ["f.wrap.wrap(x)"]
    assert found.findings[0].column == 46


def test_a_broken_file_without_fsdp_is_of_no_concern(tmp_path):
    (tmp_path / "old.py").write_text("print 'two'")
    assert audit(tmp_path).is_settled


# --- The command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "exit_code"), [("print(1)", 0), (USE, 0), (USE + "FSDP(net, **unknown)", 1), ("fsdp = (", 1)]
)
def test_the_exit_code_says_whether_something_is_left_to_decide(tmp_path, code, exit_code, capsys):
    (tmp_path / "program.py").write_text(code)
    assert main(["audit", str(tmp_path)]) == exit_code
    assert "of FSDP1 in" in capsys.readouterr().out


def test_a_path_that_is_not_there_is_a_wrong_call(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["audit", str(tmp_path / "nothing")])
    assert stopped.value.code == 2
    assert "no such file or directory" in capsys.readouterr().err


def test_the_text_has_places_replacements_and_counts(tmp_path, capsys, monkeypatch):
    (tmp_path / "program.py").write_text(
        "o = Adam(net.parameters())\n" + USE.replace("model", "net") + "net.no_sync()\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["audit", "program.py"]) == 1
    text = capsys.readouterr().out
    assert "program.py:3:7  exact  FSDP(net)\n    -> shard_like_fsdp1(net)\n" in text
    assert "program.py:4:1  exact, likely  net.no_sync()\n    -> no_sync(net)\n" in text
    assert "4 uses of FSDP1 in 1 of 1 files: 3 exact, 0 with a note, 1 check by hand, 0 not possible" in text


def test_json_holds_the_same(tree, capsys):
    assert main(["audit", str(tree), "--exclude", "b", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["counts"] == {"mapped": 2, "noted": 0, "decision": 0, "refused": 0}
    assert [(f["line"], f["column"], f["replacement"]) for f in data["findings"]][1] == (2, 9, "shard_like_fsdp1(net)")
    assert data["read"] == 2
