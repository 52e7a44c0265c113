"""Programs drawn from a grammar: each use is found exactly once, and none is invented. Bytes of any kind: no error."""

import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.fsdp1.audit import audit
from shardkit.fsdp1.audit.program import findings_of

PACKAGE, CLASS = "torch.distributed.fsdp", "FullyShardedDataParallel"
PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))


class Statement(NamedTuple):
    """A line of a program with ``{n}`` for fresh names, and the uses in it; ``{fsdp}`` is FSDP1's class."""

    code: str
    uses: tuple[str, ...] = ()


STATEMENTS = [
    Statement("m{n} = {fsdp}(Net())", ("FSDP",)),
    Statement("m{n} = {fsdp}(Net(), device_id={n}).to('cuda'); m{n}.no_sync()", ("FSDP", "FSDP.no_sync")),
    Statement("m{n} = Net(); m{n}.no_sync(); m{n} = {fsdp}(m{n}); m{n}.no_sync()", ("FSDP", "FSDP.no_sync")),
    Statement("m{n}, k{n} = {fsdp}(a), b; m{n}.module; k{n}.module", ("FSDP", "FSDP.module")),
    Statement("m{n} = [{fsdp}(a)]; m{n}[0].clip_grad_norm_(1.0)", ("FSDP", "FSDP.clip_grad_norm_")),
    Statement("a.b{n} = {fsdp}(c); a.b{n}.check_is_root(); a.c{n}.module", ("FSDP", "FSDP.check_is_root")),
    Statement("d{n} = dict(device_id=0); m{n} = {fsdp}(Net(), **d{n})", ("FSDP",)),
    Statement(
        "p{n} = functools.partial({fsdp}, device_id=0); m{n} = p{n}(Net()); m{n}.module", ("FSDP", "FSDP.module")
    ),
    Statement("with {fsdp}.summon_full_params(x{n}): print(x{n}.module)", ("FSDP.summon_full_params", "FSDP.module")),
    Statement("s{n} = {fsdp}.optim_state_dict(a, b)", ("FSDP.optim_state_dict",)),
    Statement("if isinstance(x{n}, {fsdp}): x{n}.no_sync()", ("FSDP", "FSDP.no_sync")),
    Statement("print([u.process_group for u in {fsdp}.fsdp_modules(a)])", ("FSDP.fsdp_modules", "FSDP.process_group")),
    Statement("def f{n}(m: {fsdp}): m.no_sync()", ("FSDP", "FSDP.no_sync")),
    Statement("class C{n}({fsdp}): pass", ("FSDP",)),
    Statement("f{n} = lambda: {fsdp}(a).state_dict()", ("FSDP", "FSDP.state_dict")),
    Statement("x{n} = fsdp_module.ShardingStrategy.FULL_SHARD; print(x{n})", ("ShardingStrategy",)),
    Statement("x{n} = fsdp_module.MixedPrecision(param_dtype=a)", ("MixedPrecision",)),
    Statement("x{n} = fsdp_module._runtime_utils._lazy_init(a, b)", ("PACKAGE._runtime_utils._lazy_init",)),
    Statement("x{n} = fsdp_module.sharded_grad_scaler.ShardedGradScaler()", ("ShardedGradScaler",)),
    Statement("x{n} = name.replace('_fsdp_wrapped_module.', '')", ("FSDP._fsdp_wrapped_module",)),
    Statement("model{n}.clip_grad_norm_(1.0)", ("FSDP.clip_grad_norm_",)),
    # Nothing of FSDP1
    Statement("x{n} = DDP(Net()); x{n}.no_sync(); x{n}.module; x{n}.state_dict()"),
    Statement("x{n} = fsdp_module.fully_shard(Net()); x{n}.unshard(); x{n}.state_dict()"),
    Statement("torch.nn.utils.clip_grad_norm_(a.parameters(), 1.0)"),
    Statement("def g{n}(FSDP, model): FSDP(model).no_sync()"),
    Statement("x{n} = [FSDP.no_sync() for FSDP in a]"),
    Statement("print('FSDP(model).no_sync()')  # FSDP(model)"),
    Statement("x{n}.fsdp = {{'fsdp': False}}; x{n}.rank, x{n}.params"),
]
IMPORTS = {  # how FSDP1's class is imported, and its name then
    f"from {PACKAGE} import {CLASS} as FSDP": "FSDP",
    f"from {PACKAGE}.fully_sharded_data_parallel import {CLASS}": CLASS,
    f"import {PACKAGE}.fully_sharded_data_parallel as f": f"f.{CLASS}",
    f"from {PACKAGE} import *": CLASS,
    f"import {PACKAGE}": f"{PACKAGE}.{CLASS}",
    "import torch.distributed as dist": f"dist.fsdp.{CLASS}",
}
FRAMES = [  # what stands around a line
    "{line}",
    "def frame{n}(self, *args):\n    {line}",
    "if a{n}:\n    {line}\nelse:\n    pass",
    "for i{n} in range(3):\n    {line}",
    "try:\n    {line}\nexcept E:\n    raise",
    "class Frame{n}:\n    def method(self):\n        {line}",
    "with a{n}() as b{n}:\n    {line}",
    "while a{n}:\n    for i{n} in b:\n        {line}",
    "async def frame{n}():\n    async with a:\n        {line}",
]


