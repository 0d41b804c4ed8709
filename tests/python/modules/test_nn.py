"""The modules are drop-in: constructors, state dicts both ways, repr, training flag, copies, devices, dtypes."""

import copy
import inspect
import io

import pytest
import torch

import onepass.nn as nn

PAIRS = [
    (nn.LayerNorm, torch.nn.LayerNorm, (64,), {}),
    (nn.LayerNorm, torch.nn.LayerNorm, ((4, 16),), {"eps": 1e-3}),
    (nn.LayerNorm, torch.nn.LayerNorm, (64,), {"bias": False}),
    (nn.LayerNorm, torch.nn.LayerNorm, (64,), {"elementwise_affine": False}),
    (nn.RMSNorm, torch.nn.RMSNorm, (64,), {}),
    (nn.RMSNorm, torch.nn.RMSNorm, ((4, 16),), {"eps": 1e-3}),
    (nn.RMSNorm, torch.nn.RMSNorm, (64,), {"elementwise_affine": False}),
    (nn.Softmax, torch.nn.Softmax, (-1,), {}),
    (nn.Softmax, torch.nn.Softmax, (1,), {}),
]


def x_for(args, device="cpu", dtype=torch.float32):
    shape = args[0] if isinstance(args[0], tuple) else (64,)
    return torch.randn(5, 3, *shape, device=device, dtype=dtype)


def shaken(module):
    """Parameters that are not ones and zeros."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


@pytest.mark.parametrize("ours, theirs, args, kwargs", PAIRS)
def test_in_the_place_of_torchs(ours, theirs, args, kwargs, device):
    expected = shaken(theirs(*args, **kwargs)).to(device)
    module = ours(*args, **kwargs).to(device)
    assert isinstance(module, theirs)
    module.load_state_dict(expected.state_dict())
    x = x_for(args, device)
    torch.testing.assert_close(module(x), expected(x))
    assert repr(module) == repr(expected)


@pytest.mark.parametrize("ours, theirs, args, kwargs", PAIRS)
def test_state_dicts_load_both_ways(ours, theirs, args, kwargs):
    module, other = shaken(ours(*args, **kwargs)), theirs(*args, **kwargs)
    assert list(module.state_dict()) == list(other.state_dict())
    other.load_state_dict(module.state_dict())
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, module.state_dict()[name])


@pytest.mark.parametrize("ours, theirs", [(nn.LayerNorm, torch.nn.LayerNorm), (nn.RMSNorm, torch.nn.RMSNorm)])
def test_constructors_have_torchs_arguments_first(ours, theirs):
    mine, torchs = (list(inspect.signature(m.__init__).parameters.values()) for m in (ours, theirs))
    assert [p.name for p in mine[: len(torchs)]] == [p.name for p in torchs]
    assert [p.default for p in mine[: len(torchs)]] == [p.default for p in torchs]
    assert all(p.kind == inspect.Parameter.KEYWORD_ONLY for p in mine[len(torchs) :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_device_and_dtype(dtype):
    for module in (
        nn.LayerNorm(64, device="meta", dtype=dtype),
        nn.RMSNorm(64, device="meta", dtype=dtype),
        nn.AddLayerNorm(64, device="meta", dtype=dtype),
        nn.AddRMSNorm(64, device="meta", dtype=dtype),
        nn.BiasGELU(64, device="meta", dtype=dtype),
    ):
        parameters = list(module.parameters())
        assert parameters and all(p.dtype == dtype and p.is_meta for p in parameters)
        module.to_empty(device="cpu")
        module.reset_parameters()
        assert all(p.isfinite().all() for p in module.parameters())


def test_layer_norm_with_an_activation(device):
    module = shaken(nn.LayerNorm(64, activation="gelu")).to(device)
    x = torch.randn(5, 64, device=device)
    expected = torch.nn.functional.gelu(torch.nn.functional.layer_norm(x, (64,), module.weight, module.bias))
    torch.testing.assert_close(module(x), expected)
    assert "activation='gelu'" in repr(module)


@pytest.mark.parametrize("has_input_bias", [False, True])
def test_add_layer_norm(has_input_bias, device):
    """In place of Dropout and LayerNorm around a residual, whose weights it takes."""
    torchs = shaken(torch.nn.LayerNorm(64)).to(device)
    module = nn.AddLayerNorm(64, dropout_p=0.5).to(device)
    module.load_state_dict(torchs.state_dict())
    x, r = torch.randn(5, 64, device=device), torch.randn(5, 64, device=device)
    bias = torch.randn(64, device=device) if has_input_bias else None
    y, h = module.eval()(x, r, bias)
    expected = x + r if bias is None else x + bias + r
    torch.testing.assert_close(h, expected)
    torch.testing.assert_close(y, torchs(expected))
    _, h = module.train()(torch.ones_like(x), torch.zeros_like(x))
    assert (h == 0).any() and (h == 2).any()
    assert repr(module) == f"AddLayerNorm({torchs.extra_repr()}, dropout_p=0.5)"


def test_add_rms_norm(device):
    torchs = shaken(torch.nn.RMSNorm(64, eps=1e-6)).to(device)
    module = nn.AddRMSNorm(64, eps=1e-6).to(device)
    module.load_state_dict(torchs.state_dict())
    x, r = torch.randn(5, 64, device=device), torch.randn(5, 64, device=device)
    y, h = module(x, r)
    torch.testing.assert_close(h, x + r)
    torch.testing.assert_close(y, torchs(x + r))
    assert repr(module) == repr(torchs).replace("RMSNorm", "AddRMSNorm")


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_bias_gelu_behind_a_linear(approximate, device):
    """A linear layer's bias moves into the module behind it."""
    linear = torch.nn.Linear(32, 64, device=device)
    fused = nn.BiasGELU(64, approximate, device=device)
    assert not fused.bias.any()
    fused.load_state_dict({"bias": linear.bias.detach()})
    x = torch.randn(5, 32, device=device)
    expected = torch.nn.GELU(approximate)(linear(x))
    torch.testing.assert_close(fused(torch.nn.functional.linear(x, linear.weight)), expected)
    assert repr(fused) == f"BiasGELU(64, approximate='{approximate}')"


