"""Every code block of README.md and docs/*.md runs, and the commands they show exist.

The blocks of one file run in order in one namespace, as if typed into one session of plain Python.
A ``python`` block with ``>>>`` is a doctest. One whose first line is ``# test_*.py`` is a file, and
is given to pytest. One whose first line is ``# torchrun ...`` is a program, which
tests/training/test_parallelism.py runs. After a line ``<!-- fake_world(8) -->`` the rest of the
file runs in such a world, whatever it shards.
"""

import doctest
import importlib.util
import io
import itertools
import re
import signal
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import forks
import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardkit
import shardkit.testing
from shardkit.__main__ import main
from shardkit.testing import distributed, fake_world

ROOT = Path(__file__).parents[2]
PAGES = [
    page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if page.exists()
]

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
WORLD = re.compile(r"^<!-- fake_world\((\d+)\) -->$", re.MULTILINE)
FILE = re.compile(r"# (test_\w+\.py)\n")
PROGRAM = re.compile(r"# torchrun ")
OPTIONAL = re.compile(r"from (torchdata)\b")  # not of the test extra
COMMAND = re.compile(r"^(?:\$ )?python -m shardkit +([a-z]\S*)", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block: its language, its code, and the page's lines before it."""

    language: str
    code: str
    line: int
    offset: int


def blocks(text):
    for fence in FENCE.finditer(text):
        indent = fence["indent"]
        code = "".join(
            line.removeprefix(indent) for line in fence["code"].splitlines(keepends=True)
        )
        yield Block(
            fence["language"], code, text.count("\n", 0, fence.start("code")), fence.start()
        )


def run_page(text, name):
    """Run the page's Python blocks that are neither test files nor programs of torchrun."""
    namespace = {"__name__": "__main__"}
    world = WORLD.search(text)
    page = list(blocks(text))
    with ExitStack() as stack:
        for block, following in itertools.zip_longest(page, page[1:]):
            if block.language != "python" or FILE.match(block.code):
                continue
            if PROGRAM.match(block.code):
                continue
            optional = OPTIONAL.match(block.code)
            if optional is not None and importlib.util.find_spec(optional[1]) is None:
                continue
            if world is not None and block.offset > world.start():
                stack.enter_context(fake_world(int(world[1])))
                world = None
            if block.code.startswith(">>> "):
                run_session(block, name, namespace)
                continue
            with redirect_stdout(io.StringIO()) as printed:
                # with the page's line numbers in tracebacks
                exec(compile("\n" * block.line + block.code, name, "exec"), namespace)
            if is_output(text, block, following):
                assert printed.getvalue().strip() == following.code.strip()


def is_output(text, block, following):
    """Whether a ``text`` block follows a ``python`` block directly: it is what that prints."""
    if following is None or (block.language, following.language) != ("python", "text"):
        return False
    return not text[block.offset : following.offset].partition("\n```\n")[2].strip()


def test_the_pages_have_outputs_that_are_compared():
    texts = [page.read_text() for page in PAGES]
    pairs = [(text, *pair) for text in texts for pair in itertools.pairwise(blocks(text))]
    assert sum(is_output(*pair) for pair in pairs) >= 8


def run_session(block, name, namespace):
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    session = doctest.DocTestParser().get_doctest(block.code, namespace, name, name, block.line)
    report = []
    runner = doctest.DocTestRunner(optionflags=options, verbose=False)
    results = runner.run(session, out=report.append, clear_globs=False)
    assert results.failed == 0, "".join(report)
    namespace.update(session.globs)


@pytest.fixture
def no_world_left():
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)  # stop_requested replaces it
    if dist.is_initialized():  # shard_model makes a world of one where there is none
        dist.destroy_process_group()


# transformers' own, met by peft
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11's
@pytest.mark.usefixtures("no_world_left")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # what a block saves goes there
    run_page(page.read_text(), str(page))


