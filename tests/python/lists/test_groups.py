"""Tensors that are elsewhere each, in one call: against float64, for every way in which they and operands may come."""

import pytest
import torch
import torch._dynamo.backends.common

import onepass
from list_calls import FEATURES, LEADING, LINES, ROWS, Call, check, gradients, launches_of, ops_of, upstream

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


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


@pytest.mark.parametrize("line", ROWS)
@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_two_operators(line, stack, device):
    call = Call(line, [(2, 3)] * 4, own="some", device=device)

    def run():
        kinds = call.together(stack)
        return gradients(kinds, call.leaves(), upstream(kinds))

    _, ops = ops_of(run)
    assert ops == ["group_forward", "group_backward"]


@pytest.mark.parametrize("line", ["bias | gelu", "add | layer_norm | scale"])
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
        some = [(r, u) for kind, up in zip(call.together(), ups) for r, u in zip(kind, up) if r.requires_grad]
        (got,) = torch.autograd.grad([r for r, _ in some], [t], [u for _, u in some])
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


def test_compiled_for_any_number_of_rows():
    line = "add | rms_norm(0.0123) | scale"  # nothing is known of it yet
    graphs = []

    def noted(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if "onepass" in str(node.target)])
        return graph

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=noted, bw_compiler=noted)
    compiled = torch.compile(lambda xs, *o: onepass.fused(line, xs, *o), fullgraph=True, dynamic=True, backend=backend)
    for more in range(3):
        call = Call(line, [(5 + more,), (7 + more,)], own="some")
        ys, expected = compiled(call.xs, *call.operands), call.line(call.xs, *call.operands)
        ups = [torch.randn_like(y) for y in ys]
        for a, b in zip(gradients([ys], call.leaves(), [ups]), gradients([expected], call.leaves(), [ups])):
            torch.testing.assert_close(a, b)
    assert graphs == [["onepass.group_forward.default"], ["onepass.group_backward.default"]]
    torch._dynamo.reset()


def test_autocast():
    call = Call(FEATURES, [(4,), (2, 3)], dtype=torch.bfloat16)
    call.operands[0] = call.operands[0].detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        ys, ops = ops_of(lambda: call.line(call.xs, *call.operands))
        expected = [call.line(x, *call.operands) for x in call.xs]
    assert ops == ["linear_forward"]
    assert all(torch.equal(a, b) for a, b in zip(ys, expected))


@pytest.mark.parametrize("features", [3, 300])
def test_lines_with_linear_are_one_call_of_a_copy(features):
    w = torch.randn(features, 64, requires_grad=True)
    xs = [torch.randn(n, 64, requires_grad=True) for n in (3, 5)]
    ys, ops = ops_of(lambda: onepass.fused("rms_norm | linear", xs, w))
    assert ops == ["linear_forward"]
    for x, y in zip(xs, ys):
        torch.testing.assert_close(y, onepass.fused("rms_norm | linear", x, w))
    with pytest.raises(RuntimeError, match="takes one tensor in a call"):
        torch.ops.onepass.group_forward.default(xs, [w], "rms_norm | linear", None, False, 0, False)


@pytest.mark.quick
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


@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("line", [LINES[0], LINES[1], LINES[4], LINES[5]])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_one_launch(line, stack):
    leading = [(1024,)] * 16 if stack else [(1024,), (1,), (33, 5), *[(i, 7) for i in range(2, 15)]]
    call = Call(line, leading, 256, device="cuda")
    ups = upstream(call.together(stack))
    gradients(call.together(stack), call.leaves(), ups)  # kernels are built
    kinds, forward = launches_of(lambda: call.together(stack))
    grads, backward = launches_of(lambda: gradients(kinds, call.leaves(), ups))
    columns = any(t.dim() == 1 for t in call.leaves())
    assert len([name for name in forward if "onepass" in name]) == 1
    assert len([name for name in backward if "onepass" in name]) == 1 + columns
    assert len(grads) == len(call.leaves())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("line", [LINES[5], FEATURES])
def test_in_a_cuda_graph(line):
    call = Call(line, LEADING, own="some", device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ups = upstream(call.together())
        gradients(call.together(), call.leaves(), ups)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kinds = call.together()
        captured = gradients(kinds, call.leaves(), ups)
    with torch.no_grad():
        for x in call.xs:
            x.normal_()
    graph.replay()
    again = call.together()
    for a, b in zip(sum(kinds, []), sum(again, [])):
        assert torch.equal(a, b)
    for a, b in zip(captured, gradients(again, call.leaves(), ups)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("columns", [1 << 15, 1 << 18, 1 << 20])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_long_rows(columns):
    check(Call("layer_norm(1e-5) | scale | bias", [(2,), (5,), (1,)], columns, own="some", device="cuda"))
