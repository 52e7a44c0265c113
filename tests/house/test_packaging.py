"""The wheel has what users and type checkers need, one version, and a README whose links work
outside of the tree.
"""

import re
import runpy
import shutil
import zipfile
from email import message_from_string
from pathlib import Path

import forks
import pytest

import shardkit

ROOT = Path(__file__).parents[2]
SETUP = runpy.run_path(str(ROOT / "setup.py"))
RELATIVE = re.compile(r"!?\[[^]]*\]\((?!\w+:|#)[^)]*\)")
BUILD = "from setuptools import build_meta; build_meta.build_wheel({!r})"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("setuptools", minversion="77")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("README.md", "LICENSE", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "shardkit", source / "shardkit", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("tests", "benchmarks", "docs"):  # which must stay out
        (source / name).mkdir()
        (source / name / "__init__.py").touch()
    built = forks.python("-c", BUILD.format(str(out)), cwd=source)
    assert built.returncode == 0, built.stdout + built.stderr
    with zipfile.ZipFile(next(out.glob("*.whl"))) as archive:
        yield archive


def test_the_wheel_has_every_module_and_the_types_and_nothing_else(wheel):
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "shardkit").rglob("*.py")}
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert files == sources | {"shardkit/py.typed", "shardkit/__init__.pyi"}


def test_the_metadata_has_the_one_version_and_a_readme_without_relative_links(wheel):
    name = next(name for name in wheel.namelist() if name.endswith("METADATA"))
    metadata = message_from_string(wheel.read(name).decode())
    assert metadata["Version"] == shardkit.__version__
    assert metadata["Description-Content-Type"] == "text/markdown"
    shown, readme = metadata.get_payload(), (ROOT / "README.md").read_text()
    assert RELATIVE.search(readme)
    assert not RELATIVE.search(shown)
    assert re.findall(r"^#.*$", shown, re.MULTILINE) == re.findall(r"^#.*$", readme, re.MULTILINE)


def test_links_lead_into_the_repository_if_it_is_known():
    text = (
        "![a b](docs/a.png), [page](docs/x.md#part), [torch](https://pytorch.org), [below](#part)"
    )
    kept = "[torch](https://pytorch.org), [below](#part)"
    known = (
        "![a b](https://h/r/raw/HEAD/docs/a.png), [page](https://h/r/blob/HEAD/docs/x.md#part), "
        f"{kept}"
    )
    assert SETUP["portable"](text, "https://h/r") == known
    assert SETUP["portable"](text, "") == f", page, {kept}"
    assert (
        SETUP["repository"]('[project.urls]\nHome = "x"\nRepository = "https://h/r/"\n')
        == "https://h/r"
    )
    assert SETUP["repository"]("[project]\nRepository = 1\n") == ""