@st.composite
def programs(draw):
    """A program, and for each of its lines the uses that are in it."""
    head = draw(st.sampled_from(sorted(IMPORTS)))
    lines = ["import functools, torch", "from torch.distributed import fsdp as fsdp_module", head]
    names_fsdp1 = "FullyShardedDataParallel" in head or "*" in head
    uses = Counter({("import", 3): 1}) if names_fsdp1 else Counter()
    for n, statement in enumerate(draw(st.lists(st.sampled_from(STATEMENTS), max_size=12))):
        frame = draw(st.sampled_from(FRAMES))
        line = statement.code.format(n=n, fsdp=IMPORTS[head])
        code = frame.replace("{n}", str(n)).replace("{line}", line)
        inside = [line.strip() for line in code.split("\n")].index(line)
        uses.update((use, len(lines) + inside + 1) for use in statement.uses)
        lines += code.split("\n")
    return "\n".join(lines) + "\n", uses


@settings(max_examples=150)
@given(programs())
def test_each_use_is_found_once_and_none_is_invented(drawn):
    program, uses = drawn
    found, _ = findings_of("program.py", program)
    names = [(finding.name.replace(CLASS, "FSDP").replace(PACKAGE, "PACKAGE"), finding.line) for finding in found]
    assert Counter(names) == uses


def test_the_grammar_has_programs_that_use_fsdp1_and_lines_that_do_not():
    assert sum(bool(statement.uses) for statement in STATEMENTS) >= 20
    assert sum(not statement.uses for statement in STATEMENTS) >= 5


def read(content: bytes, name: str = "program.py"):
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / name).write_bytes(content)
        return audit(directory)


@settings(max_examples=100)
@given(st.binary(max_size=200), st.sampled_from(["program.py", "notebook.ipynb"]))
def test_no_bytes_are_an_error(content, name):
    found = read(b"fsdp\n" + content, name)
    assert len(found.files) <= 1
    assert str(found)


@settings(max_examples=60)
@given(st.sampled_from(PROGRAMS), st.data())
def test_a_program_with_a_part_cut_out_is_read_or_said_to_be_broken(program, data):
    content = program.read_bytes()
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, min(len(content), start + 300)))
    found = read(content[:start] + content[end:])
    lines = (content[:start] + content[end:]).decode(errors="replace").split("\n")
    for finding in found.findings:
        assert 1 <= finding.line <= len(lines)
        assert 1 <= finding.column <= len(lines[finding.line - 1]) + 1
