"""Hooks of mkdocs.yml: pages from outside of docs/, and the API reference with docstrings.

docs/api.md lists every public signature in ``text`` blocks. On the site each block becomes the docstrings of its names.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = {"readme.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
SIGNATURES = re.compile(r"^```text\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
PACKAGES = {  # by the text that names what they export
    "shardkit": (ROOT / "shardkit" / "__init__.pyi").read_text(),
    **{f"shardkit.{path.parent.name}": path.read_text() for path in sorted(ROOT.glob("shardkit/[a-z]*/__init__.py"))},
}
HEADING = re.compile(r"^## (shardkit\.\w+)$", re.MULTILINE)


def on_files(files, config):
    """Add the pages of the repository's root, with links that lead from docs/."""
    for uri, name in OUTSIDE.items():
        text = (ROOT / name).read_text().replace("](docs/", "](")
        for other, target in OUTSIDE.items():
            text = text.replace(f"]({target})", f"]({other})")
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Point links out of docs/ at those pages, and put docstrings into the reference."""
    for uri, name in OUTSIDE.items():
        markdown = markdown.replace(f"](../{name})", f"]({uri})")
    return documented(markdown) if page.file.src_uri == "api.md" else markdown


def on_page_content(html, page, config, files):
    """Show ``:func:`name``` of docstrings as code."""
    return re.sub(r":\w+:<code>~?", "<code>", html)


def documented(markdown):
    """Return the page with a mkdocstrings directive for each function or class that a ``text`` block shows."""
    package, parts = "shardkit", HEADING.split(markdown)
    for i, part in enumerate(parts):
        package = part if i % 2 else package
        parts[i] = f"## {part}" if i % 2 else SIGNATURES.sub(lambda block: directives(package, block[1]), part)  # noqa: B023
    return "".join(parts)


def directives(package, signatures):
    """Return the directives of a block; methods are shown with their class."""
    names = [name for name in re.findall(r"^([\w.]+)", signatures, re.MULTILINE) if "." not in name]
    return "".join(f"::: {home(name, package)}.{name}\n\n" for name in names)


def home(name, package):
    """Return the package that exports a name: the section's own first."""
    order = [package, *PACKAGES]
    return next(each for each in order if re.search(rf"\b{name}\b", PACKAGES[each]))
