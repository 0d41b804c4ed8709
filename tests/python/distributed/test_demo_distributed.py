"""The demo of several ranks: its table is complete, and a wrong loss is noticed."""

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from onepass.demo import distributed
from onepass.demo.block import ways_for


def run(**options):
    output = io.StringIO()
    code = distributed.run(**options, console=Console(file=output, width=80))
    return code, output.getvalue()


def test_runs():
    code, text = run(steps=2, rounds=1)
    assert code == 0
    assert all(way in text for way in ways_for(2))
    assert text.strip().splitlines()[-1].startswith("passed: ")


@pytest.mark.parametrize(("fused", "code"), [(1.0, 0), (1.000001, 0), (1.0001, 1), (math.nan, 1)])
def test_notices_a_wrong_loss(monkeypatch, fused, code):
    def start(function, arguments, nprocs, start_method):
        _, _, directory, _, _ = arguments
        row = {"way": "DDP", "losses": ([2.0, 1.0], [2.0, fused]), "seconds": (1.0, 0.5)}
        (Path(directory) / "rows").write_text(json.dumps([row]))

    monkeypatch.setattr(distributed.multiprocessing, "start_processes", start)
    found, text = run()
    assert found == code
    assert ("failed: 0 of 1" if code else "passed: 1 of 1") in text and "2.00x" in text
