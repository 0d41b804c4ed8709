"""Bad input raises the exception that PyTorch would raise, and says the argument, what was expected and what came."""

import functools
import re

import pytest
import torch

import onepass
import onepass.functional as F
from helpers import as_tuple
from onepass import _native
from onepass.pricing.profile import profile_of

pytestmark = pytest.mark.quick


def raises(kind, *says):
    """The exception's type and, in order, what its message says."""
    return pytest.raises(kind, match="(?s)" + ".*".join(says))


@pytest.fixture
def x(device):
    return torch.randn(4, 8, device=device)


@pytest.fixture
def b(device):
    return torch.randn(8, device=device)


class TestFused:
    def test_too_few_operands(self, x):
        with raises(TypeError, "bias", "takes", "1 operand", "got 0"):
            onepass.fused("bias", x)

    def test_too_many_operands(self, x, b):
        with raises(TypeError, "relu", "no operands", "got 1"):
            onepass.fused("relu", x, b)

    @pytest.mark.parametrize("bad", [None, {1.0, 2.0}, 3.0, "x"])
    def test_x_is_no_tensor(self, bad):
        with raises(TypeError, "x", "Tensor", type(bad).__name__):
            onepass.fused("relu", bad)

    @pytest.mark.parametrize("bad", [None, [1.0] * 8, 3.0])
    def test_an_operand_is_no_tensor(self, x, bad):
        with raises(TypeError, "b", "Tensor", type(bad).__name__):
            onepass.fused("bias | relu", x, bad)
        with raises(TypeError, "mask", "Tensor", type(bad).__name__):
            onepass.fused("mask | softmax", x, bad)

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
    def test_x_is_not_floating_point(self, device, dtype):
        with raises(RuntimeError, "x", "float32", str(dtype)):
            onepass.fused("relu", torch.ones(4, 8, dtype=dtype, device=device))
        for line in ("linear", "linear | bias", "linear | logsumexp"):
            operands = torch.ones(8, 8, device=device), torch.ones(8, device=device)
            with raises(NotImplementedError, "x must be", "float32", str(dtype)):
                onepass.fused(line, torch.ones(4, 8, dtype=dtype, device=device), *operands[: 1 + ("bias" in line)])

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
    def test_an_operand_is_not_floating_point(self, x, device, dtype):
        with raises(RuntimeError, "'bias'", "floating point", str(dtype)):
            onepass.fused("bias | relu", x, torch.ones(8, dtype=dtype, device=device))

    def test_a_mask_is_bool_or_floating_point(self, x, device):
        with raises(RuntimeError, "'mask'", "floating point", "bool", "torch.int64"):
            onepass.fused("mask | softmax", x, torch.ones(4, 8, dtype=torch.int64, device=device))

    @pytest.mark.parametrize("shape", [(7,), (9,), (1,), (8, 1), (4, 1), (3, 8), (1, 4, 8), ()])
    def test_a_column_has_the_rows_length(self, x, device, shape):
        with raises(RuntimeError, "'bias'", r"\[8\]", str(list(shape)).replace("[", r"\[")):
            onepass.fused("bias | relu", x, torch.ones(shape, device=device))

    @pytest.mark.parametrize("shape", [(4, 7), (3, 8), (2, 4, 8), (1, 4, 8), (5,)])
    def test_a_tensor_broadcasts_to_x(self, x, device, shape):
        with raises(RuntimeError, "'add'", r"\[4, 8\]", str(list(shape)).replace("[", r"\[")):
            onepass.fused("add", x, torch.ones(shape, device=device))

    def test_causal_without_rows(self, device):
        with raises((RuntimeError, ValueError), "causal", "2", "dimension"):
            onepass.fused("causal | softmax", torch.randn(8, device=device))

    def test_operands_of_another_device(self, cuda):
        with raises(RuntimeError, "same device", "cuda", "bias", "cpu"):
            onepass.fused("bias | relu", torch.randn(4, 8, device=cuda), torch.randn(8))

    def test_the_meta_device_has_no_kernel_but_shapes(self):
        y, h = onepass.fused("add | keep | rms_norm", *(torch.empty(4, 8, device="meta") for _ in range(2)))
        assert y.shape == h.shape == (4, 8) and y.is_meta

    def test_a_wrong_dropout_state_is_refused(self, x):
        forward = torch.ops.onepass.elementwise_forward
        for bad in (None, torch.zeros(3, dtype=torch.int64, device=x.device), torch.zeros(2, device=x.device)):
            with raises(RuntimeError, "dropout_state"):
                forward(x, [], "dropout(0.5)", bad)

    def test_another_devices_generator(self, cuda):
        with raises(RuntimeError, "cuda"):
            onepass.fused("dropout(0.5)", torch.randn(4, 8, device=cuda), generator=torch.Generator("cpu"))

    def test_operators_check_the_line_too(self, x):
        with raises((RuntimeError, ValueError), "unknown word", "relo"):
            torch.ops.onepass.elementwise_forward(x, [], "relo", None)
        with raises(RuntimeError, "operands"):
            torch.ops.onepass.elementwise_forward(x, [], "bias", None)

    def test_the_process_survives(self, x, b):
        for _ in range(3):
            with pytest.raises(RuntimeError):
                onepass.fused("bias | relu", x, b[:3])
        torch.testing.assert_close(onepass.fused("bias | relu", x, b), torch.relu(x + b))


