"""Other processes: DataLoader's workers, forked after the parent has used lines in threads, and spawned."""

import gc
import os
import pickle
import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import onepass

COLUMNS = 96
LINE = "layer_norm(1e-5) | scale | bias | gelu"


class Normalised(Dataset):
    """Samples that lines have been through: small ones, and one of 4 MiB, whose memory is kept for the next."""

    def __init__(self):
        self.norm = onepass.nn.LayerNorm(COLUMNS, activation="gelu")
        self.line = onepass.Line("bias | dropout(0.5) | add | keep | rms_norm(1e-6) | scale")

    def __len__(self):
        return 4

    def __getitem__(self, index):
        x, column = torch.full((16, COLUMNS), index + 1.0).cumsum(-1), torch.ones(COLUMNS)
        torch.manual_seed(index)
        normed, h = self.line(x, column, x, column)
        big = onepass.fused("bias | gelu", torch.full((11000, COLUMNS), 1.0 + index), column)
        return self.norm(x).detach(), normed, h, big[0]  # no gradients: PyTorch refuses them in a forked process


def used_in_threads():
    """The parent's state: kernels compiled, threads that ran some, memory kept."""
    data = Normalised()
    threads = [threading.Thread(target=data.__getitem__, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    x = torch.randn(4000, COLUMNS, requires_grad=True)  # in all of torch's threads
    onepass.fused(LINE, x, torch.ones(COLUMNS), torch.zeros(COLUMNS)).sum().backward()
    gc.collect()  # what other tests left on a GPU: a forked process that frees it ends
    return data


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_data_loader(context):
    data = used_in_threads()
    loader = DataLoader(data, batch_size=1, num_workers=2, multiprocessing_context=context, timeout=120)
    for i, batch in enumerate(loader):
        for ours, expected in zip(batch, data[i], strict=True):
            assert torch.equal(ours[0], expected)


def compile_one():
    line = f"mul(0.{os.getpid()}) | tanh"  # of no process before
    x = torch.randn(4, 8)
    torch.testing.assert_close(onepass.fused(line, x), torch.tanh(x * float(line[4 : line.index(")")])))
    with pytest.raises(RuntimeError, match="operand 0"):
        onepass.fused("bias | gelu", x, torch.ones(3))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_parses_and_fails_as_the_parent():
    used_in_threads()
    process = torch.multiprocessing.get_context("fork").Process(target=compile_one)
    process.start()
    process.join(120)
    assert process.exitcode == 0


def test_lines_and_modules_are_pickled():
    data = pickle.loads(pickle.dumps(Normalised()))
    for a, b in zip(data[1], Normalised()[1], strict=True):
        assert torch.equal(a, b)
