"""The decision guide of docs/memory.md is what the code says."""

from __future__ import annotations

import importlib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_has_what_the_code_says(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    guide = importlib.import_module("benchmarks.guide")
    in_page = guide.in_page(guide.PAGE.read_text())
    assert in_page == guide.guide(), "run: python -m benchmarks.guide --write"
    assert in_page.count("| 70B |") == 6
