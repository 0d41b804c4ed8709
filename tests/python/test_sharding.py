"""Lines of DTensors: any placements give what whole tensors give, and the known ones move nothing."""

import random

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import onepass
from helpers import gradients, make_inputs, upstream

R, S, P = Replicate(), Shard, Partial()
SHAPES = {2: [(2,)], 4: [(4,), (2, 2)]}  # of meshes
LINES = [
    "bias | gelu",
    "gate(silu)",
    "bias | dropout(0) | add | keep | rms_norm(1e-6) | scale",
    "layer_norm(1e-5) | scale | bias",
    "add | keep | layer_norm(1e-5) | scale | bias",
    "mul(0.125) | mask | softmax",
    "mul(0.125) | causal | softmax",
    "rope",
    "linear",
    "linear | bias",
    "linear | bias | gelu",
    "linear | add",
    "bias | gelu | linear | bias",
    "gate(silu) | linear",
    "layer_norm(1e-5) | scale | bias | linear | bias",
    "add | keep | rms_norm(1e-6) | scale | linear | bias | keep | silu",
    "scores | mul(0.125) | softmax",
    "scores | mul(0.125) | causal | softmax | keep | values",
    "scores | mul(0.125) | mask | softmax | values",
]


def distributed(tensor, mesh, placements):
    """A leaf of these placements; the parts of a partial sum differ."""
    whole = tensor.detach().to(mesh.device_type)
    for dim, placement in enumerate(placements):
        if placement.is_partial():
            whole = whole * (2 / (mesh.size(dim) + 1) / mesh.size(dim) * (1 + mesh.get_local_rank(dim)))
    kept = [R if p.is_partial() else p for p in placements]
    local = distribute_tensor(whole, mesh, kept, src_data_rank=None).to_local()
    stride = tensor.contiguous().stride()
    made = DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=stride)
    return made.detach().requires_grad_(tensor.requires_grad)


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


def assert_as_whole(line, inputs, mesh, placements):
    """Results and all gradients; returns the results."""
    whole = as_tuple(onepass.fused(line, inputs.x, *inputs.operands))
    grads = upstream(whole)
    expected = gradients(whole, inputs, grads)
    tensors = [distributed(t, mesh, at) for t, at in zip((inputs.x, *inputs.operands), placements)]
    results = as_tuple(onepass.fused(line, *tensors))
    leaves = [t for t in tensors if t.requires_grad]
    ours = torch.autograd.grad(results, leaves, [distributed(g, mesh, [R] * mesh.ndim) for g in grads])
    what = f"{line!r}, {placements} on {tuple(mesh.shape)}"
    for result, reference in zip((*results, *ours), (*whole, *expected), strict=True):
        assert result.shape == reference.shape and result.dtype == reference.dtype, what
        torch.testing.assert_close(
            result.full_tensor(), reference, rtol=1e-9, atol=1e-9, msg=lambda m, what=what: f"{what}: {m}"
        )
    return results


def any_placements(device, line, shape):
    """Some of all, the same on every rank."""
    draw = random.Random(line)
    inputs = make_inputs(line, shape, torch.float64, device, out_features=12)
    tensors = (inputs.x, *inputs.operands)
    for mesh_shape in SHAPES[torch.distributed.get_world_size()]:
        mesh = init_device_mesh(device, mesh_shape)
        choices = [[R, *map(S, range(t.dim())), *[P] * t.is_floating_point()] for t in tensors]
        for at_x in choices[0] * 2:
            placements = [[draw.choice(own) for _ in mesh_shape] for own in choices]
            placements[0][0] = at_x
            assert_as_whole(line, inputs, mesh, placements)


@pytest.mark.parametrize("line", LINES)
def test_any_placements(ranks, line):
    shape = (2, 3, 5, 8) if "scores" in line else (3, 5, 8)  # parts of different sizes, and empty ones
    ranks.run(any_placements, line, shape)


RULES = [  # x and operands, what comes, and how often backward moves something
    ("bias | gelu", [S(0), R], S(0), 0),
    ("bias | gelu", [S(2), S(0)], S(2), 0),
    ("bias | gelu", [R, S(0)], S(2), 1),
    ("gate(silu)", [S(2), S(2)], S(2), 0),
    ("gate(silu)", [R, S(1)], S(1), 1),
    ("layer_norm(1e-5) | scale | bias", [S(1), R, R], S(1), 0),
    ("add | keep | layer_norm(1e-5) | scale | bias", [S(1), S(1), R, R], S(1), 0),
    ("mul(0.125) | mask | softmax", [S(1), S(1)], S(1), 0),
    ("mul(0.125) | causal | softmax", [S(0)], S(0), 0),
    ("rope", [S(1), S(1), S(1)], S(1), 0),
    ("linear | bias | gelu", [S(0), R, R], S(0), 0),
    ("linear | bias | gelu", [R, S(0), S(0)], S(2), 0),
    ("layer_norm(1e-5) | scale | bias | linear | bias", [R, R, R, S(0), S(0)], S(2), 0),
    ("linear", [S(2), S(1)], P, 0),
    ("linear | bias", [S(2), S(1), R], P, 0),
    ("gate(silu) | linear", [S(2), S(2), S(1)], P, 0),
    ("scores | mul(0.125) | softmax | values", [S(1), S(1), S(1)], S(1), 0),
    ("scores | mul(0.125) | softmax | values", [S(2), R, R], S(2), 0),
]


def rule(device, line, placements, expected, in_backward):
    count = torch.distributed.get_world_size()
    mesh = init_device_mesh(device, (count,))
    shape = (2 * count, count, 2 * count, 8) if "scores" in line else (count, count, 8)
    inputs = make_inputs(line, shape, torch.float64, device, out_features=4 * count)
    placements = [[p] for p in placements]
    tensors = [distributed(t, mesh, at) for t, at in zip((inputs.x, *inputs.operands), placements)]
    with CommDebugMode() as moved:
        result = as_tuple(onepass.fused(line, *tensors))[0]
    assert result.placements == (expected,)
    assert moved.get_total_counts() == 0
    with CommDebugMode() as moved:
        result.to_local().sum().backward()
    assert moved.get_total_counts() == in_backward
    assert_as_whole(line, inputs, mesh, placements)


@pytest.mark.parametrize(("line", "placements", "expected", "in_backward"), RULES)
def test_rules(ranks, line, placements, expected, in_backward):
    ranks.run(rule, line, placements, expected, in_backward)


def partial_sums(device):
    """A sharded residual is met by a reduce-scatter; a product is added up before words that need the sum."""
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    counts = {}
    for line, placements in {
        "bias | add | keep | layer_norm(1e-5) | scale | bias": [P, R, S(1), R, R],
        "linear | bias | add": [S(2), S(1), R, S(1)],
        "linear | bias | gelu": [S(2), S(1), R],
    }.items():
        inputs = make_inputs(line, (3, 4, 8), torch.float64, device)
        placements = [[p] for p in placements]
        tensors = [distributed(t, mesh, at) for t, at in zip((inputs.x, *inputs.operands), placements)]
        with CommDebugMode() as moved:
            onepass.fused(line, *tensors)
        counts[line] = {str(op).split(".")[-1]: n for op, n in moved.get_comm_counts().items()}
        assert_as_whole(line, inputs, mesh, placements)
    return list(counts.values())


def test_partial_sums(ranks):
    scattered, reduced = {"reduce_scatter_tensor": 1}, {"all_reduce": 1}
    assert ranks.run(partial_sums)[0] == [scattered, scattered, reduced]
