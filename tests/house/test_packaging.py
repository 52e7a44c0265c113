"""The wheel has what users and type checkers need, one version, and a README whose links work
outside of the tree; the sdist has the tests too.
"""

import re
import runpy
import shutil
import subprocess
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import forks
import pytest

import shardkit

ROOT = Path(__file__).parents[2]
SETUP = runpy.run_path(str(ROOT / "setup.py"))
RELATIVE = re.compile(r"!?\[[^]]*\]\((?!\w+:|#)[^)]*\)")
BUILD = """
from setuptools import build_meta
build_meta.build_sdist({0!r})
build_meta.build_wheel({0!r})
"""
FOLDERS = (".ci", ".github", "benchmarks", "docs", "shardkit", "tests")
NOT_COPIED = (
    ".git",
    ".venv*",
    ".*_cache",
    ".hypothesis",
    "__pycache__",
    "*.egg-info",
    "build",
    "dist",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The tree without git, and in ``dist`` what is built from it."""
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path_factory.mktemp("built") / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*NOT_COPIED))
    run = forks.python("-c", BUILD.format(str(source / "dist")), cwd=source)
    assert run.returncode == 0, run.stdout + run.stderr
    return source


@pytest.fixture(scope="module")
def wheel(built):
    with zipfile.ZipFile(next(built.glob("dist/*.whl"))) as archive:
        yield archive


def test_the_sdist_has_the_tests_the_site_and_the_scripts(built):
    with tarfile.open(next(built.glob("dist/*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = {
        path.relative_to(built).as_posix()
        for folder in FOLDERS
        for path in (built / folder).rglob("*")
        if path.is_file()
    }
    assert files | {"CHANGELOG.md", "constraints.txt", "mkdocs.yml", "pyproject.toml"} <= names


def test_the_wheel_has_every_module_and_the_types_and_nothing_else(wheel):
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "shardkit").rglob("*.py")}
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert files == sources | {"shardkit/py.typed", "shardkit/__init__.pyi"}


def test_the_metadata_has_the_one_version_and_a_readme_without_relative_links(wheel):
    name = next(name for name in wheel.namelist() if name.endswith("METADATA"))
    metadata = message_from_string(wheel.read(name).decode())
    assert metadata["Version"] == shardkit.__version__
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert (
        "shardkit = shardkit.__main__:script"
        in wheel.read(name.replace("METADATA", "entry_points.txt")).decode()
    )
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
    assert SETUP["repository"]((ROOT / "pyproject.toml").read_text().replace("OWNER", "o")) == (
        "https://github.com/o/shardkit"
    )


def test_no_release_while_the_owner_is_a_placeholder(built):
    text = (ROOT / "pyproject.toml").read_text()
    (built / "pyproject.toml").write_text(text + 'homepage = "https://OWNER.github.io"\n')
    run = subprocess.run([built / ".ci" / "release", "v9"], capture_output=True, text=True)
    assert run.returncode == 1
    assert re.findall(r"^[\w./]+: ", run.stderr, re.MULTILINE) == [
        "pyproject.toml: ",
        "CHANGELOG.md: ",
        "shardkit/__init__.py: ",
    ]
