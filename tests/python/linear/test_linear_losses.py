"""linear_cross_entropy and linear_log_prob: PyTorch's losses of a product, without its rows."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from helpers import check_error
from onepass import functional as OF
from onepass.functional import _losses


def reference(x, w, b, target, weight, reduction, smoothing, z_loss, softcap):
    """PyTorch's, of logits in the arithmetic's dtype."""
    logits = F.linear(x, w, b)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    rows, each = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    loss = F.cross_entropy(rows, each, weight, reduction="none", label_smoothing=smoothing)
    is_counted = each != -100
    loss = loss + (z_loss * rows.logsumexp(-1).square()) * is_counted
    if reduction == "none":
        return loss.reshape(target.shape)
    share = is_counted if weight is None else weight[each.where(is_counted, 0)] * is_counted
    return loss.sum() if reduction == "sum" else loss.sum() / share.sum()


def given(shape, depth, classes, dtype, device, bias=True):
    x = torch.randn(*shape, depth, dtype=dtype, device=device)
    w, b = torch.randn(classes, depth, dtype=dtype, device=device), torch.randn(classes, dtype=dtype, device=device)
    target = torch.randint(0, classes, shape, device=device)
    if shape:
        target.view(-1)[::3] = -100
    return x.requires_grad_(), w.requires_grad_(), b.requires_grad_() if bias else None, target


HOW = list(itertools.product((0.0, 0.1), (0.0, 0.01), (None, 2.0), (False, True)))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(), (6,), (2, 200)])
@pytest.mark.parametrize("smoothing, z_loss, softcap, weighted", HOW)
def test_equals_pytorchs(smoothing, z_loss, softcap, weighted, shape, reduction, device):
    x, w, b, target = given(shape, 8, 50, torch.float64, device, bias=weighted)
    weight = torch.rand(50, dtype=torch.float64, device=device) if weighted else None
    options = {"label_smoothing": smoothing, "z_loss": z_loss, "softcap": softcap, "reduction": reduction}
    ours = OF.linear_cross_entropy(x, w, target, linear_bias=b, weight=weight, **options)
    theirs = reference(x, w, b, target, weight, reduction, smoothing, z_loss, softcap)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    leaves = [t for t in (x, w, b) if t is not None]
    g = torch.randn_like(theirs)
    expected = torch.autograd.grad(theirs, leaves, g)
    for _ in range(2):  # what forward has made is not used up
        found = torch.autograd.grad(ours, leaves, g, retain_graph=True)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing, weighted", [(0.0, False), (0.1, False), (0.1, True)])
def test_probabilities(smoothing, weighted, reduction, device):
    x, w, b, _ = given((3, 5), 4, 9, torch.float64, device)
    target = torch.rand(3, 5, 9, dtype=torch.float64, device=device).requires_grad_()
    weight = torch.rand(9, dtype=torch.float64, device=device) if weighted else None
    options = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
    ours = OF.linear_cross_entropy(x, w, target, linear_bias=b, **options)
    theirs = F.cross_entropy(F.linear(x, w, b).flatten(0, 1), target.flatten(0, 1), **options)
    theirs = theirs.reshape(ours.shape)
    torch.testing.assert_close(ours, theirs)
    leaves, g = (x, w, b, target), torch.randn_like(theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, leaves, g), torch.autograd.grad(theirs, leaves, g))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [100, 20000])
def test_error_is_no_more_than_pytorchs(rows, reduction, dtype, device):
    """Beside PyTorch's chain with float32 logits; upstream gradients are not 1."""
    x, w, b, target = given((rows,), 32, 300, dtype, device)
    leaves, scale = [x, w, b], 3.7
    ours = OF.linear_cross_entropy(x, w, target, linear_bias=b, reduction=reduction)
    mine = torch.autograd.grad(ours * scale, leaves)
    theirs = F.cross_entropy(F.linear(x, w, b).float(), target, reduction=reduction)
    chain = torch.autograd.grad(theirs * scale, leaves)
    wide = [t.detach().double().cpu().requires_grad_() for t in leaves]
    exact = F.cross_entropy(F.linear(*wide), target.cpu(), reduction=reduction)
    exact_gradients = torch.autograd.grad(exact * scale, wide)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.cpu(), exact.float(), rtol=1e-5 if dtype == torch.float32 else 2e-3, atol=1e-5)
    losses = OF.linear_cross_entropy(x, w, target, linear_bias=b, reduction="none")
    chained = F.cross_entropy(F.linear(x, w, b).float(), target, reduction="none")
    exact_losses = F.cross_entropy(F.linear(*wide), target.cpu(), reduction="none")
    check_error(losses, chained, [exact_losses], "losses", slack=3.0, precision=dtype)
    for name, a, b_, c in zip(("input", "weight", "bias"), mine, chain, exact_gradients):
        assert a.dtype == dtype
        check_error(a, b_, [c], name, slack=3.0)  # the upstream gradient rounds once more


