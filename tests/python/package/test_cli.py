"""The command: every subcommand's output and exit code."""

import sys
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

import onepass
from onepass import _native, case
from onepass.cli import app, parse_dtype, parse_shape


@pytest.fixture
def call(monkeypatch):
    monkeypatch.setattr("onepass.cli.console.width", 200)

    def run(*arguments, code=0):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == code, result.output
        return result.output

    return run


def test_words_lists_the_vocabulary(call):
    text = call("words")
    for word in onepass.words():
        assert word.name in text and word.formula in text


def test_line_says_what_it_costs(call):
    line = "bias | dropout(0.1) | add | keep | rms_norm(1e-6) | scale"
    text = call("line", line, "--shape", "8192x4096", "--dtype", "bf16")
    cost = onepass.Line(line).cost((8192, 4096), torch.bfloat16)
    for word in onepass.Line(line).words:
        assert str(word) in text and word.formula in text
    assert f"{cost.forward.flops:,}" in text and f"{cost.backward.flops:,}" in text
    assert f"{cost.forward.bytes / 2**20:.1f} MiB" in text and f"{cost.saved_bytes / 2**20:.1f} MiB" in text


def test_a_wrong_line_is_quoted_with_carets(call):
    text = call("line", "bias | gleu", code=2)
    assert "did you mean 'gelu'" in text
    assert "\n  bias | gleu\n         ^^^^" in text
    call("cache", "build", "--line", "bias | gleu", code=2)


@pytest.mark.parametrize(
    "option", [("--shape", "4096by4096"), ("--shape", ""), ("--shape", "-3x4"), ("--dtype", "int8")]
)
def test_wrong_options(call, option):
    call("line", "gelu", *option, code=2)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        *(
            (("cache", "build", "--line", "bias | gelu", "--columns", c), "--columns")
            for c in ("0", "-5", "x", "9" * 30)
        ),
        (("cache", "build", "--line", "gelu", "--arch", "sm_7", "--columns", "8"), "unknown arch 'sm_7'"),
        (
            ("cache", "build", "--line", "rope", "--arch", "sm_90a", "--columns", "7"),
            "rows of an even length, got x of shape [1, 7]",
        ),
        (("line", "linear", "--out-features", "-1"), "--out-features"),
        (("line", "linear", "--out-features", "9" * 17), "too large"),
        (("line", "gelu", "--shape", "x".join(["99999999"] * 5)), "at most 2^58 elements"),
        (("line", "gelu", "--shape", "9" * 40), "sizes joined by 'x'"),
        (("explain", "a:b", "--input", "8x0x-1"), "sizes joined by 'x'"),
        (("explain", "a:b", "--input", "8x8", "--device", "h300"), "'h100'"),
        (("bench", "--only", "(["), "regular expression"),
        (("bench", "--suite", "no such"), "no suite is called"),
        (("bench", "--device", "cuda:99"), "no device is called 'cuda:99'"),
        (("case", "bias-gelu", "--device", "mps"), "expected cpu or cuda"),
        (("demo", "--device", "no such"), "expected cpu or cuda"),
        (("calibrate", "FILE", "--device", "cuda:-3"), "expected cpu or cuda"),
        (("demo-distributed", "--steps", "0"), "--steps"),
    ],
)
def test_what_is_given_is_checked(call, command, says, tmp_path):
    """With a message, and not with a traceback or a signal."""
    command = [str(tmp_path / "file") if word == "FILE" else word for word in command]
    result = CliRunner().invoke(app, command, terminal_width=200)
    assert result.exit_code in (1, 2) and isinstance(result.exception, SystemExit), result.output
    assert says in " ".join(result.output.replace("│", " ").split()), result.output


def test_the_library_checks_numbers_too():
    """Whoever calls it: a division by zero would end the process."""
    for columns in (0, -5, 2**41):
        with pytest.raises(RuntimeError, match="columns must be from 1"):
            _native.cuda_prebuild("bias | gelu", "sm_90a", torch.float32, torch.float32, columns)
        with pytest.raises(ValueError, match="columns from 1 to 2"):
            onepass.cache.build(["sm_90a"], ["gelu"], columns=[columns])
    with pytest.raises(RuntimeError, match="even"):
        _native.cuda_prebuild("rope", "sm_90a", torch.float32, torch.float32, 7)
    for sizes in ((-1, 8, 8, 1), (8, -1, 8, 1), (8, 8, -1, 1), (8, 8, 8, -1), (2**40, 2**40, 8, 1)):
        for ask in (
            lambda s: _native.cost("linear", *s, torch.float32),
            lambda s: _native.strategies("linear", *s, torch.float32, True, "sm_90a"),
            lambda s: _native.strategies("linear", *s, torch.float32, True, "cpu"),
        ):
            with pytest.raises(RuntimeError, match="must be at least 0|too large"):
                ask(sizes)
    with pytest.raises(RuntimeError, match="'cuda:x'"):
        _native.strategies("linear", 8, 8, 8, 1, torch.float32, True, "cuda:x")
    with pytest.raises(TypeError, match="'columns'"):
        onepass.cache.build(["sm_90a"], ["gelu"], columns=["8"])
    with pytest.raises(RuntimeError, match="torch.int8"):
        onepass.cache.build(["sm_90a"], ["gelu"], dtypes=[torch.int8])


