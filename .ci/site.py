"""Hooks of mkdocs.yml: pages from outside of docs/, and the API reference with docstrings.

The site's API reference is generated: headings and names from ``__init__.pyi``, text from the
docstrings.
"""

import importlib
import re
from html import unescape
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
}
# the README is for who reads the repository; the site has its own front
PAGES = {**OUTSIDE, "index.md": "README.md"}
STUB = (ROOT / "shardkit" / "__init__.pyi").read_text()
CODE = re.compile("(?<=<code>)[^<]*")
BLOCK = re.compile(r'<div class="highlight">.*?</div>', re.DOTALL)
# beside the top level
PACKAGES = (
    "checkpoint",
    "fsdp1",
    "integrations",
    "memory",
    "sequence",
    "state",
    "testing",
    "watching",
)


def on_files(files, config):
    """Add the pages of the repository's root, with links that lead from docs/."""
    for uri, name in OUTSIDE.items():
        text = (ROOT / name).read_text().replace("](docs/", "](")
        for page, target in PAGES.items():
            text = text.replace(f"]({target})", f"]({page})")
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Point links out of docs/ at those pages, and put docstrings into the reference."""
    for uri, name in PAGES.items():
        markdown = markdown.replace(f"](../{name})", f"]({uri})")
    return markdown + reference() if page.file.src_uri == "api.md" else markdown


def on_page_content(html, page, config, files):
    """Show ``:func:`name``` of docstrings as code, make tables that a program prints fit, and let
    code in tables break after its punctuation, for phones.
    """
    html = re.sub(r":\w+:<code>~?", "<code>", html)
    html = BLOCK.sub(_fitted, html)
    return re.sub(
        r"<t[dh]\b.*?</t[dh]>", lambda cell: CODE.sub(_breakable, cell[0]), html, flags=re.DOTALL
    )


def _fitted(block):
    """Tell site.css how many columns the lines that are aligned by spaces have."""
    text = unescape(re.sub("<[^>]*>", "", block[0]))
    aligned = [len(line) for line in text.splitlines() if re.search(r"\S {3,}\S.* {2,}\S", line)]
    if len(aligned) < 2:
        return block[0]
    return block[0].replace("<div ", f'<div style="--columns: {max(aligned)}" ', 1)


def _breakable(code):
    return re.sub(r"([_.,(=])(?=\w)", r"\1<wbr>", code[0])


def reference():
    """Return a section of mkdocstrings directives for each heading of the stub, and for each
    package beside it.

    Each name once, by the module that defines it: ``shardkit.meta.materialize`` would be a module,
    for example.
    """
    sections, shown = {}, set()
    for line in STUB.splitlines():
        if line.startswith("# ## "):
            section = sections.setdefault(line.removeprefix("# ## "), [])
        elif found := re.match(r"from (shardkit[\w.]*) import (.+)", line):
            section += [(found[1], name) for name in re.findall(r"(\w+) as", found[2])]
    for package in PACKAGES:
        source = (ROOT / "shardkit" / package / "__init__.py").read_text()
        exports = re.findall(r"^from (shardkit[\w.]*) import (.+)$", source, re.MULTILINE)
        names = [
            (module, name) for module, found in exports for name in re.findall(r"(\w+) as", found)
        ]
        sections[f"shardkit.{package}"] = names
    parts = []
    for heading, names in sections.items():
        parts.append(f"\n## {heading}\n")
        for module, name in names:
            home = getattr(getattr(importlib.import_module(module), name), "__module__", "")
            home = home if home.startswith("shardkit") else module  # of data and type aliases
            if (home, name) not in shown:
                shown.add((home, name))
                parts.append(f"::: {home}.{name}\n")
    return "\n".join(parts)
