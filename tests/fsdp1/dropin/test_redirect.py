"""torch.distributed.fsdp's names in shardkit.fsdp1, and programs whose imports are redirected to them."""

import contextlib
import importlib
import pickle
import sys
import textwrap
import traceback
from importlib.machinery import SourceFileLoader
from multiprocessing import spawn
from types import ModuleType

import forks
import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.fsdp.sharded_grad_scaler
from program_runs import run_redirected
from shardkit.fsdp1.dropin.redirect import redirected
from shardkit.fsdp1.dropin.rewrite import SUBMODULES, rewrite
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

import shardkit.fsdp1
from shardkit.errors import TranslationError
from shardkit.fsdp1 import FullyShardedDataParallel as FSDP
from shardkit.fsdp1.__main__ import main
from shardkit.testing import fake_world

PUBLIC = ("", ".wrap", ".api", ".fully_sharded_data_parallel", ".sharded_grad_scaler")
OURS = {"FullyShardedDataParallel", "ShardedGradScaler"}


def both(module: str) -> tuple[ModuleType, ModuleType]:
    names = (f"{package}{module}" for package in ("torch.distributed.fsdp", "shardkit.fsdp1"))
    return importlib.import_module(next(names)), importlib.import_module(next(names))


# --- Names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_torchs_own(module):
    torchs, ours = both(module)
    names = {name for name, value in vars(torchs).items() if name[0] != "_" and not isinstance(value, ModuleType)}
    assert len(names) > 5
    found = {name: (getattr(ours, name), getattr(torchs, name)) for name in names}
    assert {name for name, (mine, its) in found.items() if mine is not its} == OURS & names


def test_the_class_is_one_and_ours():
    assert shardkit.fsdp1.fully_sharded_data_parallel.FullyShardedDataParallel is FSDP
    assert issubclass(shardkit.fsdp1.sharded_grad_scaler.ShardedGradScaler, torch.amp.GradScaler)
    assert FSDP is not TorchFSDP


@pytest.mark.parametrize("module", PUBLIC)
def test_a_star_import_brings_the_same_names(module):
    brought = []
    for package in ("torch.distributed.fsdp", "shardkit.fsdp1"):
        namespace: dict[str, object] = {}
        exec(f"from {package}{module} import *", namespace)
        brought.append(namespace.keys() - {"__builtins__"})
    torchs, ours = brought
    # torch's scaler module has no __all__, so its star import brings what it imports itself.
    assert ours == torchs if module != ".sharded_grad_scaler" else ours == {"ShardedGradScaler"}


def test_its_own_names_are_still_there():
    for name in ("from_config", "shard_like_fsdp1", "translate_fsdp1", "Translation", "Note", "parse_strategy"):
        assert getattr(shardkit.fsdp1, name).__module__.startswith("shardkit.fsdp1")
    assert {"ShardingStrategy", "translate_fsdp1"} <= set(dir(shardkit.fsdp1))


PRIVATE = [
    ("wrap", "_module_wrap_policy _or_policy _Policy _recursive_wrap _wrap _construct_wrap_fn _ConfigAutoWrap"),
    ("_common_utils", "clean_tensor_name FSDP_WRAPPED_MODULE FSDP_PREFIX TrainingState _FSDPState _get_param_to_fqns"),
    ("_flat_param", "FlatParameter FlatParamHandle HandleShardingStrategy"),
    ("_init_utils", "HYBRID_SHARDING_STRATEGIES _sync_module_params_and_buffers"),
    ("_wrap_utils", "_auto_wrap"),
    ("fully_sharded_data_parallel", "FLAT_PARAM FlatParameter StateDictType CustomPolicy TrainingState"),
    ("", "FlatParameter"),
]


@pytest.mark.parametrize(("module", "names"), PRIVATE)
def test_private_names_that_do_no_harm_are_torchs_own(module, names):
    torchs, ours = both(f".{module}".rstrip("."))
    assert all(getattr(ours, name) is getattr(torchs, name) for name in names.split())


REFUSED = [
    ("_unshard_param_utils", "_unshard_params", "summon_full_params"),
    ("_optim_utils", "_optim_state_dict", "optim_state_dict"),
    ("_fsdp_extensions", "_set_fsdp_extensions", "device_mesh"),
    ("_runtime_utils", "_unshard", "FSDPModule.reshard"),
    ("_runtime_utils", "_post_backward_hook", "public method"),
    ("_state_dict_utils", "_full_post_state_dict_hook", "public method"),
    ("fully_sharded_data_parallel", "_unshard_params_for_summon", "summon_full_params"),
]


