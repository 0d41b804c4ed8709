"""docs/adding-a-word.md is true: its words, put where it says, compile, and are what PyTorch computes."""

import ctypes
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import onepass
from onepass import _native

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/adding-a-word.md").read_text(encoding="utf-8")
COMPILER = _native.info()["compiler"]
pytestmark = pytest.mark.skipif(not shutil.which(COMPILER.split()[0]), reason="needs a C++ compiler")

# A line's kernels, forward and backward, on a whole tensor in float64.
CALL = """
#include <hwy/highway.h>
#include "onepass/kernel/row/kernels.cpu.h"
ONEPASS_BEGIN
template <class... Words, class Word>
constexpr bool is_in(word::list<Words...>, Word*) { return (same_type<Words, Word> || ...); }
static_assert(is_in(word::%(words)s(), static_cast<word::%(name)s*>(nullptr)));
using of = %(line)s;
extern "C" void run(int64 rows, int64 columns, double number, double* x, double* y, double* dy, double* dx) {
  double statistics[256];
  arguments a{};
  a.rows = a.matrix_rows = a.task_rows = rows, a.columns = a.task_columns = columns, a.inverse_columns = 1.0 / columns;
  for (int i = 0; i < kMaxDims; ++i) a.size[i] = i + 1 == kMaxDims ? rows : 1;
  const auto tensor = [&](double* data) { return view{data, {0, 0, 0, columns}, dtype::f64, 1}; };
  a.x = tensor(x), a.y = tensor(y), a.statistics = statistics, a.parameter[0] = number;
  forward<double, of>(a, 0, 1);
  a.y = tensor(dy), a.dx = tensor(dx);
  backward<double, of>(a, 0, 1);
}
ONEPASS_END
"""


def blocks(language: str, part: str) -> list[str]:
    """The code of one section."""
    section = re.search(rf"^## {part}.*?\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S).group(1)
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.M | re.S)


def put(file: Path, before: str, text: str) -> None:
    """Text before what the file has once."""
    there = file.read_text(encoding="utf-8")
    assert there.count(before) == 1
    file.write_text(there.replace(before, text + before), encoding="utf-8")


def named(file: Path, block: str, list_name: str) -> None:
    """The list at the bottom of a header, with what the page adds to it."""
    names = re.fullmatch(rf"using {list_name} = list<(.*)>;\n", block).group(1).split(", ")
    there = file.read_text(encoding="utf-8")
    before = re.search(rf"using {list_name} = list<(.*?)>;", there, re.S)
    known = re.split(r",\s*", before.group(1))
    assert [name for name in names[:-1] if name != "..."] == [n for n in known if n in names]
    assert known[-1] == names[-2] and names[-1] not in known
    file.write_text(there.replace(before.group(1), f"{before.group(1)}, {names[-1]}"), encoding="utf-8")


@pytest.fixture
def tree(tmp_path):
    """Headers, and the reference, to add to."""
    shutil.copytree(ROOT / "include", tmp_path / "include")
    shutil.copy(ROOT / "python/onepass/reference.py", tmp_path / "reference.py")
    return tmp_path


def built(tree: Path, **names: str):
    """The kernels of a line with the word."""
    (tree / "line.cc").write_text(CALL % names, encoding="utf-8")
    highway = Path(onepass.__file__).parent / "include"
    options = "-std=c++20 -O1 -march=native -ffp-contract=off -fno-math-errno -fPIC -shared".split()
    defines = ["-DONEPASS_HIGHWAY", "-DHWY_COMPILE_ONLY_STATIC", "-DHWY_DISABLED_TARGETS=(HWY_SSSE3|HWY_AVX3_DL)"]
    command = [*COMPILER.split(), *options, *defines, f"-I{tree}/include", f"-I{highway}"]
    subprocess.run([*command, str(tree / "line.cc"), "-o", str(tree / "line.so")], check=True)
    return ctypes.CDLL(str(tree / "line.so")).run


def reference_in(tree: Path):
    spec = importlib.util.spec_from_file_location("reference_with_a_word", tree / "reference.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def check(run, reference, number: float) -> None:
    torch.manual_seed(0)
    rows, columns = 5, 67
    x = (4 * torch.randn(rows, columns, dtype=torch.float64)).requires_grad_()
    dy, y, dx = torch.randn_like(x), torch.empty_like(x), torch.empty_like(x)
    at = [ctypes.c_void_p(t.data_ptr()) for t in (x, y, dy, dx)]
    run(ctypes.c_longlong(rows), ctypes.c_longlong(columns), ctypes.c_double(number), *at)
    expected = reference(x)
    torch.testing.assert_close(y, expected.detach(), rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(dx, torch.autograd.grad(expected, x, dy)[0], rtol=1e-12, atol=1e-15)


def test_an_activation(tree):
    header = tree / "include/onepass/word/activation.h"
    struct, names, *_ = blocks("cpp", "An activation")
    (entry,) = blocks("python", "An activation")
    put(header, "template <class... Words>\nstruct list {};\n", struct + "\n")
    named(header, names, "activations")
    put(tree / "reference.py", "}\n\nIN_TORCH: dict", entry)
    name = re.match(r"struct (\w+)", struct).group(1)
    assert all(word.name != name for word in onepass.words()), "the page's example is not a word yet"
    reference = reference_in(tree)
    run = built(tree, words="activations", name=name, line=f"line<chain<placed<word::{name}, -1, -1, -1>>>")
    check(run, reference.ACTIVATIONS[name], 0.0)
    word = reference.IN_TORCH[name]
    assert all(name in reference.words_called(target) and word.numbers() == () for target in word.targets)


def test_a_row_word(tree):
    header = tree / "include/onepass/word/row.h"
    struct, names = blocks("cpp", "A row word")
    (entry,) = blocks("python", "A row word")
    put(header, "// The identity as a row word", struct + "\n")
    named(header, names, "row_words")
    put(tree / "reference.py", '    "l2_norm": InTorch(', entry)
    name = re.match(r"struct (\w+)", struct).group(1)
    assert all(word.name != name for word in onepass.words()), "the page's example is not a word yet"
    run = built(tree, words="row_words", name=name, line=f"line<chain<>, word::{name}, 0, chain<>>")
    check(run, reference_in(tree).WORDS[name], 1e-12)


def test_numbers_and_operands_are_as_in_the_headers():
    """What the page quotes of words that are there."""
    headers = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "include/onepass/word").glob("*.h"))
    _, _, numbers = blocks("cpp", "An activation")
    quoted = [*numbers.splitlines(), *blocks("cpp", "A word with an operand")[0].splitlines()]
    for line in quoted:
        for part in re.split(r"(?<=,) (?=\.)", line.partition("//")[0].strip()):
            assert part.rstrip(";,") in headers, part
    for field in re.findall(r"^\| `(\w+)` \|", PAGE, re.M):
        assert re.search(rf"bool {field}\b", headers), field
