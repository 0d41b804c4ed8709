"""Random lines over random shapes, dtypes and layouts, held to the error-ratio rule.

A new structure costs a compilation by the system compiler on the CPU, so the CPU draws from lines that are compiled
anyway and varies their numbers and activations within the ahead-of-time table; CUDA draws the line word by word.
"""

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import onepass
from helpers import (
    ATTENTION_LINES,
    COMPILED_LINES,
    LINEAR_LINES,
    NAMED_LINES,
    SCORES_LINES,
    Inputs,
    check_codes,
    check_line,
    make_inputs,
    words_of,
)
from onepass import _native

COMPILED = {line.partition("(")[2].rstrip(")") for line in _native.common_lines() if line.startswith("gate(")}
ACTIVATIONS = [word.name for word in onepass.words() if word.name in COMPILED]  # ahead of time
# Others, where their results and slopes are moderate.
FUNCTIONS = (
    *("abs", "neg", "softcap(2.0)", "clamp(-0.97, 1.47)", "tanh | exp", "sigmoid | log", "sigmoid | sqrt"),
    *("tanh | square", "sigmoid | pow(1.5)", "gate(abs)", "gate(clamp(-0.51, 2.03))"),
)
SETTINGS = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@st.composite
def activation(draw):
    name = draw(st.sampled_from(ACTIVATIONS))
    if name in ("elu", "leaky_relu") and draw(st.booleans()):
        return f"{name}({draw(st.sampled_from([0.05, 0.5, 1.5]))})"
    return name


@st.composite
def word(draw):
    kind = draw(st.integers(0, 11))
    if kind <= 3:
        return draw(activation())
    if kind == 4:
        return f"gate({draw(activation())})"
    if kind == 5:
        return f"mul({draw(st.sampled_from([-1.5, 0.3, 2.0]))})"
    if kind == 6:
        return f"dropout({draw(st.sampled_from([0.1, 0.5]))})"
    if kind == 7:
        return draw(st.sampled_from(FUNCTIONS))
    if kind == 8:
        return draw(st.sampled_from(["scale(channels)", "bias(channels)", "scale(0.5, channels)"]))
    return draw(
        st.sampled_from(["bias", "scale", "add", "keep", "sub", "times", "gated(silu)", "round", "keep(float32)"])
    )


ENDINGS = [
    ["logsumexp"],
    ["mean"],
    ["entropy", "logsumexp"],
    ["sum", "entropy"],
    ["cross_entropy"],
    ["cross_entropy(0.1, 0.01, -1)"],
    ["logprob", "entropy"],
]


PAIRED = ["kl_div", "kl_div(1.0, 2.0)", "kl_div(0.3)"]  # each the only row word of its line, without a `keep`

HEADS = [
    "linear | cross_entropy(0.1)",
    "linear(chunked) | bias | logprob | entropy",
    "rms_norm(1e-6) | scale | linear | softcap(3.0) | keep | cross_entropy",
]


@st.composite
def any_line(draw):
    before = draw(st.lists(word(), max_size=4))
    row = draw(
        st.sampled_from(
            [None, "layer_norm", "layer_norm(1e-3)", "rms_norm", "rms_norm(1e-5)", "l2_norm", "softmax", "log_softmax"]
        )
    )
    if row == "softmax":
        before += draw(st.sampled_from([[], ["mask"], ["causal"], ["causal", "mask"]]))
    after = draw(st.lists(word(), max_size=4)) if row else []
    if row is None and not any(w.startswith("keep") for w in before) and draw(st.integers(0, 3)) == 0:
        return " | ".join([*before, draw(st.sampled_from(PAIRED))])
    words = [*before, *([row] if row else []), *after]
    if "keep(float32)" not in words and draw(st.integers(0, 3)) == 0:
        words = [*words, "linear", *draw(st.lists(word().filter(lambda w: w != "keep(float32)"), max_size=4))]
        if draw(st.integers(0, 2)) == 0:
            words += draw(st.sampled_from(ENDINGS))
    elif draw(st.integers(0, 3)) == 0:
        words += draw(st.sampled_from(ENDINGS))
    if not any(w.startswith(("linear", "cross_entropy", "logprob")) for w in words) and draw(st.integers(0, 3)) == 0:
        rope = draw(st.sampled_from(["rope", "rope(4)", "rope(interleaved)", "rope(2, interleaved)"]))
        endings = sum(w in ("logsumexp", "mean", "entropy", "sum") for w in words)
        words.insert(draw(st.integers(0, len(words) - endings)), rope)
    by_channels = any("channels" in w for w in words)
    assume(not by_channels or not any(w.startswith(("linear", "rope")) for w in words))
    assume(words and words.count("keep") + words.count("keep(float32)") <= 3)
    return " | ".join(words)


@st.composite
def table_line(draw):
    """A line of the ahead-of-time table, with any of its activations."""
    shape = draw(st.sampled_from(["{}", "bias | {}", "gate({})"]))
    return shape.format(draw(activation()))


def lines_for(device):
    pool = st.one_of(
        st.sampled_from(NAMED_LINES),
        st.sampled_from(COMPILED_LINES),
        st.sampled_from(LINEAR_LINES),
        st.sampled_from(HEADS),
        st.sampled_from(SCORES_LINES),
        st.sampled_from(ATTENTION_LINES),
        table_line(),
    )
    return pool if device == "cpu" else st.one_of(any_line(), pool)


