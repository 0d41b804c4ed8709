"""Fixtures of the tests of fuse."""

import pytest
import torch

from onepass.rewrite import fuse as fusing


@pytest.fixture
def every_line(monkeypatch):
    """Whatever a line can say becomes one."""
    monkeypatch.setattr(fusing, "gain_of", lambda chain, profile, training, then: float(len(chain.nodes)))
    torch._dynamo.reset()