def test_float16_gradients_are_not_nothing(device):
    """Divided by the number of rows before the products they would be."""
    x, w, _, target = given((4096,), 16, 50, torch.float16, device, bias=False)
    scale = 65536.0
    loss = OF.linear_cross_entropy(x, w, target) * scale
    found = torch.autograd.grad(loss, (x, w))
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    expected = torch.autograd.grad(F.cross_entropy(F.linear(*wide), target) * scale, wide)
    for mine, theirs in zip(found, expected):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-2, atol=2e-3 * theirs.abs().max().item())


def test_second_derivatives(device):
    x, w, b, target = given((5,), 4, 7, torch.float64, device)

    def loss(x, w, b):
        return OF.linear_cross_entropy(x, w, target, linear_bias=b, label_smoothing=0.1)

    def theirs(x, w, b):
        return F.cross_entropy(F.linear(x, w, b), target, label_smoothing=0.1)

    assert gradcheck(loss, (x, w, b)) and gradgradcheck(loss, (x, w, b))
    w, b = w.detach(), b.detach()
    hessian = torch.func.hessian(lambda x: loss(x, w, b))(x.detach())
    torch.testing.assert_close(hessian, torch.func.hessian(lambda x: theirs(x, w, b))(x.detach()))


def test_each_argument_alone(device):
    given_ = given((5,), 4, 7, torch.float64, device)
    target = given_[3]
    for needed in range(3):
        leaves = [t.detach().requires_grad_(i == needed) for i, t in enumerate(given_[:3])]
        x, w, b = leaves
        ours = OF.linear_cross_entropy(x, w, target, linear_bias=b)
        theirs = F.cross_entropy(F.linear(x, w, b), target)
        torch.testing.assert_close(
            torch.autograd.grad(ours, leaves[needed]), torch.autograd.grad(theirs, leaves[needed])
        )


def test_compiled(device):
    x, w, b, target = given((6,), 4, 7, torch.float64, device)

    def loss(x, w, b):
        return OF.linear_cross_entropy(x, w, target, linear_bias=b)

    graphs = []

    def kept(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(loss, fullgraph=True, backend=aot_autograd(fw_compiler=kept))
    torch.testing.assert_close(compiled(x, w, b), loss(x, w, b))
    torch.testing.assert_close(
        torch.autograd.grad(compiled(x, w, b) * 3, (x, w, b)), torch.autograd.grad(loss(x, w, b) * 3, (x, w, b))
    )
    ours = [str(node.target) for graph in graphs for node in graph.graph.nodes if "onepass" in str(node.target)]
    assert ours == ["onepass.linear_forward_with_gradients.default"]  # three products in all
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, w, b), loss(x, w, b))


def test_compiled_in_a_checkpoint(device):
    x, w, b, target = given((6,), 4, 7, torch.float64, device)

    def loss(x, w, b):
        return checkpoint(
            lambda x: OF.linear_cross_entropy(x, w, target, linear_bias=b, reduction="sum"), x, use_reentrant=False
        )

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        torch.autograd.grad(compiled(x, w, b), (x, w, b)), torch.autograd.grad(loss(x, w, b), (x, w, b))
    )


def test_what_is_saved(device):
    """Of gradients that forward makes, none under hooks for saved tensors, as a checkpoint has them."""
    x, w, b, target = given((64,), 16, 500, torch.float32, device)
    before = OF.linear_cross_entropy(x, w, target, linear_bias=b)
    made_ahead = "WeightedSumBackward" in str(before.grad_fn.name())
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = OF.linear_cross_entropy(x, w, target, linear_bias=b)
    assert made_ahead and "WeightedSum" not in loss.grad_fn.name()
    assert not any(t.numel() == 64 * 500 for t in saved)
    found, expected = (torch.autograd.grad(one, (x, w, b)) for one in (loss, before))
    torch.testing.assert_close(found, expected)


