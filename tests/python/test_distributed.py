"""Training on several ranks: loss curves are PyTorch's, whatever is sharded."""

import pytest
import torch

from onepass.demo.block import Size, Training, ways_for

SIZE = Size(features=32, heads=4, hidden=64, batch=4, tokens=8)
STEPS = 50


def curves(device, fused, way):
    return Training(SIZE, fused, way, device).curve(STEPS)


@pytest.fixture(scope="module")
def alone():
    """The curve of PyTorch's modules on one rank."""
    curve = torch.tensor(curves("cpu", False, None))
    assert curve[-1] < 0.7 * curve[0]
    return curve


@pytest.mark.parametrize("way", ways_for(4))
def test_loss_curve(ranks, way, alone):
    if way not in ways_for(len(ranks)):
        pytest.skip("needs 4 ranks")
    eager, fused = (torch.tensor(ranks.run(curves, fused, way)) for fused in (False, True))
    torch.testing.assert_close(fused, eager, rtol=1e-4, atol=0)
    torch.testing.assert_close(fused, alone.expand_as(fused), rtol=1e-4, atol=0)
