"""Rows of logits beside a teacher's: the word kl_div, and functional.kl_div_logits."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

import onepass
from helpers import check_line, make_inputs
from onepass import functional as OF

LINES = [
    "kl_div",
    "kl_div(1)",
    "kl_div(0.5)",
    "kl_div(0.1, 3)",
    "kl_div(0.9, 0.5)",
    "scale | gelu | kl_div(0, 2)",
    "dropout(0.1) | add | kl_div(0.5)",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [7, 77, 1000, 32000])
@pytest.mark.parametrize("line", LINES)
def test_error_is_no_more_than_pytorchs(line, columns, dtype, device):
    check_line(line, make_inputs(line, (3, 5, columns), dtype, device), slack=30.0 if dtype == torch.float64 else 3.0)


@pytest.mark.parametrize("line", ["kl_div", "kl_div(1)", "kl_div(0.5)"])
@pytest.mark.parametrize("columns", [131072, 300001])
def test_long_rows(line, columns, device):
    check_line(line, make_inputs(line, (3, columns), torch.bfloat16, device), slack=3.0)


@pytest.mark.parametrize("line", LINES[:-1])
def test_derivatives(line, device):
    inputs = make_inputs(line, (2, 5), torch.float64, device)

    def function(*tensors):
        return onepass.fused(line, *tensors)

    assert gradcheck(function, inputs.tensors) and gradgradcheck(function, inputs.tensors)


@pytest.mark.parametrize("beta", [0.0, 1e-6, 0.5, 1 - 1e-6, 1.0])
def test_of_probabilities_that_are_far_apart(beta, device):
    """Where one of the two has next to nothing, and where neither softmax has anything left in float32."""
    x = torch.tensor([[0.0, 30, -60, 5], [0, 300, -300, 1], [2, 2, 2, 2]], dtype=torch.float64, device=device)
    teacher = x.flip(-1)
    teacher[2] = x[2] + 7
    exact = onepass.reference.kl_div(x, teacher, beta)
    found = onepass.fused(f"kl_div({beta!r})", x.float(), teacher.float())
    torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_classes_that_both_leave_out(beta, device):
    """-inf in both rows: as if the class were not there, without a gradient; PyTorch's kl_div gives NaN."""
    rows = [torch.randn(4, 9, device=device) for _ in range(2)]
    masked = [F.pad(t, (0, 3), value=-math.inf).requires_grad_() for t in rows]
    plain = [t.clone().requires_grad_() for t in rows]
    got, expected = (OF.kl_div_logits(*of, beta=beta, reduction="none") for of in (masked, plain))
    torch.testing.assert_close(got, expected)
    for a, b in zip(torch.autograd.grad(got.sum(), masked), torch.autograd.grad(expected.sum(), plain)):
        torch.testing.assert_close(a, F.pad(b, (0, 3)))


def test_what_the_other_leaves_out(device):
    """q is 0 where p is not: KL(q || p) is finite, KL(p || q) is not, and what lies between them is."""
    x = torch.randn(3, 8, device=device)
    teacher = x.clone()
    teacher[:, 2] = -math.inf
    kept = [i for i in range(8) if i != 2]
    log_p, log_q = F.log_softmax(x, -1), F.log_softmax(teacher, -1)
    forward = (log_q.exp() * (log_q - log_p))[:, kept].sum(-1)
    torch.testing.assert_close(OF.kl_div_logits(x, teacher, reduction="none"), forward)
    assert OF.kl_div_logits(x, teacher, beta=1.0, reduction="none").eq(math.inf).all()
    assert OF.kl_div_logits(x, teacher, beta=0.5, reduction="none").isfinite().all()


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_logits_far_away(beta, temperature, device):
    x = torch.tensor([[3e31, 0.0, -1e30], [1.0, 2.0, 3.0], [2e31, 1e31, 0.0]], device=device)
    teacher = torch.tensor([[0.0, 2e31, 5.0], [3e31, 1.0, 0.0], [3e31, 0.0, 0.0]], device=device)
    exact = onepass.reference.kl_div(x.double(), teacher.double(), beta, temperature)
    got = OF.kl_div_logits(x, teacher, beta=beta, temperature=temperature, reduction="none")
    torch.testing.assert_close(got, exact.float())


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_what_one_leaves_out_and_the_other_has_next_to_nothing_of(beta, device):
    """-inf where the other row has a large negative number, over more of the row than a thread reads at a time: what
    has no probability in float32 counts as nothing."""
    rows = [torch.randn(3, 20000, device=device) for _ in range(2)]
    masked = [t.clone() for t in rows]
    out = -math.inf, -1e30
    for t, value in zip(masked, out if beta < 1 else out[::-1]):
        t[:, 5000:] = value
    got = OF.kl_div_logits(*masked, beta=beta, reduction="none")
    torch.testing.assert_close(got, OF.kl_div_logits(*(t[:, :5000] for t in rows), beta=beta, reduction="none"))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("columns", [300, 20000])
