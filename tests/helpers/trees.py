"""Nested state, compared."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def assert_same(found, expected, path=""):
    """Equal in every type, key, length, number and bit; DTensors as what they are of."""
    assert type(found) is type(expected), path
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key in expected:
            assert_same(found[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), path
        for number, pair in enumerate(zip(found, expected, strict=True)):
            assert_same(*pair, f"{path}/{number}")
    elif isinstance(expected, Tensor):
        assert found.dtype == expected.dtype, path
        whole = [
            each.full_tensor() if isinstance(each, DTensor) else each for each in (found, expected)
        ]
        assert torch.equal(*whole), path
    else:
        assert found == expected, path