@distributed(world_size=2)
@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_program_of_a_page_runs_on_two_ranks(page):
    torch.manual_seed(dist.get_rank())  # processes of torchrun start with different seeds
    first = next(block for block in blocks((ROOT / page).read_text()) if "backward()" in block.code)
    exec(first.code, {})


@distributed(world_size=2)
@pytest.mark.parametrize("page", ["tutorial", "data-and-logging", "evaluating", "two-models"])
def test_a_page_runs_whole_on_two_ranks(page, tmp_path):
    torch.manual_seed(dist.get_rank())
    text = (ROOT / "docs" / f"{page}.md").read_text()
    run_page(text.replace('"runs/', f'"{tmp_path}/'), page)


@distributed(world_size=2)
def test_each_rank_generates_as_often_as_it_likes():
    from hub_nets import llama

    page = (ROOT / "docs" / "evaluating.md").read_text()
    call = re.search(r"model\.generate\(ids.*?\)", page)[0]
    model, ids = shardkit.shard_model(llama()), torch.ones(1, 3, dtype=torch.long)
    with shardkit.full_params(model), torch.no_grad():
        for _ in range(1 + dist.get_rank()):
            eval(call, {"model": model, "ids": ids})


FILES = [
    pytest.param(FILE.match(block.code)[1], block.code, id=f"{page.name}:{block.line}")
    for page in PAGES
    for block in blocks(page.read_text())
    if block.language == "python" and FILE.match(block.code)
]


def run_pytest(directory, name, code):
    (directory / name).write_text(code)
    return forks.python(
        "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", name, cwd=directory
    )


@pytest.mark.parametrize(("name", "code"), FILES)
def test_the_test_files_of_the_pages_pass(name, code, tmp_path):
    run = run_pytest(tmp_path, name, code)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " skipped" not in run.stdout


def unknown_commands(text):
    """The words after ``python -m shardkit`` in the text that its help does not know."""
    shown = set(COMMAND.findall(text))
    if not shown:
        return set()
    known = io.StringIO()
    with redirect_stdout(known), pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    return {name for name in shown if not re.search(rf"\b{re.escape(name)}\b", known.getvalue())}


def test_the_commands_of_the_pages_exist():
    assert unknown_commands("\n".join(page.read_text() for page in PAGES)) == set()


def test_every_page_is_in_the_navigation_of_the_site_once():
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    listed = re.findall(
        r"^ +- (?:\w+: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE
    )
    assert sorted(listed) == sorted([*pages, "changelog.md", "contributing.md", "security.md"])


def anchors(text):
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def dead_links(page, text):
    """The page's links to files that do not exist, or to headings that their pages lack."""
    dead = set()
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
        file, _, anchor = link.partition("#")
        to = page.parent / file if file else page
        there = link.startswith("https:") or to.exists()
        if not there or (
            anchor
            and to.suffix == ".md"
            and anchor not in anchors(to.read_text() if file else text)
        ):
            dead.add(link)
    return dead


def test_the_links_of_the_pages_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert {str(page): dead for page in pages if (dead := dead_links(page, page.read_text()))} == {}


def test_docstrings_have_no_markup_that_the_site_cannot_show():
    unknown = re.compile(r"^ +={4,}|``\\\\ |Examples:\n +[^>` ]", re.MULTILINE)
    files = [*(ROOT / "shardkit").rglob("*.py")]
    assert [str(file) for file in files if unknown.search(file.read_text())] == []


@pytest.mark.parametrize("name", ["api", "plan.types", "testing.counts", "planning.rules"])
def test_the_examples_of_docstrings_are_right(name):
    module = importlib.import_module(f"shardkit.{name}")
    public = {name: getattr(shardkit, name) for name in shardkit.__all__}
    names = public | vars(shardkit.testing) | {"torch": torch, "nn": nn}
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    results = doctest.testmod(module, extraglobs=names, optionflags=options)
    assert results.attempted > 0
    assert results.failed == 0