@pytest.mark.parametrize(("module", "name", "fix"), REFUSED)
def test_what_works_on_flat_parameters_is_refused_when_called(module, name, fix):
    namespace: dict[str, object] = {}
    exec(f"from shardkit.fsdp1.{module} import {name} as function", namespace)
    with pytest.raises(TranslationError, match=f"{name}: is a private function of torch's FSDP1.*{fix}"):
        namespace["function"](nn.Linear(1, 1))


def test_what_asks_about_a_model_answers_for_ours_and_for_others():
    from shardkit.fsdp1._common_utils import _get_module_fsdp_state, _is_fsdp_flattened
    from shardkit.fsdp1._runtime_utils import _get_fsdp_root_states, _is_fsdp_root, _lazy_init

    from shardkit.fsdp1 import _traversal_utils

    plain = nn.Linear(2, 2)
    assert _get_module_fsdp_state(plain) is None
    assert _traversal_utils._get_fsdp_states(plain) == []
    assert not _is_fsdp_flattened(plain.weight)
    with fake_world(2):
        model = FSDP(nn.Sequential(FSDP(nn.Linear(2, 2)), nn.Linear(2, 2)))
        assert _lazy_init(model, model) is model
        assert _get_module_fsdp_state(model) is model
        assert _traversal_utils._get_fsdp_states(model) == [model, model[0]]
        assert _get_fsdp_root_states(nn.Sequential(model)) == [model]
        assert _is_fsdp_root(model, model)
        assert not _is_fsdp_root(model[0], model[0])
        assert all(map(_is_fsdp_flattened, model.parameters()))


@pytest.mark.parametrize("statement", ["from shardkit.fsdp1{} import novel", "import shardkit.fsdp1{}.novel"])
@pytest.mark.parametrize("module", [*PUBLIC, "._common_utils"])
def test_what_torch_has_not_is_an_import_error(module, statement):
    with pytest.raises(ImportError):  # which programs catch for names of other versions
        exec(statement.format(module), {})


def test_wrap_takes_our_class():
    from shardkit.fsdp1.wrap import always_wrap_policy, enable_wrap, wrap

    with fake_world(2), enable_wrap(wrapper_cls=FSDP, auto_wrap_policy=always_wrap_policy):
        inner = wrap(nn.Sequential(nn.Linear(2, 2)))
        assert isinstance(inner, FSDP)
        assert isinstance(inner[0], FSDP)
    assert type(wrap(nn.Linear(2, 2))) is nn.Linear


# --- Rewriting ------------------------------------------------------------------------------------------------------

FORMS = [  # a program, and an expression that is shardkit's class or module
    ("from torch.distributed.fsdp import FullyShardedDataParallel as F", "F"),
    ("from torch.distributed.fsdp import *", "FullyShardedDataParallel"),
    ("from torch.distributed import fsdp", "fsdp.FullyShardedDataParallel"),
    ("from torch.distributed import get_rank, fsdp as f, ReduceOp", "get_rank and ReduceOp and f"),
    ("import torch.distributed.fsdp as F", "F"),
    ("import os, torch.distributed.fsdp.wrap as w, sys", "os and sys and w"),
    ("import torch.distributed.fsdp", "torch.distributed.fsdp.FullyShardedDataParallel"),
    ("import torch.distributed.fsdp.wrap", "torch.distributed.fsdp.wrap"),
    ("import torch", "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"),
    ("import torch.distributed as dist", "dist.fsdp.FullyShardedDataParallel"),
    ("from torch import distributed as d", "d.fsdp"),
    ("import torch\nmine = torch.distributed", "mine.fsdp"),
    ("import torch", "getattr(torch.distributed, 'fsdp')"),
    ("import importlib", "importlib.import_module('torch.distributed.fsdp.sharded_grad_scaler')"),
    ("from importlib import import_module", "import_module('torch.distributed.fsdp')"),
    ("from torch.distributed.fsdp import wrap", "wrap"),
    ("from torch.distributed.fsdp import _common_utils as c", "c"),
    ("from torch.distributed.fsdp.wrap import _or_policy as p\nimport torch", "torch.distributed.fsdp"),
    ("def f():\n    from torch.distributed.fsdp import FullyShardedDataParallel as F\n    return F", "f()"),
    (
        "try:\n    from torch.distributed.fsdp import novel\nexcept ImportError as e:\n    import shardkit.fsdp1",
        "shardkit",
    ),
    ("class A:\n    from torch.distributed.fsdp import FullyShardedDataParallel as F", "A.F"),
]
UNTOUCHED = [
    ("from torch.distributed.fsdp._fully_shard import FSDPModule as f", "f is FSDPModule"),
    ("from .fsdp import x", "x"),
    ("import fsdp.torch as f", "f"),
    ("from torch.distributed._composable import fsdp", "fsdp"),
    ("self.fsdp = config.fsdp", "self.fsdp"),
    ("torch.distributed.fsdp = 1", "0"),
    ("name = 'torch.distributed.fsdp'", "name"),
]


