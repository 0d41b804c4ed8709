"""The suite "head": rows say what was measured, and what fails or is wrong shows."""

import json
from io import StringIO

import pytest
import torch
from rich.console import Console

from onepass import bench
from onepass.bench import head
from onepass.bench.head import PRODUCTS, PROVIDERS, Head

CPU = torch.device("cpu")
TINY = (Head(40, 16, 300, torch.float32), Head(40, 16, 300, torch.float32, ignored=0.5))
TIMED = ["eager", "onepass", "onepass_none"]


def run(providers, file=None, cases=TINY):
    console = Console(file=StringIO(), width=200)
    found = head.run(CPU, None, file, providers, True, console, cases)
    return found, console.file.getvalue()


def test_rows(tmp_path):
    file = tmp_path / "results.json"
    found, shown = run(TIMED, file)
    assert json.loads(file.read_text()) == found and "40x16x300 fp32" in shown
    assert [(row["ignored"], row["provider"]) for row in found["rows"]] == [
        (head_.ignored, name) for head_ in TINY for name in (PRODUCTS, *TIMED)
    ]
    for row in found["rows"]:
        assert row["forward_seconds"] > 0 and row["step_seconds"] > 0
        assert row["provider"] == PRODUCTS or row["difference"] < 1e-4
    (page,) = head.markdown([found])
    assert page.count("\n| ") == 2 + len(found["rows"]) and "over three" in page


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="torch has none before 2.13")
def test_torchs_own():
    (row,) = [row for row in run(["torch_chunked"], cases=TINY[:1])[0]["rows"] if row["provider"] != PRODUCTS]
    assert row["difference"] < 1e-4 and "failure" not in row


def test_what_is_wrong_or_not_there_shows(monkeypatch):
    def wrong():
        return lambda x, w, target: PROVIDERS["eager"]()(x, w, target) * 1.01

    def absent():
        raise ModuleNotFoundError("No module named 'absent'")

    monkeypatch.setitem(PROVIDERS, "wrong", wrong)
    monkeypatch.setitem(PROVIDERS, "absent", absent)
    found, shown = run(["wrong", "absent", "eager"], cases=TINY[:1])
    _, *rows = found["rows"]
    assert "gradients are" in rows[0]["failure"] and "No module" in rows[1]["failure"] and "step_seconds" in rows[2]
    assert "No module" in shown


def test_by_the_command(monkeypatch):
    monkeypatch.setattr(head, "QUICK", TINY[0])
    console = Console(file=StringIO(), width=200)
    found = bench.run("cpu", providers=["eager"], quick=True, console=console, suite="head")
    assert found["suite"] == "head" and len(found["rows"]) == 2
    with pytest.raises(ValueError, match="no provider is called who"):
        bench.run("cpu", providers=["who"], quick=True, console=console, suite="head")
    with pytest.raises(ValueError, match="no shape matches 'what'"):
        bench.run("cpu", only="what", quick=True, console=console, suite="head")
