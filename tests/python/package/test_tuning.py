"""`onepass tune`: what is measured, kept and used from then on; and what says why it cannot be."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import onepass
from onepass import _native, tuning
from onepass.cli import app

LINE = "layer_norm(1e-5) | scale | bias | gelu"

AGAIN = """
import sys
import torch
import onepass
from onepass import _native
line, columns = sys.argv[1], int(sys.argv[2])
x, w, b = torch.randn(64, columns, device="cuda"), *torch.randn(2, columns, device="cuda")
got = onepass.fused(line, x, w, b)
torch.testing.assert_close(got, onepass.Line(line).reference(x, w, b))
print(torch.cuda.current_device(), onepass.Line(line).plan(x.shape, torch.float32, device="cuda").why)
"""


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    return tmp_path


def entries():
    return [entry.label for entry in onepass.cache.list() if entry.kind == "tuned"]


def test_cuda_a_line_is_tuned_and_stays_right(cuda, own_cache):
    said = []
    found = tuning.tune(LINE, 1000, torch.float32, rows=4096, said=lambda what, share: said.append(share))
    assert [(of.line, of.backward, of.rows, of.columns) for of in found] == [
        (LINE, False, 4096, 1000),
        (LINE, True, 4096, 1000),
    ]
    assert all(of.tried > 5 and of.seconds[1] <= of.seconds[0] for of in found)
    assert said == sorted(said) and said[-1] == 1.0
    assert len(entries()) == 2 and all(label.endswith(LINE) for label in entries())
    x, w, b = torch.randn(300, 1000, device="cuda", requires_grad=True), *torch.randn(2, 1000, device="cuda")
    exact = x.detach().double().requires_grad_()
    upstream = torch.randn(300, 1000, device="cuda")
    got, expected = onepass.fused(LINE, x, w, b), onepass.Line(LINE).reference(exact, w.double(), b.double())
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    (dx,), (dexact,) = torch.autograd.grad(got, x, upstream), torch.autograd.grad(expected, exact, upstream.double())
    torch.testing.assert_close(dx.double(), dexact, rtol=1e-4, atol=1e-4)


def test_cuda_another_process_uses_what_was_kept(cuda, own_cache):
    def said() -> str:
        command = [sys.executable, "-c", AGAIN, LINE, "1000"]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ).stdout

    before = said()
    x, w, b = torch.randn(64, 1000, device="cuda"), *torch.randn(2, 1000, device="cuda")
    calls = tuning._heard_in(lambda: onepass.fused(LINE, x, w, b))
    ways = _native.tuning("ways", calls[0]["key"])
    other = next(way for way in ways if "rows" in way and "across=1 " not in way)
    assert _native.tuning("keep", calls[0]["key"], other, "a test's")["done"]
    assert said() != before
    assert onepass.cache.clear() > 1
    assert said() == before


def test_cuda_a_models_lines_are_found_by_running_it(cuda, own_cache):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 256), nn.LayerNorm(256))
    model, x = onepass.fuse(model.cuda()), torch.randn(512, 256, device="cuda")
    found = tuning.tune_step(lambda: model(x).square().sum().backward())
    assert {of.columns for of in found} == {256}
    assert {of.backward for of in found} == {False, True}
    assert any("layer_norm" in of.line for of in found)


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        tuning.tune("gelu", 64)
    with pytest.raises(RuntimeError, match=r"tune_step\(\): needs a CUDA device"):
        tuning.tune_step(lambda: None)
    result = CliRunner().invoke(app, ["tune", "--line", "gelu", "--columns", "64"])
    assert result.exit_code == 1 and "needs a CUDA device" in result.output


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--line", "gelu"], "expected --line with --columns"),
        ([], "expected --line with --columns"),
        (["--line", "gelu", "--columns", "64", "--model", "a:b"], "expected --line with --columns"),
        (["--model", "a:b"], "or --model with --input"),
        (["--model", "a:b", "--input", "4x8", "--columns", "64"], "or --model with --input"),
        (["--line", "gelou", "--columns", "64"], "gelou"),
        (["--line", "gelu", "--columns", "64", "--dtype", "int8"], "expected one of"),
    ],
)
def test_what_does_not_fit_is_named(arguments, said):
    result = CliRunner().invoke(app, ["tune", *arguments])
    assert result.exit_code == 2 and said in result.output


def test_what_was_not_heard_has_no_ways():
    with pytest.raises(RuntimeError, match="no call was heard"):
        _native.tuning("ways", "a key")
    with pytest.raises(RuntimeError, match="no way of a kernel is called 'columns'"):
        _native.tuning("use", "a key", "columns")
    assert tuning._heard_in(lambda: onepass.fused("gelu", torch.randn(3, 4))) == []