def test_checkpointed(device):
    x, w, b, target = given((6,), 4, 7, torch.float64, device)

    def loss(x, w, b):
        return OF.linear_cross_entropy(x, w, target, linear_bias=b)

    again = torch.utils.checkpoint.checkpoint(loss, x, w, b, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again, (x, w, b)), torch.autograd.grad(loss(x, w, b), (x, w, b)))


@pytest.mark.parametrize("weighted, smoothing", [(False, 0.0), (True, 0.0), (True, 0.1)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_rows_are_left_out(reduction, weighted, smoothing, device, monkeypatch):
    monkeypatch.setattr(_losses, "_MANY_LOGITS", 1000)
    weight = torch.rand(50, dtype=torch.float64, device=device) if weighted else None
    options = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
    x, w, b, target = given((40, 30), 8, 50, torch.float64, device)
    target[torch.rand(40, 30, device=device) < 0.6] = -100
    ours = OF.linear_cross_entropy(x, w, target, linear_bias=b, **options)
    theirs = reference(x, w, b, target, weight, reduction, smoothing, 0.0, None)
    torch.testing.assert_close(ours, theirs)
    g = torch.randn_like(theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, (x, w, b), g), torch.autograd.grad(theirs, (x, w, b), g))
    if reduction != "none" and not smoothing:
        counted = (target != -100).sum().item()
        with FlopCounterMode(display=False) as flops:
            OF.linear_cross_entropy(x, w, target, linear_bias=b, **options)
        assert flops.get_total_flops() == 3 * 2 * counted * 8 * 50


@pytest.mark.parametrize("with_torch", ["make_fx", "jit.trace"])
@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:Converting a tensor")
def test_traced_for_other_targets(with_torch, device, monkeypatch):
    monkeypatch.setattr(_losses, "_MANY_LOGITS", 0)
    x, w, _, all_count = given((40,), 8, 50, torch.float64, device)
    x, w, all_count = x.detach(), w.detach(), all_count.clamp(min=0)
    few_count = all_count.where(torch.arange(40, device=device) < 5, -100)
    for traced, other in itertools.permutations((all_count, few_count)):
        if with_torch == "make_fx":
            graph = make_fx(lambda x, w, target: OF.linear_cross_entropy(x, w, target))(x, w, traced)
        else:
            graph = torch.jit.trace(OF.linear_cross_entropy, (x, w, traced), check_trace=False)
        torch.testing.assert_close(graph(x, w, other), F.cross_entropy(F.linear(x, w), other))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_of_meta_tensors(reduction, monkeypatch):
    """Which have no targets to look at."""
    monkeypatch.setattr(_losses, "_MANY_LOGITS", 0)
    x, w, b, target = given((40,), 8, 50, torch.float32, "meta")
    loss = OF.linear_cross_entropy(x, w, target, linear_bias=b, reduction=reduction)
    assert loss.is_meta and [g.shape for g in torch.autograd.grad(loss, (x, w, b))] == [x.shape, w.shape, b.shape]


def test_no_rows(device):
    """As PyTorch: a mean of nothing is NaN, a sum 0."""
    x, w, _, target = given((0,), 8, 50, torch.float32, device)
    assert OF.linear_cross_entropy(x, w, target).isnan()
    loss = OF.linear_cross_entropy(x, w, target, reduction="sum")
    assert loss == 0 and not any(g.any() for g in torch.autograd.grad(loss, (x, w)))


@pytest.mark.parametrize("many", [1 << 24, 10])
def test_all_are_ignored(many, device, monkeypatch):
    monkeypatch.setattr(_losses, "_MANY_LOGITS", many)
    x, w, b, target = given((40,), 8, 50, torch.float32, device)
    target.fill_(-100)
    loss = OF.linear_cross_entropy(x, w, target, linear_bias=b)
    assert loss.isnan()
    assert not any(g.any() for g in torch.autograd.grad(loss, (x, w, b)))
    assert OF.linear_cross_entropy(x, w, target, reduction="sum") == 0


def test_flops_of_three_products(device):
    x, w, b, target = given((40,), 8, 50, torch.float32, device)
    with FlopCounterMode(display=False) as flops:
        OF.linear_cross_entropy(x, w, target, linear_bias=b).backward()
    assert flops.get_total_flops() == 3 * 2 * 40 * 8 * 50
    with FlopCounterMode(display=False) as flops:
        OF.linear_cross_entropy(x, w, target, linear_bias=b, reduction="none").sum().backward()
    assert flops.get_total_flops() == 4 * 2 * 40 * 8 * 50


def test_autocast(device):
    x, w, _, target = given((64,), 8, 50, torch.float32, device, bias=False)
    with torch.autocast(device, torch.bfloat16):
        ours = OF.linear_cross_entropy(x, w, target)
        theirs = F.cross_entropy(F.linear(x, w).float(), target)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    for mine, wanted in zip(torch.autograd.grad(ours, (x, w)), torch.autograd.grad(theirs, (x, w))):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, wanted, rtol=3e-2, atol=3e-3)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_log_prob(temperature, softcap, device):
    x, w, b, target = given((4, 9), 8, 50, torch.float64, device)
    ours, entropy = OF.linear_log_prob(
        x, w, target, linear_bias=b, temperature=temperature, softcap=softcap, entropy=True
    )
    logits = F.linear(x, w, b)
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    theirs, of_logits = OF.log_prob(logits, target, entropy=True)
    torch.testing.assert_close((ours, entropy), (theirs, of_logits))
    upstream = torch.randn_like(ours), torch.randn_like(entropy)
    torch.testing.assert_close(
        torch.autograd.grad((ours, entropy), (x, w, b), upstream),
        torch.autograd.grad((theirs, of_logits), (x, w, b), upstream),
    )
    assert OF.linear_log_prob(x, w, target).shape == (4, 9)


