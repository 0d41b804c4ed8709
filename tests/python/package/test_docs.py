"""The documentation is true: generated pages are current, code blocks run, links lead somewhere."""

import ctypes
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import onepass
from onepass import _native, docs
from onepass.bench import report, whole_picture
from onepass.case import CASES

ROOT = Path(__file__).resolve().parents[3]
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
GUIDES = [*sorted((ROOT / "docs/how-to").glob("*.md")), ROOT / "docs/coming-from.md"]


def test_the_language_page_is_current():
    assert (ROOT / "docs/language.md").read_text(encoding="utf-8") == docs.language(), "run `onepass docs`"


def test_the_language_page_has_every_word():
    page = docs.language()
    for word in onepass.words():
        assert f"| `{word.name}` |" in page


def test_limits_of_a_line_are_as_stated():
    stated = r"(\d+) row words, (\d+) operands, (\d+) numbers, (\d+) `keep`s, and (\d+) words"
    rows, operands, numbers, keeps, words = re.search(stated, docs.language()).groups()
    for word, most in (("softmax", rows), ("add", operands), ("mul(2)", numbers), ("keep", keeps), ("relu", words)):
        onepass.Line(" | ".join([word] * int(most)))
        with pytest.raises(onepass.LineError, match="at most"):
            onepass.Line(" | ".join([word] * (int(most) + 1)))


def run_blocks(path, namespace):
    """A page's Python blocks, in order and in one namespace, as a reader would type them."""
    blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, path.name, "exec"), namespace)


def test_readmes_blocks_run():
    run_blocks(ROOT / "README.md", {})


def test_the_language_pages_blocks_run():
    x, residual = torch.randn(2, 3, 64).unbind()
    gamma, beta, b, g = torch.randn(4, 64).unbind()
    W, c = torch.randn(1, 64), torch.randn(1)
    names = {"x": x, "residual": residual, "gamma": gamma, "beta": beta, "b": b, "g": g, "W": W, "c": c}
    run_blocks(ROOT / "docs/language.md", {"onepass": onepass, "torch": torch, **names})


