"""The benchmark's suites: which cases they have, and what a layout is."""

from dataclasses import replace

import pytest
import torch

from onepass import Line, bench
from onepass.bench.any_lines import ANY_LINES, cause, random_lines
from onepass.bench.attention import ATTENTIONS
from onepass.bench.models import MODELS
from onepass.bench.patterns import LAYOUTS, PATTERNS, Case
from onepass.bench.programs import PROGRAMS
from onepass.bench.suites import SUITES, cases_of

EVERY = (*PATTERNS, *ATTENTIONS, *MODELS, *PROGRAMS, *ANY_LINES)
BY_NAME = {pattern.name: pattern for pattern in PATTERNS}


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_every_suite_has_cases_of_distinct_shapes(suite, device_type):
    cases = [(pattern, case) for pattern in EVERY for case in cases_of(pattern, device_type, suite=suite)]
    assert len({(pattern.name, *case) for pattern, case in cases}) == len(cases) and bool(cases) == (suite != "host")
    assert all(case.out_features for pattern, case in cases if " linear" in pattern.line)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_where_numbers_lie_and_nothing_else(layout, device):
    x, residual, _ = BY_NAME["add_rms_norm"].inputs((8, 16), torch.float32, torch.device(device), layout)
    assert x.is_leaf and x.requires_grad and x.shape == residual.shape == (8, 16)
    begins = [t.data_ptr() % 16 + 4 * t.stride(0) for t in (x, residual)]
    assert begins == [{"strided": 4 * 80, "misaligned": 4 + 4 * 16}[layout]] * 2
    cases = (Case((8, 16), torch.float32, layout),)
    pattern = replace(BY_NAME["add_rms_norm"], cpu=cases, cuda=cases)
    (row,) = bench.run(device=device, providers=["onepass"], patterns=[pattern], quick=True)["rows"]
    assert row["layout"] == layout and row["failure"] is None


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_attentions_curve_has_as_many_probabilities_everywhere(device_type):
    cases = [case for pattern in ATTENTIONS for case in cases_of(pattern, device_type, suite="attention_curve")]
    assert len({case.out_features * case.shape[0] * case.shape[1] * case.shape[2] for case in cases}) == 1
    assert {case.shape[-1] for case in cases} == {32, 64, 128}


def test_any_lines_are_lines_of_lengths_that_nobody_tuned():
    assert [(p.line, p.cuda) for p in random_lines()] == [(p.line, p.cuda) for p in ANY_LINES]
    assert len({p.line for p in ANY_LINES}) > 150
    for pattern in ANY_LINES:
        (((rows, length), *_),) = pattern.cuda
        assert Line(pattern.line).weight is None
        assert 64 <= length <= 2**18 and length & (length - 1) and 2**25 < rows * length <= 2**26
    assert len({pattern.cuda[0].dtype for pattern in ANY_LINES}) == 3
    assert any("keep" in p.line for p in ANY_LINES) and any(p.line.endswith("cross_entropy") for p in ANY_LINES)


def test_any_lines_are_right_and_summed_up(device, capsys):
    kept = next(pattern for pattern in ANY_LINES if "keep" in pattern.line)
    ending = next(pattern for pattern in ANY_LINES if pattern.line.endswith("cross_entropy"))
    cases = (Case((6, 77), torch.float32),)
    patterns = [replace(pattern, cpu=cases, cuda=cases) for pattern in (kept, ending)]
    rows = bench.run(device=device, providers=["eager", "onepass"], patterns=patterns, suite="any")["rows"]
    assert [row["failure"] for row in rows] == [None] * 4
    kernels = [row["kernels"] for row in rows if row["provider"] == "onepass"]
    for found in kernels if device == "cuda" else []:
        assert {kernel["backward"] for kernel in found} == {False, True}
        assert all(kernel["registers"] > 0 and kernel["threads"] >= 32 for kernel in found)
    shown = capsys.readouterr().out
    assert "2 lines" in shown and "median" in shown and "another is ahead in" in shown and "6x77" in shown


def test_what_limits_a_lines_kernels_is_said():
    kernels = [
        {"name": "forward", "backward": False, "registers": 40, "spilled": 0, "threads": 1536, "flops": 12},
        {"name": "parts", "backward": True, "registers": 168, "spilled": 96, "threads": 384, "flops": 30},
        {"name": "tiles", "backward": True, "registers": 32, "spilled": 0, "threads": 2048, "flops": 30},
    ]
    assert cause(kernels, "forward") == "40, 1536, 12"
    assert cause(kernels, "backward") == "168 and 96 B, 384, 30; 32, 2048, 30"
    assert cause([], "forward") == ""


@pytest.mark.parametrize("name", [pattern.name for pattern in PROGRAMS])
def test_programs_are_right_and_timed(name, device):
    pattern = next(pattern for pattern in PROGRAMS if pattern.name == name)
    batched = len(pattern.cpu[0].shape) == 3
    cases = (Case((3, 5, 48) if batched else (6, 40), torch.bfloat16),)
    pattern = replace(pattern, cpu=cases, cuda=cases)
    rows = bench.run(device=device, providers=["eager", "onepass"], patterns=[pattern], suite="programs")["rows"]
    assert [(row["provider"], row["failure"]) for row in rows] == [("eager", None), ("onepass", None)]
    assert all(row["forward_us"] > 0 for row in rows)
    assert all(row["backward_us"] is None if "quantize" in row["line"] else row["backward_us"] > 0 for row in rows)


def test_programs_of_a_batch_have_columns_of_their_own(device):
    pattern = next(pattern for pattern in PROGRAMS if pattern.name == "modulated_norm")
    x, scale, shift = pattern.inputs((3, 5, 16), torch.float32, torch.device(device))
    assert scale.shape == shift.shape == (3, 1, 16) and x.is_leaf and scale.requires_grad
