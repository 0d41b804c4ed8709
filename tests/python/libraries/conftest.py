"""Fixtures of the tests of other libraries' models."""

import pytest
import torch

from models import take_every_line


@pytest.fixture(autouse=True)
def every_line(monkeypatch):
    """Whatever a line can say becomes one, group normalisations of small images, too."""
    take_every_line(monkeypatch)
    monkeypatch.setattr("onepass.rewrite.prices.is_worth_it", lambda before, after: True)


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are small: on two busy cores threads that wait for each other take three times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