def kinds_of_tensors():
    """What is no block of numbers, and how it is called."""
    x = torch.randn(4, 8)
    made = {
        "torch.sparse_coo": x.to_sparse(),
        "torch.sparse_csr": x.to_sparse_csr(),
        "nested": torch.nested.nested_tensor([x[:2], x]),
    }
    jagged = torch.nested.nested_tensor([x[:2], x], layout=torch.jagged)
    return [*made.items(), ("nested", jagged)]


@pytest.mark.filterwarnings("ignore")  # of nested and quantised tensors, which are to be given up
class TestKindsOfTensors:
    @pytest.mark.parametrize("training", [False, True])
    def test_what_is_not_dense(self, training):
        x, b = torch.randn(4, 8), torch.randn(8)
        quantised = torch.quantize_per_tensor(torch.randn(4, 8), 0.1, 0, torch.qint8)
        for name, strange in [*kinds_of_tensors(), *([] if training else [("quantized", quantised)])]:
            bad = strange.clone().requires_grad_(training)
            for call in (
                lambda t: onepass.fused("relu", t),
                lambda t: onepass.fused("layer_norm | scale", t, b),
                lambda t: onepass.fused("add | softmax", x, t),
                lambda t: onepass.fused("bias | gelu", x, t),
                lambda t: onepass.fused("linear", x, t),
                lambda t: onepass.fused("scores | softmax", t, x),
                lambda t: onepass.fused("relu", [t, t]),
                lambda t: onepass.fused("add", [x, x], [t, t]),
                lambda t: F.layer_norm(t, 8),
                lambda t: F.rms_norm(x, 8, t),
                lambda t: F.add_rms_norm(x, t, 8),
                lambda t: F.softmax(t),
                lambda t: F.bias_gelu(t, b),
                lambda t: F.swiglu(t),
                lambda t: F.swiglu(t, t),
                lambda t: F.linear(t, x),
                lambda t: F.scaled_dot_product_attention(t, t, t),
                lambda t: F.attention_scores(x, t),
            ):
                with raises(RuntimeError, "must be a dense tensor", name):
                    call(bad)

    def test_every_dtype_has_its_name(self):
        dtypes = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
        for dtype in dtypes - set(_native.DTYPES):
            if "q" in str(dtype):  # quantised
                continue
            with raises(RuntimeError, "x", "float32", f"got {dtype}$"):
                onepass.fused("relu", torch.empty(4, 8, dtype=dtype))
            with raises(RuntimeError, "'bias'", f"got {dtype}$"):
                onepass.fused("bias", torch.ones(4, 8), torch.empty(8, dtype=dtype))


