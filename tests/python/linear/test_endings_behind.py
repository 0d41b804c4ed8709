"""Endings behind `linear`: numbers of rows that exist a chunk at a time."""

import re

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._pytree import tree_leaves

import onepass
from helpers import DTYPES, as_tuple, assert_equal, check_line, gradients, make_inputs, run, upstream, with_strategy

LINES = [
    "linear | cross_entropy",
    "linear | bias | softcap(3) | cross_entropy(0.1, 0.001)",
    "rms_norm(1e-6) | scale | linear | logprob | entropy",
    "linear | add | logsumexp | mean",
    "keep | layer_norm(1e-5) | scale | bias | linear | mul(0.5) | sum",
]
KEPT = ["linear | keep | cross_entropy", "keep | rms_norm(1e-6) | linear | bias | keep | softcap(2) | logprob"]
STRATEGIES = ["auto", "chunked", "unfused"]


def inputs_for(line, rows, depth, out_features, dtype, device, **options):
    return make_inputs(line, (rows, depth), dtype, device, out_features=out_features, **options)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("line", LINES)
def test_error_is_no_more_than_pytorchs(line, strategy, dtype, device):
    inputs = inputs_for(line, 37, 200, 300, dtype, device)
    check_line(with_strategy(line, strategy), inputs, slack=30.0 if dtype == torch.float64 else 3.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("line", KEPT)
def test_logits_that_are_kept(line, dtype, device):
    check_line(line, inputs_for(line, 37, 200, 300, dtype, device), slack=3.0)


def many_chunks(device):
    """Rows and out_features of five chunks (on CUDA three), and of two."""
    rows = 4096 if device == "cuda" else 1024
    return (5 * rows - 7, 64), (2 * rows - 1, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("line", ["linear | cross_entropy(0.1)", "rms_norm(1e-6) | scale | linear | bias | logprob"])
def test_many_chunks(line, dtype, device):
    for rows, columns in many_chunks(device):
        inputs = inputs_for(line, rows, 16, columns, dtype, device)
        assert onepass.Line(line).plan((rows, 16), dtype, columns, device=device).strategy == "chunked"
        check_line(line, inputs, slack=3.0)


def test_the_gradient_of_the_matrix_is_added_up_in_float32(cuda):
    """Of four chunks and more, in 16 bits: 1.7e9 logits. It is as far from the sum of what a chunk's product is made of
    as that sum rounded."""
    if torch.cuda.mem_get_info()[0] < 30 << 30:
        pytest.skip("needs 30 GB")
    x, w = torch.randn(50000, 16, device=cuda), torch.randn(34000, 16, device=cuda)
    x, w = (t.bfloat16().requires_grad_() for t in (x, w))
    target = torch.randint(0, 34000, (50000,), device=cuda)
    (found,) = torch.autograd.grad(onepass.fused("linear | cross_entropy", x, w, target).sum(), w)
    exact = torch.zeros(34000, 16, dtype=torch.float64, device=cuda)
    with torch.no_grad():
        for rows, its in zip(x.split(1000), target.split(1000)):
            of_logits = torch.softmax((rows @ w.T).float(), -1)
            of_logits[torch.arange(len(its), device=cuda), its] -= 1
            exact += of_logits.bfloat16().double().T @ rows.double()
    assert (found - exact).norm() < 1.2 * (exact.bfloat16() - exact).norm()


def test_plan_says_what_backward_takes():
    plan = onepass.Line("linear | cross_entropy").plan
    of = ((8192, 4096), torch.bfloat16, 128256)
    assert "makes a chunk's rows again" in plan(*of, device="h200").why
    assert "makes a chunk's rows again" not in plan(*of, device="h200", training=False).why


def test_a_kept_value_is_not_chunked(device):
    """All rows of it are there anyway."""
    plan = onepass.Line("linear | keep | cross_entropy").plan((8192, 16), torch.float32, 50000, device=device)
    assert plan.strategy == "unfused" and "is kept" in str(plan)
    with pytest.raises(RuntimeError, match="a row behind 'linear' is kept"):
        inputs = inputs_for("linear | keep | cross_entropy", 3, 4, 5, torch.float32, device)
        onepass.fused("linear(chunked) | keep | cross_entropy", inputs.x, *inputs.operands)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("strategy", ["chunked", "unfused"])
def test_shapes(shape, strategy, device):
    """Targets and rows that broadcast are of x's leading dimensions."""
    x, w = torch.randn(*shape, 5, device=device), torch.randn(7, 5, device=device)
    r = torch.randn(*shape[-1:], 7, device=device)
    target = torch.randint(0, 7, shape, device=device)
    leaves = [t.requires_grad_() for t in (x, w, r)]
    line = onepass.Line(f"linear({strategy}) | add | cross_entropy")
    ours, theirs = line(x, w, r, target), line.reference(x, w, r, target)
    assert ours.shape == shape and ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs)
    g = torch.randn_like(ours)
    torch.testing.assert_close(torch.autograd.grad(ours, leaves, g), torch.autograd.grad(theirs, leaves, g))


@pytest.mark.parametrize("strategy", ["auto", "chunked", "unfused"])
def test_empty(strategy, device):
    x, w = torch.randn(0, 5, device=device, requires_grad=True), torch.randn(7, 5, device=device, requires_grad=True)
    target = torch.zeros(0, dtype=torch.int64, device=device)
    y = onepass.fused(
        with_strategy("linear | cross_entropy", "auto" if strategy == "chunked" else strategy), x, w, target
    )
    assert y.shape == (0,)
    y.sum().backward()
    assert x.grad.shape == x.shape and not w.grad.any()


@pytest.mark.parametrize("line", [*LINES, *KEPT])
def test_each_argument_alone(line, device):
    """Where only one tensor needs a gradient, of any of the results."""
    given = inputs_for(line, 4, 5, 6, torch.float64, device)
    smooth = [i for i, t in enumerate(given.tensors) if t.is_floating_point()]
    for needed in smooth:
        inputs = given.to(torch.float64)
        for i in smooth:
            inputs.tensors[i].requires_grad_(i == needed)
        leaf = inputs.tensors[needed]
        ours = as_tuple(onepass.fused(line, inputs.x, *inputs.operands))
        theirs = as_tuple(onepass.Line(line).reference(inputs.x, *inputs.operands))
        for mine, wanted in zip(ours, theirs):
            torch.testing.assert_close(mine, wanted)
            if mine.requires_grad and wanted.requires_grad:
                g = torch.randn_like(wanted)
                found = torch.autograd.grad(mine, leaf, g, retain_graph=True, allow_unused=True)
                expected = torch.autograd.grad(wanted, leaf, g, retain_graph=True, allow_unused=True)
                torch.testing.assert_close(found, expected)


def function_of(line, device):
    given = inputs_for(line, 3, 4, 5, torch.float64, device)
    smooth = [t for t in given.tensors if t.is_floating_point()]

    def function(*tensors):
        pending = iter(tensors)
        x, *operands = (next(pending) if t.is_floating_point() else t for t in given.tensors)
        return onepass.fused(line, x, *operands)

    return function, tuple(smooth)


@pytest.mark.parametrize("line", [*LINES, *KEPT, "linear(chunked) | logprob | entropy"])
def test_second_derivatives(line, device):
    function, tensors = function_of(line, device)
    assert gradcheck(function, tensors) and gradgradcheck(function, tensors)


@pytest.mark.parametrize("line", [*LINES, *KEPT, "linear(chunked) | add | cross_entropy"])
def test_transforms(line, device):
    function, (x, *others) = function_of(line, device)
    others = [t.detach() for t in others]
    first = lambda x: tree_leaves(function(x, *others))[0]  # noqa: E731
    total = lambda x: sum(t.sum() for t in tree_leaves(function(x, *others)))  # noqa: E731
    x = x.detach()
    torch.testing.assert_close(torch.func.jacfwd(first)(x), torch.func.jacrev(first)(x))
    some = torch.randn(3, *x.shape, dtype=x.dtype, device=device)
    torch.testing.assert_close(torch.vmap(first)(some), torch.stack([first(one) for one in some]))
    each = torch.stack([torch.func.grad(total)(one) for one in some])
    torch.testing.assert_close(torch.vmap(torch.func.grad(total))(some), each)


@pytest.mark.parametrize("line", [*LINES, *KEPT])
def test_compiled(line, device):
    torch._dynamo.reset()  # of one function only so many captures are kept
    function, tensors = function_of(line, device)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    ours, expected = tree_leaves(compiled(*tensors)), tree_leaves(function(*tensors))
    torch.testing.assert_close(ours, expected)
    total = lambda results: sum((t * t.detach().cos()).sum() for t in results)  # noqa: E731
    torch.testing.assert_close(torch.autograd.grad(total(ours), tensors), torch.autograd.grad(total(expected), tensors))


@pytest.mark.parametrize("line", [*LINES, *KEPT, "linear(chunked) | add | cross_entropy"])
def test_opcheck(line, device):
    inputs = inputs_for(line, 3, 4, 5, torch.float32, device)
    x, operands = inputs.x.detach(), [t.detach() for t in inputs.operands]
    torch.library.opcheck(torch.ops.onepass.linear_forward.default, (x, operands, line, None, True))


def test_bits_are_the_same_again(device):
    line = "rms_norm(1e-6) | scale | linear(chunked) | bias | cross_entropy"
    found = []
    for _ in range(2):
        inputs = inputs_for(line, 300, 64, 500, torch.float32, device)
        results, _ = run(line, inputs)
        found.append([*results, *gradients(results, inputs, upstream(results))])
    for one, other in zip(*found):
        assert_equal(one, other)


@pytest.mark.parametrize(
    "line, message",
    [
        ("linear | softmax", "'softmax' behind 'linear': a row word stands before it, but for those"),
        ("linear | cross_entropy | bias", "'bias' behind 'cross_entropy', which ends a line"),
        ("linear | amax", "'amax' behind a contraction, where it has no kernel"),
        ("scores | logsumexp", "'logsumexp' behind a contraction"),
        ("linear | quantize(fp8)", "'quantize' behind a contraction"),
    ],
)
def test_lines_that_there_are_not(line, message):
    with pytest.raises(onepass.LineError, match=re.escape(message)):
        onepass.Line(line)


@pytest.mark.parametrize(
    "strategy, line, message",
    [
        ("tiled", "linear | cross_entropy", "it has no kernel for endings behind 'linear'"),
        ("panels", "linear | cross_entropy", "it has no kernel for endings behind 'linear'"),
        ("chunked", "linear | bias", "it is for endings behind 'linear'"),
        ("chunked", "linear", "it is for endings behind 'linear'"),
    ],
)
def test_strategies_that_do_not_serve(strategy, line, message, device):
    inputs = inputs_for(line, 8, 16, 32, torch.bfloat16, device)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        onepass.fused(with_strategy(line, strategy), inputs.x, *inputs.operands)


def test_bad_targets():
    x, w = torch.randn(2, 3, 4), torch.randn(7, 4)
    for strategy in ("chunked", "unfused"):
        line = with_strategy("linear | cross_entropy", strategy)
        with pytest.raises(IndexError, match="Target 9 is out of bounds"):
            onepass.fused(line, x, w, torch.full((2, 3), 9))


@pytest.mark.parametrize("strategy", ["chunked", "unfused"])
def test_a_target_of_another_shape(strategy, device):
    x, w = torch.randn(2, 3, 4, device=device), torch.randn(7, 4, device=device)
    with pytest.raises(RuntimeError, match="must have shape"):
        onepass.fused(
            with_strategy("linear | cross_entropy", strategy), x, w, torch.ones(6, dtype=torch.int64, device=device)
        )


def test_what_is_saved(device):
    """Two numbers a row for the ending and one for the norm, never logits."""
    line = "rms_norm(1e-6) | scale | linear | cross_entropy"
    inputs = inputs_for(line, 64, 32, 1000, torch.float32, device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        onepass.fused(line, inputs.x, *inputs.operands)
    sizes = sorted(t.numel() for t in saved)
    assert sizes == sorted([64 * 32, 32, 1000 * 32, 64, 3 * 64])
