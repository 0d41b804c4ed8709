"""To fuse or not as a case: all variants agree, the trace and the picture have what ran, sentences have its figures,
and what is wrong fails."""

import json
from dataclasses import replace

import pytest
import torch

from cases import run_case
from onepass.bench.accuracy import RATIO
from onepass.bench.report import duration
from onepass.case import fuse_or_not, timeline

pytestmark = pytest.mark.usefixtures("one_clock")
OURS = ("onepass_splits", "onepass")
UNCOMPILED = ("split_stack", "combined", *OURS)


def test_the_case(device, tmp_path):
    pytest.importorskip("matplotlib")
    files = {"json": tmp_path / "case.json", "trace": tmp_path / "trace.json", "plot": tmp_path / "picture.svg"}
    text = run_case("fuse-or-not", device=device, **files)
    assert f"passed: 16 of 16 errors at most {RATIO} times" in text
    (on,) = json.loads(files["json"].read_text())["devices"]
    assert [row["provider"] for row in on["rows"]] == list(UNCOMPILED)
    assert all(row["failure"] is None for row in on["rows"])

    whole = {row["variant"]: row for row in on["start_to_finish"]}
    assert tuple(whole) == (*UNCOMPILED, "modules")
    assert all(row["forward_us"] > 0 and row["step_us"] > 0 for row in whole.values())
    assert whole["combined"]["published"] == 8.4
    names = [f"{name}, {way}" for way in ("forward", "forward and backward") for name in UNCOMPILED]
    lanes = {name: lane for panel in on["launches"].values() for name, lane in panel.items()}
    assert list(lanes) == names
    for lane in lanes.values():
        assert 0 < lane["busy_us"] <= lane["duration_us"] and lane["launches"] > 0
    assert lanes["split_stack, forward"]["launches"] > lanes["combined, forward"]["launches"]

    traced = {event["name"] for event in json.loads(files["trace"].read_text())["traceEvents"]}
    assert set(names) <= traced
    picture = files["plot"].read_text()
    assert all(name in picture for name in UNCOMPILED) and picture.count("<path") > 50

    told = " ".join(on["explanation"])
    for word in ("Horizontal", "Intermediates", "Vertical"):
        assert word in told
    # Beside other work launches may cost nothing.
    assert ("Launches" in told) == (whole["split_stack"]["forward_us"] > whole["combined"]["forward_us"])
    gain = whole["split_stack"]["forward_us"] / whole["combined"]["forward_us"]
    for figure in (*(duration(whole[name]["forward_us"]) for name in ("split_stack", "combined")), f"{gain:.1f} times"):
        assert figure in told


