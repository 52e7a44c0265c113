"""Meta init on models as people have them: the whole zoo.

``benchmarks/sweeps/meta_init.py`` does the same for all causal LMs of transformers.
"""

import pytest
from meta_check import check_same_as_ordinary
from zoo import ZOO

from shardkit.meta import init_on_meta
from shardkit.testing import fake_world


@pytest.fixture(autouse=True)
def world():
    with fake_world(3, rank=2):
        yield


@pytest.mark.parametrize("name", sorted(set(ZOO) - {"channels_last"}))
def test_zoo(name):
    check_same_as_ordinary(ZOO[name].build)


def test_a_recording_of_transformers_is_not_taken_for_a_meta_model():
    """transformers leaves out its initializers on meta, by several kinds of tests; none may
    succeed.
    """
    with init_on_meta():
        model = ZOO["llama"].build()
        assert all(getattr(module, "_is_hf_initialized", False) for module in model.modules())
