"""What importing the package takes and leaves, and what it finds out at once."""

import importlib.metadata
import logging
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch

import onepass
from onepass import _log, _metadata, _printed, _tracing

HEAVY = ("torch._dynamo", "torch._inductor", "sympy", "matplotlib", "transformers", "torch.distributed.tensor")


def python(program: str, **environment: str) -> subprocess.CompletedProcess:
    """A fresh one."""
    given = {**os.environ, "PYTHONPATH": str(_metadata.Checkout().locate_file("")), **environment}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=given)


def test_what_is_slow_is_not_imported():
    ended = python(f"import sys, onepass, onepass.cli; print([name for name in {HEAVY} if name in sys.modules])")
    assert ended.stdout == "[]\n", ended.stderr


def test_constants_of_a_trace_are_marked_as_torch_marks_them():
    def ours():
        pass

    def theirs():
        pass

    _tracing.assume_constant_result(ours)
    torch.compiler.assume_constant_result(theirs)
    assert vars(ours) == vars(theirs) != {}


def test_the_backend_is_found_where_nothing_is_installed():
    program = """
import torch, onepass
from torch.nn import functional as F
x, b = torch.randn(512, 512), torch.randn(512)
found = torch.compile(lambda x, b: F.gelu(x + b), backend="onepass")(x, b)
assert torch.equal(found, onepass.fused("bias | gelu", x, b))
"""
    ended = python(program)
    assert ended.returncode == 0, ended.stderr
    assert importlib.metadata.version("onepass") == onepass.__version__ == _metadata.VERSION


def test_the_metadata_are_those_of_the_project():
    """What an installed package says, it has from pyproject.toml."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    points = importlib.metadata.EntryPoints(_metadata.Checkout().entry_points)
    assert project["version"] == _metadata.VERSION
    group = "torch_dynamo_backends"
    assert {p.name: p.value for p in points.select(group=group)} == project["entry-points"][group]


def test_an_old_torch_is_named():
    ended = python("import torch; torch.__version__ = '2.9.1+cu128'; import onepass")
    assert "onepass needs torch 2.10 or newer; this is 2.9.1+cu128" in ended.stderr and ended.returncode == 1


LINE = "abs | neg | abs | neg"


@pytest.mark.parametrize(("level", "says"), [("info", 2), ("warning", 0), ("", 0), ("nonsense", 0)])
def test_a_compiler_that_runs_is_said(level, says, tmp_path):
    """To standard error, which is no terminal here; what is in the cache is not compiled."""
    environment = {"ONEPASS_LOG": level, "ONEPASS_CACHE_DIR": str(tmp_path)}
    for expected, unsaid in ((says, 0.01), (0, 1.0)):  # reading takes less than a second
        program = f"import torch, onepass; onepass._log.UNSAID = {unsaid}; onepass.fused({LINE!r}, torch.randn(3, 4))"
        said = python(program, **environment).stderr.splitlines()
        assert [f'the line "{LINE}"' in line for line in said] == [True] * expected, said


def test_no_standard_error():
    """In a service: closed, or none."""
    for end in ("sys.stderr.close()", "sys.stderr = None"):
        ended = python(f"import sys; {end}; import onepass; print(onepass._log.is_on_terminal())", ONEPASS_LOG="info")
        assert ended.stdout == "False\n"


def test_a_programs_own_log_gets_it(caplog, capsys, monkeypatch):
    monkeypatch.setattr(_log, "UNSAID", 0.01)
    with caplog.at_level(logging.INFO, "onepass"), _log.taking_seconds("a line"):
        time.sleep(0.5)
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert not capsys.readouterr().err


class Table(_printed.Printed):
    def __rich__(self):
        return "wide " * 100


def test_reports_are_as_wide_as_the_terminal(monkeypatch):
    for columns in (60, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert columns - 5 <= max(map(len, str(Table()).splitlines())) <= columns
    html = Table()._repr_html_()
    assert html.startswith("<pre") and html.rstrip().endswith("</pre>") and "wide" in html
    for report in (onepass.report(onepass.fuse(torch.nn.Identity())), onepass.explain(torch.nn.ReLU(), torch.randn(8))):
        assert "<pre" in report._repr_html_()
