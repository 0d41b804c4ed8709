"""The table of architectures in docs/models.md: what it says is what `explain` says."""

import json
from pathlib import Path

import pytest
import torch

import onepass
from onepass.bench import shares
from onepass.bench.architectures import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[3]
RESULTS = json.loads((ROOT / "bench/results/explain.json").read_text(encoding="utf-8"))
ALWAYS = ("DiT", "ELECTRA")


def test_the_table_is_current():
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    assert f"<!-- shares:begin -->\n\n{shares.markdown(RESULTS)}\n\n<!-- shares:end -->" in page, (
        "`onepass docs --results`"
    )


def test_the_table_has_every_architecture():
    assert [row["model"] for row in RESULTS["rows"]] == list(ARCHITECTURES)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ALWAYS else pytest.mark.slow) for n in ARCHITECTURES]
)
def test_a_row_is_what_explain_says(name):
    """To a fiftieth: where matrices are multiplied by own code depends on the processor."""
    pytest.importorskip("transformers", reason="needs onepass[demo]")
    (written,) = [row for row in RESULTS["rows"] if row["model"] == name]
    found = shares.row(name)
    for profile in shares.WAYS:
        for part in ("elementwise_seconds", "in_lines_seconds"):
            assert _share(found[profile], part) == pytest.approx(_share(written[profile], part), abs=0.02), profile


def _share(row, of):
    return row[of] / row["seconds"]


def test_what_is_element_wise():
    """Of a product, a sum, a norm and a copy, the sum and the norm are in a line."""
    norm, layer = torch.nn.LayerNorm(1024), torch.nn.Linear(1024, 1024, bias=False)
    x = torch.randn(4096, 1024)
    with torch.no_grad():
        explained = onepass.explain(lambda x: norm(layer(x) + x).roll(1), x, device="h200")
    by_name = {operator.name: operator.forward.seconds for operator in explained.operators}
    all_of_it, in_lines = explained.elementwise
    assert in_lines == pytest.approx(by_name["add"] + by_name["layer_norm"])
    assert all_of_it == pytest.approx(in_lines + by_name["roll"])
    assert json.loads(explained.to_json())["elementwise_seconds"] == [all_of_it, in_lines]
