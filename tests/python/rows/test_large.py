"""More than 2^31 elements: the last rows are right, forward and backward. Needs a GPU with room; skipped elsewhere."""

import pytest
import torch

import onepass
from helpers import assert_equal
from onepass.reference import dropout_numbers

COLUMNS = 4096
ROWS = 2**31 // COLUMNS + 5
LAST = slice(ROWS - 3, ROWS)


@pytest.fixture
def large(cuda):
    """A random bf16 tensor of more than 2^31 elements (4.3 GB), and the promise of room for `tensors` of them."""

    def make(rows=ROWS, columns=COLUMNS, tensors=5):
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if free < (tensors + 0.5) * rows * columns * 2:
            pytest.skip(f"needs room for {tensors} tensors of {rows * columns * 2 / 1e9:.1f} GB")
        height = min(rows, 4099)
        block = torch.randn(height, columns, device=cuda, dtype=torch.bfloat16)
        x = torch.empty(rows, columns, device=cuda, dtype=torch.bfloat16)
        for start in range(0, rows, height):
            stop = min(start + height, rows)
            x[start:stop] = block[: stop - start].roll(start // height, 1)
        return x

    yield make
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    "line", ["bias | gelu", "layer_norm(1e-5) | scale | bias", "softmax", "rms_norm(1e-6) | scale"]
)
def test_rows_beyond_2_31_elements(line, large, cuda):
    """Any block of rows gives what it gives alone, to the bit; so do the rows' gradients."""
    x = large().requires_grad_()
    columns = [
        torch.randn(COLUMNS, device=cuda).requires_grad_() for _ in range(line.count("bias") + line.count("scale"))
    ]
    y = onepass.fused(line, x, *columns)
    dy = torch.randn(1, COLUMNS, device=cuda, dtype=torch.bfloat16).expand(ROWS, COLUMNS)
    dx, *dcolumns = torch.autograd.grad(y, (x, *columns), dy)
    middle = 2**30 // COLUMNS
    for rows in (slice(0, 3), slice(middle - 1, middle + 2), LAST):
        part = x.detach()[rows].clone().requires_grad_()
        expected = onepass.fused(line, part, *columns)
        assert_equal(y[rows], expected, f"rows {rows}")
        dexpected, *_ = torch.autograd.grad(expected, (part, *columns), dy[rows])  # floats, too: one accuracy
        assert_equal(dx[rows], dexpected, f"gradient of rows {rows}")
    assert all(d.isfinite().all() and d.any() for d in dcolumns)


def test_a_row_longer_than_2_31_bytes(large, cuda):
    x = large(rows=3, columns=2**30 + 8, tensors=8)
    y = onepass.fused("gelu", x)
    assert_equal(y[:, -64:], onepass.fused("gelu", x[:, -64:].contiguous()))
    assert_equal(y[2, :64], onepass.fused("gelu", x[2, :64].contiguous()))


def test_dropout_beyond_2_31_elements(large, cuda):
    """The mask's group number does not wrap at 2^28 groups: the last rows have the contract's numbers."""
    x = large(tensors=4).fill_(1)
    state = torch.tensor([12345, 678], device=cuda)
    y = torch.ops.onepass.elementwise_forward(x, [torch.zeros(COLUMNS, device=cuda)], "dropout(0.25) | add", state)[0]
    groups = COLUMNS // 8
    for first in (0, 2**31 // COLUMNS, ROWS - 3):
        numbers = _numbers_of_rows(first, 3, state, groups)
        assert torch.equal(y[first : first + 3] != 0, numbers >= 16384)


def _numbers_of_rows(first, rows, state, groups):
    """dropout_numbers of rows in the middle of a tensor, without those before them."""
    from onepass.reference import high_word, low_word, philox

    group = torch.arange(first * groups, (first + rows) * groups, device=state.device)
    seed, offset = state.unbind()
    counter = (low_word(group), high_word(group), low_word(offset), high_word(offset))
    words = torch.stack(torch.broadcast_tensors(*philox(counter, (low_word(seed), high_word(seed)))), -1)
    return torch.stack((words & 0xFFFF, words >> 16), -1).reshape(rows, groups * 8)


def test_numbers_of_rows_are_dropout_numbers():
    """What the test above compares with is the reference."""
    state = torch.tensor([12345, 678])
    whole = dropout_numbers((9, 64), state, 0, "cpu")
    assert torch.equal(_numbers_of_rows(4, 3, state, 8), whole[4:7])


def test_strided_views_beyond_2_31_elements(large, cuda):
    """Row stride times row number exceeds 2^31, of a tensor with few rows."""
    x = large(tensors=2)
    view = x[:: ROWS // 7, 100:1900]
    weight = torch.randn(1800, device=cuda)
    ours = onepass.fused("rms_norm(1e-6) | scale", view, weight)
    assert_equal(ours, onepass.fused("rms_norm(1e-6) | scale", view.contiguous(), weight))


def test_columns_gradients_over_many_rows(large, cuda):
    """2^20 rows of 2048: the gradient of a bias is the sum, within what fp32 sums may lose."""
    x = large(rows=2**20 + 1, columns=2048, tensors=5)
    bias = torch.zeros(2048, device=cuda, requires_grad=True)
    y = onepass.fused("bias | relu", x, bias)
    dy = x.roll(1, 0)
    (dbias,) = torch.autograd.grad(y, bias, dy)
    exact = torch.zeros(2048, device=cuda, dtype=torch.float64)
    for start in range(0, len(x), 2**16):
        rows = slice(start, start + 2**16)
        exact += torch.where(x[rows] > 0, dy[rows], 0).double().sum(0)
    assert ((dbias.double() - exact).abs() <= 2e-6 * exact.abs().max() + 1e-3).all()
