"""LayerNorm + activation and bias + GELU as cases: every dtype, rows that are not aligned, memory and finite
differences; what is wrong fails."""

import json

import pytest
import torch

import onepass
from cases import WrongGradient, run_case
from onepass.bench.accuracy import RATIO
from onepass.case import CASES, bias_gelu, layernorm_activation

pytestmark = pytest.mark.usefixtures("one_clock")
DTYPES = ("float32", "float16", "bfloat16")


def found_by(name, tmp_path, device, **options):
    """What the case prints, and the one device's results."""
    file = tmp_path / "case.json"
    text = run_case(name, device=device, json=file, **options)
    results = json.loads(file.read_text())
    assert results["case"] == name and results["quick"]
    (on,) = results["devices"]
    assert on["device"] == device and on["failures"] == []
    return text, on


def test_layer_norm_and_activations(device, tmp_path):
    text, on = found_by("layernorm-activation", tmp_path, device)
    assert f"passed: 20 of 20 errors at most {RATIO} times" in text
    lines = [pattern.line for pattern in layernorm_activation.COMPARISON.patterns]
    assert all(f"\n{line}\n" in text for line in lines)
    rows = {(row["line"], row["dtype"]) for row in on["rows"]}
    assert rows == {(lines[0], dtype) for dtype in DTYPES} | {(line, "float32") for line in lines[1:]}
    for row in on["rows"]:
        assert tuple(row["errors"]) == ("output", "x", "norm weight", "norm bias")
        assert row["forward_us"] > 0 and row["backward_us"] > 0 and row["saved_bytes"] > 0
    unfused, fused = on["rows"][:2]
    assert (unfused["forward_operators"], fused["forward_operators"]) == (2, 1)
    assert unfused["saved_bytes"] > fused["saved_bytes"]


def test_every_dtype_is_measured_where_memory_is_all():
    for name in ("layernorm-activation", "bias-gelu"):
        comparison = CASES[name].args[0]
        sizes = {(case.shape, str(case.dtype)) for case in comparison.patterns[0].cuda}
        large = (8192, 4096) if name == "layernorm-activation" else (16384, 4096)
        assert {(large, f"torch.{dtype}") for dtype in DTYPES} <= sizes


def test_bias_gelu(device, tmp_path):
    text, on = found_by("bias-gelu", tmp_path, device)
    assert f"passed: 27 of 27 errors at most {RATIO} times" in text
    kinds = {(tuple(row["shape"]), row["layout"]) for row in on["rows"]}
    assert kinds == {((64, 512), ""), ((64, 511), ""), ((64, 512), "misaligned")}
    assert {row["dtype"] for row in on["rows"]} == set(DTYPES)
    assert len(on["alignment"]) == 6
    for row in on["alignment"]:
        assert row["forward_ratio"] > 0 and row["backward_ratio"] > 0
        assert (row["shape"][1] == 511) != (row["layout"] == "misaligned")
        assert f"{row['forward_ratio']:.2f} times the aligned ones' time" in text
    assert on["gradcheck"] == ["eager", "onepass"]
    for row in on["loops"]:
        size = torch.tensor([], dtype=getattr(torch, row["dtype"])).itemsize * 64 * 512
        assert row["total_us"] > 0 and row["calls"] == 20
        assert row["peak_bytes"] == (2 * size if row["provider"] == "eager" else size)
    assert [row["dtype"] for row in on["loops"]] == [dtype for dtype in DTYPES for _ in range(2)]


def test_ratios_are_of_times_for_a_number():
    def row(columns, layout, us):
        times = {"forward_us": us, "backward_us": 2 * us}
        return {"shape": [8, columns], "dtype": "float32", "layout": layout, "provider": "onepass"} | times

    odd, misaligned = bias_gelu.alignment([row(100, "", 10.0), row(99, "", 19.8), row(100, "misaligned", 15.0)])
    assert (odd["forward_ratio"], odd["backward_ratio"]) == (2.0, 2.0)
    assert (misaligned["layout"], misaligned["forward_ratio"]) == ("misaligned", 1.5)


@pytest.mark.parametrize("name", ["layernorm-activation", "bias-gelu"])
def test_a_wrong_gradient_fails(name, replaced, tmp_path):
    def wrong(pattern, x, *columns):
        return onepass.fused(pattern.line, WrongGradient.apply(x), *columns)

    replaced("onepass", wrong)
    file = tmp_path / "case.json"
    text = run_case(name, code=1, device="cpu", json=file)
    assert "fused: gradient of x: error " in text and "\nfailed: " in text
    (on,) = json.loads(file.read_text())["devices"]
    if name == "bias-gelu":
        (failure,) = on["failures"]
        assert failure.startswith("gradcheck in float64, fused on cpu: GradcheckError") and failure in " ".join(
            text.split()
        )
        assert on["gradcheck"] == ["eager"]


def test_what_raises_in_the_loop_says_so(replaced):
    def broken(pattern, x, b):
        raise NotImplementedError("no such kernel")

    replaced("onepass", broken)
    text = run_case("bias-gelu", code=1, device="cpu")
    assert "failed: 0 of 27 errors" in text and "NotImplementedError: no such kernel" in text