def test_compiled_variants_are_told_beside_what_was_published(monkeypatch, tmp_path):
    """Compiling takes minutes: as if it left a function as it is. What it computes is not ours to fail."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    file = tmp_path / "case.json"
    text = run_case("fuse-or-not", device="cpu", compiled=True, json=file)
    (on,) = json.loads(file.read_text())["devices"]
    assert [row["provider"] for row in on["rows"]] == [variant.name for variant in fuse_or_not.VARIANTS]
    told = " ".join(on["explanation"])
    for variant in fuse_or_not.VARIANTS:
        if variant.compiled:
            assert f"{variant.name} takes " in told and f"times as fast here, {variant.published} as published" in told
    assert "passed: 16 of 16" in text


def test_the_published_size_is_measured():
    (pattern,) = fuse_or_not.COMPARISON.patterns
    for cases in (pattern.cpu, pattern.cuda):
        assert ((16, 1024, 256), torch.float32, "", 1) in cases


@pytest.mark.parametrize("variant", fuse_or_not.VARIANTS, ids=lambda variant: variant.name)
def test_variants_agree_with_modules_made_inside(variant, device):
    """As published: the same seed, the same layer."""
    if variant.compiled:
        variant = replace(variant, compiled=False)
    data = torch.randn(4 * 8 * 16, device=device)
    results = []
    for function in (fuse_or_not.split_stack, variant.whole()):
        torch.manual_seed(3)
        results.append(function(data, 4, 8, 16))
    torch.testing.assert_close(*results)
    assert results[1].shape == (4, 8, 1) and results[1].requires_grad


@pytest.mark.parametrize("name", ["split_stack", *OURS])
def test_a_wrong_variant_fails(name, monkeypatch):
    def wrong(variant):
        function = variant.function
        return replace(variant, function=lambda *inputs: 1.05 * function(*inputs))

    variants = tuple(wrong(v) if v.name == name else v for v in fuse_or_not.VARIANTS)
    monkeypatch.setattr(fuse_or_not, "VARIANTS", variants)
    text = run_case("fuse-or-not", code=1, device="cpu")
    who = "fused" if name == "onepass" else name
    assert f"4x64x32→1 fp32 {who}: output: error " in " ".join(text.split())
    assert "failed: 12 of 16 errors" in text


def test_a_variant_that_raises_leaves_the_others(monkeypatch, tmp_path):
    def broken(*inputs):
        raise NotImplementedError("no such kernel")

    variants = tuple(replace(v, function=broken) if v.name == "onepass" else v for v in fuse_or_not.VARIANTS)
    monkeypatch.setattr(fuse_or_not, "VARIANTS", variants)
    file = tmp_path / "case.json"
    text = run_case("fuse-or-not", code=1, device="cpu", json=file)
    (on,) = json.loads(file.read_text())["devices"]
    assert on["failures"] == ["4x64x32→1 fp32 onepass, as published: NotImplementedError: no such kernel"]
    assert on["failures"][0] in text and on["explanation"] == []
    assert "split_stack" in {row["variant"] for row in on["start_to_finish"]}


def event(name, category, start, duration, thread=1):
    return {"name": name, "cat": category, "ts": start, "dur": duration, "tid": thread, "ph": "X"}


def test_lanes_have_what_ran_on_the_device_between_beginning_and_end():
    events = [
        {"name": "process_name", "ph": "M"},
        event("first", "user_annotation", 100.0, 50.0),
        event("first", "gpu_user_annotation", 110.0, 30.0),
        event("second", "user_annotation", 200.0, 40.0),
        event("aten::add", "cpu_op", 101.0, 20.0),
        event("cudaLaunchKernel", "cuda_runtime", 105.0, 4.0),
        event("cuLaunchKernelEx", "cuda_driver", 111.0, 2.0),
        event("add_kernel", "kernel", 110.0, 10.0),
        event("Memcpy DtoD", "gpu_memcpy", 115.0, 15.0),
        event("other_kernel", "kernel", 210.0, 5.0),
        event("warm_up", "kernel", 10.0, 5.0),
    ]
    first, second = timeline.lanes(events, ["first", "second"], torch.device("cuda"))
    assert [(bar.name, bar.start, bar.duration) for bar in first.bars] == [
        ("add_kernel", 10.0, 10.0),
        ("Memcpy DtoD", 15.0, 15.0),
    ]
    assert first.launch_us == (4.0, 2.0) and first.duration == 50.0
    assert first.busy == 20.0  # they overlap by 5
    assert [bar.name for bar in second.bars] == ["other_kernel"] and second.busy == 5.0


def test_lanes_on_the_cpu_have_the_outermost_operators():
    events = [
        event("call", "user_annotation", 0.0, 100.0),
        event("aten::linear", "cpu_op", 10.0, 20.0),
        event("aten::addmm", "cpu_op", 12.0, 10.0),
        event("MulBackward0", "cpu_op", 40.0, 10.0),
        event("aten::mul", "cpu_op", 41.0, 5.0),
        event("aten::view", "cpu_op", 60.0, 1.0),
        event("onepass::linear_forward", "cpu_op", 15.0, 2.0, thread=2),
    ]
    (lane,) = timeline.lanes(events, ["call"], torch.device("cpu"))
    assert [bar.name for bar in lane.bars] == ["aten::linear", "onepass::linear_forward", "aten::mul"]
