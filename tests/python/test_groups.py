"""Tensors that are elsewhere each, in one call: against float64, for every way in which they and operands may come."""

import pytest
import torch

import onepass
from helpers import Recorder, check_error

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
FEATURES = "layer_norm(0) | tanh | linear | bias | relu"
LINES = [
    "gelu",
    "bias | gelu_tanh",
    "gate(silu)",
    "bias | scale | add",
    "layer_norm(1e-5) | scale | bias",
    "bias | add | keep | rms_norm(1e-6) | scale",
    "mul(0.125) | mask | softmax",
    "mul(0.5) | causal | softmax",
    FEATURES,
    "add | keep | rms_norm(1e-6) | scale | linear | bias | keep | silu",
    "linear",
]
LEADING = [(3,), (2, 5), (1,), (0,), (1, 2, 4)]


def _misaligned(x):
    return x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)


def _strided(x):
    return x.new_zeros((*x.shape[:-1], x.shape[-1] + 3))[..., : x.shape[-1]].copy_(x)


def _transposed(x):
    return x.transpose(0, -2).contiguous().transpose(0, -2)


LAYOUTS = {
    "dense": [lambda x: x],
    "misaligned": [_misaligned],
    "some misaligned": [lambda x: x, _misaligned],
    "strided": [_strided],
    "each its own": [lambda x: x, _misaligned, _strided, _transposed],
}


class Call:
    """Tensors for a line: so many x of these leading shapes, operands for all or for each."""

    def __init__(
        self, line, leading, columns=64, *, own="", dtype=torch.float32, operand_dtype=None, device="cpu", seed=0
    ):
        self.line = onepass.Line(line)
        generator = torch.Generator().manual_seed(seed)
        if "causal" in line:
            leading = [s if len(s) > 0 else (1,) for s in leading]

        def leaf(shape, of_dtype, scale=1.0):
            t = (torch.randn(shape, generator=generator) * scale).to(device, of_dtype)
            return t.requires_grad_(of_dtype.is_floating_point)

        self.xs = [leaf((*s, columns), dtype) for s in leading]
        self.operands = []
        width = columns
        for i, word in enumerate(word for word in self.line.words if word.operand != "none"):
            count = len(leading) if own == "all" or (own == "some" and i % 2 == 0) else None
            if word.operand == "matrix":
                made = [leaf((3, columns), dtype, columns**-0.5) for _ in range(count or 1)]
                width = 3
            elif word.operand == "column":
                made = [leaf((width,), operand_dtype or dtype) for _ in range(count or 1)]
            elif word.kind == "mask":
                made = [torch.rand((width,), generator=generator).to(device) > 0.3 for _ in range(count or 1)]
            else:
                shapes = [(*s, width) for s in leading] if count else [(width,)]
                made = [leaf(s, operand_dtype or dtype) for s in shapes]
            self.operands.append(made if count else made[0])

    def leaves(self):
        flat = [*self.xs]
        for o in self.operands:
            flat += o if isinstance(o, list) else [o]
        return [t for t in flat if t.requires_grad]

    def run(self, of, stack=False, layouts=(lambda x: x,)):
        """By kinds of result, one for each tensor."""
        xs = [layouts[i % len(layouts)](x) for i, x in enumerate(self.xs)]
        results = of(xs, self.operands)
        return list(results) if self.line.keeps else [results]

    def together(self, stack=False, layouts=(lambda x: x,)):
        """Of one call."""
        kinds = self.run(lambda xs, o: self.line(xs, *o, stack=stack), stack, layouts)
        return [list(k) for k in kinds]

    def each(self, of):
        """Of one call for each."""
        results = [of(x, *[o[i] if isinstance(o, list) else o for o in self.operands]) for i, x in enumerate(self.xs)]
        return list(map(list, zip(*results))) if self.line.keeps else [results]

    def double(self):
        other = object.__new__(Call)
        other.line = self.line

        def wide(t):
            if isinstance(t, list):
                return [wide(each) for each in t]
            return t.detach().double().requires_grad_() if t.is_floating_point() else t

        other.xs, other.operands = wide(self.xs), wide(self.operands)
        return other


def upstream(kinds, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(r.shape, generator=generator).to(r.device, r.dtype) for r in kind] for kind in kinds]


def gradients(kinds, leaves, ups):
    flat = [r for kind in kinds for r in kind]
    return torch.autograd.grad(flat, leaves, [u for kind in ups for u in kind], allow_unused=True)


