"""The former names of strategies are read as the present ones, and each warns once, at the user's line."""

import warnings

import pytest
import torch

import onepass
from onepass import functional as F
from onepass import line as lines

ALIASES = [
    ("linear(streamed)", "linear(small_m)"),
    ("linear(resident) | bias", "linear(small_k) | bias"),
    (
        "layer_norm(1e-5) | linear(dots) | dropout(0.5) | gelu",
        "layer_norm(1e-5) | linear(small_n) | dropout(0.5) | gelu",
    ),
    ("scores(resident) | softmax", "scores(two_pass) | softmax"),
    ("scores( streamed ) | softmax | values", "scores( flash ) | softmax | values"),
]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """As if no line had been parsed."""
    monkeypatch.setattr(lines, "_warned", set())
    lines._parse.cache_clear()


@pytest.mark.parametrize("old, new", ALIASES)
def test_a_line_is_stored_under_the_present_name(old, new):
    with pytest.warns(FutureWarning, match="is now called"):
        line = onepass.Line(old)
    assert line.text == new and line._without_dropout == onepass.Line(new)._without_dropout
    assert repr(line) == repr(onepass.Line(new))
    assert line.plan((64, 64), out_features=8, device="sm_90a") == onepass.Line(new).plan(
        (64, 64), out_features=8, device="sm_90a"
    )


def test_each_old_name_warns_once_at_the_users_line():
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    calls = [
        lambda: onepass.fused("linear(dots)", x, w),
        lambda: onepass.fused("linear(dots) | relu", x, w),
        lambda: F.linear(x, w, activation="gelu", strategy="dots"),
        lambda: onepass.nn.LinearAct(8, 3, strategy="dots"),
    ]
    for first in range(len(calls)):
        lines._warned.clear()
        lines._parse.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for call in (*calls[first:], *calls[:first]):
                call()
        assert [str(w.message) for w in caught] == ["onepass: 'linear(dots)' is now called 'linear(small_n)'"]
        assert caught[0].category is FutureWarning and caught[0].filename == __file__


def test_one_name_has_two_present_ones():
    with pytest.warns(FutureWarning) as caught:
        onepass.Line("linear(resident)"), onepass.Line("scores(resident) | softmax")
    assert len(caught) == 2


def test_a_module_has_the_present_name():
    with pytest.warns(FutureWarning):
        assert onepass.nn.LinearAct(8, 8, strategy="streamed").strategy == "small_m"
    assert onepass.nn.LinearAct(8, 8).strategy == "auto"


@pytest.mark.parametrize("line", ["linear(flash)", "linear(two_pass)", "scores(dots)", "scores(small_m)"])
def test_errors_list_present_names_of_the_word(line):
    with pytest.raises(onepass.LineError, match="expected one of") as error:
        onepass.Line(line)
    assert not any(f", {old}" in str(error.value) for old in ("streamed", "resident", "dots"))
