"""The ways a line with `linear` is computed: each forced in turn, what is chosen, and what is said of it."""

import pytest
import torch

import onepass
from helpers import (
    HALF_TYPES,
    assert_equal,
    check_line,
    gradients,
    make_inputs,
    run,
    upstream,
    with_strategy,
)
from onepass import functional as F
from onepass import nn

NORM_LINEAR = "layer_norm(1e-5) | scale | bias | linear | bias"
NORM_LINEARS = (
    NORM_LINEAR,
    "layer_norm(1e-5) | linear",
    "layer_norm(1e-5) | bias | linear | gelu",
    "rms_norm(1e-6) | linear | add",
    "rms_norm(1e-6) | scale | linear | bias | keep | silu",
)
ONE_KERNEL = ("tiled", "deferred")
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the kernel is for compute capability 9.0",
)


@needs_hopper
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("line", ("linear", "linear | bias | gelu", "linear | bias | keep | gelu | add"))
def test_tiled_is_as_accurate_as_pytorchs_chain(line, dtype):
    check_line(with_strategy(line, "tiled"), make_inputs(line, (300, 264), dtype, "cuda", out_features=392), slack=2.0)


@needs_hopper
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("line", NORM_LINEARS)
def test_deferred_is_as_accurate_as_pytorchs_chain(line, dtype):
    check_line(
        with_strategy(line, "deferred"), make_inputs(line, (300, 264), dtype, "cuda", out_features=392), slack=2.0
    )


@needs_hopper
@pytest.mark.parametrize("ratio", [0, 1, 16, 64, 256, 1024])
@pytest.mark.parametrize("line", [NORM_LINEAR, "rms_norm(1e-6) | scale | linear"])
def test_deferred_however_large_the_mean_is(line, ratio):
    """The error is no more than PyTorch's, whose chain rounds the normalised row instead of the scaled matrix."""
    inputs = make_inputs(line, (512, 1000), torch.bfloat16, "cuda", out_features=128)
    with torch.no_grad():
        inputs.x.add_(ratio)
    check_line(with_strategy(line, "deferred"), inputs, slack=2.0)


@needs_hopper
def test_deferred_where_the_first_columns_are_far_from_the_rest():
    inputs = make_inputs(NORM_LINEAR, (256, 4096), torch.bfloat16, "cuda", out_features=64)
    with torch.no_grad():
        inputs.x[:, 64:].add_(300)
        inputs.x[1::2, 0].add_(1000)
    check_line(with_strategy(NORM_LINEAR, "deferred"), inputs, slack=2.0)


@needs_hopper
@pytest.mark.parametrize(
    "shape, out_features", [((200, 9000), 520), ((20000, 256), 512), ((1000, 1024), 1024)], ids=str
)
@pytest.mark.parametrize("line", [NORM_LINEAR, "rms_norm(1e-6) | scale | linear"])
def test_deferred_with_statistics_of_a_pass_of_their_own_and_without(line, shape, out_features):
    """Rows too long or products too short for the product's kernel to make them."""
    inputs = make_inputs(line, shape, torch.bfloat16, "cuda", out_features=out_features)
    with torch.no_grad():
        inputs.x.add_(3)
    check_line(with_strategy(line, "deferred"), inputs, slack=2.0)


@needs_hopper
def test_deferred_of_rows_that_are_all_the_same():
    x = torch.full((256, 512), 3.0, device="cuda", dtype=torch.bfloat16)
    w, c = torch.randn(64, 512, device="cuda").bfloat16(), torch.randn(64, device="cuda").bfloat16()
    got = onepass.fused("layer_norm(1e-5) | linear(deferred) | bias", x, w, c)
    torch.testing.assert_close(got, c.expand(256, 64), rtol=1e-2, atol=2e-2)  # float32's rounding times 1 / √eps