def test_dropout_add(device):
    module = nn.DropoutAdd(0.25)
    x, r = torch.ones(64, 64, device=device), torch.zeros(64, 64, device=device)
    y = module(x, r)
    assert 0.15 < (y == 0).double().mean().item() < 0.35
    assert torch.equal(module.eval()(x, r), x)
    torch.testing.assert_close(module(x, r, torch.ones(64, device=device)), x + 1)
    assert repr(module) == "DropoutAdd(p=0.25)" and not module.state_dict()
    assert repr(nn.DropoutAdd(activation="gelu")) == "DropoutAdd(p=0.5, activation='gelu')"


def test_gates(device):
    gate, up = torch.randn(5, 64, device=device), torch.randn(5, 64, device=device)
    packed = torch.cat((gate, up), -1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(nn.SwiGLU()(gate, up), expected)
    torch.testing.assert_close(nn.SwiGLU()(packed), expected)
    for approximate in ("none", "tanh"):
        expected = torch.nn.functional.gelu(gate, approximate=approximate) * up
        torch.testing.assert_close(nn.GEGLU(approximate)(gate, up), expected)
        torch.testing.assert_close(nn.GEGLU(approximate)(packed), expected)
    assert repr(nn.SwiGLU()) == "SwiGLU()" and repr(nn.GEGLU("tanh")) == "GEGLU(approximate='tanh')"


def test_softmax_as_in_attention(device):
    module = nn.Softmax(scale=0.125, is_causal=True, dropout_p=0.5).eval()
    x, mask = torch.randn(2, 9, 9, device=device), torch.randn(9, device=device)
    lower = torch.ones(9, 9, dtype=torch.bool, device=device).tril()
    expected = (x * 0.125 + mask).masked_fill(~lower, float("-inf")).softmax(-1)
    torch.testing.assert_close(module(x, mask), expected)
    assert (module.train()(torch.zeros(64, 64, device=device)) == 0).double().mean() > 0.6
    assert repr(module) == "Softmax(dim=-1, scale=0.125, is_causal=True, dropout_p=0.5)"


def test_log_softmax_is_torchs(device):
    x = torch.randn(4, 6, 9, device=device)
    for module in (nn.LogSoftmax(), nn.LogSoftmax(1)):
        torch.testing.assert_close(module(x), x.log_softmax(module.dim))
        assert isinstance(module, torch.nn.LogSoftmax) and repr(module) == f"LogSoftmax(dim={module.dim})"


MODULES = [
    nn.LayerNorm(64, activation="gelu"),
    nn.RMSNorm(64),
    nn.AddLayerNorm(64),
    nn.AddRMSNorm(64),
    nn.BiasGELU(64),
    nn.DropoutAdd(0.0),
    nn.SwiGLU(),
    nn.GEGLU(),
    nn.Softmax(),
    nn.LogSoftmax(),
]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: type(m).__name__)
def test_copies_and_pickles_compute_the_same(module):
    x = torch.randn(5, 64)
    arguments = (x, torch.randn(5, 64)) if "Add" in type(module).__name__ else (x,)
    file = io.BytesIO()
    torch.save(shaken(module), file)
    file.seek(0)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        expected, got = module(*arguments), other(*arguments)
        for a, b in zip(*((t,) if isinstance(t, torch.Tensor) else t for t in (expected, got))):
            assert torch.equal(a, b)


