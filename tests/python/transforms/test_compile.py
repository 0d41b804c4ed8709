"""torch.compile, export and autocast: one graph, few recompilations, eager's numbers; opcheck for every operator."""

import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

import onepass
import onepass.functional as F
from helpers import Recorder, as_tuple, make_inputs, upstream
from onepass._operators import fake

LINES = [
    "bias | gelu",
    "gate(silu)",
    "layer_norm(1e-5) | scale | bias | gelu",
    "add | keep | rms_norm(1e-6) | scale",
    "mul(0.125) | causal | softmax",
    "scores | mul(0.125) | mask | softmax",
    "scores | mul(0.125) | mask | softmax | dropout(0.1)",
    "bias | dropout(0.1) | add | keep | layer_norm(1e-5) | scale | bias",
]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(function, tensors):
    """Results and gradients of sum(result · weight), the weights a function of the shapes."""
    leaves = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in tensors]
    torch.manual_seed(5)
    results = as_tuple(function(*leaves))
    return results, torch.autograd.grad(results, [t for t in leaves if t.requires_grad], upstream(results))


def assert_same(function, compiled, tensors):
    for ours, expected in zip(step(compiled, tensors), step(function, tensors)):
        for a, b in zip(ours, expected, strict=True):
            assert a.dtype == b.dtype and a.stride() == b.stride()
            assert torch.equal(a, b)


@pytest.mark.parametrize("line", LINES)
def test_fullgraph_forward_and_backward(line, device):
    function = functools.partial(onepass.fused, line)
    inputs = make_inputs(line, (6, 5, 64), torch.float32, device)
    assert_same(function, torch.compile(function, fullgraph=True, backend="aot_eager"), inputs.tensors)


@pytest.mark.parametrize("line", ["layer_norm(1e-5) | scale | bias", "bias | dropout(0.1) | add"])
def test_inductor(line, device):
    """With work for Inductor before and behind the line, in fp32 and in a permuted layout."""
    inputs = make_inputs(line, (12, 64), torch.float32, device)

    def function(x, *operands):
        return torch.sin(onepass.fused(line, x.t().contiguous().t() * 2, *operands))

    compiled = torch.compile(function, fullgraph=True)
    for ours, expected in zip(step(compiled, inputs.tensors), step(function, inputs.tensors)):
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_inductor_knows_all_operators():
    """It does not find out by itself: torch 2.11 writes down all that an operator's arguments are made of then."""
    from torch._inductor.lowering import lowerings

    torch.compile(lambda x: onepass.fused("gelu", x))(torch.randn(3, 8))
    ours = [getattr(torch.ops.onepass, name).default for name in fake.names]
    assert ours and all(operator in lowerings for operator in ours)


def test_a_line_object_in_a_compiled_function(device):
    line = onepass.Line("bias | gelu")
    x, b = torch.randn(4, 8, device=device), torch.randn(8, device=device)
    compiled = torch.compile(lambda x, b: line(x, b), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, b), line(x, b))


def test_a_line_first_seen_while_compiling(device):
    """Nothing parsed it before; its kernel is built then, too."""
    x, r = torch.randn(4, 8, device=device), torch.randn(4, 8, device=device)
    text = "  relu|add  "
    compiled = torch.compile(lambda x, r: onepass.fused(text, x, r), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, r), torch.relu(x) + r)


NAMED = {
    "layer_norm": lambda x, r, w, b: F.layer_norm(x, (64,), w, b, activation="gelu"),
    "layer_norm over two dimensions": lambda x, r, w, b: F.layer_norm(x, x.shape[1:], None, None),
    "rms_norm": lambda x, r, w, b: F.rms_norm(x, (64,), w),
    "add_layer_norm": lambda x, r, w, b: F.add_layer_norm(x, r, 64, w, b, input_bias=b, dropout_p=0.1),
    "add_rms_norm": lambda x, r, w, b: F.add_rms_norm(x, r, 64, w, training=False, dropout_p=0.5),
    "bias_act": lambda x, r, w, b: F.bias_act(x, b, "leaky_relu(0.2)"),
    "bias_gelu": lambda x, r, w, b: F.bias_gelu(x, b, "tanh"),
    "dropout_add": lambda x, r, w, b: F.dropout_add(x, r, 0.2, bias=b, activation="silu"),
    "swiglu": lambda x, r, w, b: F.swiglu(x),
    "geglu": lambda x, r, w, b: F.geglu(x, r, "tanh"),
    "softmax": lambda x, r, w, b: F.softmax(x, scale=0.3, mask=r > 0, is_causal=True, dropout_p=0.1),
    "softmax over another dimension": lambda x, r, w, b: F.softmax(x, 1, mask=r),
}


