"""The line: what parses, what it says of itself, what it costs, and how an error points at its word."""

import pickle
import resource

import pytest
import torch

import onepass
from onepass import Line, LineError, _native
from onepass import line as lines

pytestmark = pytest.mark.quick


def error_of(text):
    with pytest.raises(LineError) as caught:
        Line(text)
    return str(caught.value)


def marked(message):
    """The characters that the carets stand under."""
    *_, line, carets = message.split("\n")
    assert set(carets) <= {" ", "^"}
    begin, end = carets.index("^"), len(carets)
    return line[begin:end]


@pytest.mark.parametrize("text", ["bias|gelu", "  bias  |  gelu  ", "bias |\tgelu", "bias\n| gelu\n", "bias | gelu"])
def test_spaces_do_not_matter(text, device):
    x, b = torch.randn(3, 8, device=device), torch.randn(8, device=device)
    assert [word.name for word in Line(text).words] == ["bias", "gelu"]
    assert torch.equal(onepass.fused(text, x, b), onepass.fused("bias | gelu", x, b))


@pytest.mark.parametrize(
    "number, value",
    [
        ("1", 1.0),
        ("-0.5", -0.5),
        ("1e-5", 1e-5),
        ("1E+2", 100.0),
        (".25", 0.25),
        ("2.", 2.0),
        (" 3 ", 3.0),
        ("1_0", 10.0),
    ],
)
def test_numbers_are_pythons_floats(number, value):
    assert Line(f"mul({number})").words[0].parameters == (value,)


@pytest.mark.parametrize("number", ["1,5", "0x10", "one", "", "1 2", "1e", "--1", "1_", "_1"])
def test_what_python_would_not_read_is_no_number(number):
    message = error_of(f"bias | mul({number}) | relu")
    assert "number" in message and "mul" in message


def test_words_of_a_line():
    words = Line("bias | dropout(0.25) | add | keep | layer_norm(1e-6) | gate(elu(0.5))").words
    assert [w.name for w in words] == ["bias", "dropout", "add", "keep", "layer_norm", "gate"]
    assert [w.operand for w in words] == ["column", "none", "tensor", "none", "none", "tensor"]
    assert [w.kind for w in words] == ["affine", "dropout", "affine", "keep", "row", "gate"]
    assert [w.parameters for w in words] == [(), (0.25,), (), (), (1e-6,), (0.5,)]
    assert words[5].activation == "elu" and words[0].activation is None


def test_the_vocabulary():
    words = {word.name: word for word in onepass.words()}
    assert set(onepass.reference.WORDS) <= set(words), "a word with a reference that the vocabulary lacks"
    assert set(words) <= set(onepass.reference.WORDS), "a word without a reference"
    for word in words.values():
        assert word.formula and word.meaning and word.kind
        assert word.operand in ("none", "column", "tensor", "target", "matrix", "keys", "values")
        assert bool(word.operand_name) == (word.operand != "none")
    activations = {name for name, word in words.items() if word.kind == "activation"}
    assert activations == set(onepass.reference.ACTIVATIONS)


def test_repr_reads_back():
    line = Line(" bias|dropout( 0.1 ) | add|gate( leaky_relu(0.2) ) |  rms_norm")
    again = eval(repr(line), {"onepass": onepass})
    assert [(w.name, w.parameters, w.activation) for w in again.words] == [
        (w.name, w.parameters, w.activation) for w in line.words
    ]
    assert repr(again) == repr(line)


def test_a_line_can_be_pickled():
    line = pickle.loads(pickle.dumps(Line("bias | gelu")))
    x, b = torch.randn(2, 4), torch.randn(4)
    assert torch.equal(line(x, b), onepass.fused("bias | gelu", x, b))


def test_line_and_fused_are_the_same(device):
    x, r, w = torch.randn(5, 16, device=device), torch.randn(5, 16, device=device), torch.randn(16, device=device)
    line = Line("add | keep | rms_norm(1e-6) | scale")
    for ours, expected in zip(line(x, r, w), onepass.fused(line.text, x, r, w), strict=True):
        assert torch.equal(ours, expected)


