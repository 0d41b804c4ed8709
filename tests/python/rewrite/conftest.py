"""Fixtures of the tests of fuse."""

import pytest
import torch

from onepass.rewrite import fuse as fusing
from onepass.rewrite import heads


@pytest.fixture
def small_heads(monkeypatch):
    """Heads are found, however few logits they have."""
    monkeypatch.setattr(heads, "LEAST_LOGITS", 0)
    torch._dynamo.reset()


@pytest.fixture
def every_line(monkeypatch, small_heads):
    """Whatever a line can say becomes one."""
    monkeypatch.setattr(fusing, "gain_of", lambda chain, profile, training, then: float(len(chain.nodes)))