@pytest.mark.parametrize("function", list(NAMED.values()), ids=list(NAMED))
def test_named_functions(function, device):
    x, r = torch.randn(2, 6, 64, device=device), torch.randn(2, 6, 64, device=device)
    w, b = torch.randn(64, device=device), torch.randn(64, device=device)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.manual_seed(4)
    expected = as_tuple(function(x, r, w, b))
    torch.manual_seed(4)
    for ours, want in zip(as_tuple(compiled(x, r, w, b)), expected, strict=True):
        assert torch.equal(ours, want)


def test_modules(device):
    block = torch.nn.ModuleList(
        [onepass.nn.AddLayerNorm(64, dropout_p=0.1), onepass.nn.SwiGLU(), onepass.nn.RMSNorm(32)]
    )
    block.to(device)

    def function(x, r):
        y, h = block[0](x, r)
        return block[2](block[1](y)), h

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x, r = torch.randn(6, 64, device=device), torch.randn(6, 64, device=device)
    for training in (True, False):
        block.train(training)
        torch.manual_seed(4)
        expected = function(x, r)
        torch.manual_seed(4)
        for ours, want in zip(compiled(x, r), expected):
            assert torch.equal(ours, want)


@pytest.mark.parametrize(
    "line", ["bias | gelu", "add | keep | rms_norm(1e-6) | scale", "mul(0.125) | causal | softmax"]
)
@pytest.mark.parametrize("dynamic", [None, True])
def test_dynamic_shapes_do_not_recompile(line, dynamic, device):
    """Rows and columns both change: a static graph or two, a dynamic one, and not one graph a size."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(functools.partial(onepass.fused, line), fullgraph=True, dynamic=dynamic, backend=counter)
    for rows, columns in [(8, 64), (16, 64), (33, 96), (5, 40), (100, 1000), (64, 3)]:
        inputs = make_inputs(line, (2, rows, columns), torch.float32, device)
        for ours, expected in zip(as_tuple(compiled(*inputs.tensors)), as_tuple(onepass.fused(line, *inputs.tensors))):
            assert torch.equal(ours, expected)
    # With dynamic=None sizes turn dynamic one after the other: rows at the second call, columns at the third.
    assert counter.frame_count <= (1 if dynamic else 3)


def test_one_row_and_many(device):
    """Decoding after prefill: sizes of 1 are special to Dynamo, and cost one more graph, not one each."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        functools.partial(onepass.fused, "rms_norm(1e-6) | scale"), fullgraph=True, backend=counter
    )
    w = torch.randn(64, device=device)
    for rows in (128, 1, 96, 1, 77, 55, 1, 31):
        compiled(torch.randn(rows, 64, device=device), w)
    assert counter.frame_count <= 3


def test_gradients_under_dynamic_shapes(device):
    line = "layer_norm(1e-5) | scale | bias"
    function = functools.partial(onepass.fused, line)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (7, 16, 33):
        assert_same(function, compiled, make_inputs(line, (rows, 64), torch.float32, device).tensors)


