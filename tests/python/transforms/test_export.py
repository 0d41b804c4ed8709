"""Exported models: saved and loaded, compiled ahead of time, and taken apart into PyTorch's operators and ONNX's."""

import io
import subprocess
import sys

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import onepass
import onepass.functional as F
from helpers import as_tuple, make_inputs

LINES = [
    "bias | gelu",
    "add | keep | rms_norm(1e-6) | scale",
    "mul(0.125) | mask | softmax",
    "bias | dropout(0.1) | add | keep | layer_norm(1e-5) | scale | bias",
    "layer_norm(1e-5) | scale | bias | linear | bias | gelu",
    "scores | mul(0.125) | causal | softmax",
    "scores | mul(0.125) | mask | softmax | values",
]


class Model(torch.nn.Module):
    """Every kind of line, by function and by module."""

    def __init__(self):
        super().__init__()
        self.norm = onepass.nn.AddLayerNorm(16, dropout_p=0.1)
        self.up = onepass.nn.LinearAct(16, 12, activation="gelu")
        self.mlp = onepass.nn.LayerNormMLP(12, 24)
        self.attention = onepass.nn.MultiheadAttention(12, 3, batch_first=True)
        self.rms_norm = onepass.nn.RMSNorm(12)
        self.gate = onepass.nn.SwiGLU()

    def forward(self, x, residual):
        y, h = self.norm(x, residual)
        y = self.rms_norm(self.mlp(self.up(y)))
        y = self.attention(y, y, y, need_weights=False)[0]
        y = y + F.softmax(y, mask=y > 0, scale=0.5) + F.softmax(y)
        y = y + onepass.fused("mul(0.5) | gelu", y) + onepass.fused("rms_norm | relu", [y, y], stack=True).sum(0)
        first, second = onepass.fused("bias | gelu", [y, y * 2], self.rms_norm.weight)
        return self.gate(first + second), h, F.attention_scores(y, y)


def tensors(rows, device):
    return tuple(torch.randn(rows, 5, 16, device=device) for _ in range(2))


def exported(device, *, training=False):
    """A program for any number of rows, and what it was made of."""
    model = Model().to(device).train(training)
    rows = torch.export.Dim("rows", min=2, max=64)
    return torch.export.export(model, tensors(4, device), dynamic_shapes=({0: rows}, {0: rows})), model


def targets(graph):
    return {str(node.target) for node in graph.nodes if node.op == "call_function"}


def assert_close(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_saved_program(training, device):
    program, model = exported(device, training=training)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    program = torch.export.load(file)
    kinds = {name.split(".")[1] for name in targets(program.graph) if name.startswith("onepass")}
    assert {f"{k}_forward" for k in ("elementwise", "rowwise", "linear", "scores", "group")} <= kinds
    assert ("dropout_state" in kinds) == training
    x = tensors(7, device)
    torch.manual_seed(2)
    ours = program.module()(*x)
    torch.manual_seed(2)
    for a, b in zip(ours, model(*x), strict=True):
        assert torch.equal(a, b)


LOADS_A_PLAIN_MODEL = """
import sys, torch
path, device = sys.argv[1:]
program = torch.export.export(torch.nn.Linear(8, 8, device=device), (torch.ones(2, 8, device=device),))
path = torch._inductor.aoti_compile_and_package(program, package_path=path)
torch._inductor.aoti_load_package(path)
"""


@pytest.fixture
def aot_inductor(device, tmp_path):
    """Where it works: there are installations for CUDA in which loading any program ends the process."""
    if torch.cuda.is_available():
        plain = [sys.executable, "-c", LOADS_A_PLAIN_MODEL, str(tmp_path / "plain.pt2"), device]
        if subprocess.run(plain).returncode != 0:
            pytest.skip("AOTInductor does not load a plain layer here")


def test_compiled_ahead_of_time(aot_inductor, device, tmp_path):
    program, model = exported(device)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    x = tensors(7, device)
    assert_close(torch._inductor.aoti_load_package(path)(*x), model(*x))


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_decomposed(training, device):
    """The mask is that of the kernels, given the state; here another is drawn, by torch's own operator."""
    program, model = exported(device, training=training)
    plain = program.run_decompositions(onepass.decompositions())
    assert not any(name.startswith("onepass") for name in targets(plain.graph))
    x = tensors(7, device)
    results = plain.module()(*x)
    if not training:
        assert_close(results, model(*x))


def test_decomposed_attention_lies_as_it_did(device):
    """Of turned heads: what follows views that."""

    class Attended(torch.nn.Module):
        def forward(self, query, key, value):
            heads = [t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (query, key, value)]
            return onepass.fused("scores | mul(0.3) | softmax | values", *heads).transpose(1, 2).reshape(3, 5, 16) + 1

    packed = [torch.randn(3, 5, 16, device=device) for _ in range(3)]
    program = torch.export.export(Attended(), tuple(packed))
    plain = program.run_decompositions(onepass.decompositions())
    assert not any(name.startswith("onepass") for name in targets(plain.graph))
    torch.testing.assert_close(plain.module()(*packed), Attended()(*packed))


@pytest.mark.parametrize("line", LINES)
def test_a_decomposed_line(line, device):
    inputs = make_inputs(line, (2, 5, 6), torch.float64, device)
    x, *operands = [t.detach() for t in inputs.tensors]

    def run(*some):
        return as_tuple(onepass.fused(line, *some, training=False))

    graph = make_fx(run, decomposition_table=onepass.decompositions())(x, *operands)
    assert not any(name.startswith("onepass") for name in targets(graph.graph))
    assert_close(graph(x, *operands), run(x, *operands))


@pytest.mark.parametrize("stack", [False, True], ids=["list", "stack"])
def test_a_decomposed_list(stack, device):
    xs = [torch.randn(5, 6, device=device) for _ in range(2)]
    residuals, weight = [torch.randn(5, 6, device=device) for _ in range(2)], torch.randn(6, device=device)

    def run(*xs):
        results = onepass.fused("add | keep | rms_norm(1e-6) | scale", list(xs), residuals, weight, stack=stack)
        return results if stack else [t for kind in results for t in kind]

    graph = make_fx(run, decomposition_table=onepass.decompositions())(*xs)
    assert not any(name.startswith("onepass") for name in targets(graph.graph))
    assert_close(graph(*xs), run(*xs))


def test_gradients_are_not_decomposed(device):
    """What backward reads would be missing."""
    x = torch.randn(4, 8, device=device, requires_grad=True)

    def both(x):
        y = onepass.fused("rms_norm", x)
        return torch.autograd.grad(y.sum(), x)

    with pytest.raises(RuntimeError, match="expected a graph without gradients, but got a backward operator"):
        make_fx(both, decomposition_table=onepass.decompositions())(x)


def test_onnx():
    """ONNX's own operators only, evaluated by its reference."""
    reference = pytest.importorskip("onnx.reference")
    pytest.importorskip("onnxscript")
    program, model = exported("cpu")
    plain = program.run_decompositions(onepass.decompositions())
    onnx_model = torch.onnx.export(plain, tensors(4, "cpu"), dynamo=True, verbose=False).model_proto
    assert {node.domain for node in onnx_model.graph.node} == {""} and not onnx_model.functions
    x = tensors(7, "cpu")
    names = [given.name for given in onnx_model.graph.input]
    results = reference.ReferenceEvaluator(onnx_model).run(None, {n: t.numpy() for n, t in zip(names, x)})
    assert_close([torch.from_numpy(r) for r in results], model(*x))