BAD = [
    ({"reduction": "all"}, ValueError, "expected reduction to be one of"),
    ({"label_smoothing": 2.0}, ValueError, "expected label_smoothing to be between 0 and 1"),
    ({"weight": torch.ones(3)}, RuntimeError, "expected weight of shape \\[7\\]"),
    ({"ignore_index": 0.5}, TypeError, "'ignore_index' must be int, not float"),
    ({"linear_bias": torch.ones(3)}, RuntimeError, "must have shape \\[7\\]"),
    ({"linear_bias": torch.ones(5, 7)}, RuntimeError, "must have one dimension in a line with a contraction"),
    ({"target": torch.zeros(5, dtype=torch.bool)}, TypeError, "expected target to be torch.int64, torch.int32 or"),
    ({"target": torch.zeros(5)}, RuntimeError, "or 7 probabilities, but got torch.float32 of shape \\[5\\]"),
    ({"target": torch.full((5,), 7)}, IndexError, "Target 7 is out of bounds"),
    ({"target": torch.zeros(3, dtype=torch.int64)}, RuntimeError, "expected target of shape \\[5\\]"),
    ({"linear_weight": torch.ones(7, 3)}, RuntimeError, "must have shape \\[N, 4\\]"),
    ({"linear_weight": torch.ones(4)}, RuntimeError, "expected linear_weight of shape \\[C, K\\]"),
    ({"input": 1.0}, TypeError, "argument 'input' must be Tensor, not float"),
    (
        {"input": torch.ones(5, 4, dtype=torch.int64)},
        NotImplementedError,
        "x must be torch.float32, .* got torch.int64",
    ),
    ({"linear_weight": torch.ones(7, 4).to_sparse()}, NotImplementedError, "must be a dense tensor"),
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("bad, kind, message", BAD)
def test_errors(bad, kind, message, training):
    good = {"input": torch.randn(5, 4, requires_grad=training), "linear_weight": torch.randn(7, 4)}
    good["target"] = torch.zeros(5, dtype=torch.int64)
    with pytest.raises(kind, match=message):
        OF.linear_cross_entropy(**{**good, **bad})
    with pytest.raises(ValueError, match="expected temperature to be other than 0"):
        OF.linear_log_prob(**good, temperature=0.0)


@pytest.mark.parametrize("autocast", [False, True])
def test_float16_takes_what_scales_the_loss(autocast, device):
    """Gradients of a mean over many rows are nothing before that, and those of a sum infinite."""
    x, w = torch.randn(8192, 16, device=device), torch.randn(256, 16, device=device) / 20
    x[:, 3] += 30
    target = torch.randint(100, (8192,), device=device)
    target[:4000] = 7

    def gradient(function, reduction, scale, dtype):
        given = [t.to(dtype, copy=True).requires_grad_() for t in (x, w)]
        with torch.autocast(torch.device(device).type, torch.float16, enabled=autocast and dtype != torch.float64):
            loss = function(*given, target, reduction=reduction)
            loss = loss if reduction == "mean" else loss / 8192
        return [g.double() / scale for g in torch.autograd.grad(loss * scale, given)]

    def of_logits(x, w, target, reduction):
        return F.cross_entropy(
            F.linear(x, w).to(torch.float64 if x.dtype == torch.float64 else torch.float32), target, reduction=reduction
        )

    for reduction, scale in itertools.product(("mean", "sum"), (65536.0, 1.0)):
        exact = gradient(of_logits, reduction, 1.0, torch.float64)
        dtype = torch.float32 if autocast else torch.float16
        ours, theirs = (gradient(f, reduction, scale, dtype) for f in (OF.linear_cross_entropy, of_logits))
        for mine, other, right in zip(ours, theirs, exact):
            assert (mine - right).norm() <= 1.5 * (other - right).norm() + 1e-4 * right.norm()


def test_x_that_is_made_of_the_matrix(device):
    """As with tied embeddings: gradients again, and those that are to be differentiated, are of each once."""
    w = torch.randn(11, 8, dtype=torch.float64, device=device, requires_grad=True)
    target = torch.randint(11, (7,), device=device)

    def of(function, w):
        return function(w[:7].tanh(), w, target)

    theirs, ours = (of(f, w) for f in (lambda x, w, t: F.cross_entropy(F.linear(x, w), t), OF.linear_cross_entropy))
    (expected,) = torch.autograd.grad(theirs, w, create_graph=True)
    (found,) = torch.autograd.grad(ours, w, create_graph=True)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        *[torch.autograd.grad(g.square().sum(), w, retain_graph=True) for g in (found, expected)]
    )
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(ours, w, retain_graph=True)[0], expected)
    torch.testing.assert_close(torch.autograd.grad(ours, w)[0], expected)


