"""What every refusal has in common: its message is in sentences, and the model is unchanged."""

import re
from contextlib import contextmanager

import pytest
from small_models import snapshot

from shardkit import PlanError


@contextmanager
def refused(model, *parts):
    """A PlanError with all of ``parts`` in it, and a model that is what it was."""
    before = snapshot(model)
    with pytest.raises(PlanError) as caught:
        yield
    for part in parts:
        assert part in str(caught.value)
    assert all(re.match(r".+\.", line) for line in str(caught.value).splitlines()), (
        "not in sentences"
    )
    assert snapshot(model) == before
