"""What operators cost: never less than a roofline computed by hand allows, nor many times as much, whatever PyTorch
calls them."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onepass
from onepass.pricing import prices
from onepass.pricing.profile import profile_of

BANDWIDTH = 4.8e12
PEAK = {
    torch.float32: 67e12,
    torch.complex64: 67e12,
    torch.float64: 67e12,
    torch.bfloat16: 989e12,
    torch.float16: 989e12,
    torch.int8: 1979e12,
}
TF32 = 494e12
"""Of an H200's data sheet; PyTorch allows TF32 in convolutions."""


def meta(*shape, dtype=torch.float32, grad=True):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad and not dtype == torch.int8)


def indices(*shape):
    return torch.zeros(shape, dtype=torch.long, device="meta")


@dataclass(frozen=True)
class Case:
    """An operator on tensors, with the flops of its products and the bytes that it must move, where these are not those
    of all its tensors; `back` is what its backward must move, where that is not the gradients of all that has some."""

    name: str
    function: object
    tensors: tuple
    flops: float = 0
    moved: float | None = None
    back: float | None = None
    back_flops: float | None = None


def conv(dims, groups=1, transposed=False, dtype=torch.float32):
    """A batch of 8, 64 to 96 channels, 16 places in each dimension, kernels of 3."""
    place, kernel = (16,) * dims, (3,) * dims
    function = getattr(F, f"conv_transpose{dims}d" if transposed else f"conv{dims}d")
    weight = (64, 96 // groups, *kernel) if transposed else (96, 64 // groups, *kernel)
    padding = 0 if transposed else 1
    flops = 2 * 8 * 16**dims * 64 * 96 // groups * 3**dims
    name = f"conv{dims}d groups={groups} transposed={transposed} {dtype}"
    tensors = meta(8, 64, *place, dtype=dtype), meta(*weight, dtype=dtype)
    return Case(name, lambda x, w: function(x, w, padding=padding, groups=groups), tensors, flops)


def attention(dtype, causal, **options):
    q, k = meta(2, 8, 512, 64, dtype=dtype), meta(2, 8, 384, 64, dtype=dtype)
    scores = 2 * 8 * 512 * 384 / (2 if causal else 1)
    call = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, **options)  # noqa: E731
    return Case(f"attention {dtype} {causal} {options}", call, (q, k, k.detach().requires_grad_()), 4 * scores * 64)


X, IMAGE = meta(256, 4096), meta(8, 64, 56, 56)
CHANNELS = meta(64)
LOGITS, TABLE = meta(16384, 128256), meta(32768, 4096)
SQUARE = meta(512, 512)
LEFT, RIGHT, BATCHED = meta(4, 64, 128), meta(4, 128, 96), 2 * 4 * 64 * 128 * 96


def square(size, dtype):
    return meta(size, size, dtype=dtype), meta(size, size, dtype=dtype)


SCATTERED = indices(256, 64), meta(256, 64)