@st.composite
def shapes(draw):
    leading = draw(st.lists(st.integers(1, 7), max_size=3))
    columns = draw(st.one_of(st.integers(4, 40), st.sampled_from([63, 64, 127, 128, 200, 760, 1024, 1128])))
    return (*leading, columns)


def relaid(draw, tensor):
    """The numbers in a layout that is drawn: dense, rows apart, dims swapped in memory, one element off."""
    if tensor.dim() == 0:
        return tensor
    layout = draw(st.sampled_from(["dense", "rows", "columns", "swapped", "misaligned"]))
    if layout == "rows" or (layout == "swapped" and tensor.dim() < 2):
        wide = tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] + 5))
        wide[..., 2:-3] = tensor
        return wide[..., 2:-3]
    if layout == "columns":
        return torch.stack((tensor, tensor), -1).flatten(-2)[..., ::2]
    if layout == "swapped":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "misaligned":
        room = tensor.new_zeros(tensor.numel() + 1)
        room[1:] = tensor.flatten()
        return room[1:].view(tensor.shape)
    return tensor


def relaid_inputs(draw, inputs):
    tensors = []
    for tensor in inputs.tensors:
        moved = relaid(draw, tensor.detach())
        tensors.append(moved.requires_grad_(tensor.requires_grad))
    return Inputs(tensors[0], tensors[1:])


def slack_of(line, inputs):
    """How much more than the floor an error may be."""
    slack = max(1.0, 0.5 * len(words_of(line)))
    if "scores" in line:  # long products, added up in another order than PyTorch's
        slack *= 2
    fewest = min(t.numel() for t in inputs.tensors if t.is_floating_point())
    if fewest < 256:  # the largest error of a few is luck
        slack *= 1.6 if fewest >= 16 else 6 if "linear" in line else 3
    differences = ("entropy", "softmax", "kl_div")  # their gradients are
    return slack * 2 if any(word in line for word in differences) else slack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_error_is_no_more_than_pytorchs(dtype, device):
    @settings(SETTINGS, max_examples=60 if device == "cpu" else 100)
    @given(st.data())
    def check(data):
        line = data.draw(lines_for(device), "line")
        shape = data.draw(shapes(), "shape")
        if "rope" in line:  # rows have an even length
            shape = (*shape[:-1], shape[-1] + shape[-1] % 2)
        assume(len(shape) > 1 or not ("causal" in line or "scores" in line))
        parameter_dtype = data.draw(st.sampled_from([dtype, torch.float32, torch.bfloat16]), "columns' dtype")
        bool_mask = data.draw(st.booleans(), "bool mask") if device == "cuda" else True
        seed = data.draw(st.integers(0, 2**31), "seed")
        inputs = make_inputs(
            line,
            shape,
            dtype,
            device,
            parameter_dtype=parameter_dtype,
            bool_mask=bool_mask,
            seed=seed,
            out_features=data.draw(st.integers(1, 70), "out_features"),
        )
        torch.manual_seed(seed)
        check_line(line, relaid_inputs(data.draw, inputs), slack=slack_of(line, inputs))

    check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes(dtype, device):
    """Every line may end in codes, of which each is a compilation on the CPU."""
    rows = [line for line in (*NAMED_LINES, *COMPILED_LINES[:24]) if "dropout(0.5)" not in line]
    formats = ["fp8", "fp8e5m2", "int8", "fp8, 16", "fp8, 128"]

    @settings(SETTINGS, max_examples=6 if device == "cpu" else 60)
    @given(st.sampled_from(rows), st.sampled_from(formats), shapes(), st.integers(0, 2**31))
    def check(line, name, shape, seed):
        assume(len(shape) > 1 or "causal" not in line)
        group = int(name.partition(", ")[2] or 1)
        shape = (*shape[:-1], -(-shape[-1] // group) * group)
        torch.manual_seed(seed)
        check_codes(f"{line} | quantize({name})", make_inputs(line, shape, dtype, device, seed=seed))

    check()


@settings(SETTINGS, max_examples=300)
@given(any_line())
def test_any_line_parses_and_says_what_it_is(line):
    parsed = onepass.Line(line)
    assert len(parsed.words) == len(line.split(" | "))
    again = eval(repr(parsed), {"onepass": onepass})
    assert [(w.name, w.parameters, w.activation) for w in again.words] == [
        (w.name, w.parameters, w.activation) for w in words_of(line)
    ]
    cost = parsed.cost((32, 64), torch.bfloat16, None if parsed.weight is None else 64)
    tensors = 1 if parsed.numbers[0] else 2
    assert cost.forward.bytes >= tensors * 32 * 64 * 2 and cost.backward.flops >= cost.forward.flops >= 0


@settings(SETTINGS, max_examples=300)
@given(st.text(alphabet="bias|gelu()_.0123456789 \t-\u00e9\U0001f600", max_size=40))
def test_any_text_is_a_line_or_a_line_error(text):
    """Neither a crash nor another exception; the message quotes the text."""
    try:
        onepass.Line(text)
    except onepass.LineError as error:
        assert "^" in str(error)
