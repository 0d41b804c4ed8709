"""What tests of what attention is given have in common."""

import torch

import onepass


def heads(x, count):
    return x.view(*x.shape[:2], count, -1).transpose(1, 2)


def expanded(x, times, apart=lambda x: x[:, :, None, :, :]):
    batch, count, *row = x.shape
    return apart(x).expand(batch, count, times, *row).reshape(batch, count * times, *row)


def joined(k):
    """With an empty tensor, as a cache's first update is written."""
    return torch.cat([torch.tensor([], dtype=k.dtype), k], dim=-2)


def agree(function, tensors):
    torch._dynamo.reset()
    outcomes = []
    for way in (function, onepass.fuse(function)):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        results = way(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        sum((t * torch.linspace(-1, 2, t.numel()).view_as(t)).sum() for t in results if t.requires_grad).backward()
        outcomes.append([(t, t.stride()) for t in (*results, *(leaf.grad for leaf in leaves))])
    for (theirs, its_strides), (ours, our_strides) in zip(*outcomes, strict=True):
        # Of float64 both are up to 1e-5 of the largest number off: a small one is the difference of such.
        largest = theirs.detach().abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=max(2e-5, 1e-5 * largest))
        assert our_strides == its_strides
