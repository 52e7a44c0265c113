"""Hooks of mkdocs.yml: pages from outside of docs/, and the API reference with docstrings.

The site's API reference is generated: headings and names from ``__init__.pyi``, text from the docstrings.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = {"readme.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
STUB = (ROOT / "shardkit" / "__init__.pyi").read_text()
PACKAGES = ("fsdp1", "integrations", "memory", "sequence", "testing", "watching")  # public ones beside the top level


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
    return markdown + reference() if page.file.src_uri == "api.md" else markdown


def on_page_content(html, page, config, files):
    """Show ``:func:`name``` of docstrings as code."""
    return re.sub(r":\w+:<code>~?", "<code>", html)


def reference():
    """Return a section of mkdocstrings directives for each heading of the stub, and for each package beside it."""
    parts = []
    for line in STUB.splitlines():
        if line.startswith("# ## "):
            parts.append(f"\n## {line.removeprefix('# ## ')}\n")
        elif found := re.match(r"from (shardkit[\w.]*) import (.+)", line):
            parts += [f"::: {found[1]}.{name}\n" for name in re.findall(r"(\w+) as", found[2])]
    for package in PACKAGES:
        source = (ROOT / "shardkit" / package / "__init__.py").read_text()
        exports = re.findall(r"^from (shardkit[\w.]*) import (.+)$", source, re.MULTILINE)
        parts.append(f"\n## shardkit.{package}\n")
        parts += [f"::: {module}.{name}\n" for module, names in exports for name in re.findall(r"(\w+) as", names)]
    return "\n".join(parts)