@needs_hopper
@pytest.mark.parametrize("operand_dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_deferred_with_affine_of_another_dtype(operand_dtype):
    x, w = (torch.randn(s, 512, device="cuda").bfloat16() for s in (200, 96))
    g, b = (torch.randn(512, device="cuda", dtype=operand_dtype) for _ in range(2))
    line = "layer_norm(1e-5) | scale | bias | linear({})"
    got, expected = (onepass.fused(line.format(name), x, g, b, w) for name in ("deferred", "unfused"))
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


@needs_hopper
@pytest.mark.parametrize("how", ONE_KERNEL)
@pytest.mark.parametrize(
    "rows, columns, out_features",
    [
        (1, 8, 8), (1, 4096, 256), (127, 64, 72), (128, 72, 64), (129, 1024, 136), (257, 2048, 200), (2, 8192, 520),
(33000, 256, 64), (5000, 4096, 2056),
    ],
)  # fmt: skip
def test_shapes(rows, columns, out_features, how):
    line = ("" if how == "tiled" else "layer_norm(1e-5) | scale | bias | ") + "linear | bias | gelu_tanh"
    inputs = make_inputs(line, (rows, columns), torch.bfloat16, "cuda", out_features=out_features)
    check_line(with_strategy(line, how), inputs, slack=2.0)


@needs_hopper
@pytest.mark.parametrize("line", ["linear | bias | gelu", "linear | dropout(0.1) | add"])
def test_strategies_agree(line):
    """Products are summed in another order."""
    inputs = make_inputs(line, (4, 700, 512), torch.bfloat16, "cuda", out_features=768)
    results = {}
    for name in ("unfused", "tiled"):
        outputs, _ = run(with_strategy(line, name), inputs, generator=torch.Generator("cuda").manual_seed(3))
        results[name] = [*outputs, *gradients(outputs, inputs, upstream(outputs))]
    for unfused, tiled in zip(results["unfused"], results["tiled"]):
        torch.testing.assert_close(tiled, unfused, rtol=2e-2, atol=2e-2 * unfused.abs().max().item())


@needs_hopper
@pytest.mark.parametrize("how", ONE_KERNEL)
def test_the_same_bits_every_time(how):
    line = with_strategy("linear | bias | gelu" if how == "tiled" else f"{NORM_LINEAR} | gelu", how)
    inputs = make_inputs(line, (9000, 2048), torch.bfloat16, "cuda", out_features=1536)
    first, *others = (run(line, inputs)[0][0] for _ in range(5))
    for other in others:
        assert_equal(other, first)


@needs_hopper
@pytest.mark.parametrize("layout", ["rows", "leading"])
def test_rows_that_lie_apart(layout):
    x = torch.randn(300, 528, device="cuda", dtype=torch.bfloat16)
    x = x[:, :512] if layout == "rows" else x.view(3, 100, 528).transpose(0, 1)[..., :512]
    w = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    for line, operands in (
        ("linear(tiled) | gelu", (w,)),
        ("rms_norm | scale | linear(deferred)", (w[0], w)),
    ):
        got = onepass.fused(line, x, *operands)
        assert_equal(got, onepass.fused(line, x.contiguous(), *operands))


@needs_hopper
def test_tiled_refuses_what_it_cannot_take():
    x, w = torch.randn(64, 72, device="cuda"), torch.randn(40, 72, device="cuda")
    half = [t.half() for t in (x, w)]
    with pytest.raises(RuntimeError, match=r"linear\(tiled\).*bfloat16 and float16"):
        F.linear(x, w, strategy="tiled")
    with pytest.raises(RuntimeError, match="one dtype"):
        F.linear(x, half[1], strategy="tiled")
    with pytest.raises(RuntimeError, match="multiples of 8 elements"):
        F.linear(half[0][:, :70], half[1][:, :70], strategy="tiled")
    with pytest.raises(RuntimeError, match=r"linear\(tiled\).*nothing may stand before 'linear'"):
        F.rms_norm_linear(half[0], half[0][0], half[1], strategy="tiled")
    with pytest.raises(RuntimeError, match=r"linear\(deferred\).*only a norm"):
        F.layer_norm_linear(half[0], half[0][0], None, half[1], norm_activation="gelu", strategy="deferred")
    with pytest.raises(RuntimeError, match="16 bytes"):
        F.linear(half[0][:, 1:65], half[1][:, :64], strategy="tiled")


@needs_hopper
@pytest.mark.parametrize("how", ONE_KERNEL)
def test_in_a_cuda_graph(how):
    x, w = (torch.randn(s, 512, device="cuda", dtype=torch.bfloat16) for s in (640, 384))
    g = torch.randn(512, device="cuda", dtype=torch.bfloat16)
    line = "linear(tiled) | silu" if how == "tiled" else "rms_norm | scale | linear(deferred) | silu"
    operands = (w,) if how == "tiled" else (g, w)
    onepass.fused(line, x, *operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = onepass.fused(line, x, *operands)
    for _ in range(2):
        x.normal_()
        graph.replay()
        assert_equal(y, onepass.fused(line, x, *operands))


def test_a_strategy_for_another_device_is_refused():
    x, w = torch.randn(4, 8), torch.randn(16, 8)
    with pytest.raises(RuntimeError, match=r"linear\(tiled\).*for CUDA"):
        F.linear(x, w, strategy="tiled")
    assert_equal(F.linear(x, w, strategy="unfused"), F.linear(x, w))


def test_an_unknown_strategy():
    x, w = torch.randn(4, 8), torch.randn(16, 8)
    with pytest.raises(
        onepass.LineError,
        match="unknown strategy .fast., expected one of auto, unfused, .*, small_k, small_n, panels",
    ):
        F.linear(x, w, strategy="fast")
    with pytest.raises(TypeError, match="argument 'strategy' must be str, not int"):
        F.linear(x, w, strategy=3)
    with pytest.raises(onepass.LineError, match="expected a strategy"):
        onepass.Line("linear()")


def test_every_function_and_module_hands_its_strategy_on():
    x, w, square = torch.randn(4, 8), torch.randn(16, 8), torch.randn(8, 16)
    column = torch.ones(8)
    calls = [
        lambda: F.linear(x, w, strategy="tiled"),
        lambda: F.layer_norm_linear(x, column, None, w, strategy="tiled"),
        lambda: F.rms_norm_linear(x, column, w, strategy="tiled"),
        lambda: F.layer_norm_mlp(x, column, None, w, None, square, strategy="tiled"),
        lambda: F.gated_mlp(x, w, w, square, strategy="tiled"),
        lambda: nn.LinearAct(8, 16, strategy="tiled")(x),
        lambda: nn.LayerNormLinear(8, 16, strategy="tiled")(x),
        lambda: nn.RMSNormLinear(8, 16, strategy="tiled")(x),
        lambda: nn.LayerNormMLP(8, 16, strategy="tiled")(x),
        lambda: nn.GatedMLP(8, 16, strategy="tiled")(x),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="its kernel is for CUDA"):
            call()


# What was measured (docs/measured-facts.md, "linear").
@pytest.mark.parametrize(
    "line, shape, out_features, chosen",
    [
        ("linear | bias | gelu", (8192, 4096), 16384, "tiled"),
        ("linear | bias | silu", (8192, 4096), 16384, "tiled"),
        (NORM_LINEAR, (32768, 4096), 4096, "unfused"),
        (NORM_LINEAR, (8192, 4096), 4096, "unfused"),
        (NORM_LINEAR, (32768, 1024), 4096, "unfused"),
        (NORM_LINEAR, (65536, 1024), 1024, "deferred"),
        (NORM_LINEAR, (65536, 256), 64, "deferred"),
        (NORM_LINEAR, (65536, 4096), 64, "deferred"),
        (NORM_LINEAR, (131072, 128), 128, "small_k"),
        (NORM_LINEAR, (262144, 64), 64, "small_k"),
        (NORM_LINEAR, (16384, 256), 64, "small_k"),
        (NORM_LINEAR, (32768, 8192), 256, "deferred"),
        (NORM_LINEAR, (131072, 512), 128, "deferred"),
        (NORM_LINEAR, (16, 4096), 4096, "unfused"),
        (NORM_LINEAR, (8, 4096), 4096, "small_m"),
        (NORM_LINEAR, (1, 4096), 14336, "small_m"),
        (NORM_LINEAR, (16, 1024), 1024, "small_m"),
        ("linear | bias", (1, 4096), 4096, "small_m"),
        ("add | keep | rms_norm(1e-6) | scale | linear", (8, 4096), 6144, "small_m"),
        ("gate(silu) | linear", (1, 14336), 4096, "small_m"),
        ("gate(silu) | linear", (8192, 14336), 4096, "unfused"),
    ],
)
def test_plan_takes_what_was_faster(line, shape, out_features, chosen):
    plan = onepass.Line(line).plan(shape, torch.bfloat16, out_features, device="sm_90a", training=False)
    assert plan.strategy == chosen and str(plan).startswith(f"{chosen}: ")
    ways = {way.name: way for way in plan.alternatives}
    assert set(ways) == {"unfused", "tiled", "deferred", "small_m", "small_k", "small_n"}
    assert ways[chosen].seconds == min(way.seconds for way in plan.alternatives if way.seconds is not None)


def test_plan_says_why_not():
    line = onepass.Line("linear | gelu")
    for arch, dtype, columns, why in [
        ("sm_80", torch.bfloat16, 512, "compute capability 9.0"),
        ("sm_90a", torch.float32, 64, "bfloat16 and float16"),
        ("sm_90a", torch.float16, 63, "multiples of 8"),
    ]:
        plan = line.plan((64, columns), dtype, 64, device=arch)
        assert plan.strategy == "unfused" and why in plan.why
    named = onepass.Line("linear(tiled) | gelu").plan((64, 64), torch.bfloat16, 64, device="cpu")
    assert named.strategy == "tiled" and "its kernel is for CUDA" in named.why


# No time was measured there: docs/measured-facts.md, "Chips that were not measured".
@pytest.mark.parametrize("chip", ["sm_80", "sm_86", "sm_89", "sm_100a", "sm_120"])
def test_plan_on_chips_that_were_not_measured(chip):
    for shape, out_features, ours in [((131072, 128), 128, "small_k"), ((1, 4096), 14336, "small_m")]:
        plan = onepass.Line(NORM_LINEAR).plan(shape, torch.bfloat16, out_features, device=chip, training=False)
        ways = {way.name: way for way in plan.alternatives}
        assert ways["tiled"].seconds is None and ways["deferred"].seconds is None
        times = {way.name: way.seconds for way in plan.alternatives if way.seconds is not None}
        assert ours in times and plan.strategy == min(times, key=times.get)
    forced = onepass.Line("linear(unfused) | gelu").plan((8192, 4096), torch.bfloat16, 16384, device="sm_90a")
    assert forced.strategy == "unfused"


def test_plan_on_the_cpu():
    line = onepass.Line(NORM_LINEAR)
    plan = line.plan((16384, 256), torch.float32, 64, device="cpu")
    assert plan.strategy == "panels" and "unfused" in str(plan)
    assert [way.name for way in plan.alternatives] == ["unfused", "small_n", "panels"]
    assert plan.alternatives[2].bytes < plan.alternatives[0].bytes
    for shape, dtype, out_features in [
        ((16, 8), torch.float32, 16),
        ((16384, 256), torch.bfloat16, 64),
        ((48, 768), torch.float32, 3072),
    ]:
        plan = line.plan(shape, dtype, out_features, device="cpu")
        assert plan.strategy == "unfused" and "not panels" in plan.why


def test_panels_can_be_named():
    inputs = make_inputs(NORM_LINEAR, (4000, 256), torch.float32, "cpu", out_features=64)
    for name in ("panels", "unfused"):
        check_line(with_strategy(NORM_LINEAR, name), inputs, slack=2.0)
    with pytest.raises(RuntimeError, match=r"linear\(panels\).*for many rows"):
        run(
            with_strategy(NORM_LINEAR, "panels"),
            make_inputs(NORM_LINEAR, (8, 256), torch.float32, "cpu", out_features=4),
        )


def test_plan_without_a_choice():
    assert onepass.Line("linear").plan((4, 8), torch.float32, 16, device="cpu").strategy == "unfused"
    assert onepass.Line("rms_norm | scale").plan((4, 8)).strategy == "fused"
    with pytest.raises(TypeError, match="out_features"):
        onepass.Line("linear").plan((4, 8))
    with pytest.raises(RuntimeError, match="unknown arch 'sm_1'"):
        onepass.Line("linear").plan((4, 8), torch.bfloat16, 16, device="sm_1")
