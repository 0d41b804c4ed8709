"""Processes of one group, which tests hand functions to: gloo on the CPU, NCCL where there are GPUs enough."""

import os
import tempfile
import traceback
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing

TIMEOUT = {"cpu": 120, "cuda": 300}  # seconds that a function may take; CUDA's kernels are compiled at first use
IMPORTED_ONCE = ["onepass", "torch.distributed.tensor", "torch.distributed.fsdp"]


class Ranks:
    """`count` processes that wait for functions to run, each as all ranks at once."""

    def __init__(self, count, device):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED_ONCE)
        self._directory = tempfile.TemporaryDirectory()
        store = Path(self._directory.name) / "store"
        self.device = device
        self._pipes, self._processes = [], []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, count, device, str(store)), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def __len__(self):
        return len(self._processes)

    def run(self, function, *args):
        """function(device, *args) on every rank, a module's function: what each returned.

        Raises:
            RuntimeError: with the traceback of the first rank that failed.
        """
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT[self.device]):
                self.stop()
                raise RuntimeError(f"rank {rank} did not answer within {TIMEOUT[self.device]} s")
            answers.append(pipe.recv())
        for rank, (_, failure) in enumerate(answers):
            if failure:
                raise RuntimeError(f"rank {rank}:\n{failure}")
        return [answer for answer, _ in answers]

    def stop(self):
        for process in self._processes:
            process.kill()
            process.join()
        self._directory.cleanup()


def _serve(pipe, rank, count, device, store):
    """Runs what comes until the pipe is closed."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=count)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(0)  # all ranks draw the same; CUDA's generators begin anywhere
        try:
            pipe.send((function(device, *args), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))
