"""Large results on the CPU are in pages of our own, which go back with the tensor and are written again."""

import os

import pytest
import torch

import onepass
from helpers import as_tuple

SHAPE = (1024, 1024)  # 4 MiB of float32: what is smaller is torch's


def large(seed=0):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


needs_pages = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11), reason="torch_from_blob came with torch 2.11"
)


@needs_pages
def test_a_results_memory_is_used_again():
    x = large()
    first = onepass.fused("relu", x)
    at = first.data_ptr()
    assert at % (2 << 20) == 0
    del first
    assert onepass.fused("relu", x).data_ptr() == at


def test_what_is_alive_is_not_written():
    x, other = large(1), large(2)
    y = onepass.fused("layer_norm(1e-5)", x)
    view = y[3:5].T
    expected = view.clone()
    del y
    for _ in range(4):
        onepass.fused("layer_norm(1e-5)", other)
    torch.testing.assert_close(view, expected, rtol=0, atol=0)


def test_gradients_may_outlive_everything():
    x = large(3).requires_grad_()
    y, kept = as_tuple(onepass.fused("add | keep | rms_norm(1e-6)", x, large(4)))
    (y.sum() + kept.square().sum()).backward()
    expected = x.grad.clone()
    grad = x.grad
    del y, kept, x
    for seed in range(4):
        onepass.fused("gelu", large(seed))
    torch.testing.assert_close(grad, expected, rtol=0, atol=0)


def test_a_result_is_like_any_tensor(tmp_path):
    y = onepass.fused("relu", large(5))
    expected = y.clone()
    torch.save(y, tmp_path / "y.pt")
    torch.testing.assert_close(torch.load(tmp_path / "y.pt"), expected, rtol=0, atol=0)
    assert (y.numpy() == expected.numpy()).all()
    torch.testing.assert_close(torch.from_dlpack(y), expected, rtol=0, atol=0)
    y.add_(1)
    y.resize_(512, 512)
    assert y.shape == (512, 512) and y.is_contiguous()
    shared = onepass.fused("relu", large(5)).share_memory_()
    assert shared.is_shared()
    torch.testing.assert_close(shared, expected, rtol=0, atol=0)


def test_a_forked_process_has_its_own():
    x = large(6)
    y = onepass.fused("relu", x)
    expected = y.clone()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork has no other
    try:
        child = os.fork()
        if child == 0:
            mine = y.clone()
            del y
            same = torch.equal(onepass.fused("relu", x), mine)
            os._exit(0 if same else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