@pytest.mark.parametrize(("program", "ours"), FORMS)
def test_every_form_of_import_is_turned(program, ours):
    tree, _ = rewrite(f"{program}\nfound = {ours}\n".encode(), "train.py")
    namespace: dict[str, object] = {}
    exec(compile(tree, "train.py", "exec"), namespace)
    found = namespace["found"]
    name = found.__name__ if isinstance(found, ModuleType) else found.__module__
    assert name.startswith("shardkit")


@pytest.mark.parametrize(("program", "expression"), UNTOUCHED)
def test_what_is_no_import_of_fsdp1_stays(program, expression):
    import ast

    source = f"{program}\n{expression}\n"
    tree, count = rewrite(source.encode(), "train.py")
    assert count == 0
    assert ast.unparse(tree) == ast.unparse(ast.parse(source))


def test_other_things_called_fsdp_are_what_they_were():
    tree, _ = rewrite(
        b"from argparse import Namespace as dist\nfound = dist(fsdp=3).fsdp\ndist.fsdp = 4\nn = dist.fsdp", ""
    )
    namespace: dict[str, object] = {}
    exec(compile(tree, "", "exec"), namespace)
    assert (namespace["found"], namespace["n"]) == (3, 4)
    del namespace["dist"].fsdp


def test_submodules_are_torchs():
    assert {"wrap", "api", "_common_utils", "_flat_param"} < set(SUBMODULES)
    assert "_fully_shard" not in SUBMODULES


# --- Running --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A program, its helpers, and an installed library."""
    files = {
        "train.py": """
            import pickle, sys
            import helpers, library
            from helpers.inner import FSDP as inner
            from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

            class Mine:
                pass

            if __name__ == "__main__":
                assert pickle.loads(pickle.dumps(Mine())).__class__ is Mine
                if "fail" in sys.argv:
                    import torch
                    torch.distributed.fsdp.novel()  # line 14
                if "exit" in sys.argv:
                    sys.exit(3)
                seen = __file__, sys.argv[:], sys.path[0], __spec__, __package__
            """,
        "helpers/__init__.py": "from .inner import FSDP",
        "helpers/inner.py": """
            try:
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
            except ImportError:
                FSDP = None
            """,
        "site-packages/library.py": "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP",
        "broken.py": "from torch.distributed.fsdp import (",
    }
    for name, source in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    yield tmp_path
    sys.modules.pop("library", None)


def test_a_program_runs_as_under_plain_python(folder):
    argv, path, before = sys.argv[:], sys.path[:], sys.modules["__main__"]
    seen = run_redirected(folder / "train.py", ["--lr", "1"])
    script = str(folder / "train.py")
    assert seen["FSDP"] is seen["inner"] is seen["helpers"].FSDP is FSDP
    assert seen["library"].FSDP is TorchFSDP
    assert seen["seen"] == (script, [script, "--lr", "1"], str(folder), None, None)
    assert (seen["__name__"], seen["Mine"].__module__) == ("__main__", "__main__")
    assert (sys.argv, sys.path, sys.modules["__main__"]) == (argv, path, before)
    assert "helpers" not in sys.modules  # the next program may have another of this name, or want torch's


def test_a_package_may_be_named_as_the_programs_own(folder):
    assert run_redirected(folder / "train.py", also=["library"])["library"].FSDP is FSDP


def test_its_errors_show_its_own_lines(folder):
    with pytest.raises(AttributeError, match=r"'shardkit\.fsdp1' has no attribute 'novel'") as raised:
        run_redirected(folder / "train.py", ["fail"])
    lines = traceback.extract_tb(raised.value.__traceback__)
    assert (14, "torch.distributed.fsdp.novel()  # line 14") in [(line.lineno, line.line) for line in lines]
    with pytest.raises(SyntaxError) as broken:
        run_redirected(folder / "broken.py")
    assert (broken.value.filename, broken.value.lineno) == (str(folder / "broken.py"), 1)
    with pytest.raises(SystemExit) as ended:
        run_redirected(folder / "train.py", ["exit"])
    assert ended.value.code == 3