def test_reference_is_the_pytorch_composition(device):
    x, r = torch.randn(5, 16, device=device), torch.randn(5, 16, device=device)
    y, h = Line("add | keep | gelu").reference(x, r)
    assert torch.equal(h, x + r) and torch.equal(y, torch.nn.functional.gelu(x + r))
    assert torch.equal(Line("dropout(0.5)").reference(x, training=False), x)
    assert isinstance(Line("relu").reference(x), torch.Tensor)


@pytest.mark.parametrize(
    "text, word, suggestion",
    [
        ("bias | gleu", "gleu", "gelu"),
        ("biass | gelu", "biass", "bias"),
        ("layernorm | scale", "layernorm", "layer_norm"),
        ("softmaks", "softmaks", "softmax"),
        ("gate(sliu)", "sliu", "silu"),
        ("  rms_nrom(1e-6)", "rms_nrom", "rms_norm"),
        ("swiglu", "swiglu", "gate(silu)"),
        ("layer_norm | matmul", "matmul", "linear"),
        ("gate(swish)", "swish", "silu"),
    ],
)
def test_unknown_words_get_a_caret_and_a_suggestion(text, word, suggestion):
    message = error_of(text)
    assert f"'{word}'" in message and f"'{suggestion}'" in message
    assert text in message and marked(message) == word


@pytest.mark.parametrize(
    "text, says, mark",
    [
        ("", "empty line", "^"),
        ("   ", "empty line", " "),
        ("bias | ", "end of the line", None),
        ("| bias", "expected a word, got '|'", "|"),
        ("bias || gelu", "expected a word, got '|'", "|"),
        ("bias gelu", "expected '|' between words", "g"),
        ("mul", "'mul' needs a number", "mul"),
        ("mul(2", "expected ')'", None),
        ("bias(3)", "'bias' takes no number", "("),
        ("gate", "'gate' needs an activation", "gate"),
        ("gate()", "expected an activation", ")"),
        ("gate(softmax)", "unknown activation 'softmax'", "softmax"),
        ("scores | softmax | rms_norm(1e-6)", "a second row word, 'rms_norm'", "rms_norm(1e-6)"),
        ("softmax | " * 8 + "rms_norm(1e-6)", "a line has at most 8 row words", "rms_norm(1e-6)"),
        ("linear(3)", "unknown strategy '3'", "3"),
        ("linear | bias | linear", "a second contraction, 'linear'", "linear"),
        ("bias | linear | rms_norm", "'rms_norm' behind 'linear'", "rms_norm"),
        ("dropout(1.5)", "between 0 and 1", "dropout(1.5)"),
        ("dropout(-0.1)", "between 0 and 1", "dropout(-0.1)"),
        ("bias | ünder", "got 'ü'", "ü"),
        ("relu | é", "got 'é'", "é"),
        ("bias\0gelu", "expected '|'", None),
    ],
)
def test_errors_point_at_the_fault(text, says, mark):
    message = error_of(text)
    assert says in message
    if text.strip() and "\0" not in text:
        assert text in message
    if mark not in (None, "^", " "):
        assert marked(message) == mark


@pytest.mark.parametrize("text", [" | ".join(["add"] * 13), " | ".join(["keep"] * 5), " | ".join(["mul(2)"] * 13)])
def test_what_a_kernel_cannot_hold_is_refused(text):
    assert "at most" in error_of(text)


def test_line_error_is_a_value_error():
    assert issubclass(LineError, ValueError)


@pytest.mark.parametrize("bad", [None, 3, b"bias", ["bias"]])
def test_a_line_is_text(bad):
    with pytest.raises(TypeError, match="line"):
        Line(bad)
    with pytest.raises(TypeError, match="line|unhashable"):
        onepass.fused(bad, torch.randn(3))