def test_several_gradients_at_once(device):
    x, w, _, target = given((6,), 4, 7, torch.float64, device)
    upstream = torch.randn(3, dtype=torch.float64, device=device)
    ours, theirs = OF.linear_cross_entropy(x, w, target), F.cross_entropy(F.linear(x, w), target)
    torch.testing.assert_close(
        *[torch.autograd.grad(loss, (x, w), upstream, is_grads_batched=True) for loss in (ours, theirs)]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [0, 6])
def test_no_target_that_counts(rows, dtype, device):
    """The mean is NaN, and gradients are zero."""
    x, w = torch.randn(rows, 4, device=device).to(dtype), torch.randn(7, 4, device=device).to(dtype)
    target = torch.full((rows,), -100, device=device)
    for function in (OF.linear_cross_entropy, torch.compile(OF.linear_cross_entropy, backend="aot_eager")):
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        loss = function(*leaves, target)
        assert loss.isnan()
        assert all(not g.any() for g in torch.autograd.grad(loss, leaves))


def test_exported(device):
    """Gradients are not made in forward, which may be all that runs."""
    x, w, b, target = given((6,), 4, 7, torch.float64, device)

    class Head(torch.nn.Module):
        def forward(self, x, w, b, target):
            return OF.linear_cross_entropy(x, w, target, linear_bias=b)

    exported = torch.export.export(Head(), (x, w, b, target))
    assert not any("with_gradients" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(x, w, b, target), Head()(x, w, b, target))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factor", [1.0, -2.5])
def test_gradients_are_multiplied_in_place(factor, dtype, device):
    if device == "cpu":
        pytest.skip("an operator of CUDA alone")
    gradient = torch.randn(50, 264, device=device).to(dtype)
    expected, memory = (gradient.float() * factor).to(dtype), gradient.data_ptr()
    torch.ops.onepass.times_(gradient, torch.full((1, 1), factor, device=device))
    assert gradient.data_ptr() == memory
    torch.testing.assert_close(gradient, expected, rtol=0, atol=0)