class TestPlans:
    @pytest.mark.parametrize("function", ["cost", "plan"])
    def test_dtype_and_sizes(self, function):
        ask = getattr(onepass.Line("linear"), function)
        for dtype in (torch.int8, torch.bool, torch.float8_e5m2):
            with raises(RuntimeError, function, "torch.bfloat16", f"got {dtype}"):
                ask((4, 8), dtype, 8)
        with raises(TypeError, "'dtype'", "str"):
            ask((4, 8), "float32", 8)
        for shape in ((-1, 8), (2**70, 8), (2**40, 2**40)):
            with raises(RuntimeError, function, "shape"):
                ask(shape, torch.float32, 8)
        for shape in (8, (4, 8.5), ("4", 8)):
            with raises(TypeError, function, "shape", "int"):
                ask(shape, torch.float32, 8)
        for features in (-1, 2**70):
            with raises(RuntimeError, function, "out_features"):
                ask((4, 8), torch.float32, features)
        ask((0, 8), torch.float32, 8), ask((4, 0), torch.float32, 0), ask((), torch.float32, 8)

    def test_devices_as_explain_takes_them(self, tmp_path):
        line, of = onepass.Line("layer_norm | scale | linear"), ((4096, 1024), torch.bfloat16, 1024)
        for name, chip in {"h100": "sm_90a", "h200": "sm_90a", "a100": "sm_80", torch.device("cpu"): "cpu"}.items():
            assert line.plan(*of, device=name) == line.plan(*of, device=chip)
        profile = profile_of("h200")
        (tmp_path / "profile.json").write_text(profile.to_json())
        for device in (profile, str(tmp_path / "profile.json")):
            assert line.plan(*of, device=device) == line.plan(*of, device="sm_90a")
        with raises(ValueError, "'h100'", "got 'h300'"):
            line.plan(*of, device="h300")
        with raises(RuntimeError, "unknown arch 'sm_7'"):
            line.plan(*of, device="sm_7")


class TestNormalisations:
    @pytest.mark.parametrize("function", [F.layer_norm, F.rms_norm])
    def test_normalized_shape_does_not_fit(self, function, x):
        with raises(RuntimeError, r"normalized_shape=\[9\]", r"\[\*, 9\]", r"\[4, 8\]"):
            function(x, 9)
        with raises(RuntimeError, r"normalized_shape=\[8, 4\]", r"\[4, 8\]"):
            function(x, (8, 4))
        with raises(RuntimeError, r"normalized_shape=\[2, 4, 8\]", r"\[4, 8\]"):
            function(x, (2, 4, 8))
        with raises(RuntimeError, "at least 1-dimensional"):
            function(x, ())

    @pytest.mark.parametrize("shape", [(7,), (4, 8), (1,), ()])
    def test_weight_and_bias_have_normalized_shape(self, x, device, shape):
        got = str(list(shape)).replace("[", r"\[")
        with raises(RuntimeError, "weight", r"\[8\]", got):
            F.layer_norm(x, 8, torch.ones(shape, device=device))
        with raises(RuntimeError, "bias", r"\[8\]", got):
            F.layer_norm(x, 8, None, torch.ones(shape, device=device))
        with raises(RuntimeError, "weight", r"\[8\]", got):
            F.add_rms_norm(x, x, 8, torch.ones(shape, device=device))

    def test_what_is_no_tensor(self, x):
        with raises(TypeError, "layer_norm", "'x'", "Tensor", "list"):
            F.layer_norm([1.0], 1)
        with raises(TypeError, "rms_norm", "'weight'", "Tensor", "float"):
            F.rms_norm(x, 8, 1.0)
        with raises(TypeError, "add_layer_norm", "'residual'", "Tensor", "NoneType"):
            F.add_layer_norm(x, None, 8)

    def test_eps_is_a_number(self, x):
        with raises(TypeError, "layer_norm", "'eps'", "float", "NoneType"):
            F.layer_norm(x, 8, eps=None)

    def test_residual_has_xs_shape(self, x):
        for function in (F.add_layer_norm, F.add_rms_norm):
            with raises(RuntimeError, "'add'", r"\[4, 8\]", r"\[4, 7\]"):
                function(x, x[:, :7], 8)

    def test_input_bias_has_the_rows_length(self, x):
        with raises(RuntimeError, "'bias'", r"\[8\]", r"\[3\]"):
            F.add_layer_norm(x, x, 8, input_bias=x[0, :3])


