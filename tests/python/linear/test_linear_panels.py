"""Lines with `linear` and many rows: on the CPU a panel of rows at a time."""

import pytest
import torch

import onepass
from helpers import LINEAR_LINES, assert_equal, check_line, gradients, make_inputs, run, upstream


class TestManyRows:
    """On the CPU a panel of rows at a time."""

    # More than four panels, the last one short; with 100 features the matrix's gradient is not in panels.
    @pytest.mark.parametrize("out_features", [24, 100])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("line", LINEAR_LINES)
    def test_error_is_no_more_than_pytorchs(self, line, dtype, out_features, device):
        check_line(line, make_inputs(line, (5, 107, 1024), dtype, device, out_features=out_features), slack=2.0)

    @pytest.mark.parametrize("layout", ["rows", "columns", "expanded", "swapped"])
    def test_layouts(self, layout, device):
        line = "layer_norm(1e-5) | scale | bias | linear | bias"
        inputs = make_inputs(line, (535, 1024), torch.float32, device)
        x, grad = inputs.x.detach(), torch.randn(535, 24, device=device)
        if layout == "expanded":
            x, grad = x[:1].expand_as(x), grad[:1].expand_as(grad)
        expected = onepass.fused(line, inputs.x.detach().copy_(x), *inputs.operands)
        wanted = torch.autograd.grad(expected, inputs.operands, grad.contiguous())
        if layout == "rows":
            x, grad = torch.stack((x, x), 1)[:, 0], torch.stack((grad, grad), 1)[:, 1]
        elif layout == "columns":
            x, grad = torch.stack((x, x), -1)[..., 0], torch.stack((grad, grad), -1)[..., 1]
        elif layout == "swapped":
            x, grad = x.t().contiguous().t(), grad.t().contiguous().t()
        y = onepass.fused(line, x.requires_grad_(), *inputs.operands)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        for a, b in zip(torch.autograd.grad(y, inputs.operands, grad), wanted):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)

    def test_x_of_another_dtype(self, device):
        line = "layer_norm(1e-5) | scale | bias | linear | bias"
        inputs = make_inputs(line, (535, 1024), torch.float32, device)
        x = inputs.x.detach().bfloat16().requires_grad_()
        y = onepass.fused(line, x, *inputs.operands)
        expected = onepass.Line(line).reference(inputs.x.detach().copy_(x), *inputs.operands)
        assert y.dtype == torch.float32
        tolerance = 1e-4 if device == "cpu" else 2e-2  # a kernel's rows have x's dtype, a panel's the matrix's
        torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
        y.sum().backward()
        assert x.grad.dtype == torch.bfloat16

    @pytest.mark.parametrize("line", ["layer_norm(1e-5) | scale | bias | linear | bias", "add | keep | linear"])
    def test_the_same_bits_whatever_the_threads(self, line):
        inputs = make_inputs(line, (3000, 1024), torch.float32)
        matrix = next(i for i, t in enumerate(inputs.tensors) if t.shape == (24, 1024)) - len(inputs.tensors)
        outcomes, panels, before = [], [], torch.get_num_threads()
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results, _ = run(line, inputs)
                outcomes.append([*results, *gradients(results, inputs, upstream(results))])
                panels.append((inputs.x[:128] @ inputs.tensors[matrix].t()).detach())
        finally:
            torch.set_num_threads(before)
        # On some processors the library's product of a panel has other bits in another thread.
        library = all(torch.equal(panel, panels[0]) for panel in panels)
        for some in outcomes[1:]:
            for i in range(-len(some), 0):
                # The matrix's gradient may be one product of the library, which is shared as the library likes.
                if i == matrix or not library:
                    torch.testing.assert_close(some[i], outcomes[0][i], rtol=1e-4, atol=1e-4)
                else:
                    assert_equal(some[i], outcomes[0][i], f"number {i} from the end")


@pytest.mark.parametrize("line", ["linear | bias", "linear | bias | gelu", "linear | bias | keep | silu | add"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_forward_has_the_same_bits_whatever_the_threads(line, threads):
    """The products are this package's own: their sums depend on no panel."""
    inputs, before = make_inputs(line, (523, 320), torch.float32, out_features=200), torch.get_num_threads()
    try:
        torch.set_num_threads(before)
        expected, _ = run(line, inputs)
        torch.set_num_threads(threads)
        found, _ = run(line, inputs)
    finally:
        torch.set_num_threads(before)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_equal(a, b, f"result {i}")


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("columns, out_features", [(1024, 64), (1000, 1024), (257, 33)])
def test_layouts_of_the_factors(columns, out_features, transposed):
    """Rows that lie 4096 bytes apart, matrices of contiguous columns, and both as parts of larger tensors."""
    x, w, b = torch.randn(300, columns), torch.randn(out_features, columns), torch.randn(out_features)
    expected = torch.nn.functional.linear(x.double(), w.double(), b.double()).float()
    if transposed:
        w = w.t().contiguous().t()
    for left in (x, torch.randn(300, columns + 24)[:, 24:].copy_(x), x.t().contiguous().t(), x.view(30, 10, columns)):
        for right in (w, torch.cat((w, w), 0)[out_features:], torch.stack((w, w), -1)[..., 0]):
            y = onepass.fused("linear(panels) | bias", left, right, b)
            torch.testing.assert_close(y.flatten(0, -2), expected, rtol=1e-4, atol=1e-3)


def test_backward_goes_the_named_way():
    """Unfused, the matrix's gradient is one product of the library; in panels it is a sum of parts."""
    inputs = make_inputs("layer_norm(1e-5) | linear", (4000, 256), torch.float32, out_features=64)
    x, w = inputs.tensors
    normed, upstream_gradient = onepass.fused("layer_norm(1e-5)", x.detach()), torch.randn(4000, 64)
    expected = upstream_gradient.t() @ normed
    for name, same in (("unfused", True), ("panels", False)):
        y = onepass.fused(f"layer_norm(1e-5) | linear({name})", x, w)
        _, found = torch.autograd.grad(y, (x, w), upstream_gradient)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
        assert torch.equal(found, expected) == same


def test_few_rows_are_the_librarys():
    line = onepass.Line("linear | bias")
    assert line.plan((48, 768), torch.float32, 768, device="cpu").strategy == "unfused"
    assert line.plan((1024, 768), torch.float32, 768, device="cpu").strategy == "panels"
    assert line.plan((1024, 768), torch.bfloat16, 768, device="cpu").strategy == "unfused"
