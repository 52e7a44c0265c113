"""What every refusal has in common: its message has the one form, and the model is unchanged."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.nn as nn
from small_models import snapshot

from shardkit import PlanError


@contextmanager
def refused(model: nn.Module, *parts: str) -> Iterator[None]:
    """A PlanError with all of ``parts`` in it, and a model that is what it was."""
    before = snapshot(model)
    with pytest.raises(PlanError) as caught:
        yield
    for part in parts:
        assert part in str(caught.value)
    assert re.match(r"(?s)[^\n]+: .+\. .+\.", str(caught.value)), "not of the form <what>: <problem>. <rule>. <fix>."
    assert snapshot(model) == before
