"""linear_cross_entropy's errors beside PyTorch's chain with float32 logits, of which even one copy may not fit."""

import math

import pytest
import torch
import torch.nn.functional as F

from helpers import FLOOR, RATIO, check_error
from onepass import functional as OF

# Tokens, features, classes, and the rows of logits that the chain and the exact gradients have at a time.
FEW, MANY = (3000, 40, 700, 512), (65536, 1152, 262144, 2048)
ROOM = 110e9  # bytes of a GPU that MANY may take


def head_of(tokens, features, classes, dtype, device):
    """x, a matrix, and targets; logits are normal numbers times 2."""
    x = torch.randn(tokens, features, device=device).to(dtype)
    w = (torch.randn(classes, features, device=device) * (2 / math.sqrt(features))).to(dtype)
    return x.requires_grad_(), w.requires_grad_(), torch.randint(classes, (tokens,), device=device)


def pytorchs(x, w, target, rows):
    """Losses, dx and dw of F.cross_entropy(F.linear(x, w).float(), target), as autograd computes them. The logits are
    there some rows at a time; their gradients, of x's dtype, all at once, for dx and dw are one product each (of other
    sizes a library may round otherwise)."""
    x, w = x.detach(), w.detach()
    of_logits = torch.empty(len(x), len(w), dtype=x.dtype, device=x.device)
    losses = torch.empty(len(x), device=x.device)
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        logits = F.linear(x[part], w).float().requires_grad_()
        losses[part] = loss = F.cross_entropy(logits, target[part], reduction="none")
        of_logits[part] = torch.autograd.grad(loss, logits, torch.full_like(loss, 1 / len(x)))[0]
        del logits, loss
    return losses, of_logits @ w, of_logits.T @ x


def exactly(x, w, target, rows):
    """The same in float64, without a graph: the logits' gradients take the place of the logits."""
    x, w = x.detach(), w.detach().double()
    losses = torch.empty(len(x), dtype=torch.float64, device=x.device)
    dx, dw = torch.empty(x.shape, dtype=torch.float64, device=x.device), torch.zeros_like(w)
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        given, at = x[part].double(), target[part, None]
        logits = given @ w.T
        log_sum = logits.logsumexp(-1, keepdim=True)
        losses[part] = (log_sum - logits.gather(1, at)).squeeze(1)
        logits.sub_(log_sum).exp_()
        logits.scatter_add_(1, at, torch.full_like(log_sum, -1.0)).div_(len(x))
        torch.mm(logits, w, out=dx[part])
        dw.addmm_(logits.T, given)
    return losses, dx, dw


def root_mean_square(found, exact):
    """Of the differences, some rows at a time."""
    parts = zip(found.split(8192), exact.split(8192), strict=True)
    return math.sqrt(sum((a.double() - b).square().sum().item() for a, b in parts) / exact.numel())


def check_errors(tokens, features, classes, rows, dtype, device):
    """RATIO holds for root mean squares without a floor, and by the rule of the helpers."""
    x, w, target = head_of(tokens, features, classes, dtype, device)
    mean = OF.linear_cross_entropy(x, w, target)
    dx, dw = torch.autograd.grad(mean, (x, w))
    with torch.no_grad():
        losses = OF.linear_cross_entropy(x, w, target, reduction="none")
    theirs, exact = pytorchs(x, w, target, rows), exactly(x, w, target, rows // 2)
    for name, mine, other, right in zip(("losses", "dx", "dw"), (losses, dx, dw), theirs, exact, strict=True):
        error, their_error = root_mean_square(mine, right), root_mean_square(other, right)
        size = right.norm().item() / math.sqrt(right.numel())
        print(f"{name}: {error:.4e}, PyTorch's {their_error:.4e}, of {size:.4e}")
        assert their_error <= 0.02 * size, f"{name}: what it is held against is wrong"
        assert error <= RATIO * their_error, name
        check_error(mine, other, right, name, precision=dtype, slack=2.0)  # the largest of many is luck
    # The mean of as many independent errors has theirs by the root of their number.
    error, other = (abs(m.double().item() - exact[0].mean().item()) for m in (mean, theirs[0].mean()))
    by_luck = root_mean_square(theirs[0], exact[0]) / math.sqrt(tokens)
    print(f"mean: {error:.4e}, PyTorch's {other:.4e}")
    assert error <= max(RATIO * max(other, by_luck), FLOOR[torch.float32] * 2**-23 * exact[0].mean().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_chain_of_chunks(dtype, device):
    """What errors are held against is PyTorch's chain and the exact numbers."""
    tokens, features, classes, rows = FEW
    x, w, target = head_of(tokens, features, classes, dtype, device)
    losses, dx, dw = pytorchs(x, w, target, rows)
    logits = F.linear(x, w).float()
    whole = torch.autograd.grad(F.cross_entropy(logits, target), (x, w))
    each = F.cross_entropy(logits.detach(), target, reduction="none")
    nearly = {"rtol": 0, "atol": (32 if dtype == torch.float32 else 4) * torch.finfo(dtype).eps}
    for found, expected in zip((losses, dx, dw), (each, *whole), strict=True):
        largest = expected.abs().max()
        torch.testing.assert_close(found / largest, expected / largest, **nearly)
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    each = F.cross_entropy(F.linear(*wide), target, reduction="none")
    expected = (each.detach(), *torch.autograd.grad(each.mean(), wide))
    torch.testing.assert_close(exactly(x, w, target, rows), expected, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [FEW[0], 5000, 20000])
def test_errors_of_some(tokens, dtype, device):
    check_errors(tokens, *FEW[1:], dtype, device)


@pytest.fixture
def room(cuda):
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < ROOM:
        pytest.skip(f"needs {ROOM / 1e9:.0f} GB of a GPU's memory")
    yield
    torch.cuda.empty_cache()


def test_errors_of_many(room, cuda):
    """The matrix' gradient is summed over as many chunks as a large head has."""
    check_errors(*MANY, torch.bfloat16, cuda)
    print(f"peak: {torch.cuda.max_memory_allocated() / 1e9:.0f} GB")
