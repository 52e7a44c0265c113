"""Constructions: each is something that people write, and that a simpler way of recording gets
wrong.
"""

import numpy
import torch
from torch import nn


def own(value):
    """A module with one parameter of that value."""
    return nn.ParameterList([nn.Parameter(value)])


class Holder(nn.Module):
    """A module with what ``fill`` puts in it, and a linear layer after, so that the random state
    matters.
    """

    def __init__(self, fill):
        super().__init__()
        fill(self)
        self.after = nn.Linear(5, 3)


def in_place_parts(m):
    m.w = nn.Parameter(torch.empty(7, 4))
    for rows in m.w.data.split((3, 3, 1)):
        nn.init.xavier_uniform_(rows)
    with torch.no_grad():
        m.w[0] = 7.0
        m.w[1].mul_(2)
        m.w[:, 2] += torch.randn(7)
        m.w[m.w > 1.5] = 1.5


def samplers(m):
    for i, init in enumerate(
        (nn.init.trunc_normal_, nn.init.orthogonal_, nn.init.kaiming_normal_, nn.init.eye_)
    ):
        setattr(m, f"w{i}", nn.Parameter(init(torch.empty(6, 5))))
    m.tail = nn.Parameter(nn.init.trunc_normal_(torch.empty(4, 3), a=1.9, b=2.0))
    m.sparse = nn.Parameter(nn.init.sparse_(torch.empty(10, 4), 0.3))
    m.dirac = nn.Parameter(nn.init.dirac_(torch.empty(3, 3, 3)))


def rejection(m):
    value = torch.randn(40)
    while (outside := value.abs() > 1).any():
        value = torch.where(outside, torch.randn(40), value)
    m.w = nn.Parameter(value)


def values_in_control_flow(m):
    m.rates = [x.item() for x in torch.linspace(0, 0.3, 4)] + torch.linspace(0, 1, 3).tolist()
    m.width = int(torch.randint(3, 9, ()))
    m.w = nn.Parameter(torch.randn(m.width, 2))
    m.kept = nn.Parameter(m.w.data[m.w.data[:, 0] > 0])


def constants(m):
    m.a = nn.Parameter(torch.tensor([[1.5, 2.0], [3.0, -0.0]]))
    m.b = nn.Parameter(torch.tensor(0.5) * torch.ones(4))
    m.c = nn.Parameter(torch.from_numpy(torch.linspace(0, 1, 5).numpy() * 2))
    m.d = nn.Parameter(torch.arange(5) * 0.3)
    m.load_state_dict({"a": torch.ones(2, 2), "d": torch.full((5,), 3.0)}, strict=False)


def reused_numpy_memory(m):
    shared = torch.zeros(3).numpy()
    m.rows = nn.Parameter(torch.empty(4, 3))
    for i in range(4):
        shared[:] = i
        m.rows.data[i].copy_(torch.from_numpy(shared))


def buffers(m):
    m.register_buffer(
        "inv_freq", 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8), persistent=False
    )
    m.register_buffer("original", m.inv_freq, persistent=False)
    m.register_buffer("position", torch.arange(6).expand(1, -1))
    m.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
    m.register_buffer("nothing", None)
    m.register_buffer("noise", torch.rand(3))


def dtypes(m):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        m.a = nn.Linear(5, 7)
        m.b = nn.Parameter(torch.arange(5) * 0.3)
        nn.init.trunc_normal_(m.a.weight)
    finally:
        torch.set_default_dtype(before)
    m.c = nn.Linear(3, 3).to(torch.bfloat16)
    m.d = nn.Linear(3, 3, dtype=torch.float64)
    m.e = nn.Parameter(torch.randn(6, 2, dtype=torch.complex64))
    m.f = nn.Parameter(torch.randn(6, 2, dtype=torch.complex64).conj())
    m.g = nn.Parameter(torch.view_as_real(m.e.data)[..., 1].neg().clone())


def reseeding(m):
    m.a = nn.Parameter(torch.randn(3))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        m.forked = nn.Parameter(torch.randn(3))
    m.b = nn.Parameter(torch.randn(3))
    state = torch.get_rng_state()
    m.c = nn.Parameter(torch.randn(3))
    torch.set_rng_state(state)
    m.c_again = nn.Parameter(torch.randn(3))
    generator = torch.Generator().manual_seed(9)
    m.d = nn.Parameter(torch.randn(3, generator=generator))
    m.e = nn.Parameter(torch.empty(3).normal_(generator=generator))
    for i, name in enumerate(("exponential_", "cauchy_", "log_normal_", "uniform_", "bernoulli_")):
        setattr(m, f"f{i}", nn.Parameter(getattr(torch.empty(3), name)(generator=generator)))
    m.g = nn.Parameter(torch.empty(3).geometric_(0.3, generator=generator))