def check(call, stack=False, layouts=(lambda x: x,), slack=4.0):
    """Values and gradients, against PyTorch's in float64 and in the dtype; results are those of a call for each."""
    ours, theirs = call.together(stack, layouts), call.each(call.line.reference)
    wide = call.double()
    exact = wide.each(wide.line.reference)
    for k, (a, b, c) in enumerate(zip(ours, theirs, exact)):
        for i in range(len(call.xs)):
            assert a[i].shape == b[i].shape and a[i].dtype == b[i].dtype
            check_error(a[i], b[i], c[i], f"result {k} of tensor {i}", slack=slack)
    ups = upstream(ours)
    wide_ups = [[u.double() for u in kind] for kind in ups]
    for t, a, b, c in zip(
        call.leaves(),
        gradients(ours, call.leaves(), ups),
        gradients(theirs, call.leaves(), ups),
        gradients(exact, wide.leaves(), wide_ups),
    ):
        assert a.shape == t.shape and a.dtype == t.dtype
        check_error(a, b, c, f"gradient of {tuple(t.shape)}", slack=slack)


def ops_of(run):
    recorder = Recorder()
    with recorder:
        result = run()
    return result, [func.name().removeprefix("onepass::") for func, _, _ in recorder.calls]


@pytest.mark.parametrize("own", ["", "some", "all"])
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("device", DEVICES)
def test_values_and_gradients(line, own, device):
    check(Call(line, LEADING, own=own, device=device))


@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("line", [LINES[0], LINES[1], LINES[5], FEATURES])
@pytest.mark.parametrize("device", DEVICES)
def test_layouts(line, layouts, device):
    check(Call(line, [(4, 3), (2, 5), (1, 7), (3, 1), (5, 4)], device=device), layouts=layouts)


@pytest.mark.parametrize("line", [LINES[1], LINES[4], LINES[5], FEATURES])
@pytest.mark.parametrize("columns", [1, 7, 1000, 3001])
@pytest.mark.parametrize("device", DEVICES)
def test_row_lengths(line, columns, device):
    if "norm" in line and columns == 1:
        pytest.skip("a norm of one number has no gradient but rounding errors")
    check(Call(line, [(3,), (40,), (300,)], columns, own="some", device=device))


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, None), (torch.float16, torch.float32), (torch.float64, None)])
@pytest.mark.parametrize("line", [LINES[1], LINES[5], LINES[3]])
@pytest.mark.parametrize("device", DEVICES)
def test_dtypes(line, dtypes, device):
    check(Call(line, LEADING, own="some", dtype=dtypes[0], operand_dtype=dtypes[1], device=device))


@pytest.mark.parametrize("line", [LINES[1], LINES[4], FEATURES])
@pytest.mark.parametrize("count", [1, 2, 40, 150])
@pytest.mark.parametrize("device", DEVICES)
def test_any_number_of_them(line, count, device):
    check(Call(line, [(1 + i % 5,) for i in range(count)], own="some", device=device))


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("device", DEVICES)
def test_stacked(line, device):
    call = Call(line, [(2, 3)] * 5, own="some", device=device)
    check(call, stack=True)
    with torch.no_grad():
        stacked, lists = call.line(call.xs, *call.operands, stack=True), call.line(call.xs, *call.operands)
    for kind, some in zip(stacked, lists) if call.line.keeps else [(stacked, lists)]:
        assert kind.is_contiguous() and torch.equal(kind, torch.stack(some))


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_two_operators(line, stack, device):
    call = Call(line, [(2, 3)] * 4, own="some", device=device)

    def run():
        kinds = call.together(stack)
        return gradients(kinds, call.leaves(), upstream(kinds))

    _, ops = ops_of(run)
    assert ops == ["group_forward", "group_backward"]


@pytest.mark.parametrize("line", ["bias | gelu", "add | layer_norm | scale", FEATURES])
def test_nothing_is_copied(line):
    call = Call(line, [(20, 3), (5,), (7, 2)], own="some")
    ups = upstream(call.together())
    with torch.profiler.profile() as profile:
        gradients(call.together(), call.leaves(), ups)
    moving = ("aten::cat", "aten::stack", "aten::copy_", "aten::clone")
    assert [e.key for e in profile.key_averages() if e.key in moving] == []


