"""The disk cache through the package: filled at first use, shared by processes, rebuilt where damaged, and done without
where the directory cannot be written. Each case runs in processes of its own with ONEPASS_CACHE_DIR."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import BUILT_FOR_THIS_TORCH, NO_COMPILER

COMPILER = os.environ["ONEPASS_CXX"]  # conftest.py's, or what was given
LINE = "mul(0.7) | softplus | mul(1.3) | tanh"  # in no table: compiled at first use on every device

PROGRAM = """
import json, sys, warnings
import torch
device, line, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import onepass
    x = torch.linspace(-3, 3, 4 * 50).reshape(4, 50).to(device).requires_grad_()
    for _ in range(options.get("calls", 1)):
        y = onepass.fused(line, x)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
exact = x.detach().double().requires_grad_()
expected = onepass.Line(line).reference(exact)
(dexact,) = torch.autograd.grad(expected, exact, torch.ones_like(expected))
print(json.dumps({
    "error": (y - expected).abs().max().item(),
    "gradient_error": (dx - dexact).abs().max().item(),
    "fused": y.grad_fn.name(),
    "warnings": [str(w.message) for w in caught if "onepass" in str(w.message) or "cache" in str(w.message)],
}))
"""


one_entry_a_line = pytest.mark.skipif(
    not BUILT_FOR_THIS_TORCH, reason="built for another torch, for which it has an entry"
)


def start(device, directory, line=LINE, *, options=None, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, device, line, json.dumps(options or {})],
        env={**os.environ, "ONEPASS_CACHE_DIR": str(directory), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a shell's background job ignores
    )


def finish(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    answer = json.loads(out.splitlines()[-1])
    assert answer["error"] < 1e-6 and answer["gradient_error"] < 1e-6, answer
    return answer


def assert_kernel_ran(answer):
    assert "onepass" in answer["fused"], answer


def entries(directory):
    """Finished entries; a name that starts with a dot or ends in .tmp is one under way."""
    return {
        p: p.read_bytes()
        for p in sorted(Path(directory).rglob("*"))
        if p.is_file() and not p.name.startswith(".") and ".tmp" not in p.name and not p.name.endswith(".lock")
    }


def filled(device, directory):
    assert_kernel_ran(finish(start(device, directory)))
    cached = entries(directory)
    assert cached, "a first use fills the cache"
    return cached


def test_a_first_use_fills_it_and_a_second_reads_it(device, tmp_path):
    cached = filled(device, tmp_path)
    times = {p: p.stat().st_mtime_ns for p in cached}
    assert_kernel_ran(finish(start(device, tmp_path)))
    assert entries(tmp_path) == cached
    assert {p: p.stat().st_mtime_ns for p in cached} == times, "written again"


def counting_compiler(folder):
    """A compiler that notes each compilation and passes it on."""
    log, wrapper = folder / "compilations", folder / "compiler"
    wrapper.write_text(
        f'#!/bin/sh\nfor word; do [ "$word" = --version ] && exec {COMPILER} --version; done\n'
        f'echo compiled >> {log}\nexec {COMPILER} "$@"\n'
    )
    wrapper.chmod(0o755)
    return {"ONEPASS_CXX": str(wrapper)}, lambda: log.read_text().count("compiled") if log.exists() else 0


@one_entry_a_line
def test_a_line_is_compiled_once_for_all_processes(tmp_path):
    """And once for its forward, backward and every number of threads and calls in a process."""
    compiler, compilations = counting_compiler(tmp_path)
    for _ in range(3):
        assert_kernel_ran(finish(start("cpu", tmp_path / "cache", options={"calls": 3}, **compiler)))
        assert compilations() == 1


@one_entry_a_line
def test_lines_of_the_table_need_no_entry(tmp_path):
    assert_kernel_ran(finish(start("cpu", tmp_path, "gelu")))
    assert not entries(tmp_path)


def test_numbers_and_spaces_share_an_entry(device, tmp_path):
    cached = filled(device, tmp_path)
    assert_kernel_ran(finish(start(device, tmp_path, " mul(0.2)|softplus|mul( 5 )|tanh ")))
    assert entries(tmp_path) == cached


def test_eight_processes_at_once(device, tmp_path):
    alone = filled(device, tmp_path / "alone")
    together = tmp_path / "together"
    compiler, compilations = counting_compiler(tmp_path)
    for answer in [finish(p) for p in [start(device, together, **compiler) for _ in range(8)]]:
        assert_kernel_ran(answer)
    assert len(entries(together)) == len(alone)
    if device == "cpu":
        assert compilations() == len(alone), "of processes that want a line at once one compiles it"
    leftovers = [p for p in together.iterdir() if ".tmp" in p.name or p.is_dir()]
    assert not leftovers, "a process left its files"


DAMAGE = {
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "garbage": lambda content: os.urandom(len(content)),
    "flipped": lambda content: _with_a_bit_flipped(content, 2 * len(content) // 3),
}


def _with_a_bit_flipped(content, at):
    return content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]


def test_a_damaged_entry_is_rebuilt(device, tmp_path):
    """Any damage: DiskCache's own tests have more kinds."""
    cached = filled(device, tmp_path)
    for name, damaged in DAMAGE.items():
        for path, content in cached.items():
            path.write_bytes(damaged(content))
        assert_kernel_ran(finish(start(device, tmp_path)))
        rebuilt = entries(tmp_path)
        assert set(rebuilt) >= set(cached)
        for path, content in cached.items():
            assert len(rebuilt[path]) > len(content) // 2, f"{path.name}, {name}, is still damaged"
    times = {p: p.stat().st_mtime_ns for p in rebuilt}
    assert_kernel_ran(finish(start(device, tmp_path)))
    assert {p: p.stat().st_mtime_ns for p in entries(tmp_path)} == times, "the rebuilt entry is not read"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_write_permission(device, tmp_path):
    tmp_path.chmod(0o555)
    assert_kernel_ran(finish(start(device, tmp_path / "below")))
    assert_kernel_ran(finish(start(device, tmp_path)))
    assert not entries(tmp_path)


