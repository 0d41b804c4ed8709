"""What the tests of teaching cases share: running one, and being wrong on purpose."""

import io

import torch
from rich.console import Console

from onepass.case import CASES


class WrongGradient(torch.autograd.Function):
    """Passes a tensor, and 1.05 times its gradient."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        return 1.05 * grad


def run_case(name, code=0, **options):
    """What `onepass case` prints; its exit code is compared."""
    output = io.StringIO()
    assert CASES[name](quick=True, console=Console(file=output, width=120), **options) == code, output.getvalue()
    return output.getvalue()