@pytest.mark.parametrize("module", MODULES, ids=lambda m: type(m).__name__)
def test_every_parameter_gets_a_gradient(module):
    x = torch.randn(5, 64, requires_grad=True)
    arguments = (x, torch.randn(5, 64)) if "Add" in type(module).__name__ else (x,)
    result = module(*arguments)
    first = result if isinstance(result, torch.Tensor) else result[0]
    first.square().sum().backward()
    assert x.grad is not None and x.grad.any()
    assert all(p.grad is not None and p.grad.any() for p in module.parameters())
    module.zero_grad()


def test_all_is_complete():
    assert set(nn.__all__) == {
        "LayerNorm", "RMSNorm", "AddLayerNorm", "AddRMSNorm", "BiasGELU", "DropoutAdd", "SwiGLU", "GEGLU", "Softmax",
        "LogSoftmax", "LinearAct", "LayerNormLinear", "RMSNormLinear", "LayerNormMLP", "GatedMLP", "MultiheadAttention",
        "CrossEntropyLoss", "GroupNorm", "LinearCrossEntropyLoss",
    }  # fmt: skip
    for name in nn.__all__:
        assert issubclass(getattr(nn, name), torch.nn.Module)


def test_in_a_training_step(device):
    """A block of modules learns: loss falls, the parameters move."""
    torch.manual_seed(0)

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.act = nn.LayerNorm(32), torch.nn.Linear(32, 64, bias=False), nn.BiasGELU(64)
            self.down, self.out = torch.nn.Linear(64, 32), nn.AddRMSNorm(32, eps=1e-6, dropout_p=0.1)

        def forward(self, x):
            return self.out(self.down(self.act(self.up(self.norm(x)))), x)[0]

    block = Block().to(device)
    x, target = torch.randn(64, 32, device=device), torch.randn(64, 32, device=device)
    optimiser = torch.optim.AdamW(block.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        optimiser.zero_grad()
        loss = (block(x) - target).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda **given: nn.LayerNorm(8, **given),
        lambda **given: nn.RMSNorm(8, **given),
        lambda **given: nn.AddLayerNorm(8, **given),
        lambda **given: nn.AddRMSNorm(8, **given),
        lambda **given: nn.DropoutAdd(**given),
        lambda **given: nn.LinearAct(8, 8, **given),
        lambda **given: nn.LayerNormLinear(8, 8, **given),
        lambda **given: nn.RMSNormLinear(8, 8, **given),
        lambda **given: nn.LayerNormMLP(8, 8, **given),
        lambda **given: nn.GatedMLP(8, 8, **given),
    ],
)
def test_activations_are_checked_when_a_module_is_made(make):
    name = type(make()).__name__
    for wrong in ("gelo", "softmax", "elu(", "elu(x)", "relu(1)", "elu(0.5) | tanh", ""):
        with pytest.raises(ValueError, match=f"{name}|LayerNorm|RMSNorm"):
            make(activation=wrong)
    with pytest.raises(TypeError, match="'activation' must be str, not"):
        make(activation=torch.relu)
    make(activation="leaky_relu(0.2)")


def test_other_settings_are_checked_when_a_module_is_made():
    for make in (
        lambda s: nn.LinearAct(8, 8, strategy=s),
        lambda s: nn.LayerNormLinear(8, 8, strategy=s),
        lambda s: nn.RMSNormLinear(8, 8, strategy=s),
        lambda s: nn.LayerNormMLP(8, 8, strategy=s),
        lambda s: nn.GatedMLP(8, 8, strategy=s),
    ):
        with pytest.raises(ValueError, match="unknown strategy 'fast'"):
            make("fast")
        with pytest.raises(TypeError, match="'strategy' must be str"):
            make(None)
        make("unfused")
    with pytest.raises(ValueError, match="LayerNorm"):
        nn.LayerNormLinear(8, 8, norm_activation="gelo")
    with pytest.raises(ValueError, match="GatedMLP.*None"):
        nn.GatedMLP(8, 8, activation=None)
    for make in (lambda a: nn.BiasGELU(8, a), nn.GEGLU):
        with pytest.raises(RuntimeError, match="none or tanh, but got 'fast'"):
            make("fast")
    with pytest.raises(TypeError, match="'scale' must be float"):
        nn.Softmax(scale="half")