class TestCost:
    M, N = 128, 256

    def cost(self, line, dtype=torch.float32):
        return Line(line).cost((self.M, self.N), dtype)

    def test_every_tensor_moves_once_forward(self):
        tensor, column = self.M * self.N * 4, self.N * 4
        assert self.cost("bias | gelu").forward.bytes == 2 * tensor + column
        assert self.cost("add | relu").forward.bytes == 3 * tensor
        assert self.cost("add | keep").forward.bytes == 4 * tensor

    def test_statistics_are_counted(self):
        tensor, column = self.M * self.N * 2, self.N * 2
        assert self.cost("rms_norm | scale", torch.bfloat16).forward.bytes == 2 * tensor + column + 4 * self.M
        assert self.cost("layer_norm", torch.bfloat16).forward.bytes == 2 * tensor + 8 * self.M

    def test_backward(self):
        tensor, column = self.M * self.N * 4, self.N * 4
        assert self.cost("bias | gelu").backward.bytes == 3 * tensor + 2 * column  # x, dy, dx, bias and its gradient
        assert self.cost("gate(silu)").backward.bytes == 5 * tensor  # x, u, dy, dx, du
        assert self.cost("add").backward.bytes <= tensor  # the gradient itself

    def test_saved(self):
        tensor, column = self.M * self.N * 4, self.N * 4
        assert self.cost("bias | gelu").saved_bytes == tensor + column
        assert self.cost("rms_norm | scale").saved_bytes == tensor + column + 4 * self.M
        assert self.cost("add").saved_bytes == 0

    def test_flops_grow_with_words_and_elements(self):
        one, two = self.cost("gelu"), self.cost("bias | gelu")
        assert 0 < one.forward.flops < two.forward.flops
        assert one.forward.flops % (self.M * self.N) == 0
        assert Line("gelu").cost((2, self.M, self.N)).forward.flops == 2 * one.forward.flops
        assert one.backward.flops > one.forward.flops

    def test_linear(self):
        """x, W and y once; the contraction's input is never stored."""
        K = 64
        x, y, w, column = self.M * self.N * 4, self.M * K * 4, self.N * K * 4, 4
        line = Line("layer_norm | scale | bias | linear | bias")
        cost = line.cost((self.M, self.N), torch.float32, out_features=K)
        assert cost.forward.bytes == x + y + w + (2 * self.N + K) * column + 12 * self.M
        assert cost.saved_bytes == x + w + 2 * self.N * column + 12 * self.M
        assert cost.backward.bytes == cost.saved_bytes + y + x + w + (2 * self.N + K) * column
        assert cost.forward.flops >= 2 * self.M * self.N * K
        assert Line("linear | bias | gelu").cost((self.M, self.N), out_features=K).saved_bytes == x + w + y + K * column
        with pytest.raises(TypeError, match="out_features"):
            line.cost((self.M, self.N))
        with pytest.raises(TypeError, match="out_features"):
            Line("gelu").cost((self.M, self.N), out_features=K)

    def test_leading_dimensions_are_rows(self):
        assert Line("softmax").cost((4, 32, 256)) == Line("softmax").cost((128, 256))


def test_a_line_has_a_most_of_words():
    for count in (33, 10000):
        message = error_of(" | ".join(["relu"] * count))
        assert message.startswith("a line has at most 32 words") and len(message) < 1000
    assert len(Line(" | ".join(["relu"] * 32)).words) == 32


def memory():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_lines_are_remembered_up_to_a_number():
    """Each that is called with another number was remembered for ever: 3,000 of them took 17 MB."""
    x = torch.randn(2, 8, requires_grad=True)

    def run(begin, end):
        for i in range(begin, end):
            y = onepass.fused(f"leaky_relu({i / 16384})", x)
            y.sum().backward()
            if i % 8 == 0:
                torch.func.grad(lambda x, i=i: onepass.fused(f"elu({1 + i / 16384})", x).sum())(x.detach())

    run(0, 1200)
    before = memory()
    run(1200, 3200)
    assert memory() - before < 4 * 2**20
    assert lines._parse.cache_info().currsize <= _native.REMEMBERED
    assert torch.equal(onepass.fused("leaky_relu(0.0625)", x), torch.nn.functional.leaky_relu(x, 0.0625))