def test_rows_that_lie_far_from_each_other(columns, beta, device):
    """A softmax does not change with what is added to all of a row, nor does the number's error."""
    x = 2 * torch.randn(8, columns, device=device)
    teacher = 2 * torch.randn(8, columns, device=device) + 1e4
    exact = onepass.reference.kl_div(x.double(), teacher.double(), beta)
    got = OF.kl_div_logits(x, teacher, beta=beta, reduction="none")
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("beta", "which"), [(1e-5, 1), (1 - 1e-5, 0)])
def test_gradients_beside_the_ends_of_beta(beta, which, device):
    """Of a mixture that has next to nothing of one of the two: the gradient of the row that this one is."""
    rows = [4 * torch.randn(32, 300, device=device) for _ in range(2)]
    wide = [t.double() for t in rows]
    of, exact_of = (tensors[which].requires_grad_() for tensors in (rows, wide))
    (got,) = torch.autograd.grad(OF.kl_div_logits(*rows, beta=beta, reduction="sum"), of)
    (exact,) = torch.autograd.grad(onepass.reference.kl_div(*wide, beta).sum(), exact_of)
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=2e-5 * exact.abs().max().item())


@pytest.mark.parametrize("which", [0, 1])
def test_one_gradient_alone(which, device):
    inputs = make_inputs("kl_div(0.3)", (5, 130), torch.float32, device)
    tensors = [t.detach().requires_grad_(i == which) for i, t in enumerate(inputs.tensors)]
    g = torch.randn(5, device=device)
    got = torch.autograd.grad(onepass.fused("kl_div(0.3)", *tensors), tensors[which], g)
    both = torch.autograd.grad(onepass.fused("kl_div(0.3)", *inputs.tensors), inputs.tensors, g)
    torch.testing.assert_close(got[0], both[which], rtol=0, atol=0)


def test_a_teacher_for_all_rows_and_other_layouts(device):
    x = torch.randn(6, 4, 33, device=device).transpose(0, 1).requires_grad_()
    teacher = torch.randn(6, 1, 66, device=device, dtype=torch.float64)[..., ::2].requires_grad_()
    y = onepass.fused("kl_div(0.5, 2)", x, teacher.transpose(0, 1).float())
    expected = onepass.reference.kl_div(x, teacher.transpose(0, 1), 0.5, 2.0)
    torch.testing.assert_close(y, expected)
    g = torch.randn(4, 6, device=device)
    for got, right in zip(torch.autograd.grad(y, (x, teacher), g), torch.autograd.grad(expected, (x, teacher), g)):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (5,), ()], ids=str)
