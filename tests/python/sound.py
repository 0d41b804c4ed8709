"""What tests of what fuse must not change have in common."""

import torch

import onepass

R = torch.randn


def runs(call, tensors):
    """Results, the inputs afterwards, and gradients of leaves and of results that are returned on the way."""
    leaves = [t.clone().requires_grad_(t.is_floating_point() and t.requires_grad) for t in tensors]
    results = call(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    found = [*results, *leaves]
    wanted = [t for t in (*leaves, *results) if t.requires_grad]
    if wanted:
        total = sum((r * torch.linspace(-1, 2, r.numel(), dtype=r.dtype).view(r.shape)).sum() for r in results)
        found += torch.autograd.grad(total, wanted, allow_unused=True)
    return found


def agrees(function, *tensors):
    """The lines with which results, inputs, gradients and strides are those of eager."""
    fused = onepass.fuse(function)
    for theirs, ours in zip(runs(function, tensors), runs(fused, tensors), strict=True):
        assert (theirs is None) == (ours is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5, check_stride=True, equal_nan=True)
    return [f.line for f in onepass.report(fused).lines]


def grad(*shape):
    return R(*shape).requires_grad_()
