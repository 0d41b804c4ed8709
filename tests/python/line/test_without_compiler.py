"""Without a C++ compiler lines outside the table run as PyTorch's operators: all of them, and as strictly."""

import os
import subprocess
import sys

from helpers import NO_COMPILER


def run_without_compiler(program, cache):
    environment = {**os.environ, "ONEPASS_CACHE_DIR": str(cache), **NO_COMPILER}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


MIXTURES = """
import contextlib, itertools, warnings
import torch, onepass
warnings.simplefilter("ignore")
lines = [
    "add | add | keep | layer_norm(1e-12)", "mul(0.3) | tanh | scale | tanh", "scale | mask | softmax | tanh",
    "tanh | gelu | linear | tanh | tanh | bias", "linear | tanh | keep | silu | silu", "scores | tanh | mask | softmax",
    "scores | tanh | tanh | softmax | values", "dropout(0.3) | tanh | keep | relu | keep", "gate(elu(0.7)) | tanh",
]
dtypes = [torch.float32, torch.bfloat16, torch.float64]
for line, dtype, other, grad, is_bool, cast in itertools.product(
    lines, dtypes, dtypes, (False, True), (False, True), (None, torch.bfloat16)
):
    x, columns, operands = torch.randn(2, 4, 8, dtype=dtype, requires_grad=grad), 8, []
    for word in onepass.Line(line).words:
        if word.operand in ("matrix", "keys"):
            operands.append(torch.randn(*([2] if word.operand == "keys" else []), 5, columns, dtype=dtype))
            columns = 5
        elif word.operand == "values":
            operands.append(torch.randn(2, columns, 3, dtype=dtype))
        elif word.name == "mask" and is_bool:
            operands.append(torch.rand(2, 4, columns) < 0.8)
        elif word.operand != "none":
            operands.append(torch.randn(*([] if word.operand == "column" else [2, 4]), columns, dtype=other))
    for o in operands:
        o.requires_grad_(grad and o.is_floating_point())
    with torch.autocast("cpu", cast) if cast else contextlib.nullcontext():
        results = onepass.fused(line, x, *operands)
    results = results if isinstance(results, tuple) else (results,)
    behind = cast if cast and onepass.Line(line).weight is not None and dtype != torch.float64 else dtype
    assert results[0].dtype == behind, (line, results[0].dtype)
    if grad:
        leaves = [t for t in (x, *operands) if t.requires_grad]
        given = torch.autograd.grad(sum(r.float().sum() for r in results), leaves)
        assert all(g.shape == t.shape and g.dtype == t.dtype for g, t in zip(given, leaves))
    onepass.fused(line, [x, x], *operands)
"""


def test_without_a_compiler_every_mixture_runs(tmp_path):
    run_without_compiler(MIXTURES, tmp_path)


def test_the_composition_refuses_what_the_kernel_refuses(tmp_path):
    """Broadcasting a column of the wrong length would pass silently through PyTorch's operators."""
    program = """
import warnings
import torch, onepass
warnings.simplefilter("ignore")
x, b = torch.randn(4, 8), torch.randn(8)
for shape, line in (((1,), "bias | scale"), ((3, 8), "bias | scale"), ((2, 4, 8), "add | scale")):
    bad = torch.ones(shape)
    try:
        onepass.fused(line, x, bad, b)
    except RuntimeError as error:
        assert str(list(bad.shape)) in str(error), error
    else:
        raise AssertionError(f"{line} took a tensor of shape {tuple(bad.shape)}")
torch.manual_seed(0)
expected = onepass.fused("scale | dropout(0.5)", x, b, generator=torch.Generator().manual_seed(1))
assert torch.equal(onepass.fused("scale | dropout(0.5)", x, b, generator=torch.Generator().manual_seed(1)), expected)
assert torch.equal(onepass.fused("scale | dropout(0.5)", x, b, training=False), x * b)
"""
    run_without_compiler(program, tmp_path)


def test_losses_need_no_compiler(tmp_path):
    """Their lines are compiled ahead of time, but for those with a cap or a temperature."""
    program = """
import warnings
import torch, onepass
from onepass.functional import cross_entropy, linear_cross_entropy, linear_log_prob, log_prob
warnings.simplefilter("error")
for dtype in (torch.float32, torch.bfloat16):
    x, w = (torch.randn(n, 4, dtype=dtype, requires_grad=True) for n in (5, 7))
    target = torch.arange(5)
    linear_cross_entropy(x, w, target, label_smoothing=0.1, z_loss=1e-4).backward()
    cross_entropy(x @ w.T, target, reduction="none").sum().backward()
    for entropy in (False, True):
        for results in (linear_log_prob(x, w, target, entropy=entropy), log_prob(x @ w.T, target, entropy=entropy)):
            sum(r.sum() for r in (results if entropy else [results])).backward()
"""
    run_without_compiler(program, tmp_path)


def test_a_loss_of_a_product(tmp_path):
    """Of a line without kernels gradients are not made in forward."""
    program = """
import warnings
import torch, onepass
import torch.nn.functional as F
warnings.simplefilter("ignore")
x, w, target = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True), torch.arange(5)
loss = onepass.functional.linear_cross_entropy(x, w, target, softcap=3.0)
expected = F.cross_entropy((F.linear(x, w) / 3).tanh() * 3, target)
torch.testing.assert_close(loss, expected)
torch.testing.assert_close(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(expected, (x, w)))
"""
    run_without_compiler(program, tmp_path)