def test_shapes_and_dtypes():
    assert parse_shape("2x3X4") == (2, 3, 4) and parse_shape("768") == (768,)
    for name in ("bf16", "bfloat16"):
        assert parse_dtype(name) == torch.bfloat16


def test_info_names_what_is_there(call):
    text = call("info")
    for part in (onepass.__version__, torch.__version__, _native.info()["simd_target"], "C++ compiler", "NVRTC", "GPU"):
        assert part in text


def test_cache_is_built_listed_and_cleared(call, tmp_path, monkeypatch):
    pytest.importorskip("cuda.pathfinder")
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    options = ("--arch", "sm_90a", "--line", "bias | gelu", "--dtype", "bf16", "--columns", "1024")
    text = call("cache", "build", "--verbose", *options)
    assert "sm_90a bf16 forward" in text and "sm_90a bf16 backward" in text
    kernels = list(tmp_path.glob("*.cubin"))
    assert f"{len(kernels)} CUDA kernels are in {tmp_path}" in text
    assert f"{len(kernels)} kernels" in call("cache", "list") and "sm_90a" in call("cache", "list")
    assert f"removed {len(kernels)} kernels" in call("cache", "clear")
    assert not list(tmp_path.iterdir()) and "0 kernels" in call("cache", "list")


def test_demo_passes_its_device_and_exit_code(call, monkeypatch):
    calls = []
    replace(monkeypatch, "demo", lambda **given: calls.append(given) or 3)
    call("demo", "--device", "cpu", code=3)
    assert calls == [{"device": "cpu"}]


def test_bench_passes_its_options(call, monkeypatch, tmp_path):
    calls = []
    replace(monkeypatch, "bench", lambda **given: calls.append(given))
    file = tmp_path / "new" / "results.json"
    call("bench", "--device", "cpu", "--only", "norm", "--json", str(file), "--providers", "eager, compile", "--quick")
    assert file.parent.is_dir()
    call("bench")
    call("bench", "--suite", "curve", "--dtype", "bf16", "--plot", str(tmp_path))
    default = {"device": None, "only": None, "json": None, "providers": None, "quick": False}
    default |= {"suite": "table", "dtype": None, "plot": None}
    assert calls == [
        default | {"device": "cpu", "only": "norm", "json": file, "providers": ["eager", "compile"], "quick": True},
        default,
        default | {"suite": "curve", "dtype": torch.bfloat16, "plot": tmp_path},
    ]


def test_case_passes_its_options_and_exit_code(call, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setitem(case.CASES, "layernorm-linear", lambda **given: calls.append(given) or 1)
    file = tmp_path / "new" / "results.json"
    call("case", "layernorm-linear", code=1)
    call("case", "layernorm-linear", "--device", "cpu", "--json", str(file), "--quick", "--compile", code=1)
    assert file.parent.is_dir()
    trace, plot = tmp_path / "traces" / "trace.json", tmp_path / "plots" / "plot.svg"
    call("case", "layernorm-linear", "--trace", str(trace), "--plot", str(plot), code=1)
    assert trace.parent.is_dir() and plot.parent.is_dir()
    nothing = {"device": None, "json": None, "quick": False, "compiled": False, "trace": None, "plot": None}
    assert calls == [
        nothing,
        nothing | {"device": "cpu", "json": file, "quick": True, "compiled": True},
        nothing | {"trace": trace, "plot": plot},
    ]


def test_a_case_without_a_picture_says_so(call, tmp_path):
    assert "has no plot" in call("case", "bias-gelu", "--plot", str(tmp_path / "plot.svg"), code=2)
    assert "has no trace" in call("case", "roofline", "--trace", str(tmp_path / "trace.json"), code=2)


def test_an_unknown_case_names_those_that_there_are(call):
    text = call("case", "layernorm", code=2)
    assert all(name in text for name in case.CASES)


def replace(monkeypatch, name, run):
    """Puts a module in the place of onepass.<name>, with `run` for its own."""
    module = ModuleType(f"onepass.{name}")
    module.run = run
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(onepass, name, module, raising=False)
