"""Run a check on many models of transformers, and print those that fail."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable

import torch
import transformers
from tiny_transformers import builder


def causal_lms() -> list[str]:
    """The class names of all causal LMs."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))


def is_large(name: str) -> bool:
    """Whether building it would take minutes; False where it does not build on meta either."""
    try:
        with torch.device("meta"):
            return sum(param.numel() for param in builder(name)().parameters()) > 30_000_000
    except Exception:
        return False


def sweep(names: list[str], verdict: Callable[[str], tuple[str, str]]) -> Counter[str]:
    """Print a line for each model of which the verdict, a word and a detail, is not "equal", and
    return the counts.
    """
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    counts, begin = Counter[str](), time.perf_counter()
    for name in names:
        kind, detail = verdict(name)
        counts[kind] += 1
        if kind != "equal":
            print(f"{name}: {kind}: {detail}", flush=True)
    print(f"of {counts.total()}: {dict(counts)}; {time.perf_counter() - begin:.0f} s", flush=True)
    return counts