CASES = [
    *(conv(dims) for dims in (1, 2, 3)),
    conv(2, groups=64 // 2),
    conv(2, dtype=torch.bfloat16),
    *(conv(dims, transposed=True) for dims in (1, 2, 3)),
    Case("einsum", lambda x, y: torch.einsum("bij,bjk->bik", x, y), (LEFT, RIGHT), BATCHED),
    Case("einsum transposed", lambda x, y: torch.einsum("ij,jk->ki", x, y), (SQUARE, meta(512, 64)), 2 * 512**2 * 64),
    Case("matmul", torch.matmul, square(512, torch.bfloat16), 2 * 512**3),
    Case("matmul float64", torch.matmul, square(512, torch.float64), 2 * 512**3),
    Case("matmul complex", torch.matmul, square(256, torch.complex64), 8 * 256**3),
    Case("matmul broadcast", torch.matmul, (meta(4, 1, 64, 128), meta(3, 128, 96)), 3 * BATCHED),
    Case("matmul vector", torch.matmul, (SQUARE, meta(512)), 2 * 512 * 512, back_flops=2 * 512 * 512),
    Case("bmm", torch.bmm, (LEFT, RIGHT), BATCHED),
    Case("baddbmm", torch.baddbmm, (meta(4, 64, 96), LEFT, RIGHT), BATCHED),
    Case("addbmm", torch.addbmm, (meta(64, 96), LEFT, RIGHT), BATCHED),
    Case("addmm", torch.addmm, (meta(96), meta(64, 128), meta(128, 96)), 2 * 64 * 128 * 96),
    Case("linear", F.linear, (meta(4, 64, 128), meta(96, 128), meta(96)), 2 * 256 * 128 * 96),
    Case("bilinear", F.bilinear, (meta(256, 64), meta(256, 32), meta(16, 64, 32)), 2 * 256 * 64 * 32 * 16),
    Case("int mm", torch._int_mm, square(64, torch.int8), 2 * 64**3, back=0, back_flops=0),
    Case(
        "grouped mm",
        torch._grouped_mm,
        (meta(64, 128, dtype=torch.bfloat16), meta(2, 128, 96, dtype=torch.bfloat16), indices(2).int()),
        2 * 64 * 128 * 96,
    ),
    attention(torch.bfloat16, False),
    attention(torch.float16, True),
    attention(torch.float32, False, dropout_p=0.1),
    Case("group_norm", lambda x, w, b: F.group_norm(x, 8, w, b), (IMAGE, CHANNELS, CHANNELS.detach().requires_grad_())),
    Case("batch_norm", lambda x: F.batch_norm(x, None, None, training=True), (IMAGE,)),
    Case("instance_norm", F.instance_norm, (IMAGE,)),
    Case("local_response_norm", lambda x: F.local_response_norm(x, 4), (IMAGE,)),
    Case("cross_entropy", F.cross_entropy, (LOGITS, indices(16384)), 0, 2 * LOGITS.nbytes, 4 * LOGITS.nbytes),
    Case("log_softmax", lambda x: F.log_softmax(x, 0), (X,)),
    Case("embedding", F.embedding, (indices(4, 512), TABLE), 0, 2 * 2048 * 4096 * 4, TABLE.nbytes),
    Case("embedding_bag", F.embedding_bag, (indices(16, 32), TABLE), 0, 512 * 4096 * 4, TABLE.nbytes),
    Case("index_select", lambda x, i: x.index_select(0, i), (X, indices(64)), moved=2 * 64 * 4096 * 4),
    Case("index", lambda x, i: x[i], (X, indices(64)), moved=2 * 64 * 4096 * 4),
    Case("gather", lambda x, i: x.gather(1, i), (X, indices(256, 64)), moved=256 * 64 * 16),
    Case("scatter_add", lambda x, i, y: x.scatter_add(1, i, y), (X, *SCATTERED), back=256 * 64 * 16),
    Case("cumsum", lambda x: x.cumsum(-1), (X,)),
    Case("sort", lambda x: x.sort(-1)[0], (X,), moved=4 * X.nbytes),
    Case("topk", lambda x: x.topk(8)[0], (X,)),
    Case("cat", lambda x, y: torch.cat((x, y)), (X, meta(64, 4096)), back=0),
    Case("stack", lambda x, y: torch.stack((x, y)), (X, meta(256, 4096)), back=0),
    Case("pad", lambda x: F.pad(x, (1, 1)), (X,), back=2 * X.nbytes),
    Case("reflection pad", lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), (IMAGE,)),
    Case("interpolate", lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), (IMAGE,)),
    Case("max_pool", lambda x: F.max_pool2d(x, 2), (IMAGE,)),
    Case("avg_pool", lambda x: F.avg_pool2d(x, 2), (IMAGE,)),
    Case("adaptive_pool", lambda x: F.adaptive_avg_pool2d(x, 1), (IMAGE,)),
    Case("rfft", torch.fft.rfft, (X,)),
    Case("roll", lambda x: x.roll(3, 1), (X,)),
    Case("copy of a transposed tensor", lambda x: x.mT.reshape(-1), (X,), back=0),
    Case("contiguous", lambda x: x.mT.contiguous(), (X,), back=0),
    Case("expanded", lambda x: x.expand(8, 256, 4096).contiguous(), (X,), moved=9 * X.nbytes),
    Case("slice", lambda x: x[:, :64].contiguous(), (X,), moved=2 * 256 * 64 * 4),
    Case("where", lambda x, y: torch.where(x > 0, x, y), (X, meta(256, 4096))),
    Case("prelu", F.prelu, (IMAGE, CHANNELS)),
    Case("glu", F.glu, (X,)),
    Case("logsumexp", lambda x: x.logsumexp(-1), (X,)),
    Case("clone", torch.clone, (X,), back=0),
    Case("cast", lambda x: x.to(torch.bfloat16), (X,)),
]  # fmt: skip


def bytes_in(tree):
    return sum(t.nbytes for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor))