def test_a_directory_that_cannot_be_made(device, tmp_path):
    """Below a file, where not even root can write: the kernel is built and used all the same; one warning says why."""
    blocker = tmp_path / "file"
    blocker.write_text("")
    answer = finish(start(device, blocker / "cache", options={"calls": 3}))
    assert_kernel_ran(answer)
    assert len(answer["warnings"]) == 1 and "ONEPASS_CACHE_DIR" in answer["warnings"][0], answer["warnings"]


def test_without_a_compiler_the_composition_runs_and_says_so_once(tmp_path):
    answer = finish(start("cpu", tmp_path, options={"calls": 3}, **NO_COMPILER))
    assert "onepass" not in answer["fused"]
    assert len(answer["warnings"]) == 1, answer["warnings"]
    assert "compiler" in answer["warnings"][0]


ANOTHER_TORCH = """
import warnings
import torch
torch.__version__ = torch.torch_version.TorchVersion("2.99.0")  # nothing was built for it
import onepass
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    x = torch.randn(4, 8, requires_grad=True)
    for _ in range(3):
        y = onepass.fused("gelu", x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
print(y.grad_fn.name(), [e.label for e in onepass.cache.list()], [str(w.message) for w in caught])
"""


def run_with_another_torch(directory, **environment):
    done = subprocess.run(
        [sys.executable, "-c", ANOTHER_TORCH],
        env={**os.environ, "ONEPASS_CACHE_DIR": str(directory), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_autograd_function_is_compiled_for_another_torch(tmp_path):
    compiler, compilations = counting_compiler(tmp_path)
    for _ in range(2):
        out = run_with_another_torch(tmp_path / "cache", **compiler)
        assert "Fused" in out and "autograd for torch 2.99.0" in out and out.endswith(" []\n"), out
        assert compilations() == 1
    if os.geteuid() == 0:  # an entry that another user could have written is not loaded
        give_away(entries(tmp_path / "cache"))
        text = Path(compiler["ONEPASS_CXX"]).read_text()
        Path(compiler["ONEPASS_CXX"]).write_text(text.replace(f"echo compiled >> {tmp_path}/compilations", "exit 1"))
        out = run_with_another_torch(tmp_path / "cache", **compiler)
        assert out.startswith("ApplyBackward") and "belongs to user 4321" in out and "status 1" in out, out


def test_without_a_compiler_another_torch_takes_pythons_way_and_says_so_once(tmp_path):
    out = run_with_another_torch(tmp_path, **NO_COMPILER)
    assert out.startswith("ApplyBackward [] [") and out.count("Python's way") == 1, out


@one_entry_a_line
def test_list_and_clear(device, tmp_path):
    filled(device, tmp_path)
    program = """
import json
import onepass
listed = onepass.cache.list()
removed = onepass.cache.clear()
left = len(onepass.cache.list())
print(json.dumps([len(listed), removed, left, min(e.bytes for e in listed), listed[0].label, listed[0].kind]))
"""
    environment = {**os.environ, "ONEPASS_CACHE_DIR": str(tmp_path)}
    out = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr
    listed, removed, left, smallest, label, kind = json.loads(out.stdout.splitlines()[-1])
    assert listed == removed > 0 and left == 0 and smallest > 0
    assert "softplus" in label and kind
    assert not entries(tmp_path)


def test_the_default_place_follows_the_platform(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "ONEPASS_CACHE_DIR"}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "cpu", LINE, "{}"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert entries(tmp_path / "onepass")


def test_a_forked_process_computes(tmp_path):
    """DataLoader workers fork a parent that has already computed."""
    program = """
import os, sys
import torch, onepass
torch.set_num_threads(1)
x = torch.randn(64, 64)
expected = onepass.fused("gelu", x)
pid = os.fork()
if pid == 0:
    torch.set_num_threads(1)
    os._exit(0 if torch.equal(onepass.fused("gelu", x), expected) else 1)
_, status = os.waitpid(pid, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""
    environment = {**os.environ, "ONEPASS_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_importing_starts_no_cuda(cuda, tmp_path):
    program = """
import onepass, torch
onepass.Line("bias | gelu")
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def compiler_of(folder, *does):
    """A compiler whose lines of shell stand before the real one is run."""
    wrapper = folder / "compiler"
    lines = ["#!/bin/sh", '[ "$1" = --version ] && echo broken 1.0 && exit 0', *does, f'exec {COMPILER} "$@"']
    wrapper.write_text("\n".join(lines) + "\n")
    wrapper.chmod(0o755)
    return str(wrapper)


def test_with_a_compiler_that_fails_the_composition_runs_and_says_so_once(tmp_path):
    """tests/cache/compiler_test.cc has the ways in which it may."""
    fails = "echo unrecognized option -std=c++20 >&2; exit 1"
    compiler = compiler_of(tmp_path, f"echo compiled >> {tmp_path}/log", fails)
    answer = finish(start("cpu", tmp_path / "cache", options={"calls": 3}, ONEPASS_CXX=compiler))
    assert "onepass" not in answer["fused"] and not entries(tmp_path / "cache")
    (warning,) = answer["warnings"]
    for part in ("runs as a composition", "unrecognized option -std=c++20", "broken 1.0", "ONEPASS_CXX", "C++20"):
        assert part in warning, warning
    assert (tmp_path / "log").read_text() == "compiled\n", "it is tried once"


def wait_until(holds, seconds=60):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def runs(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ctrl_c_ends_a_compilation_and_leaves_nothing(tmp_path):
    """It is a KeyboardInterrupt, at once."""
    written = f"echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/compiler.pid"
    process = start("cpu", tmp_path / "cache", ONEPASS_CXX=compiler_of(tmp_path, f"{written}; sleep 600"))
    wait_until((tmp_path / "compiler.pid").exists, 120)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0 and err.rstrip().endswith("KeyboardInterrupt") and "RuntimeError" not in err, err
    wait_until(lambda: not runs(int((tmp_path / "compiler.pid").read_text())))
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()], "a folder was left"


def give_away(paths):
    for path in paths:
        os.chown(path, 4321, 4321)
        path.chmod(0o666)


EACH_PAIR = """
import sys, torch, onepass
dtype = getattr(torch, sys.argv[1])
torch.manual_seed(0)
tensors = [torch.randn(*size, dtype=dtype, requires_grad=True) for size in ((40, 70), (70,))]
line = onepass.Line("tanh | bias | rms_norm(1e-6) | softsign")
wide = [t.detach().double().requires_grad_() for t in tensors]
y, expected = line(*tensors), line.reference(*wide)
upstream = torch.randn_like(y)
got, want = torch.autograd.grad(y, tensors, upstream), torch.autograd.grad(expected, wide, upstream.double())
bound = 40 * torch.finfo(dtype).eps
for ours, exact in zip((y, *got), (expected, *want)):
    torch.testing.assert_close(ours.double(), exact, rtol=bound, atol=bound * exact.abs().max().item())
"""


@one_entry_a_line
def test_what_stands_behind_a_matrix_of_another_dtype(tmp_path):
    """Is compiled before the line runs, as all of it: where that fails, the composition runs."""
    program = """
import torch, onepass
x, g, h = torch.randn(4, 8), torch.randn(8), torch.randn(6, dtype=torch.bfloat16)
for weight in (torch.randn(6, 8), torch.randn(6, 8, dtype=torch.bfloat16)):
    print(onepass.fused("gelu | scale | linear | tanh | scale | softplus", x, g, weight, h).dtype)
"""
    compiler = compiler_of(tmp_path, 'for word; do case $word in *.cc) ! grep -q bf16 "$word" || exit 1 ;; esac; done')
    environment = {**os.environ, "ONEPASS_CACHE_DIR": str(tmp_path / "cache"), "ONEPASS_CXX": compiler}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["torch.float32", "torch.bfloat16"]
    assert done.stderr.count("runs as a composition of PyTorch operators") == 1, done.stderr


def test_several_compilers_make_one_entry(tmp_path):
    """Each makes one of the pairs of kernels that a dtype has; all of them are called."""
    dtypes = ("float32", "float64", "bfloat16", "float16")
    for dtype in dtypes:
        environment = {**os.environ, "ONEPASS_CACHE_DIR": str(tmp_path), "MAX_JOBS": "4"}
        command = [sys.executable, "-W", "error", "-c", EACH_PAIR, dtype]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    assert len([path for path in entries(tmp_path) if path.suffix == ".so"]) == len(dtypes)


def test_another_compiler_makes_another_entry(tmp_path):
    """The key holds what decides the code."""
    first = filled("cpu", tmp_path / "cache")
    other = tmp_path / "compiler"
    other.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo other 2.0 && exit 0\nexec {COMPILER} "$@"\n')
    other.chmod(0o755)
    assert_kernel_ran(finish(start("cpu", tmp_path / "cache", ONEPASS_CXX=str(other))))
    assert len(entries(tmp_path / "cache")) == 2 * len(first)
