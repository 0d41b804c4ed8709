"""Lines of DTensors: any placements give what whole tensors give, and the known ones move nothing."""

import math
import random
import re

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import onepass
from helpers import gradients, make_inputs, upstream
from onepass import functional as OF

R, S, P = Replicate(), Shard, Partial()
SHAPES = {2: (2,), 4: (2, 2)}  # of meshes
LINES = [
    "bias | gelu",
    "gate(silu)",
    "bias | dropout(0) | add | keep | rms_norm(1e-6) | scale",
    "layer_norm(1e-5) | scale | bias",
    "add | keep | layer_norm(1e-5) | scale | bias",
    "mul(0.125) | mask | softmax",
    "mul(0.125) | causal | softmax",
    "rope",
    "rms_norm(1e-6) | scale | rope(4)",
    "logsumexp",
    "add | keep(float32) | rms_norm(1e-6) | scale",
    "add | keep | rms_norm(1e-3) | scale | entropy | mean",
    "bias | cross_entropy(0.1) | logprob",
    "scale | kl_div(0.5)",
    "linear | cross_entropy(0.1, 0.01)",
    "rms_norm(1e-6) | scale | linear | bias | softcap(3) | logprob | entropy",
    "linear | add | logsumexp",
    "linear | keep | logprob",
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


TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-6, torch.bfloat16: 2**-6}


def assert_near(found, expected, dtype, what=""):
    """Shapes and dtypes too. dtype: of products, and of the gradients that ranks add up; but for float64, differences
    are measured against the largest number."""
    assert found.shape == expected.shape and found.dtype == expected.dtype, what
    scale = 1.0 if dtype == torch.float64 else expected.detach().abs().max().item()
    near = TOLERANCES[dtype]
    torch.testing.assert_close(found, expected, rtol=near, atol=near * scale, msg=lambda m: f"{what}: {m}")


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
        assert_near(result.full_tensor(), reference, inputs.x.dtype, what)
    return results


def any_placements(device, line, shape, of_columns=()):
    """Some of all, the same on every rank."""
    draw = random.Random(line)
    inputs = make_inputs(line, shape, torch.float64, device, out_features=12)
    for i, size in enumerate(of_columns):
        inputs.operands[i] = torch.linspace(-1, 2, math.prod(size), dtype=torch.float64, device=device).view(size)
        inputs.operands[i].requires_grad_()
    tensors = (inputs.x, *inputs.operands)
    mesh = init_device_mesh(device, SHAPES[torch.distributed.get_world_size()])
    choices = [[R, *map(S, range(t.dim())), *[P] * t.is_floating_point()] for t in tensors]
    for at_x in choices[0]:
        placements = [[draw.choice(own) for _ in range(mesh.ndim)] for own in choices]
        placements[0][0] = at_x
        assert_as_whole(line, inputs, mesh, placements)


@pytest.mark.parametrize("line", LINES)
def test_any_placements(ranks, line):
    shape = (2, 3, 5, 8) if "scores" in line else (3, 5, 8)  # parts of different sizes, and empty ones
    ranks.run(any_placements, line, shape)


@pytest.mark.parametrize("of_columns", [[(3, 1, 8), (8,)], [(5, 8), (3, 1, 8)]])
def test_columns_of_batches(ranks, of_columns):
    ranks.run(any_placements, "layer_norm(1e-5) | scale(1) | bias", (3, 5, 8), of_columns)


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
        result.to_local(grad_placements=[R if expected.is_partial() else expected]).sum().backward()
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


