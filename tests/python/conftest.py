"""Every test that asks for `device` runs on the CPU, and on CUDA where there is one."""

import os
from pathlib import Path

import pytest
import torch

import onepass

# For the processes that tests start: the same package as here.
os.environ["PYTHONPATH"] = str(Path(onepass.__file__).resolve().parent.parent)

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(20260921)


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return "cuda"