class TestOthers:
    @pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
    def test_dropout_probability(self, x, p):
        for call in (
            lambda: F.dropout_add(x, x, p),
            lambda: F.dropout_add(x, x, p, training=False),
            lambda: F.add_layer_norm(x, x, 8, dropout_p=p),
            lambda: F.softmax(x, dropout_p=p),
            lambda: onepass.nn.DropoutAdd(p),
            lambda: onepass.nn.AddRMSNorm(8, dropout_p=p),
            lambda: onepass.nn.Softmax(dropout_p=p),
        ):
            with raises(ValueError, "dropout probability has to be between 0 and 1", "got", str(p)):
                call()

    def test_activation(self, x, b):
        with raises(ValueError, "bias_act", "activation", "gelu", "'gelo'"):
            F.bias_act(x, b, "gelo")
        with raises(ValueError, "'softmax'"):
            F.layer_norm(x, 8, activation="softmax")
        with raises(ValueError, "relu | softmax"):
            F.layer_norm(x, 8, activation="relu | softmax")
        with raises(TypeError, "activation", "str", "function"):
            F.bias_act(x, b, torch.relu)
        with raises(ValueError, "gated", "activation", "None"):
            F.gated(x, x, None)

    def test_approximate(self, x, b):
        with raises(RuntimeError, "bias_gelu", "approximate", "none or tanh", "'fast'"):
            F.bias_gelu(x, b, "fast")
        with raises(RuntimeError, "geglu", "approximate", "'fast'"):
            F.geglu(x, x, "fast")

    def test_packed_gates_are_even(self, device):
        with raises(RuntimeError, "swiglu", "even", r"\[4, 7\]"):
            F.swiglu(torch.randn(4, 7, device=device))
        with raises(RuntimeError, "reglu", "even", r"\[\]"):
            F.reglu(torch.tensor(1.0, device=device))
        with raises(TypeError, "geglu", "'gate'", "Tensor", "list"):
            F.geglu([1.0, 2.0])

    def test_softmax_dim(self, x):
        with raises(IndexError, r"range of \[-2, 1\]", "2"):
            F.softmax(x, 2)
        with raises(IndexError, r"range of \[-2, 1\]", "-3"):
            F.softmax(x, -3)
        with raises(ValueError, "is_causal", "dim=0"):
            F.softmax(x, 0, is_causal=True)

    def test_softmax_scale(self, x):
        with raises(TypeError, "softmax", "'scale'", "float", "str"):
            F.softmax(x, scale="half")

    def test_bias_length(self, x):
        with raises(RuntimeError, "'bias'", r"\[8\]", r"\[7\]"):
            F.bias_gelu(x, x[0, :7])

    def test_a_failed_call_changes_nothing(self, x, b):
        before = x.clone()
        with pytest.raises(RuntimeError):
            F.add_layer_norm(x, x, 8, b, b[:2])
        assert torch.equal(x, before)
        for result in as_tuple(F.add_layer_norm(x, x, 8, b, b)):
            assert result.isfinite().all()


@pytest.mark.parametrize(
    ("text", "shape", "needs"),
    [
        ("bias | quantize(fp8, 128)", (2, 3, 100), "'quantize(fp8, 128)' needs rows whose length is a multiple of 128"),
        ("rms_norm(1e-6) | scale | rope", (2, 3, 33), "'rope' needs rows of an even length"),
        ("rope(64)", (2, 3, 32), "'rope(64)' needs rows of that length at least"),
        ("causal | softmax", (8,), "'causal' needs a tensor of at least 2 dimensions"),
    ],
)
def test_shapes_that_a_line_does_not_take_have_no_plan(text, shape, needs):
    line = onepass.Line(text)
    for ask in (line.cost, line.plan, functools.partial(line.plan, device="sm_90a")):
        with pytest.raises(RuntimeError, match=re.escape(f"{needs}, got x of shape {list(shape)}")):
            ask(shape, torch.bfloat16)