def seeded_inside(m):
    m.a = nn.Parameter(torch.randn(3))
    torch.manual_seed(11)  # the seed that the test begins with
    m.b = nn.Parameter(torch.randn(3))


def norms(m):
    m.a = nn.utils.parametrizations.weight_norm(nn.Linear(5, 7))
    m.b = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 7))
    m.c = nn.utils.parametrizations.orthogonal(nn.Linear(5, 7))
    m.d = nn.BatchNorm2d(4)


def looks_at_devices(m):
    weight = torch.empty(4, 3)
    assert weight.device.type == "cpu"
    assert not weight.is_meta
    m.same = weight.to("cpu") is weight and weight.cpu() is weight
    if weight.device.type != "meta" and torch.tensor([]).device == torch.get_default_device():
        weight.to(weight.device).normal_()
    m.w = nn.Parameter(weight.to("cpu", torch.float32))
    m.lower = nn.Parameter(weight.to("cpu", torch.float16))


def draws_that_depend_on_values(m):
    # the result is dropped, but how many numbers it took follows from the rates
    torch.poisson(torch.rand(50) * 20)
    torch.bernoulli(torch.rand(5))
    m.w = nn.Parameter(torch.randn(3))


def decompositions(m):
    _, s, vh = torch.linalg.svd(torch.randn(4, 6))  # whose meta kernel lays vh out in another way
    m.vh = nn.Parameter(vh[:3].clone(memory_format=torch.contiguous_format))
    m.values = nn.Parameter(s)
    m.spectrum = nn.Parameter(
        torch.view_as_real(torch.fft.rfft2(torch.randn(4, 6)))[..., 0].clone(
            memory_format=torch.contiguous_format
        )
    )


def reads_before_changes(m):
    m.a = nn.Parameter(torch.ones(4, 3))
    m.before = nn.Parameter(m.a.data.clone())
    m.a.data.mul_(2)
    m.noisy = nn.Parameter(m.a.data + torch.rand(4, 3))
    m.a.data.add_(torch.rand(4, 3))
    m.late = nn.Parameter(m.before.data - m.a.data)
    m.a.data.zero_()
    m.x = nn.Parameter(torch.ones(4, 3))
    m.copy_of_x = nn.Parameter(m.x.data.clone())
    m.x.data.mul_(2)


def lists_as_indices(m):
    m.w = nn.Parameter(torch.ones(6, 4))
    m.w.data[[1, 3]] = 0.0
    m.w.data[[True, False, True, False, False, False]] = 2.0
    m.w.data[4, [0, 2]] = torch.rand(2)
    m.w.data[[0, 5], [1, 2]] = 7.0
    m.w.data[(range(2, 4), slice(1, None, 2))] += 3.0
    table = torch.arange(24.0).view(6, 4)
    m.rows = table[[5, 0], None].sum().item()
    m.register_buffer("columns", table[:, [0, 2]])
    m.register_buffer("by_array", table[numpy.array([[0, 1], [2, 2]])])
    m.register_buffer("by_tuple", table[(3, 1),])
    m.register_buffer("nested", table[[[0, 5], [1, 2]], 1])
    m.register_buffer("nothing", table[[]])
    m.register_buffer("long", table[[0, 1] * 20])


def tensors_of_python_data(m):
    m.w = nn.Parameter(torch.rand(3))
    m.register_buffer("steps", m.w.new_tensor([2.0, 3.0]))
    m.register_buffer("ids", m.w.new_tensor([2, 3], dtype=torch.long) * 2)
    m.register_buffer("same", torch.tensor([1, 2], device=m.w.device))
    m.w.data[:2] *= m.w.new_tensor([0.5, 3])


def forward_in_the_constructor(m):
    m.features = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Dropout(), nn.ReLU())
    m.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    with torch.no_grad():
        width = m.norm(m.features(torch.randn(2, 2, 10))).flatten(1).shape[1]
        m.features.eval()
        m.register_buffer("mean", m.features(torch.ones(2, 2, 10)).mean())
    m.features.train()
    m.out = nn.Linear(width, 3)


FILLS = [
    in_place_parts, samplers, rejection, values_in_control_flow, constants, reused_numpy_memory, buffers, dtypes,
    reseeding, seeded_inside, norms, looks_at_devices, decompositions,
    reads_before_changes, draws_that_depend_on_values, lists_as_indices, tensors_of_python_data,
    forward_in_the_constructor,
]  # fmt: skip
