"""explain leaves nothing out: what Dynamo keeps as one node, whatever is within it, has its price, and rows add up."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as mapped
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import onepass
from models import make, moved
from onepass.advice import explain as explaining
from onepass.pricing.prices import Price
from onepass.pricing.profile import profile_of


def sums(explained):
    return [sum((getattr(o, side) for o in explained.operators), Price()) for side in ("forward", "backward")]


def rows(explained):
    return [operator.name for operator in explained.operators]


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, upstream):
        x, w = ctx.saved_tensors
        return upstream @ w.t(), x.t() @ upstream


X, W = torch.randn(256, 256), torch.randn(256, 256)
PRODUCT = 2 * 256**3


def block(x):
    return F.gelu(x @ W)


def test_attention_of_one_node():
    """As much as its parts: projections, scores and values, and the projection of the result."""
    layer = nn.MultiheadAttention(256, 4, batch_first=True)
    x = torch.randn(8, 128, 256)
    explained = onepass.explain(lambda x: layer(x, x, x, need_weights=False)[0], x, device="h200")
    forward, backward = sums(explained)
    projections, attended = 2 * 8 * 128 * 256 * (3 * 256 + 256), 4 * 8 * 128 * 128 * 256
    assert "multi_head_attention_forward" in rows(explained)
    assert projections + attended <= forward.flops < 1.02 * (projections + attended)
    # x has no gradient; attention makes its scores again
    back = 2 * projections - 2 * 8 * 128 * 256 * 3 * 256 + 2.5 * attended
    assert back <= backward.flops < 1.02 * back


def test_half_of_the_readmes_layer_is_there():
    model = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, activation="gelu")
    explained = onepass.explain(model, torch.randn(8, 128, 256), device="h200")
    (attention,) = [o for o in explained.operators if o.name == "multi_head_attention_forward"]
    now, fused = explained.seconds
    share = (attention.forward.seconds + attention.backward.seconds) / now
    assert 0.3 < share < 0.6 and "multi_head_attention_forward" in str(explained)
    forward, backward = sums(explained)
    assert now == pytest.approx(forward.seconds + backward.seconds)
    gained = sum(sum(p.seconds for p in a.now) - sum(p.seconds for p in a.fused) for a in explained.lines)
    assert now - fused == pytest.approx(gained) and gained > 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_encoder_layers_of_one_operator(device):
    """Opened or not, they multiply as much."""
    model = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True).eval().to(device)
    with torch.no_grad():
        explained = onepass.explain(model, torch.randn(8, 128, 256, device=device), device="h200")
    flops = 8 * 128 * (2 * 4 * 256**2 + 2 * 2 * 256 * 1024 + 4 * 128 * 256)
    assert flops <= sums(explained)[0].flops < 1.03 * flops


def test_the_operator_itself():
    """As it stays with a mask."""
    model = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True).eval()
    padding = torch.zeros(8, 128, dtype=torch.bool)
    padding[:, 100:] = True
    with torch.no_grad():
        explained = onepass.explain(model, torch.randn(8, 128, 256), src_key_padding_mask=padding, device="h200")
    assert "_transformer_encoder_layer_fwd" in rows(explained)
    flops = 8 * 128 * (2 * 4 * 256**2 + 2 * 2 * 256 * 1024 + 4 * 128 * 256)
    assert flops <= sums(explained)[0].flops < 1.03 * flops


def test_checkpointed_blocks_run_twice_and_have_lines():
    x = X.clone().requires_grad_()
    norm = nn.LayerNorm(256)
    plain, held = (
        onepass.explain(function, x, device="h200")
        for function in (
            lambda x: norm(block(x)),
            lambda x: checkpoint(lambda t: norm(block(t)), x, use_reentrant=False),
        )
    )
    assert [line.line for line in held.lines] == [line.line for line in plain.lines] != []
    (forward, backward), (forward_again, backward_again) = sums(plain), sums(held)
    assert forward_again == forward and backward_again.flops == backward.flops + forward.flops
    (one,), (other,) = plain.lines, held.lines
    assert other.fused[1].bytes == one.fused[1].bytes + one.fused[0].bytes
    assert sum(b.seconds for b in other.now) > sum(b.seconds for b in one.now)
    assert all("in tag_activation_checkpoint" in o.why for o in held.operators if o.name == "matmul")


def test_autograd_functions_have_their_own_backward():
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    forward, backward = sums(onepass.explain(Squared.apply, x, w, device="h200"))
    assert forward.flops == PRODUCT and backward.flops == 2 * PRODUCT


def test_cond_has_its_dearest_branch():
    def function(x):
        return torch.cond(x.sum() > 0, lambda t: (t @ t).sin(), lambda t: t.cos(), (x,))

    with torch.no_grad():
        explained = onepass.explain(function, X, device="h200")
    assert "matmul" in rows(explained) and "sin" in rows(explained) and "cos" not in rows(explained)
    assert any("dearest of 2 branches" in o.why for o in explained.operators)


def test_loops():
    def repeated(x):
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x @ x), (torch.zeros((), dtype=torch.long), x))[1]

    def scanned(x):
        return scan(lambda carry, row: (carry + row, (carry * row).clone()), torch.zeros(256), x)[1]

    with torch.no_grad():
        once = onepass.explain(repeated, X, device="h200")
        assert sums(once)[0].flops >= PRODUCT and any("one iteration" in o.why for o in once.operators)
        (added,) = [o for o in onepass.explain(scanned, X, device="h200").operators if o.name == "add"]
        assert added.forward.kernels == 256 and added.forward.bytes == 256 * 3 * 256 * 4
        (sine,) = onepass.explain(lambda x: mapped(lambda row: row.sin(), x), X, device="h200").operators
        assert sine.forward.bytes == 2 * X.nbytes


def test_flex_attention():
    q = torch.randn(1, 2, 512, 32)
    with torch.no_grad():
        explained = onepass.explain(lambda q: flex_attention(q, q, q, score_mod=lambda s, *_: s * 2), q, device="h200")
    (attention,) = [o for o in explained.operators if o.name == "flex_attention"]
    assert attention.forward.flops == 4 * 2 * 512 * 512 * 32 and attention.forward.bytes >= 2 * q.nbytes


def recurrent(cell, **options):
    """Layers, and the flops of their products for a step of one row."""
    layer = getattr(nn, cell)(64, 48, **options)
    return layer, 2 * sum(w.numel() for name, w in layer.named_parameters() if "weight" in name)


@pytest.mark.parametrize(
    "cell, options",
    [
        ("LSTM", {"num_layers": 2}),
        ("LSTM", {"proj_size": 32}),
        ("GRU", {"bidirectional": True}),
        ("RNN", {"bias": False}),
    ],
)
def test_recurrent_layers(cell, options):
    layer, flops = recurrent(cell, batch_first=True, **options)
    x = torch.randn(16, 50, 64, requires_grad=True)
    explained = onepass.explain(lambda x: layer(x)[0], x, device="h200")
    (row,) = [o for o in explained.operators if o.name in ("lstm", "gru", "rnn_tanh")]
    assert row.forward.flops == pytest.approx(16 * 50 * flops) and row.backward.flops == 2 * row.forward.flops
    assert row.forward.kernels > 50 and row.shape == layer(x)[0].shape
    assert row.forward.bytes > x.nbytes + sum(p.nbytes for p in layer.parameters() if p.dim() == 2)


def test_transforms():
    with torch.no_grad():
        batched = onepass.explain(
            lambda x, w: torch.vmap(lambda t: t @ w)(x), X.expand(4, 256, 256).clone(), W, device="h200"
        )
        derived = onepass.explain(lambda x: torch.func.grad(lambda t: (t @ t).sin().sum())(x), X, device="h200")
    assert sums(batched)[0].flops == 4 * PRODUCT
    assert sums(batched)[0].bytes <= 9 * X.nbytes
    assert sums(derived)[0].flops >= 3 * PRODUCT


def written(x):
    y = x.clone()
    y[:100] = 1.0
    y[:, 5:].mul_(2.0)
    return y


def test_views_that_copy_and_what_is_overwritten():
    with torch.no_grad():
        explained = onepass.explain(lambda x: x.t().reshape(-1), X, device="h200")
        assert sums(explained)[0].bytes == 2 * X.nbytes
        explained = onepass.explain(written, X, device="h200")
        assert sums(explained)[0].bytes >= (2 + 100 / 256 + 2 * 251 / 256) * X.nbytes


def called(layer, call):
    return lambda x: call(layer, x)


MODELS = {
    "attention": (lambda: called(nn.MultiheadAttention(256, 4), lambda layer, x: layer(x, x, x)[0]), (X,)),
    "checkpoint": (lambda: lambda x: checkpoint(block, x * 2.0, use_reentrant=False), (X,)),
    "autograd function": (lambda: Squared.apply, (X, W)),
    "lstm": (lambda: called(nn.LSTM(256, 32), lambda layer, x: layer(x)[1][0]), (X,)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 8)),
        (torch.randn(2, 3, 32, 32),),
    ),
    "written": (lambda: written, (X,)),
    "transforms": (lambda: lambda x: torch.vmap(lambda t: t.softmax(-1) @ W)(x[None]), (X,)),
    **{name: (lambda name=name: _model(name), ()) for name in ("llama", "mamba", "vit")},
}
INFERENCE = ("written", "mamba")


def _model(name):
    model, inputs = make(name)
    model, inputs = model.float(), moved(inputs, torch.float32, "cpu")
    return lambda: model(**inputs)


def storages(tree):
    values = torch.utils._pytree.tree_leaves(tree)
    while wrapped := [
        v for v in values if isinstance(v, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(v)
    ]:
        values = [torch._C._functorch.get_unwrapped(v) if any(v is w for w in wrapped) else v for v in values]
    return {v.untyped_storage()._cdata for v in values if isinstance(v, torch.Tensor) and v.numel()}


def moves(node, gm):
    """Whether a node gives new memory: read off the storages of what it takes and gives, whatever it calls."""
    if node.op not in ("call_function", "call_method"):
        return False
    if node.target in (torch.empty, "new_empty", torch.empty_like):
        return False
    taken = {s for other in node.all_input_nodes for s in storages(other.meta.get("example_value"))}
    if node.meta.get("example_value") is None:
        return getattr(node.target, "__name__", "") == "setitem"
    return not storages(node.meta["example_value"]) <= taken


@pytest.mark.parametrize("name", MODELS)
def test_no_node_that_moves_data_is_missing(name, monkeypatch):
    model, inputs, training = MODELS[name][0](), MODELS[name][1], name not in INFERENCE
    seen, missing = [], []
    parts = explaining.parts

    def checked(gm, profile, training):
        found = list(parts(gm, profile, training))
        there = {part.node for part in found}
        for node in gm.graph.nodes:
            if moves(node, gm) and not isinstance(node.target, torch._ops.HigherOrderOperator):
                seen.append(node)
                missing.extend([] if node in there else [node])
            elif isinstance(node.target, torch._ops.HigherOrderOperator):
                seen.append(node)
                missing.extend([] if any(node.target.name() in part.within for part in found) else [node])
        return found

    monkeypatch.setattr(explaining, "parts", checked)
    with torch.set_grad_enabled(training):
        explained = onepass.explain(model, *(x.clone().requires_grad_(training) for x in inputs), device="h200")
    assert seen and not missing
    profile = profile_of("h200")
    for operator in explained.operators:
        price = operator.forward + operator.backward
        assert price.bytes > 0 and price.seconds >= 0.9 * price.bytes / profile.bandwidth
    now = sum(p.seconds for p in sums(explained))
    assert explained.seconds[0] == pytest.approx(now)