def test_nothing_of_it_stays(folder, monkeypatch):
    loader, prepare = SourceFileLoader.get_code, spawn.get_preparation_data
    monkeypatch.syspath_prepend(folder)
    with redirected() as redirect:
        assert SourceFileLoader.get_code is not loader
        assert importlib.import_module("helpers").FSDP is FSDP
        assert redirect.modules == ["helpers", "helpers.inner"]
        assert redirect.count == 1
    assert (SourceFileLoader.get_code, spawn.get_preparation_data) == (loader, prepare)
    assert importlib.import_module("helpers").FSDP is TorchFSDP
    for name in ("helpers", "helpers.inner"):
        del sys.modules[name]


def test_bytecode_of_what_was_turned_is_not_kept(folder, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    run_redirected(folder / "train.py")
    cached = {path.name.partition(".")[0] for path in folder.rglob("*.pyc")}
    assert cached <= {"library", "__init__"}


@pytest.fixture
def alone(monkeypatch):
    """What ``python -m shardkit.fsdp1`` does to its process for good, undone."""
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, getattr(sys, name)[:])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    mains = {name: sys.modules[name] for name in ("__main__", "__mp_main__")}
    with redirected():
        yield
    sys.modules.update(mains)


@pytest.mark.parametrize("arguments", [[], ["nowhere.py"], ["-m", "nowhere.at.all"], ["-m"], ["--novel", "train.py"]])
def test_what_is_no_program_is_a_usage_error(alone, arguments, capsys):
    with contextlib.suppress(SystemExit):  # argparse's
        assert main(arguments) == 2
    assert "python -m shardkit.fsdp1" in capsys.readouterr().err


def test_a_program_without_fsdp_is_told_of(alone, tmp_path, capsys):
    (tmp_path / "train.py").write_text("import torch; print(torch.__name__)")
    assert main([str(tmp_path / "train.py")]) == 0
    captured = capsys.readouterr()
    assert captured.out == "torch\n"
    assert "nothing was redirected. Name the package that does with --also" in captured.err


SPAWNING = """
    import multiprocessing, sys
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    class Mine:
        def __init__(self):
            self.wrapper = FSDP.__module__

    def child(queue):
        queue.put((__name__, Mine(), sys.argv))

    if __name__ == "__main__":
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        name, mine, argv = queue.get()
        process.join()
        print(name, type(mine) is Mine, mine.wrapper, FSDP.__module__, argv[1:], process.exitcode)
        raise RuntimeError("seen")
    """


def test_the_command_runs_a_script_and_the_processes_that_it_spawns(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SPAWNING))
    # As torchrun -m shardkit.fsdp1 train.py starts each rank.
    run = forks.python("-m", "shardkit.fsdp1", "--also", "none", "train.py", "--lr", "1", cwd=tmp_path)
    module = "shardkit.fsdp1.dropin.module"
    assert run.stdout == f"__mp_main__ True {module} {module} ['--lr', '1'] 0\n", run.stderr
    shown = [line for line in run.stderr.splitlines() if line.startswith("  File")]
    assert shown == [f'  File "{tmp_path / "train.py"}", line 20, in <module>']  # as under plain python
    assert run.stderr.endswith("RuntimeError: seen\n")
    assert run.returncode == 1


def test_a_module_runs_as_under_plain_python(alone, tmp_path, monkeypatch, capsys):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("from torch.distributed.fsdp import FullyShardedDataParallel as F")
    (tmp_path / "pkg" / "__main__.py").write_text("from . import F\nprint(F.__module__, __spec__.name, __package__)")
    (tmp_path / "pkg" / "train.py").write_text("import sys\nfrom . import F, __main__\nprint(sys.argv)\nsys.exit(7)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit, match="7"):
        main(["-m", "pkg.train", "--lr", "1"])
    assert main(["-m", "pkg"]) == 0
    imported, arguments, ran = capsys.readouterr().out.splitlines()
    assert imported == ran == "shardkit.fsdp1.dropin.module pkg.__main__ pkg"
    assert arguments == str([str(tmp_path / "pkg" / "train.py"), "--lr", "1"])
    for name in ("pkg", "pkg.__main__"):
        del sys.modules[name]


def test_pickle_finds_what_is_ours():
    assert pickle.loads(pickle.dumps(FSDP)) is FSDP
