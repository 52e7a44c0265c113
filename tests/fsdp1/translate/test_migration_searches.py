"""The searches of the page on migrating find the lines of FSDP1 programs that must change."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "migrating-from-fsdp1.md").read_text()
PROGRAMS = ROOT / "tests" / "fsdp1" / "dropin" / "programs"
SEARCHES = re.findall(r"^f '(.+)' +# .+$", PAGE, re.MULTILINE)

# What none of the programs has.
OTHERS = """
    with enable_wrap(wrapper_cls=FSDP): layer = wrap(layer)
    state = FSDP.scatter_full_optim_state_dict(full, model, optim=optimizer)
    state = FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer)
    model.register_comm_hook(None, bf16_compress_hook)
    weight.register_hook(clamp)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    for handle in model._all_handles: handle.flat_param.grad = None
    saved = FSDP.sharded_optim_state_dict(model, optimizer)
    assert model.check_is_root()
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A codebase: the programs, and one with the rest."""
    folder = tmp_path_factory.mktemp("codebase") / "src"
    folder.mkdir()
    for program in PROGRAMS.glob("*.py"):
        (folder / program.name).write_text(program.read_text())
    (folder / "others.py").write_text(OTHERS)
    return folder


def matches(pattern, source):
    """The lines that the page's command prints for a pattern."""
    command = ["grep", "-rnE", "--include=*.py", "-e", pattern, "src/"]
    run = subprocess.run(command, cwd=source.parent, capture_output=True, text=True)
    assert run.returncode in (0, 1), run.stderr
    return run.stdout.splitlines()


def test_each_search_finds_a_line(source):
    assert len(SEARCHES) > 20
    assert [pattern for pattern in SEARCHES if not matches(pattern, source)] == []


def test_the_block_is_a_shell_script_that_finds_them(source):
    """As a reader pastes it."""
    block = PAGE.partition("```bash\nf() {")[2].partition("```")[0]
    script = "f() {" + block
    run = subprocess.run(["bash", "-c", script], cwd=source.parent, capture_output=True, text=True)
    assert run.stderr == ""
    assert run.stdout.count("\n") > 100
