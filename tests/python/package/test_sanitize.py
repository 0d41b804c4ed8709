"""tools/sanitize without a GPU: its calls are for every kernel, and nothing that compute-sanitizer says is missed."""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

import onepass

TOOLS = Path(__file__).resolve().parents[3] / "tools"

# As compute-sanitizer 2026.4 writes them.
MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __shared__ write of size 2304 bytes
=========     at onepass::device::tell_bytes(unsigned int, unsigned int, int, unsigned int)+0x88d0 in matrix.cuda.h:55
=========     by thread (32,0,0) in block (0,0,0)
=========     Access to 0x31900 is not located in remote CTA
=========         Device Frame: onepass_probabilities_backward_sm90+0x10 in onepass_line.cu:11
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: clone [0x125c3c] in libc.so.6
=========
========= Program hit cudaErrorLaunchFailure (error 719) due to "unspecified launch failure" on CUDA API call to cuda.
=========     Saved host backtrace up to driver entry point at error
=========
========= Target application returned an error
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at onepass::device::bring_bytes(int)+0xbd00 in matrix.cuda.h:49
=========     and Read access at onepass::device::load_facts(int)+0x1b50 in row_facts.cuda.h:23 [256 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"


@pytest.fixture(scope="module")
def tool():
    loader = importlib.machinery.SourceFileLoader("sanitize", str(TOOLS / "sanitize"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("sanitize", loader))
    sys.modules["sanitize"] = module  # dataclasses ask for it
    loader.exec_module(module)
    yield module
    del sys.modules["sanitize"]


@pytest.fixture(scope="module")
def calls(tool):
    import sanitized_calls

    return sanitized_calls


def test_some_call_is_for_every_kernel(tool, calls):
    known = tool.kernels_known()
    assert len(known) == len(set(known)) > 20
    assert {kernel for call in calls.CALLS.values() for kernel in call.kernels} == set(known)
    assert set(tool.FORMS) <= set(known)


def test_every_call_has_a_line_that_can_be_read(calls):
    texts = [call.text for call in calls.CALLS.values() if call.text]
    assert len(texts) > 80
    for text in texts:
        onepass.Line(text)


def test_what_no_call_launches_is_said(tool):
    claims = {"norm": ("rowwise_forward",), "gelu": ("elementwise_forward",)}
    launches = {"norm": ["rowwise_forward", "new_kernel"], "gelu": ["rowwise_forward"]}
    missing = tool.not_reached(claims, launches, ("rowwise_forward", "elementwise_forward"))
    assert missing == [
        "elementwise_forward: no call launches it",
        "new_kernel: src/cuda/kernels.h lacks it",
        "call 'gelu' does not launch elementwise_forward, only rowwise_forward",
    ]


def test_forms_are_read_from_the_sources_in_a_cache(tool, tmp_path, monkeypatch):
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    list(onepass.cache.build(["sm_90a"], ["layer_norm | scale"], [torch.bfloat16], [65536]))
    forms = tool.forms_in(tmp_path)
    assert {"in a cluster", "made again", "two rows in flight"} <= forms["rowwise_backward"]
    assert not forms["rowwise_backward"] & {"in a block", "in a warp", "several tensors", "float64"}
    assert forms["add_columns"] == {"float"}


def test_reports_are_told_apart(tool):
    first, second = tool.parse(MEMCHECK, tool.kernels_known())
    assert (
        first.kernel == "probabilities_backward_sm90"
        and first.lines[0] == "Invalid __shared__ write of size 2304 bytes"
    )
    assert "not located in remote CTA" in first.text
    assert second.kernel == "" and second.lines[0].startswith("Program hit cudaErrorLaunchFailure")
    assert MEMCHECK.encode()[second.at :].startswith(b"========= Program hit")
    (race,) = tool.parse(RACECHECK, tool.kernels_known())
    assert race.kernel == "" and len(race.lines) == 2
    assert tool.parse(CLEAN, tool.kernels_known()) == []


def test_a_log_that_says_more_than_was_read_is_a_failure(tool):
    assert tool.not_understood(CLEAN, []) == []
    assert tool.not_understood("========= COMPUTE-SANITIZER\n", []) == ["it has no summary"]
    assert tool.not_understood("", []) == ["it has no summary"]
    assert tool.not_understood("========= ERROR SUMMARY: 3 errors\n", []) == ["3 errors, and no report of them"]
    assert tool.not_understood(RACECHECK, tool.parse(RACECHECK, ())) == []


def test_only_what_is_explained_is_clean(tool, monkeypatch):
    (report, _), outcome = tool.parse(MEMCHECK, tool.kernels_known()), tool.Outcome()
    outcome.kernels["probabilities_backward_sm90"] = ["probabilities"]
    monkeypatch.setattr(tool, "EXPLAINED", (tool.Explained("memcheck", report.kernel, "remote CTA", "why"),))
    outcome.add("memcheck", "probabilities", report)
    assert outcome.is_clean and "1 explained" in outcome.table(tool.TOOLS)
    outcome.add("racecheck", "probabilities", report)  # which that reason is not for
    assert not outcome.is_clean and "1 errors" in outcome.table(tool.TOOLS)


def test_every_reason_is_of_a_kernel_and_a_tool(tool):
    for explained in tool.EXPLAINED:
        assert explained.kernel in tool.kernels_known() and explained.tool in tool.TOOLS and len(explained.reason) > 40


# A call of "dies" ends its process; the sanitizer writes what $LOG has for calls of "wrong" ones.
STAND_IN_WORKER = """
import json, sys
report, rest = sys.argv[1], sys.argv[2:]
calls = [c for i, c in enumerate(rest) if not c.startswith("--") and rest[i - 1] != "--log"]
with open(report, "w") as out:
    for call in calls:
        print(json.dumps({"call": call, "log": 0, "begins": True}), file=out)
        if call == "dies":
            print(json.dumps({"call": call, "log": 0, "error": "CUDA error: gone"}), file=out)
            sys.exit(3)
        print(json.dumps({"call": call, "log": 0, "seconds": 0.5, "kernels": ["elementwise_forward"]}), file=out)
"""
STAND_IN_SANITIZER = """#!{python}
import subprocess, sys
if sys.argv[1] == "--version":
    print("Version {version} (build 1)")
    sys.exit()
log = sys.argv[sys.argv.index("--log-file") + 1]
at = sys.argv.index({python!r})
code = subprocess.run(sys.argv[at:]).returncode
wrong = any(word in sys.argv for word in {wrong!r})
open(log, "w").write({errors!r} if wrong else {clean!r})
sys.exit(code)
"""


@pytest.fixture
def stand_ins(tool, calls, tmp_path, monkeypatch):
    """Names of calls to run, and what the sanitizer finds something in."""
    worker, sanitizer = tmp_path / "worker.py", tmp_path / "compute-sanitizer"
    worker.write_text(STAND_IN_WORKER)
    monkeypatch.setattr(tool, "WORKER", worker)

    def run(names, wrong=(), version="2026.4.0"):
        wrong = [*wrong, *calls.PLANTED]
        errors = (
            MEMCHECK.replace("onepass_probabilities_backward_sm90", "onepass_planted")
            if len(wrong) == len(calls.PLANTED)
            else MEMCHECK
        )
        text = STAND_IN_SANITIZER.format(
            python=sys.executable, version=version, wrong=wrong, errors=errors, clean=CLEAN
        )
        sanitizer.write_text(text)
        os.chmod(sanitizer, 0o755)
        return tool.run_all(tool.Runner(tmp_path / "run", str(sanitizer)), ("memcheck",), list(names), 2)

    run.sanitizer = sanitizer
    return run


def test_a_clean_run(stand_ins):
    outcome = stand_ins(["gelu", "norm"])
    assert outcome.failures == [] and outcome.is_clean
    assert str(outcome.found["elementwise_forward"]["memcheck"]) == "clean, 1.0 s"


def test_calls_behind_one_that_fails_still_run(stand_ins):
    outcome = stand_ins(["a", "dies", "b", "c"])
    assert not outcome.is_clean
    assert sorted(outcome.failures) == [
        "call 'dies' under memcheck: CUDA error: gone",
        "call 'dies': CUDA error: gone",
    ]
    assert outcome.kernels["elementwise_forward"] == ["a", "b", "c"]
    assert outcome.found["elementwise_forward"]["memcheck"].seconds == 1.5


def test_reports_count_for_their_kernel(stand_ins):
    outcome = stand_ins(["gelu", "norm"], wrong=["norm"])
    assert outcome.found["probabilities_backward_sm90"]["memcheck"].errors == 1
    assert outcome.found["call 'norm'"]["memcheck"].errors == 1  # which names no kernel
    assert [r["lines"][0] for r in outcome.reports][:1] == ["Invalid __shared__ write of size 2304 bytes"]
    # The planted error was reported as another kernel's.
    assert outcome.failures == ["memcheck does not see the error of a kernel that has one"]


def test_without_a_gpu_or_with_an_old_sanitizer_it_says_so(tool, stand_ins, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sanitize", "--sanitizer", str(stand_ins.sanitizer)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tool.main() == 2
    assert "no CUDA device" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert tool.main() == 2
    assert "no compute-sanitizer" in capsys.readouterr().err
    stand_ins(["gelu"], version="2025.3.1.0")
    assert tool.main() == 2
    assert "older than 2026.4" in capsys.readouterr().err
