"""Every example runs."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[3] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, capsys):
    if "from transformers" in path.read_text():
        pytest.importorskip("transformers", reason="needs onepass[demo]")
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out