def codes_of_groups(device):
    """Rows stay where they are; columns are brought together, since ranks may have parts of a group."""
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    for line in ("bias | quantize(int8, 16)", "bias | keep | rms_norm(1e-6) | quantize(int8, 16)"):
        inputs = make_inputs(line, (8, 32), torch.float32, device)
        whole = onepass.fused(line, inputs.x, *inputs.operands)
        for at in (S(0), S(1)):
            tensors = [distributed(t, mesh, p) for t, p in zip((inputs.x, *inputs.operands), ([at], [R]))]
            with CommDebugMode() as moved:
                results = onepass.fused(line, *tensors)
            assert (moved.get_total_counts() == 0) == (at == S(0))
            for ours, theirs in zip(results, whole, strict=True):
                assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
                assert torch.equal(ours.full_tensor(), theirs)


def test_codes_of_groups(ranks):
    ranks.run(codes_of_groups)


class Moved(TorchDispatchMode):
    """How many elements each collective operator takes."""

    def __init__(self):
        super().__init__()
        self.elements = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "c10d" in function.namespace and not re.search("wait|wrap", function.__name__):
            self.elements.append(args[0].numel())
        return function(*args, **(kwargs or {}))


def sharded_vocabulary(device, line, vocabulary):
    """What a forward and a backward move between ranks."""
    mesh, rows = init_device_mesh(device, (torch.distributed.get_world_size(),)), 6
    inputs = make_inputs(line, (rows, vocabulary), torch.float32, device)
    placements = [[S(1)], *[[R] if o.dtype == torch.int64 else [S(0)] for o in inputs.operands]]
    tensors = [distributed(t, mesh, at) for t, at in zip((inputs.x, *inputs.operands), placements)]
    with Moved() as forward:
        results = as_tuple(onepass.fused(line, *tensors))
    assert all(r.placements == (R,) for r in results)
    with Moved() as backward:
        torch.autograd.backward([r.to_local() for r in results], [torch.ones(rows, device=device) for _ in results])
    return forward.elements, backward.elements


@pytest.mark.parametrize(
    ("line", "numbers"), [("cross_entropy(0.1)", 3), ("bias | logprob | entropy", 3), ("logsumexp", 1)]
)
def test_of_a_sharded_vocabulary_only_numbers_of_rows_move(ranks, line, numbers):
    for vocabulary in (64, 4096):
        for forward, backward in ranks.run(sharded_vocabulary, line, vocabulary):
            assert forward == [numbers * 6] and backward == []


def sharded_head(device, line, vocabulary, at_x):
    """The same where `linear` makes the columns, of a matrix whose rows are sharded; results are as whole ones."""
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    inputs = make_inputs(line, (6, 8), torch.float64, device, out_features=vocabulary)
    behind = onepass.Line(line).weight
    shares = [i >= behind and operand.is_floating_point() for i, operand in enumerate(inputs.operands)]
    placements = [[at_x], *[[S(0) if is_shared else R] for is_shared in shares]]
    assert_as_whole(line, inputs, mesh, placements)
    tensors = [distributed(t, mesh, at) for t, at in zip((inputs.x, *inputs.operands), placements)]
    with Moved() as forward:
        results = as_tuple(onepass.fused(line, *tensors))
    assert all(r.placements == (R,) for r in results)
    with Moved() as backward:
        torch.autograd.backward([r.to_local() for r in results], [torch.ones_like(r.to_local()) for r in results])
    return forward.elements, backward.elements


@pytest.mark.parametrize(
    ("line", "numbers"),
    [
        ("linear | cross_entropy(0.1)", 3),
        ("rms_norm(1e-6) | scale | linear | bias | softcap(3) | logprob | entropy", 3),
        ("linear | logsumexp | mean", 2),
    ],
)
def test_of_a_sharded_head_only_numbers_of_rows_move(ranks, line, numbers):
    for vocabulary in (64, 4096):
        for forward, backward in ranks.run(sharded_head, line, vocabulary, R):
            assert forward == [numbers * 6] and backward == []  # x's gradient is left as a sum over ranks