def test_empty_rows_and_small_tensors(shape, device):
    x, teacher = (torch.randn(shape, device=device, requires_grad=True) for _ in range(2))
    got = onepass.fused("kl_div", x, teacher)
    expected = onepass.reference.kl_div(x, teacher) if shape else torch.zeros((), device=device)
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected)
    grads = torch.autograd.grad(got.sum(), (x, teacher))
    assert [g.shape for g in grads] == [x.shape, x.shape]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_function(reduction, device):
    x, teacher = (torch.randn(2, 3, 50, device=device, requires_grad=True) for _ in range(2))
    got = OF.kl_div_logits(x, teacher, temperature=2.0, reduction=reduction)
    logs = [F.log_softmax(t / 2, -1) for t in (x, teacher)]
    of_rows = F.kl_div(*logs, reduction="none", log_target=True).sum(-1)
    expected = of_rows if reduction == "none" else of_rows.mean() if reduction == "mean" else of_rows.sum()
    torch.testing.assert_close(got, expected)
    g = torch.randn_like(got)
    for a, b in zip(torch.autograd.grad(got, (x, teacher), g), torch.autograd.grad(expected, (x, teacher), g)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_generalised_divergence_of_trl(beta, device):
    """trl.GKDTrainer.generalized_jsd_loss, written out."""
    x, teacher = (torch.randn(4, 60, device=device) for _ in range(2))
    student_log_probs, teacher_log_probs = (F.log_softmax(t / 0.9, -1) for t in (x, teacher))
    if beta in (0, 1):
        pair = (student_log_probs, teacher_log_probs) if beta == 0 else (teacher_log_probs, student_log_probs)
        expected = F.kl_div(*pair, reduction="none", log_target=True)
    else:
        mixture = torch.logsumexp(
            torch.stack([student_log_probs + math.log(1 - beta), teacher_log_probs + math.log(beta)]), dim=0
        )
        kl_teacher = F.kl_div(mixture, teacher_log_probs, reduction="none", log_target=True)
        kl_student = F.kl_div(mixture, student_log_probs, reduction="none", log_target=True)
        expected = beta * kl_teacher + (1 - beta) * kl_student
    got = OF.kl_div_logits(x, teacher, beta=beta, temperature=0.9, reduction="none")
    torch.testing.assert_close(got, expected.sum(-1))


def test_in_a_compiled_function(device):
    x, teacher = (torch.randn(4, 60, device=device, requires_grad=True) for _ in range(2))
    compiled = torch.compile(lambda x, t: OF.kl_div_logits(x, t, beta=0.3), fullgraph=True)
    expected = torch.autograd.grad(OF.kl_div_logits(x, teacher, beta=0.3), (x, teacher))
    for got, right in zip(torch.autograd.grad(compiled(x, teacher), (x, teacher)), expected):
        torch.testing.assert_close(got, right)


def test_by_torch_func(device):
    x, teacher = (torch.randn(4, 60, device=device, dtype=torch.float64) for _ in range(2))
    got = torch.func.grad(lambda x: OF.kl_div_logits(x, teacher, beta=0.3))(x)
    right = torch.func.grad(lambda x: onepass.reference.kl_div(x, teacher, 0.3).mean())(x)
    torch.testing.assert_close(got, right)
    rows = torch.func.vmap(lambda x, t: OF.kl_div_logits(x, t))(x, teacher)
    torch.testing.assert_close(rows, OF.kl_div_logits(x, teacher, reduction="none"))


def test_numbers_are_float32_and_the_same_each_time(device):
    x, teacher = (torch.randn(9, 5000, device=device).bfloat16().requires_grad_() for _ in range(2))
    first, second = (torch.autograd.grad(OF.kl_div_logits(x, teacher, beta=0.5), (x, teacher)) for _ in range(2))
    assert OF.kl_div_logits(x, teacher).dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"beta": 1.5}, ValueError, "expected beta to be between 0 and 1, but got 1.5"),
        ({"temperature": 0.0}, ValueError, "expected temperature to be above 0, but got 0.0"),
        ({"reduction": "batchmean"}, ValueError, "expected reduction to be one of"),
        ({"teacher": torch.randn(4, 7)}, RuntimeError, "teacher of 'kl_div'\\) must have x's shape"),
        (
            {"teacher": torch.ones(4, 8, dtype=torch.long)},
            RuntimeError,
            "teacher of 'kl_div'\\) must be a floating point tensor",
        ),
    ],
)
def test_errors(arguments, error, says, device):
    given = {"teacher": torch.randn(4, 8)} | arguments
    given["teacher"] = given["teacher"].to(device)
    with pytest.raises(error, match=says):
        OF.kl_div_logits(torch.randn(4, 8, device=device), **given)