def test_changing_numbers_in_a_compiled_function(device):
    """A probability that a schedule changes, a training flag: right after each change."""
    x, r = torch.ones(64, 64, device=device), torch.zeros(64, 64, device=device)
    compiled = torch.compile(lambda x, p, t: F.dropout_add(x, r, p, t), fullgraph=True, backend="aot_eager")
    for p, training in [(0.1, True), (0.5, True), (0.5, False), (0.25, True)]:
        kept = (compiled(x, p, training) != 0).double().mean().item()
        assert abs(kept - (1 - p if training else 1)) < 0.05


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autocast_leaves_dtypes_alone(compiled, device):
    """The result has x's dtype, whatever autocast would make of torch's own norm."""

    def function(x, w, b, m):
        return F.layer_norm(x, 64, w, b), F.softmax(torch.mm(x, m).to(x.dtype)), torch.mm(x, m)

    if compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    w, b, m = torch.ones(64, device=device), torch.zeros(64, device=device), torch.randn(64, 64, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(8, 64, device=device, dtype=dtype)
        with torch.autocast(device, torch.bfloat16):
            norm, probabilities, product = function(x, w, b, m)
        assert norm.dtype == dtype and probabilities.dtype == dtype and product.dtype == torch.bfloat16
        torch.testing.assert_close(norm, F.layer_norm(x, 64, w, b))


def test_autocast_backward(device):
    x = torch.randn(8, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(64, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        y = F.rms_norm(x, 64, w)
    dx, dw = torch.autograd.grad(y, (x, w), torch.randn_like(y))
    assert dx.dtype == torch.bfloat16 and dw.dtype == torch.float32


def test_export(device):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = onepass.nn.AddRMSNorm(64)
            self.act = onepass.nn.SwiGLU()

        def forward(self, x, r):
            y, h = self.norm(x, r)
            return self.act(y), h

    block = Block().to(device)
    x, r = torch.randn(6, 64, device=device), torch.randn(6, 64, device=device)
    rows = torch.export.Dim("rows", min=2, max=512)
    program = torch.export.export(block, (x, r), dynamic_shapes=({0: rows}, {0: rows}))
    assert any("onepass" in str(node.target) for node in program.graph.nodes)
    x, r = torch.randn(33, 64, device=device), torch.randn(33, 64, device=device)
    for ours, expected in zip(program.module()(x, r), block(x, r)):
        assert torch.equal(ours, expected)


def recorded_calls(line, shape, device, dtype=torch.float32):
    """The operator calls of a forward and a backward, as eager mode makes them."""
    inputs = make_inputs(line, shape, dtype, device)
    recorder = Recorder()
    with recorder:
        results = as_tuple(onepass.fused(line, *inputs.tensors))
        torch.autograd.grad(results, inputs.differentiable, upstream(results))
    detach = functools.partial(torch.utils._pytree.tree_map_only, torch.Tensor, torch.Tensor.detach)
    return [(func, detach(args), detach(kwargs)) for func, args, kwargs in recorder.calls]


@pytest.mark.quick
@pytest.mark.parametrize("line", [*LINES, "add", "keep | relu", "mask | softmax"])
@pytest.mark.parametrize("shape", [(6, 5, 64), (3, 7), (1, 1), (0, 8)], ids=str)
def test_opcheck(line, shape, device):
    """Schema, aliasing, fake kernels and AOT dispatch of every operator call that the line makes."""
    calls = recorded_calls(line, shape, device)
    assert calls
    for func, args, kwargs in calls:
        opcheck(func, args, kwargs)


@pytest.mark.quick
@pytest.mark.parametrize("line", LINES)
def test_opcheck_of_the_differentiable_operator(line, device):
    inputs = make_inputs(line, (6, 5, 64), torch.float32, device)
    has_dropout = onepass.Line(line).has_dropout
    state = torch.tensor([3, 4], dtype=torch.int64, device=device) if has_dropout else None
    opcheck(onepass.autograd.differentiable(), (tuple(inputs.tensors), line, state))


@pytest.mark.parametrize("line", ["bias | gelu", "add | keep | rms_norm(1e-6) | scale", "mask | softmax"])
def test_compiled_autograd(line, device):
    """The backward pass of an eager forward, traced and compiled."""
    inputs = make_inputs(line, (6, 5, 64), torch.float32, device)
    results = as_tuple(onepass.fused(line, *inputs.tensors))
    grads = upstream(results)
    torch.autograd.backward(results, grads, retain_graph=True)
    leaves = [t for t in inputs.tensors if t.requires_grad]
    expected = [t.grad for t in leaves]
    for t in leaves:
        t.grad = None
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        torch.autograd.backward(results, grads)
    for t, gradient in zip(leaves, expected, strict=True):
        assert torch.equal(t.grad, gradient)


def test_make_fx_traces_through(device):
    """Tracing by dispatch alone, without Dynamo, sees the operators below the autograd function."""
    from torch.fx.experimental.proxy_tensor import make_fx

    line = "layer_norm(1e-5) | scale | bias"
    inputs = make_inputs(line, (6, 64), torch.float32, device)

    def both(x, w, b):
        y = onepass.fused(line, x, w, b)
        return y, torch.autograd.grad(y, (x, w, b), torch.ones_like(y))

    graph = make_fx(both)(*inputs.tensors)
    names = {str(node.target) for node in graph.graph.nodes}
    assert {"onepass.rowwise_forward.default", "onepass.rowwise_backward.default"} <= names
    for a, b in zip(graph(*inputs.tensors)[1], both(*inputs.tensors)[1], strict=True):
        assert torch.equal(a, b)


def test_opcheck_sees_every_operator(device):
    seen = {str(func) for line in LINES for func, _, _ in recorded_calls(line, (3, 8), device)}
    expected = {f"onepass.{k}_{d}.default" for k in ("elementwise", "rowwise") for d in ("forward", "backward")}
    assert expected <= seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_fake_kernels_give_dtypes_and_strides(dtype, device):
    """Strided input, contiguous result; also for mixed dtypes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    line = "add | keep | layer_norm(1e-5) | scale | bias"
    x = torch.randn(8, 6, 64, device=device).to(dtype).transpose(0, 1)
    operands = [
        torch.randn(8, 6, 64, device=device).transpose(0, 1),
        torch.ones(64, device=device),
        torch.ones(64, device=device),
    ]
    real = onepass.fused(line, x, *operands)
    with FakeTensorMode() as mode:
        fake = onepass.fused(line, *(mode.from_tensor(t) for t in (x, *operands)))
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


def test_caches_of_other_versions_are_not_read():
    from torch._inductor.codecache import FxGraphHashDetails

    graph = torch.fx.symbolic_trace(lambda x: x.sin())
    tag = torch.compiler.config.cache_key_tag
    assert onepass.__version__ in tag
    assert FxGraphHashDetails(graph, [], {}, []).cache_key_tag == tag