def assert_calls_alike(function, whole, mesh, placements, what):
    """function(*tensors) of distributed tensors, and its gradients, are those of whole ones."""
    tensors = [distributed(t, mesh, [at]) for t, at in zip(whole, placements)]
    found = []
    for given in (tensors, whole):
        results, leaves = as_tuple(function(*given)), [t for t in given if t.requires_grad]
        weights = upstream([r.full_tensor() if isinstance(r, DTensor) else r for r in results])
        if given is tensors:
            assert all(r.placements == (R,) for r in results), what
            weights = [distributed(g, mesh, [R]) for g in weights]
        found.append((*results, *torch.autograd.grad(results, leaves, weights)))
    for ours, theirs in zip(*found, strict=True):
        assert_near(ours.full_tensor(), theirs, whole[0].dtype, what)


LOSSES = {
    "plain": {},
    "ignored": {"ignore_index": 3},
    "smoothed": {"label_smoothing": 0.1},
    "capped": {"softcap": 3.0},
    "all": {"ignore_index": -1, "label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 3.0},
}
SHARED_DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def head_of(device, dtype, ignored, rows=(5, 6), depth=8, vocabulary=64):
    """x, a matrix, a bias and targets, of which one in four is ignored; every rank makes the same."""
    x, w, b = make_inputs("linear | bias", (*rows, depth), dtype, device, out_features=vocabulary).tensors
    return x, w, b, some_targets(rows, vocabulary, ignored, device)


def some_targets(rows, vocabulary, ignored, device):
    target = torch.arange(math.prod(rows), device=device).mul(7).remainder(vocabulary)
    target[::4] = ignored
    return target.view(rows)


def losses_of_a_sharded_head(device, dtype, options):
    """`linear_cross_entropy` of a matrix sharded in its rows gives what it gives of whole tensors."""
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    x, w, b, target = head_of(device, dtype, options.get("ignore_index", -100))
    for reduction in ("mean", "sum", "none"):

        def loss(x, w, target, b=None, reduction=reduction):
            return OF.linear_cross_entropy(x, w, target, linear_bias=b, reduction=reduction, **options)

        what = f"{reduction} of {dtype} {options}"
        assert_calls_alike(loss, (x, w, target, b), mesh, (R, S(0), R, S(0)), what)
        assert_calls_alike(loss, (x, w, target), mesh, (R, S(0), R), f"{what}, no bias")


@pytest.mark.parametrize("dtype", SHARED_DTYPES, ids=str)
@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
def test_losses_of_a_sharded_head(ranks, dtype, options):
    ranks.run(losses_of_a_sharded_head, dtype, options)


def log_probabilities_of_a_sharded_head(device, dtype):
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    x, w, b, target = head_of(device, dtype, -100)
    for options in ({}, {"entropy": True}, {"entropy": True, "temperature": 0.7, "softcap": 3.0}):

        def log_prob(x, w, target, b=None, options=options):
            return OF.linear_log_prob(x, w, target, linear_bias=b, **options)

        assert_calls_alike(log_prob, (x, w, target, b), mesh, (R, S(0), R, S(0)), f"{dtype} {options}")
        assert_calls_alike(log_prob, (x, w, target), mesh, (R, S(0), R), f"{dtype} {options}, no bias")


@pytest.mark.parametrize("dtype", SHARED_DTYPES, ids=str)
def test_log_probabilities_of_a_sharded_head(ranks, dtype):
    ranks.run(log_probabilities_of_a_sharded_head, dtype)


LOGITS_LINES = ["cross_entropy(0.1, 0.01)", "bias | softcap(3) | logprob | entropy", "logsumexp"]


def sharded_logits(device, dtype, lines):
    """Numbers of rows of logits whose columns are sharded."""
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    for line in lines:
        inputs = make_inputs(line, (3, 5, 64), dtype, device)
        placements = [[S(2)], *[[R] if o.dtype == torch.int64 else [S(0)] for o in inputs.operands]]
        results = assert_as_whole(line, inputs, mesh, placements)
        assert all(r.placements == (R,) for r in results)


@pytest.mark.parametrize("dtype", SHARED_DTYPES, ids=str)
def test_lines_of_sharded_logits(ranks, dtype):
    ranks.run(sharded_logits, dtype, LOGITS_LINES)


def losses_of_sharded_logits(device, dtype, options):
    mesh, rows, vocabulary = init_device_mesh(device, (torch.distributed.get_world_size(),)), 15, 64
    logits = make_inputs("softmax", (rows, vocabulary), dtype, device).x
    target = some_targets((rows,), vocabulary, options.get("ignore_index", -100), device)
    for reduction in ("mean", "sum", "none"):

        def loss(logits, target, reduction=reduction):
            return OF.cross_entropy(logits, target, reduction=reduction, **options)

        assert_calls_alike(loss, (logits, target), mesh, (S(1), R), f"{reduction} of {dtype} {options}")


@pytest.mark.parametrize("dtype", SHARED_DTYPES, ids=str)
@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
def test_losses_of_sharded_logits(ranks, dtype, options):
    ranks.run(losses_of_sharded_logits, dtype, options)


def log_probabilities_of_sharded_logits(device, dtype):
    mesh, rows, vocabulary = init_device_mesh(device, (torch.distributed.get_world_size(),)), 15, 64
    logits = make_inputs("softmax", (rows, vocabulary), dtype, device).x
    target = some_targets((rows,), vocabulary, -100, device)
    for options in ({}, {"entropy": True}, {"entropy": True, "temperature": 0.7}):

        def log_prob(logits, target, options=options):
            return OF.log_prob(logits, target, **options)

        assert_calls_alike(log_prob, (logits, target), mesh, (S(1), R), f"{dtype} {options}")


@pytest.mark.parametrize("dtype", SHARED_DTYPES, ids=str)
def test_log_probabilities_of_sharded_logits(ranks, dtype):
    ranks.run(log_probabilities_of_sharded_logits, dtype)


def dropped(device, line, mesh_shape, placements):
    """The mask of each rank's part, as forward and backward have it, and of the same line again."""
    torch.manual_seed(3)
    mesh = init_device_mesh(device, mesh_shape)
    inputs = make_inputs(line, (8, 64), torch.float32, device, out_features=64)
    masks = []
    for _ in range(2):
        tensors = [distributed(t, mesh, at) for t, at in zip((inputs.x, *inputs.operands), placements)]
        result = onepass.fused(line, *tensors)
        shift = result.to_local() - result.to_local().detach()  # what is dropped gets no gradient
        masks.append((result.to_local().detach() != 0).cpu())
        if line == "dropout(0.5)":
            (gradient,) = torch.autograd.grad(shift.sum(), tensors[0])
            assert torch.equal(gradient.to_local().cpu() != 0, masks[-1])
    return masks


def pairs_alike(masks):
    return [[torch.equal(a, b) for b in masks] for a in masks]


DROPOUT = [  # a line, placements along each dimension of a mesh, and those dimensions of it along which masks differ
    ("dropout(0.5)", [[S(0), S(0)]], (True, True)),
    ("dropout(0.5)", [[S(0), R]], (True, False)),
    ("dropout(0.5)", [[R, S(1)]], (False, True)),
    ("dropout(0.5)", [[R, R]], (False, False)),
    ("linear | dropout(0.5)", [[S(0), R], [R, S(0)]], (True, True)),
    ("linear | dropout(0.5)", [[S(0), S(1)], [R, S(1)]], (True, False)),
]


@pytest.mark.parametrize(("line", "placements", "differ"), DROPOUT)
def test_dropout_masks(ranks, line, placements, differ):
    """They differ where data differ and agree where they are replicated; each call has its own."""
    count = len(ranks)
    mesh_shape = (2, count // 2)
    first, second = zip(*ranks.run(dropped, line, mesh_shape, placements))
    parts = [tuple(c for c, d in zip(divmod(rank, count // 2), differ) if d) for rank in range(count)]
    assert pairs_alike(first) == pairs_alike(second) == [[a == b for b in parts] for a in parts]
    assert not any(torch.equal(a, b) for a, b in zip(first, second))
    assert all(0.3 < mask.float().mean() < 0.7 for mask in first)


def dropout_before_and_behind(device):
    """One state cannot have both masks that agree and masks that differ: the matrix is gathered."""
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    line = "dropout(0.5) | linear | dropout(0.5)"
    inputs = make_inputs(line, (8, 64), torch.float32, device)
    tensors = [distributed(t, mesh, at) for t, at in zip((inputs.x, *inputs.operands), [[R], [S(0)]])]
    assert onepass.fused(line, *tensors).placements == (R,)
    assert onepass.fused(line, *tensors, training=False).placements == (S(1),)


def test_dropout_before_and_behind(ranks):
    ranks.run(dropout_before_and_behind)


def bad_calls(device):
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    other = init_device_mesh(device, (torch.distributed.get_world_size(), 1))
    x, bias, other_length = (distribute_tensor(torch.randn(s, device=device), mesh, [R]) for s in ((6, 8), (8,), (7,)))
    for operands, error, message in (
        ((bias.to_local(),), RuntimeError, "got mixed torch.Tensor and DTensor: expected b of 'bias' to be DTensor"),
        ((distribute_tensor(bias.to_local(), other),), RuntimeError, "expected b of 'bias' to be on x's"),
        ((other_length,), RuntimeError, r"operand 0 must have shape \[8\].*, got \[7\]"),
        ((None,), TypeError, "b of 'bias' must be Tensor, not NoneType"),
        ((), TypeError, "takes 1 operands"),
    ):
        with pytest.raises(error, match=message):
            onepass.fused("bias | gelu", x, *operands)
    with pytest.raises((RuntimeError, ValueError), match="mixed torch.Tensor and DTensor|Cannot find device mesh"):
        onepass.fused("bias | gelu", x.to_local(), bias)  # PyTorch's own message, of its versions


def test_bad_calls(ranks):
    ranks.run(bad_calls)


def a_list(device):
    """Each of its tensors as one alone."""
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    inputs = [make_inputs("rope", (4, 6, 8), torch.float64, device, seed=seed) for seed in range(2)]
    cos, sin = (distributed(t, mesh, [S(1)]) for t in inputs[0].operands)
    xs = [distributed(i.x, mesh, [S(0)]) for i in inputs]
    for x, result in zip(inputs, onepass.fused("rope", xs, cos, sin), strict=True):
        assert result.placements == (S(0),)
        torch.testing.assert_close(result.full_tensor(), onepass.fused("rope", x.x, *inputs[0].operands))


def test_list(ranks):
    ranks.run(a_list)


def attention(device, options):
    """Heads are sharded, whoever computes them."""
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    for tokens in (8, 64):
        generator = torch.Generator().manual_seed(tokens)
        whole = [torch.randn(2, 4, tokens, 16, generator=generator).to(device).requires_grad_() for _ in range(3)]
        heads = [distributed(t, mesh, [S(1)]) for t in whole]
        result = onepass.functional.scaled_dot_product_attention(*heads, **options)
        expected = F.scaled_dot_product_attention(*whole, **options)
        assert result.placements == (S(1),)
        torch.testing.assert_close(result.full_tensor(), expected)
        ours, theirs = torch.autograd.grad(result.sum(), heads), torch.autograd.grad(expected.sum(), whole)
        torch.testing.assert_close([g.full_tensor() for g in ours], list(theirs))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
def test_attention(ranks, options):
    ranks.run(attention, options)


def ways_of_calling(device):
    """Under autocast, without gradients, and with a part that is still on its way."""
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    x, weight = torch.randn(4, 8, device=device), torch.randn(8, 8, device=device)
    parts = [distribute_tensor(t, mesh, [S(0)], src_data_rank=None) for t in (x, weight)]
    with torch.autocast(device, torch.bfloat16):
        assert onepass.functional.linear(*parts).dtype == torch.bfloat16
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert onepass.fused("softmax", distributed(x, mesh, [P])).placements == (R,)
    arriving = parts[0].redistribute(placements=[R], async_op=True)
    assert type(onepass.fused("gelu", arriving).to_local()) is torch.Tensor


def test_ways_of_calling(ranks):
    ranks.run(ways_of_calling)


def transposed(device):
    """x's strides are not its gradient's."""
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    values = torch.randn(8, 4, 6, device=device, dtype=torch.float64)
    found = []
    for whole in (values.clone(), distribute_tensor(values, mesh, [S(1)])):
        x = whole.transpose(0, 2).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(onepass.fused("layer_norm(1e-5) | tanh", x).square().sum(), x)
        found.append(gradient)
    assert found[1].is_contiguous() and found[1].to_local().is_contiguous()
    torch.testing.assert_close(found[1].full_tensor(), found[0])


def test_transposed(ranks):
    ranks.run(transposed)


def twice(device):
    """A gradient's gradient, whose parts' sums are one rank's."""
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    line = "layer_norm(1e-5) | scale | tanh"
    inputs = make_inputs(line, (4, 6, 8), torch.float64, device)
    found = []
    for place in (lambda t, at: t, lambda t, at: distributed(t, mesh, [at])):
        x, scale = place(inputs.x, S(0)), place(*inputs.operands, R)
        (slope,) = torch.autograd.grad(onepass.fused(line, x, scale).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(slope.pow(3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(second.square().sum(), (x, scale)))
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(other.full_tensor(), own, rtol=1e-9, atol=1e-9)


def test_derivatives_of_gradients(ranks):
    ranks.run(twice)


COMPILED = [
    ("layer_norm(1e-5) | scale | bias | linear | bias | gelu", [R, R, R, S(0), S(0)], S(2)),
    ("linear | bias", [S(2), S(1), R], P),
    ("linear | bias | add | keep | gelu", [S(2), S(1), R, S(1)], S(1)),
    ("add | keep | rms_norm(1e-6) | scale", [S(1), P, R], S(1)),
]


def compiled(device, line, placements, expected):
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    inputs = make_inputs(line, (4, 6, 8), torch.float64, device, out_features=8)
    whole = as_tuple(onepass.fused(line, inputs.x, *inputs.operands))
    grads = gradients([sum(r.sum() for r in whole)], inputs, None)
    tensors = [distributed(t, mesh, [at]) for t, at in zip((inputs.x, *inputs.operands), placements)]
    call = torch.compile(lambda *t: onepass.fused(line, *t), fullgraph=True, backend="aot_eager")
    results = as_tuple(call(*tensors))
    assert results[0].placements == (expected,)
    ours = torch.autograd.grad(sum(r.sum() for r in results), tensors)
    for one, other in zip((*results, *ours), (*whole, *grads), strict=True):
        torch.testing.assert_close(one.full_tensor(), other, rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(torch.__version__.startswith("2.10"), reason="does not trace DTensor.from_local of a given shape")
@pytest.mark.parametrize(("line", "placements", "expected"), COMPILED)
def test_compiled(ranks, line, placements, expected):
    ranks.run(compiled, line, placements, expected)


def compiled_dropout(device):
    """Masks are eager's, and each rank has its own."""
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    x = distribute_tensor(torch.ones(8, 64, device=device), mesh, [S(0)])
    call = torch.compile(lambda t: onepass.fused("dropout(0.5)", t), fullgraph=True, backend="aot_eager")
    results = []
    for function in (call, lambda t: onepass.fused("dropout(0.5)", t)):
        torch.manual_seed(5)
        results.append(function(x).to_local())
    assert torch.equal(*results)
    return results[0].cpu()


def test_compiled_dropout(ranks):
    masks = ranks.run(compiled_dropout)
    assert not torch.equal(masks[0], masks[1])