def test_every_case_has_a_tutorial():
    assert {page.stem for page in TUTORIALS} == set(CASES)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"docs/tutorials/{name}.md" in readme for name in CASES)


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorials_blocks_run(page, one_clock, capsys):
    if "plot=" in page.read_text(encoding="utf-8"):
        pytest.importorskip("matplotlib")
    run_blocks(page, {})
    assert "\npassed: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "page", [page for page in GUIDES if "```python" in page.read_text(encoding="utf-8")], ids=lambda page: page.stem
)
def test_a_guides_blocks_run(page):
    if "transformers" in page.read_text(encoding="utf-8"):
        pytest.importorskip("transformers", reason="needs onepass[demo]")
    torch._dynamo.reset()
    torch.manual_seed(0)
    run_blocks(page, {})


def test_programs_that_guides_show_are_there():
    shown = [name for page in GUIDES for name in re.findall(r"<!-- source:(\S+) -->", page.read_text(encoding="utf-8"))]
    assert {"examples/trainer.py", "examples/sft.py", "examples/fsdp2.py"} <= set(shown)
    assert all((ROOT / name).is_file() for name in shown)


def test_the_reference_names_all_that_is_public():
    named = set(re.findall(r"^::: (\S+)", "".join(p.read_text() for p in (ROOT / "docs/reference").glob("*.md")), re.M))
    assert {f"onepass.{name}" for name in onepass.__all__} <= named


def test_the_page_on_models_runs(capsys):
    torch._dynamo.reset()
    run_blocks(ROOT / "docs/models.md", {})
    assert "worth a line" in capsys.readouterr().out


def test_the_page_on_words_of_ones_own_runs():
    try:
        run_blocks(ROOT / "docs/own-words.md", {})
    finally:
        for name in onepass.defined_words():
            onepass.undefine_word(name)


CHECK = """
#include <hwy/highway.h>
#include "onepass/lane/cpu.h"
#include "onepass/lane/math.h"
#include "onepass/word/activation.h"
ONEPASS_BEGIN
extern "C" void softsign(const double* x, double* y, double* dx, int count) {
  using L = vec<double>;
  for (int i = 0; i < count; i += lanes<L>()) {
    const L at = load_lane<L>(x + i);
    store_lane(word::softsign::forward(at), y + i);
    store_lane(word::softsign::backward(at, L(1)), dx + i);
  }
}
ONEPASS_END
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_new_activation_of_the_guide_compiles(tmp_path):
    """The struct and the list as docs/adding-a-word.md gives them, in a copy of the header; values against PyTorch."""
    struct, names = re.findall(r"```cpp\n(.*?)```", (ROOT / "docs/adding-a-word.md").read_text(encoding="utf-8"), re.S)[
        :2
    ]
    last = re.search(r", (\w+), (\w+)>;", names)
    header = (ROOT / "include/onepass/word/activation.h").read_text(encoding="utf-8")
    at_list = header.index("template <class... Words>")
    header = header[:at_list] + struct + "\n" + header[at_list:]
    assert header.count(f"{last[1]}>;") == 1, "the guide names another last activation than the header has"
    header = header.replace(f"{last[1]}>;", f"{last[1]}, {last[2]}>;")
    shutil.copytree(ROOT / "include/onepass", tmp_path / "onepass")
    (tmp_path / "onepass/word/activation.h").write_text(header, encoding="utf-8")
    source, library = tmp_path / "check.cc", tmp_path / "check.so"
    source.write_text(CHECK, encoding="utf-8")
    options = [
        "-std=c++20",
        "-O1",
        "-shared",
        "-fPIC",
        "-march=native",
        "-DONEPASS_HIGHWAY",
        "-DHWY_COMPILE_ONLY_STATIC",
    ]
    places = ["-I", str(tmp_path), "-I", str(_native.PACKAGE / "include")]
    subprocess.run(["g++", *options, *places, str(source), "-o", str(library)], check=True)

    x = torch.linspace(-30, 30, 1024, dtype=torch.float64, requires_grad=True)
    y, dx = torch.empty_like(x), torch.empty_like(x)
    ctypes.CDLL(str(library)).softsign(*(ctypes.c_void_p(t.data_ptr()) for t in (x, y, dx)), len(x))
    expected = torch.nn.functional.softsign(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(dx, torch.autograd.grad(expected.sum(), x)[0])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_results_are_filled_between_the_markers(tmp_path, monkeypatch):
    monkeypatch.setattr("onepass.bench.report.markdown", lambda results: f"table of {results['device']}\n")
    begin, end = docs.RESULTS
    page, readme, results = tmp_path / "docs/results.md", tmp_path / "README.md", tmp_path / "bench/results"
    page.parent.mkdir(), results.mkdir(parents=True)
    page.write_text(f"before\n\n{begin}\nold\n{end}\n\nafter\n")
    readme.write_text("\n".join(docs.SUMMARY))
    for device in ("cuda", "cpu"):
        (results / f"{device}.json").write_text(json.dumps({"device": device}))
    assert docs.fill_results(tmp_path) == 2
    assert page.read_text() == f"before\n\n{begin}\n\ntable of cpu\n\ntable of cuda\n\n{end}\n\nafter\n"
    filled = page.read_text()
    docs.fill_results(tmp_path)
    assert page.read_text() == filled
    monkeypatch.setattr(docs, "_check_matplotlib", lambda: None)
    (results / "curve.json").write_text(json.dumps({"device": "cuda", "suite": "curve"}))
    (results / "instructions.json").write_text(json.dumps({"instructions": {}}))
    monkeypatch.setattr("onepass.bench.report.plot_curves", lambda _, directory: [directory / "cuda-softmax.svg"])
    assert docs.fill_results(tmp_path) == 3
    picture = "table of cuda\n\n![cuda-softmax](pictures/cuda-softmax.svg)"
    assert page.read_text() == filled.replace("table of cuda", picture)
    page.write_text("no markers")
    with pytest.raises(ValueError, match="markers"):
        docs.fill_results(tmp_path)


def test_nothing_is_written_where_pictures_cannot_be_drawn(tmp_path, monkeypatch):
    page, results = tmp_path / "docs/results.md", tmp_path / "bench/results"
    page.parent.mkdir(), results.mkdir(parents=True)
    page.write_text("as it was")
    rows = [{"model": "Llama, 8 layers", "provider": "eager"}]
    (results / "fuse.json").write_text(json.dumps({"device": "cuda", "suite": "fuse", "rows": rows}))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        docs.fill_results(tmp_path)
    assert page.read_text() == "as it was" and list(page.parent.iterdir()) == [page]


def test_the_readmes_picture_is_of_the_results_that_are_there():
    """And so are the numbers beside it."""
    names = [f"h200-fuse-{name}.json" for name in ("again", "routing", "others", "flux")]
    runs = [json.loads((ROOT / "bench/results" / name).read_text(encoding="utf-8")) for name in names]
    every = [row for run in runs for row in run["rows"]]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first, rest = readme.split("(docs/pictures/h200-training.svg)")
    assert first.count("\n") < readme.count("\n") / 4
    picture = (ROOT / "docs/pictures/h200-training.svg").read_text(encoding="utf-8")
    rows = [row for row in every if row["provider"] in whole_picture.BARS]
    assert all(f">{1e3 * row['seconds']:.1f}<" in picture for row in rows)
    assert all(f">{row['step_bytes'] / 2**30:.1f}<" in picture for row in rows)
    of = {(row["model"].split(",")[0], row["provider"]): row for row in every}
    models = {model for model, _ in of}
    said = " ".join(rest.split())
    assert f"Training steps of {len(models)} models" in said
    for name, form in (
        ("onepass", "fused, they are {:.2f} to {:.2f} times as fast as with torch.compile"),
        ("onepass_inductor", '(`fuse(model, then="inductor")`) {:.2f} to {:.2f} times'),
    ):
        timed = [model for model in models if (model, name) in of]
        assert len(timed) == (7 if name == "onepass_inductor" else len(models))
        gains = sorted(of[model, "compile"]["seconds"] / of[model, name]["seconds"] for model in timed)
        assert form.format(gains[0], gains[-1]) in said
    with_eager = {model for model in models if (model, "eager") in of}
    least = min(with_eager, key=lambda model: of[model, "eager"]["seconds"] / of[model, "onepass"]["seconds"])
    gain = of[least, "eager"]["seconds"] / of[least, "onepass"]["seconds"]
    assert f"{least} is {gain:.2f} times as fast as eager" in said
    less = [1 - of[model, "onepass"]["step_bytes"] / of[model, "compile"]["step_bytes"] for model in models]
    assert f"up to {100 * max(less):.0f} % less memory above the weights" in said
    beside = sorted(of[m, "liger"]["seconds"] / of[m, "onepass"]["seconds"] for m in models if (m, "liger") in of)
    assert len(beside) == 5
    assert f"The five that Liger has take {beside[0]:.2f} to {beside[-1]:.2f} times as long with it." in said


def test_the_readmes_table_is_of_the_results_that_are_there():
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "bench/results").glob("*.json"))]
    table = report.summary([found for found in files if "device" in found])
    assert table in (ROOT / "README.md").read_text(encoding="utf-8")
    assert table.count("\n") == 12 and "| linear + cross_entropy | 8192x4096x128256 |" in table
