"""The command: every subcommand's output and exit code."""

import json
import sys
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

import onepass
from onepass import _native, case, cli, doctor
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


def test_words_are_found_by_their_names_and_meanings(call):
    text = call("words", "swiglu", "LAYER_")
    assert "layer_norm" in text and "gate" in text and "softmax" not in text
    assert "did you mean 'softmax'?" in " ".join(call("words", "sofmax", code=2).replace("│", "").split())


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


def test_doctor_tries_what_is_there(call, tmp_path):
    file = tmp_path / "new" / "found.json"
    text = call("doctor", "--json", str(file))
    found = {finding["name"]: finding for finding in json.loads(file.read_text())}
    for part in (onepass.__version__, torch.__version__, _native.info()["simd_target"]):
        assert part in text
    assert {"CPU kernels", "C++ compiler", "autograd in C++", "cache", "NVRTC", "matplotlib"} < set(found)
    assert all(finding["advice"] for finding in found.values() if finding["state"] != "works")
    assert found["CPU kernels"]["state"] == "works"
    assert "PyTorch" in text and "CPU kernels" in call("info")


def test_doctor_says_what_to_do(call, monkeypatch, tmp_path):
    """Each thing that can be missing, or fail."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(folder))
    assert doctor.compiler("").state == "missing" and "g++" in doctor.compiler("").advice

    def fails(*_):
        raise _native.CannotCompile("no C++20\nmore")

    monkeypatch.setattr(_native, "cpu_prepare", fails)
    monkeypatch.setattr(_native, "open_autograd", fails)
    assert doctor.autograd_function().state == "missing"
    failing = doctor.compiler("/bin/false")
    assert "no C++20" in failing.said
    assert failing.state == "missing" and "ONEPASS_CXX" in failing.advice
    monkeypatch.setattr(doctor, "LEAST_ROOM", 2**62)
    assert doctor.cache_folder(folder).state == "missing"
    monkeypatch.setattr(doctor, "find_nvrtc", lambda: None)
    assert doctor.nvrtc().state == ("fails" if torch.cuda.is_available() else "missing")
    wrong = doctor.checked("x", lambda: 1 / 0, "divide by another")
    assert (wrong.state, wrong.said, wrong.advice) == (
        "fails",
        "ZeroDivisionError: division by zero",
        "divide by another",
    )
    monkeypatch.setattr(doctor, "findings", lambda: iter([wrong]))
    assert "divide by another" in call("doctor", code=1)


def test_doctor_looks_at_what_a_line_gives(monkeypatch):
    monkeypatch.setattr(doctor, "fused", lambda line, x, b: x + b)
    with pytest.raises(RuntimeError, match="is not PyTorch's"):
        doctor.on_cpu()


def test_plan_is_that_of_the_line(call):
    text = call("plan", "rms_norm(1e-6) | scale | linear", "--device", "h200", "--shape", "8x4096")
    plan = onepass.Line("rms_norm(1e-6) | scale | linear").plan((8, 4096), torch.bfloat16, 4096, device="h200")
    assert plan.why in " ".join(text.split()) and all(way.name in text for way in plan.alternatives)
    assert "one kernel" in call("plan", "bias | gelu", "--device", "sm_90a")
    assert "expected device" in " ".join(call("plan", "gelu", "--device", "h300", code=2).split())


def test_version(call):
    assert call("--version") == f"onepass {onepass.__version__}, torch {torch.__version__}\n"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("explain", "math:sqrt", "--input", "3x4"), "'math:sqrt' is called without arguments"),
        (("explain", "builtins:dict", "--input", "3x4"), "it gave dict"),
        (("bench", "--plot", "FILE"), "pip install matplotlib"),
        (("case", "roofline", "--plot", "FILE"), "pip install matplotlib"),
        (("explain", "torch.nn:Identity", "--input", "3x4", "--plot", "FILE"), "pip install matplotlib"),
        (("docs",), "in its repository"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(call, command, says, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = call(*(str(tmp_path / "file") if word == "FILE" else word for word in command), code=2)
    assert says in " ".join(text.replace("│", " ").split())


def test_errors_that_are_no_faults_are_one_line(monkeypatch, capsys, tmp_path):
    """A file that cannot be written, a package that is missing, memory that is not there."""
    monkeypatch.setattr(sys, "argv", ["onepass", "calibrate", "/proc/nowhere/file"])
    ends(capsys, "onepass: [Errno 2] No such file or directory: '/proc/nowhere'\n")
    for error, says in (
        (ModuleNotFoundError("No module named 'trl'", name="trl.rewards"), "pip install trl"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), "onepass: CUDA out of memory. Tried\n"),
    ):
        monkeypatch.setattr(cli, "app", lambda error=error, **_: (_ for _ in ()).throw(error))
        ends(capsys, says)
    monkeypatch.setattr(cli, "app", lambda **_: (_ for _ in ()).throw(ModuleNotFoundError("no", name="own")))
    with pytest.raises(ModuleNotFoundError):
        cli.main()


def ends(capsys, says):
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == 1 and says in said and said.count("\n") == 1, said


def test_work_of_others_is_said(monkeypatch, capsys):
    """Of two readings of idle ticks and all ticks."""
    ticks = [(100, 1000), (120, 1100)]
    monkeypatch.setattr(cli, "processor_ticks", lambda: ticks.pop(0))
    monkeypatch.setattr("os.cpu_count", lambda: 10)
    cli.say_if_busy(0)
    assert "other work takes 8.0 of 10 processors" in capsys.readouterr().err
    ticks += [(100, 1000), (200, 1100)]
    cli.say_if_busy(0)
    assert not capsys.readouterr().err
    monkeypatch.setattr(cli, "processor_ticks", lambda: None)
    assert cli.busy_processors(0) == 0


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
