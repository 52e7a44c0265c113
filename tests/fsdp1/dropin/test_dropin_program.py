"""torch's names in shardkit.fsdp1, and programs that run with torch's class replaced."""

import importlib
import pickle
import sys
import textwrap
from types import ModuleType

import forks
import pytest
import torch
from program_runs import replaced
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp._flat_param import FlatParameter

import shardkit.fsdp1
from shardkit.fsdp1 import FullyShardedDataParallel as FSDP
from shardkit.fsdp1.__main__ import main

PUBLIC = ("", ".wrap", ".api", ".fully_sharded_data_parallel", ".sharded_grad_scaler")
OURS = {"FullyShardedDataParallel"}


def both(module):
    names = (f"{package}{module}" for package in ("torch.distributed.fsdp", "shardkit.fsdp1"))
    return importlib.import_module(next(names)), importlib.import_module(next(names))


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_torchs_own(module):
    torchs, ours = both(module)
    public = getattr(
        torchs, "__all__", ["ShardedGradScaler"] if "scaler" in module else vars(torchs)
    )
    names = {
        name
        for name in public
        if name[0] != "_" and not isinstance(getattr(torchs, name), ModuleType)
    }
    objects = {name: (getattr(ours, name), getattr(torchs, name)) for name in names}
    assert {name for name, (mine, its) in objects.items() if mine is not its} == OURS & names


def test_the_class_is_one_and_ours():
    assert shardkit.fsdp1.fully_sharded_data_parallel.FullyShardedDataParallel is FSDP
    assert (
        shardkit.fsdp1._flat_param.FlatParameter is FlatParameter
    )  # private names are torch's too
    assert issubclass(shardkit.fsdp1.sharded_grad_scaler.ShardedGradScaler, torch.amp.GradScaler)
    assert pickle.loads(pickle.dumps(FSDP)) is FSDP is not TorchFSDP


@pytest.mark.parametrize(
    "statement", ["from shardkit.fsdp1.wrap import novel", "import shardkit.fsdp1.novel"]
)
def test_what_torch_has_not_is_an_import_error(statement):
    with pytest.raises(ImportError):  # which programs catch for names of other versions
        exec(statement, {})


def test_every_import_brings_our_class_and_torch_keeps_its_own():
    with replaced():
        from torch.distributed.checkpoint import state_dict
        from torch.distributed.fsdp import FullyShardedDataParallel as first
        from torch.distributed.fsdp.fully_sharded_data_parallel import (
            FullyShardedDataParallel as second,
        )

        assert first is second is torch.distributed.fsdp.FullyShardedDataParallel is FSDP
        assert state_dict.FSDP is TorchFSDP
    assert torch.distributed.fsdp.FullyShardedDataParallel is TorchFSDP


# --- Running: in this process, with what python -m shardkit.fsdp1 does to it undone -----------------


@pytest.fixture
def alone(monkeypatch):
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, getattr(sys, name)[:])
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, sys.modules["__main__"])
    with replaced():
        yield


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--novel", "train.py"]])
def test_what_names_no_program_is_a_usage_error(alone, arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "python -m shardkit.fsdp1" in capsys.readouterr().err


def test_a_program_that_is_not_there(alone):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.py"):
        main(["nowhere.py"])
    with pytest.raises(ImportError, match="nowhere"):
        main(["-m", "nowhere"])


def test_a_file_runs_as_under_plain_python(alone, tmp_path, capsys):
    (tmp_path / "helper.py").write_text(
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP"
    )
    (tmp_path / "train.py").write_text(
        "import pickle, sys, helper\nclass Mine: pass\n"
        "assert type(pickle.loads(pickle.dumps(Mine()))) is Mine\n"
        "print(helper.FSDP.__module__, __file__, sys.argv, sys.path[0])\nsys.exit(3)"
    )
    script = str(tmp_path / "train.py")
    with pytest.raises(SystemExit, match="3"):
        main([script, "--lr", "1"])
    seen = f"shardkit.fsdp1.dropin.module {script} {[script, '--lr', '1']} {tmp_path}\n"
    assert capsys.readouterr().out == seen
    del sys.modules["helper"]


def test_a_module_runs_as_under_plain_python(alone, tmp_path, monkeypatch, capsys):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text(
        "from torch.distributed.fsdp import FullyShardedDataParallel as F"
    )
    (tmp_path / "pkg" / "__main__.py").write_text(
        "from . import F\nprint(F.__module__, __spec__.name, __package__)"
    )
    (tmp_path / "pkg" / "train.py").write_text(
        "import sys\nfrom . import F\nprint(sys.argv)\nsys.exit(7)"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit, match="7"):
        main(["-m", "pkg.train", "--lr", "1"])
    main(["-m", "pkg"])
    arguments, ran = capsys.readouterr().out.splitlines()
    assert ran == "shardkit.fsdp1.dropin.module pkg.__main__ pkg"
    assert arguments == str([str(tmp_path / "pkg" / "train.py"), "--lr", "1"])
    del sys.modules["pkg"]


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
    run = forks.python("-m", "shardkit.fsdp1", "train.py", "--lr", "1", cwd=tmp_path)
    module = "shardkit.fsdp1.dropin.module"
    assert run.stdout == f"__mp_main__ True {module} {module} ['--lr', '1'] 0\n", run.stderr
    assert f'File "{tmp_path / "train.py"}", line 20, in <module>' in run.stderr
    assert run.stderr.endswith("RuntimeError: seen\n")
    assert run.returncode == 1