@pytest.mark.parametrize("line", ["dropout(0.5) | mul(1.0)", "bias | dropout(0.3) | rms_norm | dropout(0.1)"])
@pytest.mark.parametrize("columns", [64, 13])
@pytest.mark.parametrize("device", DEVICES)
def test_dropout_counts_through_all(line, columns, device):
    call = Call(line, [(6,)] * 3, columns, device=device)
    whole = torch.stack([x.detach() for x in call.xs]).requires_grad_()
    torch.manual_seed(0)
    ours = call.line(call.xs, *call.operands, stack=True)
    torch.manual_seed(0)
    theirs = call.line(whole, *call.operands)
    assert torch.equal(ours, theirs)
    up = torch.randn_like(ours)
    assert torch.equal(torch.stack(torch.autograd.grad(ours, call.xs, up)), *torch.autograd.grad(theirs, whole, up))
    shapes = [(4,), (1, 9), (5,)]
    pieces = [p.reshape(*s, columns) for p, s in zip(whole.detach().view(18, columns).split([4, 9, 5]), shapes)]
    torch.manual_seed(0)
    uneven = call.line([p.clone() for p in pieces], *call.operands)
    assert torch.equal(torch.cat([y.reshape(-1, columns) for y in uneven]), theirs.view(18, columns))


@pytest.mark.parametrize("line", ["bias | dropout(0.5)", "dropout(0.5)"])
def test_without_dropout(line):
    call = Call(line, [(3,), (2, 2)])
    for y, x in zip(call.line(call.xs, *call.operands, training=False), call.xs):
        assert torch.equal(y, x + (call.operands[0] if call.operands else 0))


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_some(line, device):
    call = Call(line, [(3,), (2, 2), (5,)], own="all", device=device)
    wanted = call.leaves()
    kinds = call.together()
    ups = upstream(kinds)
    expected = gradients(kinds, wanted, ups)
    for i, t in enumerate(wanted):
        for other in wanted:
            other.requires_grad_(other is t)
        (got,) = gradients(call.together(), [t], ups)
        torch.testing.assert_close(got, expected[i])


@pytest.mark.parametrize("line", [LINES[1], LINES[5], FEATURES])
@pytest.mark.parametrize("device", DEVICES)
def test_results_without_gradient(line, device):
    call = Call(line, [(3,), (2, 2), (5,)], device=device)
    kinds, each = call.together(), call.each(call.line)
    leaves = [call.xs[0], call.xs[1], *call.leaves()[3:]]
    up = torch.randn_like(kinds[0][1])
    ours = torch.autograd.grad(kinds[0][1], leaves, up, allow_unused=True)
    theirs = torch.autograd.grad(each[0][1], leaves, up, allow_unused=True)
    assert ours[0] is None or not ours[0].any()
    for a, b in list(zip(ours, theirs))[1:]:
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_one_tensor_many_times(device):
    x = torch.randn(5, 32, device=device, requires_grad=True)
    g = torch.randn(32, device=device, requires_grad=True)
    ys = onepass.fused("rms_norm | scale", [x, x, x[:2]], g)
    expected = [onepass.fused("rms_norm | scale", t, g) for t in (x, x, x[:2])]
    ups = [torch.randn_like(y) for y in ys]
    for a, b in zip(torch.autograd.grad(ys, (x, g), ups), torch.autograd.grad(expected, (x, g), ups)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("line", [LINES[1], LINES[4], FEATURES])
@pytest.mark.parametrize("device", DEVICES)
def test_the_same_bits_every_time(line, device):
    call = Call(line, [(300,), (7, 40), (1000,)], own="some", device=device)
    runs = []
    for _ in range(3):
        kinds = call.together()
        runs.append([*kinds[0], *gradients(kinds, call.leaves(), upstream(kinds))])
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again))
    each = call.each(call.line)
    assert all(torch.equal(a, b) for a, b in zip(runs[0], each[0])), "a tensor's result depends on the others"


def test_gradcheck():
    call = Call("bias | add | keep | rms_norm(0.1) | scale", [(2,), (1, 3)], 5, own="some", dtype=torch.float64)
    leaves = call.leaves()

    def of(*tensors):
        tensors = list(tensors)
        xs = [tensors.pop(0) for _ in call.xs]
        operands = [[tensors.pop(0) for _ in o] if isinstance(o, list) else tensors.pop(0) for o in call.operands]
        y, kept = call.line(xs, *operands)
        return *y, *kept

    assert torch.autograd.gradcheck(of, leaves)


