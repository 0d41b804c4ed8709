"""Lists of tensors: one call for all of them, whether they are pieces of one tensor or not."""

import pytest
import torch

import onepass
from helpers import Recorder, check_error

STACK = "layer_norm(0) | tanh | linear | bias | relu"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
PIECES = {
    "split": lambda x: [t.view(40, 64) for t in torch.split(x.view(-1), 40 * 64)],
    "chunk": lambda x: x.view(5 * 40, 64).chunk(5),
    "unbind": lambda x: x.view(5, 40, 64).unbind(),
    "unbind, dim 1": lambda x: x.view(40, 5, 64).unbind(1),
    "columns": lambda x: x.view(40, 5 * 64).split(64, dim=-1),
    "select": lambda x: [x.view(5, 40, 64)[i] for i in range(5)],
    "slices": lambda x: [x.view(5, 40, 64)[i : i + 1] for i in range(5)],
    "some": lambda x: list(x.view(5, 40, 64).unbind())[1:4],
    "rows apart": lambda x: [x.view(40, 5 * 64)[:, 64 * i : 64 * i + 32] for i in range(5)],
}


def tensors(device, columns=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    normal = [torch.randn(s, generator=generator) for s in ((5 * 40 * 64,), (1, columns), (1,))]
    normal[1] /= columns**0.5
    return [t.to(device).requires_grad_() for t in normal]


def calls_of(run):
    recorder = Recorder()
    with recorder:
        result = run()
    return result, [func.name() for func, _, _ in recorder.calls if "joined" not in func.name()]


def copies_of(run):
    """How many of PyTorch's operators would move whole tensors."""
    with torch.profiler.profile() as profile:
        run()
    moving = ("aten::cat", "aten::stack", "aten::copy_", "aten::clone", "aten::zeros", "aten::add_")
    return [e.key for e in profile.key_averages() if e.key in moving]


@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize("device", DEVICES)
def test_pieces_of_one_tensor(pieces, stack, device):
    x, w, b = tensors(device, 32 if pieces is PIECES["rows apart"] else 64)
    ys, calls = calls_of(lambda: onepass.fused(STACK, pieces(x), w, b, stack=stack))
    assert calls == ["onepass::linear_forward"]
    separately = [onepass.fused(STACK, t, w, b) for t in pieces(x)]
    expected = torch.stack(separately)
    assert isinstance(ys, torch.Tensor) if stack else isinstance(ys, list)
    together = ys if stack else torch.stack(ys)
    assert torch.equal(together, expected)
    up = torch.randn_like(expected)
    ours = torch.autograd.grad(together, (x, w, b), up)
    theirs = torch.autograd.grad(expected, (x, w, b), up)
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    exact = torch.stack([onepass.Line(STACK).reference(t, *wide[1:]) for t in pieces(wide[0])])
    for a, c, e in zip(ours, theirs, torch.autograd.grad(exact, wide, up.double())):
        check_error(a, c, e, "gradient", slack=4.0)


@pytest.mark.parametrize("pieces", ["split", "chunk", "unbind", "select"])
def test_pieces_cost_no_copy(pieces):
    x, w, b = tensors("cpu")
    up = torch.randn_like(onepass.fused(STACK, PIECES[pieces](x), w, b, stack=True))

    def run():
        y = onepass.fused(STACK, PIECES[pieces](x), w, b, stack=True)
        torch.autograd.grad(y, (x, w), up)

    assert copies_of(run) == []


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_of_their_own(device):
    xs = [torch.randn(7, 64, device=device, requires_grad=True) for _ in range(3)]
    _, w, b = tensors(device)
    ys, calls = calls_of(lambda: onepass.fused(STACK, xs, w, b))
    assert calls == ["onepass::linear_forward"]
    expected = [onepass.fused(STACK, x, w, b) for x in xs]
    ups = [torch.randn_like(y) for y in ys]
    for a, c in zip(ys, expected):
        assert torch.equal(a, c)
    ours, theirs = (torch.autograd.grad(y, (*xs, w, b), ups) for y in (ys, expected))
    for a, c in zip(ours, theirs):
        torch.testing.assert_close(a, c)


@pytest.mark.parametrize("device", DEVICES)
def test_any_leading_shapes(device):
    xs = [torch.randn(*s, 64, device=device, requires_grad=True) for s in ((3,), (2, 5), (), (0,), (1, 1, 4))]
    rs = [torch.randn(x.shape, device=device, requires_grad=True) for x in xs]
    line = "add | keep | rms_norm(1e-6) | scale"
    g = torch.randn(64, device=device, requires_grad=True)
    ys, kept = onepass.fused(line, xs, rs, g)
    expected = [onepass.fused(line, x, r, g) for x, r in zip(xs, rs)]
    for i, (y, k) in enumerate(expected):
        assert torch.equal(ys[i], y) and torch.equal(kept[i], k)
    loss = sum(y.square().sum() + k.sum() for y, k in zip(ys, kept))
    other = sum(y.square().sum() + k.sum() for y, k in expected)
    for a, c in zip(torch.autograd.grad(loss, (*xs, *rs, g)), torch.autograd.grad(other, (*xs, *rs, g))):
        torch.testing.assert_close(a, c)


@pytest.mark.parametrize("device", DEVICES)
def test_operands_for_each(device):
    xs = [torch.randn(6, 64, device=device, requires_grad=True) for _ in range(3)]
    gs = [torch.randn(64, device=device, requires_grad=True) for _ in range(3)]
    ys = onepass.fused("rms_norm(1e-6) | scale", xs, gs)
    for x, g, y in zip(xs, gs, ys):
        assert torch.equal(y, onepass.fused("rms_norm(1e-6) | scale", x, g))
    torch.stack(ys).sum().backward()
    assert all(t.grad is not None for t in (*xs, *gs))


def test_hooks_are_heard():
    x, w, b = tensors("cpu")
    heard = []
    halves = torch.split(x, 5 * 20 * 64)
    halves[0].register_hook(lambda g: heard.append(g.shape))
    pieces = [t.view(-1, 64) for t in halves]  # the hook is on what they are views of
    onepass.fused(STACK, pieces, w, b, stack=True).sum().backward()
    assert heard == [halves[0].shape]


def test_what_was_written_since_counts():
    x = torch.randn(4, 8, 64, requires_grad=True)
    base = x * 1
    first, second = base[0], base[1]
    first.mul_(2)
    y = onepass.fused("layer_norm(1e-3) | scale", [first, second], torch.ones(64), stack=True)
    expected = onepass.fused("layer_norm(1e-3) | scale", torch.stack([x[0] * 2, x[1]]), torch.ones(64))
    torch.testing.assert_close(y, expected)
    up = torch.randn_like(y)
    torch.testing.assert_close(torch.autograd.grad(y, x, up), torch.autograd.grad(expected, x, up))


def test_gradcheck():
    x = torch.randn(3 * 4 * 6, dtype=torch.float64, requires_grad=True)
    w, b = torch.randn(1, 6, dtype=torch.float64, requires_grad=True), torch.randn(1, dtype=torch.float64)
    line = "layer_norm(0.1) | tanh | linear | bias"
    assert torch.autograd.gradcheck(
        lambda x, w: onepass.fused(line, [t.view(4, 6) for t in torch.split(x, 24)], w, b, stack=True), (x, w)
    )


def test_dropout_counts_through_all():
    x = torch.randn(5, 40, 64)
    torch.manual_seed(0)
    whole = onepass.fused("dropout(0.5) | mul(1.0)", x)
    torch.manual_seed(0)
    assert torch.equal(onepass.fused("dropout(0.5) | mul(1.0)", x.unbind(), stack=True), whole)
    torch.manual_seed(0)
    assert torch.equal(torch.stack(onepass.fused("dropout(0.5) | mul(1.0)", [t.clone() for t in x])), whole)


def test_one_and_none():
    x = torch.randn(3, 64, requires_grad=True)
    (y,) = onepass.fused("rms_norm", [x])
    assert torch.equal(y, onepass.fused("rms_norm", x))
    with torch.no_grad():
        assert onepass.fused("rms_norm", (x, x), stack=True).shape == (2, 3, 64)
    with pytest.raises(RuntimeError, match="non-empty"):
        onepass.fused("rms_norm", [])


def test_errors():
    x = torch.randn(3, 64)
    with pytest.raises(TypeError, match="element 1 of x must be Tensor, not int"):
        onepass.fused("rms_norm", [x, 1])
    with pytest.raises(RuntimeError, match=r"one row length, got \[32\] for element 1"):
        onepass.fused("rms_norm", [x, x[:, :32]])
    with pytest.raises(RuntimeError, match="one dtype"):
        onepass.fused("rms_norm", [x, x.double()])
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        onepass.fused("rms_norm", [x, x[:2]], stack=True)
    with pytest.raises(RuntimeError, match="a list of 2 as x is, got 1"):
        onepass.fused("rms_norm | scale", [x, x], [x[0]])
    with pytest.raises(TypeError, match="takes 1 operands"):
        onepass.fused("rms_norm | scale", [x, x])
    with pytest.raises(TypeError, match="for a list"):
        onepass.fused("rms_norm", x, stack=True)


@pytest.mark.parametrize("fullgraph", [True])
def test_compiled(fullgraph):
    x, w, b = tensors("cpu")

    def of(x, w, b):
        return onepass.fused(STACK, [t.view(40, 64) for t in torch.split(x, 40 * 64)], w, b, stack=True)

    expected = of(x, w, b)
    y = torch.compile(of, fullgraph=fullgraph, backend="aot_eager")(x, w, b)
    assert torch.equal(y, expected)
    up = torch.randn_like(y)
    for a, c in zip(torch.autograd.grad(y, (x, w, b), up), torch.autograd.grad(expected, (x, w, b), up)):
        torch.testing.assert_close(a, c)
