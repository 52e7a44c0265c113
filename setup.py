"""What pyproject.toml cannot say: the README of a package, whose links must not be relative."""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^]]*)\]\((?P<target>(?!\w+:|#)[^)]+)\)")


def repository(pyproject: str) -> str:
    """Return the URL under ``[project.urls]``, or an empty string while it has a placeholder.

    A regular expression: Python 3.10 has no tomllib.
    """
    found = re.search(
        r'^\[project\.urls\]\n(?:.+\n)*?Repository = "([^"]+)"', pyproject, re.MULTILINE
    )
    return found[1].rstrip("/") if found and "OWNER" not in found[1] else ""


def portable(readme: str, url: str) -> str:
    """Return the text with links into the repository made absolute; without a URL links become
    text, pictures go.
    """

    def instead(link: re.Match[str]) -> str:
        if not url:
            return "" if link["picture"] else link["text"]
        return f"{link['picture']}[{link['text']}]({url}/{'raw' if link['picture'] else 'blob'}/HEAD/{link['target']})"

    return LINK.sub(instead, readme)


if __name__ == "__main__":
    read = portable(
        (HERE / "README.md").read_text("utf-8"),
        repository((HERE / "pyproject.toml").read_text("utf-8")),
    )
    setup(long_description=read, long_description_content_type="text/markdown")
