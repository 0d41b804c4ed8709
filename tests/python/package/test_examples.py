"""Every example runs, and what it says is equal is."""

import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TIMEOUT = 240  # seconds that a training may take
EXAMPLES = sorted((Path(__file__).resolve().parents[3] / "examples").glob("*.py"))
TRAINED = {
    "accelerate_loop": "accelerate",
    "causal_lm": "transformers",
    "fsdp2": "transformers",
    "sft": "trl",
    "trainer": "accelerate",
}
"""Those that compare loss curves, and the package that each needs."""
FUSED = {"sft", "trainer"}
LINES = ("linear_cross_entropy", "rope", "gate(silu)", "add | keep | rms_norm(1e-06) | scale")
"""What `fuse` finds in these."""
RANKS = {"fsdp2": 2}


def output_of_process(path):
    """Without other tests' accelerate and Dynamo."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    options = [*start, str(RANKS[path.stem])] if path.stem in RANKS else []
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *options, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, capsys):
    if path.stem not in TRAINED:
        runpy.run_path(str(path), run_name="__main__")
        assert capsys.readouterr().out
        return
    if find_spec(TRAINED[path.stem]) is None:
        pytest.skip("needs onepass[demo,train]")
    said = output_of_process(path)
    first, last = map(float, re.search(r"from (\S+) to (\S+),", said).groups())
    assert last < 0.95 * first
    assert float(re.search(r"largest difference: (\S+)", said)[1]) < 1e-3
    assert path.stem not in FUSED or all(line in said for line in LINES)