def test_is_differentiated_once():
    call = Call("bias | gelu", [(2,), (3,)])
    kinds = call.together()
    grads = torch.autograd.grad(sum(y.sum() for y in kinds[0]), call.xs, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        sum(g.sum() for g in grads).backward()


def test_torch_func():
    call = Call("bias | rms_norm | scale", [(2,), (3,)], own="some")

    def loss(xs, operands):
        return sum(y.square().sum() for y in call.line(xs, *operands))

    ours = torch.func.grad(loss)(call.xs, call.operands)
    for a, b in zip(ours, torch.autograd.grad(loss(call.xs, call.operands), call.xs)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("line", [LINES[1], LINES[3], LINES[5], FEATURES])
def test_compiled(line, stack):
    leading = [(2, 3)] * 3 if stack else [(3,), (2, 2), (1, 5)]
    call = Call(line, leading, own="some")
    parsed = call.line.text

    def of(xs, operands):
        results = onepass.fused(parsed, xs, *operands, stack=stack)
        return results if isinstance(results, tuple) else (results,)

    compiled = torch.compile(of, fullgraph=True, backend="aot_eager")
    ours, theirs = ([list(k) for k in f(call.xs, call.operands)] for f in (compiled, of))
    ups = upstream(ours)
    for a, b in zip(sum(ours, []), sum(theirs, [])):
        assert torch.equal(a, b)
    for a, b in zip(gradients(ours, call.leaves(), ups), gradients(theirs, call.leaves(), ups)):
        torch.testing.assert_close(a, b)
    torch._dynamo.reset()


def test_autocast():
    call = Call(FEATURES, [(4,), (2, 3)], dtype=torch.bfloat16)
    call.operands[0] = call.operands[0].detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        ys, ops = ops_of(lambda: call.line(call.xs, *call.operands))
        expected = [call.line(x, *call.operands) for x in call.xs]
    assert ops == ["group_forward"]
    assert all(torch.equal(a, b) for a, b in zip(ys, expected))


def test_other_lines_with_linear():
    w = torch.randn(300, 64, requires_grad=True)
    xs = [torch.randn(n, 64, requires_grad=True) for n in (3, 5)]
    ys = onepass.fused("rms_norm | linear", xs, w)
    for x, y in zip(xs, ys):
        torch.testing.assert_close(y, onepass.fused("rms_norm | linear", x, w))


def test_meta_op_checks():
    call = Call("bias | rms_norm | scale", [(2,), (3,)], own="some")
    flat = [*call.xs, *call.operands[0], call.operands[1]]
    flat = [t.detach() for t in flat]
    arguments = (flat[:2], flat[2:], call.line.text, None, True, 1, False)
    torch.library.opcheck(
        torch.ops.onepass.group_forward.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


def test_errors():
    x = torch.randn(3, 64)
    g = torch.randn(64)
    with pytest.raises(RuntimeError, match=r"\(g of 'scale'\) must have shape \[64\].*got \[32\]"):
        onepass.fused("rms_norm | scale", [x, x.clone()], [g, g[:32]])
    with pytest.raises(RuntimeError, match="elements of g of 'scale' must have one dtype"):
        onepass.fused("rms_norm | scale", [x, x.clone()], [g, g.double()])
    with pytest.raises(TypeError, match="g of 'scale' must be Tensor, not int"):
        onepass.fused("rms_norm | scale", [x, x.clone()], 3)
    with pytest.raises(RuntimeError, match="must be torch.float32"):
        onepass.fused("rms_norm", [x.int(), x.int()])
    with pytest.raises(RuntimeError, match="x's shape"):
        onepass.fused("add", [x, x.clone()], [x, x[:2]])
    with pytest.raises(RuntimeError, match="at least 2 dimensions"):
        onepass.fused("causal | softmax", [x[0], x[0].clone()])
    op = torch.ops.onepass.group_forward.default
    with pytest.raises(RuntimeError, match="one row length"):
        op([x, x[:, :32].contiguous()], [], "rms_norm", None, False, 0, False)
    with pytest.raises(RuntimeError, match="takes 2 operands for 2 tensors, got 1"):
        op([x, x], [g], "rms_norm | scale", None, False, 1, False)