def total(explained):
    return [sum((getattr(o, side) for o in explained.operators), prices.Price()) for side in ("forward", "backward")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_prices_keep_to_the_roofline(case):
    """Both ways: what the data sheet's bandwidth and peak do not allow is no price, and neither is many times that."""
    result = case.function(*case.tensors)
    forward, backward = total(onepass.explain(case.function, *case.tensors, device="h200"))
    learned = bytes_in([t for t in case.tensors if t.requires_grad])
    moved = bytes_in((case.tensors, result)) if case.moved is None else case.moved
    back = bytes_in(result) + learned if case.back is None else case.back
    back_flops = 2 * case.flops if case.back_flops is None else case.back_flops
    assert forward.flops >= case.flops and backward.flops >= back_flops
    dtype = case.tensors[1].dtype if case.flops else torch.float32
    peak = TF32 if case.name.startswith("conv") and dtype == torch.float32 else PEAK[dtype]
    profile = profile_of("h200")
    for price, bytes, flops in ((forward, moved, case.flops), (backward, back, back_flops)):
        assert price.bytes >= bytes
        least = max(bytes / BANDWIDTH, flops / peak)
        starting = profile.fixed * price.kernels
        assert least <= price.seconds <= starting + 6 * price.kernels * max(least, moved / BANDWIDTH)
        if case.flops:
            assert price.flops <= 3 * max(flops, case.flops) + 8 * price.bytes
        assert bool(price.bytes) == bool(bytes)


@pytest.mark.parametrize("p, training", [(0.0, True), (0.1, False)])
def test_dropout_that_is_off_moves_nothing(p, training):
    """It gives the tensor that it takes, of which Dynamo shows a copy (torch 2.11)."""
    explained = onepass.explain(lambda x: F.dropout(x.tanh(), p, training), X, device="h200")
    assert [operator.name for operator in explained.operators] == ["tanh"]


def test_the_issues_convolution():
    """Batch 64, 512 x 56 x 56: 9.5e11 flops forward, 2.9 ms in all is the peak."""
    with torch.device("meta"):
        model = nn.Conv2d(512, 512, 3, padding=1).bfloat16()
    explained = onepass.explain(model, meta(64, 512, 56, 56, dtype=torch.bfloat16), device="h200")
    (operator,) = explained.operators
    assert (
        operator.forward.flops == 2 * 64 * 56**2 * 512**2 * 9 and operator.backward.flops == 2 * operator.forward.flops
    )
    assert 2.8e-3 < explained.seconds[0] < 5e-3 and operator.bound == "compute"


def test_gradients_that_nobody_asks_for_have_no_price():
    weight = meta(64, 64, 3, 3)
    of_both, of_weight = (
        total(onepass.explain(F.conv2d, meta(8, 64, 56, 56, grad=grad), weight, device="h200"))[1]
        for grad in (True, False)
    )
    assert of_weight.flops == of_both.flops / 2 and of_weight.bytes < of_both.bytes
    x = meta(256, 4096, grad=False)
    for function in (torch.cumsum, F.softmax, lambda x, dim: F.layer_norm(x, x.shape[dim:]), lambda x, _: x * 2.0):
        w = meta(4096)
        both = onepass.explain(lambda x, w, f=function: (f(x, -1), w.tanh()), x, w, device="h200")
        assert total(both)[1].bytes == 3 * w.nbytes


@torch.library.custom_op("onepass_test::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0)


@turned.register_fake
def _(x):
    return torch.empty_like(x)


def test_custom_operators_have_their_bytes():
    explained = onepass.explain(lambda x: turned(x), X.detach(), device="h200")
    (operator,) = explained.operators
    assert operator.forward.bytes == 2 * X.nbytes and operator.forward.kernels == 1
    assert "onepass_test::turned only the bytes are known" in operator.why


def test_custom_operators_may_have_formulas():
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    try:
        register_flop_formula(torch.ops.onepass_test.turned)(lambda shape, *_, out_shape=None, **__: 10**15)
        explained = onepass.explain(lambda x: turned(x.tanh()), meta(128, 4096, grad=False), device="h200")
    finally:
        flop_registry.pop(torch.ops.onepass_test.turned, None)
    assert explained.operators[-1].bound == "compute" and explained.operators[-1].forward.flops == 10**15


def test_dtypes_of_products():
    gpu, cpu = profile_of("h200"), profile_of("cpu")
    half, full = gpu.products["bfloat16"], gpu.products["float32"]
    assert gpu.product_rate(torch.float16) == half and gpu.product_rate(torch.float8_e4m3fn) == 2 * half
    assert gpu.product_rate(torch.float32) == full and gpu.product_rate(torch.float32, convolves=True) == half / 2
    assert cpu.product_rate(torch.float64) == cpu.products["float32"] / 2
    assert cpu.product_rate(torch.float32, convolves=True) == cpu.products["float32"]
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert gpu.product_rate(torch.float32) == half / 2
    finally:
        torch.set_float32_matmul_precision(precision)


def test_autocast_multiplies_in_its_dtype():
    x, layer = torch.randn(512, 512), nn.Linear(512, 512, bias=False)

    def within(x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    with torch.no_grad():
        plain = onepass.explain(layer, x, device="h200").operators[0].forward
        (inner,) = onepass.explain(within, x, device="h200").operators
        with torch.autocast("cpu", torch.bfloat16):
            outer = onepass.explain(layer, x, device="h200").operators[0].forward
    half = plain.flops / profile_of("h200").product_rate(torch.bfloat16)
    assert inner.forward.computing == outer.computing == half < plain.computing
