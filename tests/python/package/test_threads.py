"""Many Python threads at once: the same line, different lines, first uses that race, forward against backward."""

import threading

import pytest
import torch

import onepass
from helpers import as_tuple, make_inputs, upstream

LINES = [
    "bias | gelu",
    "gate(silu)",
    "layer_norm(1e-5) | scale | bias",
    "add | keep | rms_norm(1e-6) | scale",
    "mul(0.125) | causal | softmax",
    "softmax",
]


def in_threads(count, work):
    """Runs work(i) in threads that start together; raises the first of their exceptions."""
    barrier, errors = threading.Barrier(count), []

    def body(i):
        try:
            barrier.wait(60)
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def outcome(line, inputs):
    results = as_tuple(onepass.fused(line, *inputs.tensors))
    return [*results, *torch.autograd.grad(results, inputs.differentiable, upstream(results))]


def test_different_lines_at_once(device):
    cases = [(line, make_inputs(line, (50, 300), torch.float32, device, seed=i)) for i, line in enumerate(LINES)]
    expected = [[t.detach().clone() for t in outcome(line, inputs)] for line, inputs in cases]

    def work(i):
        line, inputs = cases[i % len(cases)]
        for _ in range(20):
            for ours, want in zip(outcome(line, inputs), expected[i % len(cases)], strict=True):
                assert torch.equal(ours, want)

    in_threads(8, work)


def test_one_line_at_once(device):
    line = "layer_norm(1e-5) | scale | bias"
    cases = [make_inputs(line, (20 + i, 128), torch.float32, device, seed=i) for i in range(8)]
    expected = [[t.detach().clone() for t in outcome(line, inputs)] for inputs in cases]

    def work(i):
        for _ in range(20):
            for ours, want in zip(outcome(line, cases[i]), expected[i], strict=True):
                assert torch.equal(ours, want)

    in_threads(8, work)


def test_a_first_use_in_eight_threads(device):
    """The line is parsed, planned and, out of the table, compiled while seven others ask for it."""
    line = "mul(0.7) | softplus | mul(1.3) | tanh "  # the space makes it a new text
    x = torch.randn(40, 96, device=device)
    expected = torch.tanh(torch.nn.functional.softplus(x * 0.7) * 1.3)
    in_threads(8, lambda i: torch.testing.assert_close(onepass.fused(line, x), expected))


def test_errors_in_threads_stay_there(device):
    x, b = torch.randn(40, 96, device=device), torch.randn(96, device=device)
    expected = onepass.fused("bias | gelu", x, b)

    def work(i):
        for _ in range(20):
            if i % 2:
                with pytest.raises(RuntimeError, match=r"\[96\]"):
                    onepass.fused("bias | gelu", x, b[: i + 1])
            else:
                assert torch.equal(onepass.fused("bias | gelu", x, b), expected)

    in_threads(8, work)


def test_threads_on_streams_of_their_own(cuda):
    line = "layer_norm(1e-5) | scale | bias"
    cases = [make_inputs(line, (64, 1024), torch.float32, cuda, seed=i) for i in range(4)]
    expected = [[t.detach().clone() for t in outcome(line, inputs)] for inputs in cases]
    torch.cuda.synchronize()

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                got = outcome(line, cases[i])
            torch.cuda.current_stream().synchronize()
            for ours, want in zip(got, expected[i], strict=True):
                assert torch.equal(ours, want)

    in_threads(4, work)


def test_every_gpu(cuda):
    """The tensors' device counts, not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    line = "layer_norm(1e-5) | scale | bias"
    expected = None
    for index in reversed(range(torch.cuda.device_count())):
        inputs = make_inputs(line, (64, 1024), torch.float32, f"cuda:{index}")
        got = outcome(line, inputs)
        assert all(t.device.index == index for t in got) and torch.cuda.current_device() == 0
        expected = expected or [t.cpu() for t in got]
        for ours, want in zip(got, expected, strict=True):
            assert torch.equal(ours.cpu(), want)


def test_lines_that_come_and_go():
    """More than are remembered: one that another thread still runs stays."""
    x = torch.linspace(-2, 2, 64)

    def work(i):
        own = x.clone().requires_grad_()
        for turn in range(600):
            slope = (turn * 4 + i) / 4096
            y = onepass.fused(f"leaky_relu({slope})", own)
            (dx,) = torch.autograd.grad(y.sum(), own)
            assert torch.equal(y, torch.nn.functional.leaky_relu(own, slope))
            assert torch.equal(dx, torch.where(x > 0, 1.0, slope))

    in_threads(4, work)
