"""The roofline as a case: places below the roofs, what bounds them and the verdict, and that what is wrong fails."""

import json

import pytest
import torch

import onepass
from cases import run_case
from onepass.bench.accuracy import RATIO
from onepass.case import roofline, roofs
from onepass.line import Line

pytestmark = pytest.mark.usefixtures("one_clock")
ROOFS = {
    "copy_bytes_per_second": 1e12,
    "flops_per_second": {"float32": 5e13, "bfloat16": 5e14},
    "launch_us": 2.0,
}
MATMUL, NORM = Line("linear"), Line("layer_norm(1e-5)")


def test_the_case(device, tmp_path):
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "case.json", tmp_path / "roofline.svg"
    text = run_case("roofline", device=device, json=file, plot=picture)
    assert f"passed: 49 of 49 errors at most {RATIO} times" in text
    (on,) = json.loads(file.read_text())["devices"]
    patterns = [pattern.name for pattern in roofline.PATTERNS]
    assert on["roofs"]["flops_per_second"].keys() == {"float32"} and on["roofs"]["launch_us"] > 0
    assert len(on["points"]) == 2 * len(on["rows"]) == 4 * len(patterns)
    for point in on["points"]:
        assert point["intensity"] == point["flops"] / point["bytes"]
        assert point["bytes_per_second"] == pytest.approx(1e6 * point["bytes"] / point["us"])
        assert point["flops_per_second"] == pytest.approx(1e6 * point["flops"] / point["us"])
        assert point["bound"] in ("memory", "compute", "launch") and point["reached"] > 0
    assert [v["pattern"] for v in on["verdicts"]] == [name for name in patterns for _ in range(2)]
    assert all(name in text and name in picture.read_text() for name in patterns)
    told = " ".join(text.split())
    assert len(on["claims"]) == 5 + len(roofs.SAID) and all(claim in told for claim in on["claims"])
    check_bytes_of_a_norm_by_hand(on["points"])


def check_bytes_of_a_norm_by_hand(points):
    """Counted by hand, in tensors of x's size: what each operator takes and gives, columns of statistics as nothing."""
    before, after = (
        next(p for p in points if p["pattern"] == roofs.RELU_BY_HAND and p["provider"] == who)
        for who in ("eager", "onepass")
    )
    x = 256 * 1024 * 4
    by_hand = 1 + 2 + 2 + 1 + 2 + 2 + 2 + 2 + 2  # mean, minus, square, mean, minus, over, times, plus, relu
    assert before["bytes"] / x == pytest.approx(by_hand, rel=0.01)
    assert after["bytes"] / x == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize(
    "moved, flops, launches, line, dtype, bound, reached",
    [
        (10**9, 10**9, 1, NORM, torch.bfloat16, "memory", 0.5),  # 1000 us of memory, 20 of float32's arithmetic
        (10**7, 10**11, 1, NORM, torch.bfloat16, "compute", 1.0),  # 2000 us: not the rate of products
        (10**9, 10**12, 1, MATMUL, torch.bfloat16, "compute", 1.0),  # 2000 us at the rate of bfloat16
        (10**6, 10**6, 3, NORM, torch.float32, "launch", 0.003),  # 6 us, of memory 1
    ],
)
def test_the_lowest_roof_bounds(moved, flops, launches, line, dtype, bound, reached):
    place = roofs.place_of(moved, flops, 2000.0, launches, line, dtype, ROOFS)
    assert place["bound"] == bound and place["reached"] == pytest.approx(reached)
    assert place["intensity"] == flops / moved


def point(provider, bound, moved=100, launches=4, intensity=1.0, us=10.0, **others):
    size = {"shape": [8, 16], "out_features": 0, "dtype": "float32", "layout": "", "direction": "forward"}
    place = {"bound": bound, "bytes": moved, "launches": launches, "intensity": intensity, "us": us}
    return {"pattern": "softmax by hand", "provider": provider} | size | place | others


@pytest.mark.parametrize(
    "before, after, verdict",
    [
        (point("eager", "memory", 300), point("onepass", "memory"), "fuse: memory"),
        (point("eager", "memory", 105), point("onepass", "memory"), "nothing to fuse"),
        (point("eager", "launch"), point("onepass", "launch", launches=1), "fuse: launches"),
        (point("eager", "launch", launches=1), point("onepass", "launch", launches=1), "nothing to fuse"),
        (point("eager", "compute", 300), point("onepass", "memory"), "don't: compute"),
    ],
)
def test_verdicts(before, after, verdict):
    compiled = point("compile", "memory") | {"forward_us": 5.0, "backward_us": None}
    (found,) = roofs.verdicts([before, after], [compiled])
    assert found["verdict"] == verdict and found["less"] == before["bytes"] / 100
    assert (found["gain"], found["compile_gain"]) == (1.0, 2.0)


def test_rules_of_thumb_meet_the_roofs():
    square = {"pattern": roofs.MATMUL, "shape": [1024, 1024], "out_features": 1024}
    points = [point(who, "compute", intensity=60.0, **square) for who in ("eager", "onepass")]
    told = list(roofs.claims(points, ROOFS, "cuda"))
    assert "It has 60 in fp32: three matrices of 4 bytes" in told[0]
    assert "In fp32 the roofs of this device meet at 50" in told[1] and "at 500" in told[2]
    assert told[3].startswith("Of 1 unfused measurements 1 lie on the other side of that rule, farthest matmul")


def test_a_wrong_line_fails(replaced):
    replaced("onepass", lambda pattern, *inputs: 1.05 * onepass.fused(pattern.line, *inputs))
    text = run_case("roofline", code=1, device="cpu")
    assert "softmax, 256x1024 fp32 fused: output: error " in " ".join(text.split())
