"""Lines with `scores` on the CPU: a panel of one batch's rows at a time."""

import pytest
import torch

import onepass
from helpers import (
    ATTENTION_LINES,
    SCORES_LINES,
    assert_equal,
    check_line,
    gradients,
    make_inputs,
    run,
    upstream,
    with_strategy,
)

LINES = [*SCORES_LINES[1:], *ATTENTION_LINES]
HAS_BFLOAT16 = onepass.Line("scores | softmax").plan((8, 64, 64), torch.bfloat16, 64, device="cpu").strategy == "panels"
DTYPES = (
    torch.float32,
    torch.float64,
    pytest.param(torch.bfloat16, marks=pytest.mark.skipif(not HAS_BFLOAT16, reason="needs AVX512_BF16"), id="bfloat16"),
)


def panels(line):
    return with_strategy(line, "panels")


# Several panels in a batch, the last one short, rows that are no multiple of a tile's.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("line", LINES)
def test_error_is_no_more_than_pytorchs(line, dtype):
    check_line(panels(line), make_inputs(line, (3, 2, 301, 40), dtype, out_features=523), slack=2.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape, keys", [((4, 1, 64), 1), ((4, 33, 7), 31), ((5, 4, 128), 65), ((2, 2, 3, 16, 1), 32)])
@pytest.mark.parametrize("line", [LINES[1], ATTENTION_LINES[1]])
def test_shapes(line, shape, keys, dtype):
    check_line(panels(line), make_inputs(line, shape, dtype, out_features=keys), slack=2.0)


# Where panels sum no gradient of their own: a column's, one that several tensors share, kept values behind the scores.
@pytest.mark.parametrize(
    "line",
    [
        "scores | mul(0.1) | bias | softmax | values",
        "scores | add | keep | softmax | scale",
        "scores | keep | mul(0.2) | softmax | add | keep | values",
        "scores | silu | values",
    ],
)
def test_other_words(line):
    check_line(panels(line), make_inputs(line, (2, 3, 70, 16), torch.float32, out_features=50), slack=2.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("values", ["", " | values"])
@pytest.mark.parametrize("rows, keys", [(300, 300), (300, 70), (70, 300)])
def test_keys_that_no_row_of_a_panel_sees(rows, keys, values, dtype):
    """Causal rows of groups of heads, among them panels of two heads; what is hidden is never read."""
    line = "scores(panels) | mul(0.1) | causal | softmax" + values
    inputs = make_inputs(line, (2, 2, 3, rows, 24), dtype, out_features=keys)
    with torch.no_grad():
        for i, operand in enumerate(inputs.operands):
            shared = operand[:, :, :1].clone()
            inputs.operands[i] = shared.requires_grad_()
    check_line(line, inputs, slack=2.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(dtype):
    line = ATTENTION_LINES[0]

    def normal(*shape, seed):
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    query, key, value = (normal(2, 90, 4, 32, seed=i) for i in range(3))
    by_head = [t.transpose(1, 2) for t in (query, key, value)]
    cases = {
        "heads behind rows": by_head,
        "columns before rows": [t.contiguous().mT.contiguous().mT for t in by_head],
        "every other number": [torch.stack((t, t), -1)[..., 0] for t in by_head],
        "expanded keys": [
            by_head[0],
            by_head[1][:, :1].expand(2, 4, 90, 32),
            by_head[2][:1, :, :1].expand(2, 4, 90, 32),
        ],
        "misaligned": [torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape) for t in by_head],
        "a matrix": [t[0, 0] for t in by_head],
    }
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-4
    for name, case in cases.items():
        dense = [t.clone(memory_format=torch.contiguous_format).requires_grad_() for t in case]
        case = [t.requires_grad_() for t in case]
        expected, y = onepass.fused(with_strategy(line, "unfused"), *dense), onepass.fused(line, *case)
        gradient = torch.randn(y.shape).to(dtype).mT.contiguous().mT
        ours, theirs = torch.autograd.grad(y, case, gradient), torch.autograd.grad(expected, dense, gradient)
        for i, (a, b) in enumerate(zip((y, *ours), (expected, *theirs))):
            assert torch.allclose(a, b, atol=tolerance, rtol=tolerance), f"{name}, tensor {i}"


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("line", LINES)
def test_the_same_bits_whatever_the_threads(line, dtype):
    inputs = make_inputs(line, (2, 4, 200, 32), dtype, out_features=300)
    outcomes, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(3)
            results, _ = run(panels(line), inputs)
            outcomes.append([*results, *gradients(results, inputs, upstream(results))])
    finally:
        torch.set_num_threads(before)
    for some in outcomes[1:]:
        for ours, first in zip(some, outcomes[0], strict=True):
            assert_equal(ours, first)


def test_dropout_draws_what_it_draws_elsewhere():
    line = "scores | softmax | dropout(0.4)"
    query, key = (torch.randn(4, 200, 16) for _ in range(2))
    drawn = []
    for name in ("unfused", "panels"):
        torch.manual_seed(5)
        drawn.append(onepass.fused(with_strategy(line, name), query, key) == 0)
    assert torch.equal(*drawn) and drawn[0].any()


@pytest.mark.parametrize(
    "line, shape, dtype",
    [
        ("scores(panels) | softmax", (2, 3, 8), torch.float32),
        ("scores(panels) | softmax | values", (2, 3, 8), torch.float32),
        ("scores(panels)", (8, 64, 64), torch.float32),
        ("scores(panels) | softmax", (8, 64, 64), torch.float16),
    ],
)
def test_named_where_they_bring_nothing(line, shape, dtype):
    inputs = make_inputs(line, shape, dtype, torch.device("cpu"), out_features=5)
    with pytest.raises(RuntimeError, match=r"'scores\(panels\)' cannot take this call: panels are for words behind"):
        onepass.fused(line, *inputs.tensors)
