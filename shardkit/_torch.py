"""Every private torch name and every torch version check, each with the reason it is needed.

Nothing else in shardkit imports a torch name with an underscore (``tests/test_layers.py`` holds that rule).
When a new torch breaks shardkit, this file is where to look first.
"""

from __future__ import annotations

import torch

MINIMUM_TORCH = (2, 11)


def torch_version() -> tuple[int, int]:
    """Major and minor version of the torch that is imported, such as ``(2, 13)``."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


if torch_version() < MINIMUM_TORCH:
    raise ImportError(
        f"torch: version {torch.__version__} is too old. shardkit needs torch >= "
        f"{'.'.join(map(str, MINIMUM_TORCH))}. Upgrade with: pip install --upgrade torch."
    )
