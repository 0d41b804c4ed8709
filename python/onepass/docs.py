"""The pages that are generated: the language reference from the words' descriptors, docs/results.md from the JSON."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import onepass
from onepass import Word

__all__ = ["fill_results", "language", "number", "operand", "size"]

RESULTS = ("<!-- results:begin -->", "<!-- results:end -->")
SUMMARY = ("<!-- summary:begin -->", "<!-- summary:end -->")
PREDICTIONS = ("<!-- predictions:begin -->", "<!-- predictions:end -->")
SHARES = ("<!-- shares:begin -->", "<!-- shares:end -->")
TABLES, CURVES = ("table", "linear", "attention", "models"), ("curve", "attention_curve")  # the suites shown, and how

INTRODUCTION = """\
# The language

`onepass docs` writes this page from the words' descriptors in `include/onepass/word/`; edit `python/onepass/docs.py`.

A line says what happens to a row of a tensor, word by word, from left to right:

```python
y = onepass.fused("layer_norm(1e-5) | scale | bias | relu", x, gamma, beta)
```

`x` has shape (..., N); its rows are the N numbers of the last dimension. The result has x's shape and dtype (behind
`linear` rows have another length, and an ending gives one number of each) and is contiguous; behind
[`values`](#values) it lies in memory as x does. `onepass.fused` remembers what it parsed; `onepass.Line` is the same
line as an object.

## Grammar

```
line = word { "|" word }
word = name | name "(" numbers ")" | "gate" "(" activation ")" | "gated" "(" activation ")"
     | "keep" "(" dtype ")" | "quantize" "(" dtype [ "," ( "static" | number ) ] ")"
     | "rope" "(" "interleaved" ")" | "rope" "(" number "," "interleaved" ")"
     | "bias" "(" "channels" ")" | "scale" "(" [ number "," ] "channels" ")"
numbers = number { "," number }
```

- An activation is one of the words of that table below, with its number if it has one: `gate(leaky_relu(0.2))`.
- A number is written as Python writes a float. White space between the parts is free.
- A line has at most one `linear`, behind its row words, or `scores` as its first word (then one row word, and `values`
  as its last); 8 row words, 12 operands, 12 numbers, 4 `keep`s, and 32 words, for which a compiler takes up to 8 s.
- A line that cannot be read raises `onepass.LineError` (a ValueError), which quotes it with carets under the fault.

## Operands

Operands follow `x` in the order in which their words stand. `bias | add | keep | rms_norm(1e-6) | scale` takes
`(x, b, residual, g)`.

| operand | shape |
|---|---|
| column | [N], one number for each column; or rows of N numbers that broadcast to x's shape, such as [B, 1, N] |
| column of channels | [C] where C divides N, one number for N / C neighbouring columns; or rows of such |
| tensor | x's shape, or what broadcasts to it |
| table | x's shape, or what broadcasts to it, with a length of its own in the last dimension: see `rope` |
| mask | x's shape, or what broadcasts to it; bool (True takes part) or floating point (added) |
| matrix | [N', N]; behind `linear` rows have N' numbers of its dtype, and so have the operands |
| keys | [..., N', N] with x's batch sizes, of which the last may be 1; behind `scores` as behind `linear` |
| values | [..., N, N'] with the keys' batch sizes and dtype; behind `values` rows have N' numbers |

Every operand but a bool mask and those of `rope` has a gradient, in its own shape and dtype, computed only where it is
needed.

A gradient of an operand that repeats along x's leading dimensions, a column [B, 1, N] or a tensor [L, N] beside x of
shape [B, L, N], is summed over the rows that share a row of it, within the backward kernel and then over its parts, in
a fixed order: it is never made in x's shape. Where operands of one line repeat along unlike dimensions, those that most
share are summed so; the gradients of the others, and of one number a row ([B, L, 1]), are written in x's shape first.
In lines with `linear` or `scores` columns are [N], and so they are in C++; lists with others are a call each.

## keep

`keep` also returns the value at its point: the call gives a tuple, the result first, then the kept values in order. A
kept value is rounded to x's dtype, and the words behind it go on with the rounded value, so that what the caller holds
is what the line has seen. Its gradient joins there in backward. Where a line can resume from a kept tensor, backward
saves that one, which the caller holds anyway, and not x. A line that ends with `softmax` or `log_softmax` resumes from
its result.

`keep(float32)` keeps the value in float32 beside x of 16 bits (beside float64 it is float64), unrounded, and with that
value the line goes on: `add | keep(float32) | rms_norm(1e-6) | scale` is a block whose residual stream is float32. Its
operand may be float32, too; each gradient has the dtype of its tensor. A line with `linear` or `scores` keeps values in
x's dtype alone. A line that ends in numbers does not resume from such a value: x says what dtype its gradient has.

`round` rounds as `keep` does, without a result: with it a line has the rounding points of another implementation,
and its gradient passes unchanged.

## Row words

What stands before `layer_norm`, `rms_norm`, `l2_norm`, `softmax` or `log_softmax` is computed on the way into the row's
statistics, what stands behind it on the way out; neither costs another pass over memory. The affine part of a
normalisation is `scale | bias`.
Rows of an image are its channels one behind the other: `scale(channels)` and `bias(channels)` take a number for each.
Group normalisation of x (N, C, H, W) is `layer_norm(1e-5) | scale(channels) | bias(channels)` of
`x.view(N, groups, -1)`, with weight and bias as (groups, C / groups); `functional.group_norm` calls it so. In a line
with `rope`, `linear` or `scores` there is no kernel for them.
A line may have several, `rms_norm(1e-6) | scale | add | keep | rms_norm(1e-6) | scale`: the row stays on chip from the
first to the last, and each saves its own statistics for backward.

## Endings

`logsumexp`, `entropy`, `sum`, `mean`, `amax`, `cross_entropy`, `logprob` and `kl_div` give one number of each row and
end the line. The result has x's shape without the last dimension; it is float32, of float64 float64, and is never
rounded to 16 bits. Several may follow each other, `softcap(30) | logsumexp | entropy`: the row is read once, the first
one's number is the result, and the others stand behind the kept values. Backward begins at one gradient a row, needs no
sum over it, and reads x, or the last `keep` that the row word follows. The row of no element gives what PyTorch gives,
and `amax` raises.

`cross_entropy` and `logprob` take a target: int64 or int32 of x's shape without the last dimension, a column of each
row, or the number to be ignored, whose result is 0 and whose row gets no gradient. `softcap(30) | cross_entropy` is the
loss of a language model's logits, float32 beside logits of 16 bits; `logprob | entropy` reads them once for both. With
lse = log Σ exp(x), `cross_entropy(s, z, ignore_index)` is lse - (1 - s) x[target] - s mean(x) + z lse²: label smoothing
(Szegedy et al., arXiv:1512.00567) and the z-loss of PaLM (Chowdhery et al., arXiv:2204.02311); numbers that are left
out are 0, 0 and -100. Backward is one pass that reads x and writes its gradient. On the CPU a target that is no column
raises IndexError; on CUDA an assertion of the kernel fails, as PyTorch's does. A target has no gradient.

`kl_div(beta, temperature)` takes another row of logits beside each, a teacher's, of x's shape or broadcast to it.
With p the softmax of x and q that of the teacher, of both divided by the temperature (1 unless it is given), it is
KL(q || p); with beta = 1 KL(p || q), the reverse; between them beta KL(q || m) + (1 - beta) KL(p || m) with m = (1 -
beta) p + beta q, the generalised Jensen-Shannon divergence (Agarwal et al., arXiv:2306.13649). Both rows are read
once, between 0 and 1 twice, and backward reads them once more and writes a gradient for each that wants one. What has
no probability counts as nothing. It is the only row word of its line, without `keep`; behind `linear` there is no
kernel for it.

A NaN gives NaN, but `logsumexp` of a row that has +inf too gives +inf. Behind `linear` endings stand a chunk of rows at
a time (see there), but for `amax`; behind `scores` there is no kernel for them, and in `fuse` none is looked for.

## quantize

`quantize(fp8)` (float8_e4m3fn, largest number 448), `quantize(fp8e5m2)` (float8_e5m2, 57344) and `quantize(int8)` (127)
end a line with codes of x's shape. Behind the kept values stands their scale, one number a row of shape [..., 1] and
float32 (of float64 float64), so that the value is about code · scale. The scale is max |x| / largest of the row, of
the float32 values on chip, and a code is x · (1 / scale), saturated and rounded to nearest, ties to even, as PyTorch's
`.to` rounds; of float64 it is rounded to float32 first.
`times | add | keep | layer_norm(1e-6) | scale(1) | bias | quantize(fp8)` is one kernel.

The least scale is 2^-126, which a row of zeros has. A row with an infinity has an infinite scale: its finite elements
are 0, the infinite ones NaN. A row with a NaN has NaN for its scale and for all of its codes. NaN is 0 in int8.

`quantize(fp8, 128)` gives each group of 128 columns a scale of its own, of shape [..., N / 128], found as a row's is:
the activations of DeepSeek-V3 (arXiv:2412.19437) in `silu | times | quantize(fp8, 128)`. A group has 16, 32, 64, 128 or
256 columns, of which a row's length is a multiple: a call with another raises. It is no row word, and so the line is
taken in tiles where it has no other. In a line with `rope` there is no kernel for it.

`quantize(fp8, static)` takes the scale as an operand, one number ([1], or without dimensions) or what else broadcasts
to x's shape, and gives codes alone: x / scale, saturated. It is no row word.

Codes and scales have no gradient, as integers have none. Backward is that of the words up to the last kept value, whose
gradient passes for that of what was quantised: `rms_norm(1e-6) | scale | keep | quantize(fp8)` gives the operand of a
scaled product and the value to which its gradient belongs. What stands behind the last kept value gets no gradient;
without one nothing does, and `backward` raises as PyTorch's does. Behind `linear` and `scores` there is no kernel for
codes.

## rope

`rope` takes cos and sin, of x's shape or what broadcasts to it, and gives x · cos + (-x₂, x₁) · sin, where x₁ and x₂
are the halves of a row: rotary position embedding as transformers writes it (GPT-NeoX). `rope(interleaved)` takes the
row's even and odd numbers for x₁ and x₂ (GPT-J); `rope(64)` and `rope(64, interleaved)` turn the first 64 numbers of a
row, and the others pass. Rows of cos and sin have a number for each that is turned, or one for each pair. Rows have an
even length, and cos and sin get no gradient: asked for one, the call raises.

It stands anywhere among a line's words, once: `rms_norm(1e-6) | scale | rope` normalises a head and turns it. Both
numbers of a pair are in one thread's registers, or one lane, so that nothing is exchanged for it, however long a row
is. Queries and keys are one call as a list, `onepass.fused("rms_norm(1e-6) | scale | rope", [q, k], [g, h], cos, sin)`.
In a line with `linear` or `scores`, and with a target, there is no kernel for it.

## linear

What stands before `linear` makes the input of a matrix product, which is rounded to x's dtype and to the matrix's; what
stands behind it goes on with the product, rounded likewise. Under autocast the matrix is cast to its dtype first, as
that of `torch.nn.functional.linear` is. Each side is one kernel, the product is that of PyTorch's libraries, with a
bias that follows it and ends the line; `torch.set_float32_matmul_precision` holds for it.
The input of the product is not saved for backward but made again, from x or the last `keep` that the row word follows:
the backward kernel of what stands before `linear` writes it beside the gradients (a pass of its own does where no such
kernel runs, where it starts from softmax's result, and on the CPU where it keeps a value). The product itself is saved
only where a word behind it needs it. A result is the same from run to run, but unlike other lines' a row's may depend
on how many rows there are, since the libraries choose another kernel for another size.

Forward there are several ways, of which the predicted time decides; `linear(name)`, or `strategy=` of the named
functions and modules, names one, and raises where it cannot be. (The former names `streamed`, `resident` and `dots` are
still read; each warns once.)

| strategy | does | where |
|---|---|---|
| `unfused` | the words before `linear`, the library's GEMM, the words behind it | everywhere |
| `tiled` | the GEMM and the words behind it in one kernel, where no word stands before `linear` | see below |
| `deferred` | the same, a norm before `linear` deferred behind the GEMM: nothing made of x is written | see below |
| `small_m` | few rows (decoding): each block keeps them in shared memory and reads a part of the matrix | see below |
| `small_k` | few in_features: each block keeps the matrix in shared memory, a row stays in registers | see below |
| `small_n` | at most 8 out_features: a row ends in dot products, and backward begins at their gradients | everywhere |
| `panels` | the words before, the GEMM and the words behind, some rows at a time in a core's cache | the CPU |
| `chunked` | endings behind `linear`: the GEMM and the words behind it, a chunk of rows at a time | everywhere |

`rms_norm(1e-6) | scale | linear | softcap(30) | cross_entropy` is a language model's final norm, head and loss: of the
rows that `linear` gives, as long as the vocabulary, a chunk exists at a time, at most 1 GiB on CUDA and 96 MiB on the
CPU. Saved are two numbers a row; backward makes a chunk's rows again, puts their gradient in their place, and adds the
chunk's part to the gradients of the matrix and of columns, in float32 where 16 bits would be rounded more than three
times. So a step takes four products. `functional.linear_cross_entropy`, which knows how losses are added up, takes
three: it makes the gradients in forward, while a chunk is there. A `keep` behind `linear` gives those rows to the
caller, all of them: such a line is `unfused`. Words that count rows (`dropout`, `causal`) are, too.

`small_n` is one kernel forward and one backward. It is for x and a matrix of one dtype, any one, and rows that a block
has room for (of at most 8192 elements on CUDA); each of the out_features counts as one of the line's 12 operands. The
row is not rounded before it is multiplied. A row's result does not depend on the others. Backward of `softmax | linear`
takes another way, as does a call whose matrix needs no gradient where x was not saved for it. On the CPU a line is
compiled at first use for each number of out_features.

The four of `tiled`, `deferred`, `small_m` and `small_k` are for bfloat16 and float16 and for in_features and
out_features that are multiples of 8; `tiled` and `deferred` for sm_90a; on sm_80 and later `small_m` for at most 16
rows that fit in shared memory (on sm_90a 16 of 4096 elements do), `small_k` for at most 256 in_features and a matrix
that fits there (on sm_90a 384 by 256 does).
Only sm_90a has been measured: elsewhere these two are taken where a model of the chip predicts a clear gain. What is
deferred is `layer_norm` or `rms_norm`, with `scale` and `bias` or without, and nothing else stands before `linear`.
Panels are for float32 and float64 and from 64 rows on; their GEMM is this package's own, and has the same bits
for any number of threads. Backward they are for words before `linear` and at most 1024 out_features, with the
library's GEMM.
`Line.plan` says which way is taken, and why:

```python
line = onepass.Line("layer_norm(1e-5) | scale | bias | linear | bias")
print(line.plan((65536, 4096), torch.bfloat16, out_features=64, device="sm_90a"))
```

`deferred` multiplies x itself with W ∘ scale, whose rows are centred, and takes mean and deviation into account behind
the GEMM. It rounds the scaled matrix where the other ways round the normalised row: the error is the same, however
large the mean is beside the deviation (see [numerics](numerics.md)). In float32 it would not be, and is never taken.

## scores

`scores` multiplies each row of x, a query, with the keys of its batch: x is (..., L, E), the keys (..., S, E), and the
line goes on with (..., L, S). Where the keys' last batch size is 1, all heads there share them (grouped queries). The
words behind are those of any line: `scores | mul(0.125) | mask | softmax` are attention's probabilities,
`scores | mul(0.125) | add | causal | softmax` with a bias for each place. Saved for backward are x, the keys, and what
the words behind need of their result; scores that they need themselves are computed again.

| strategy | does | where |
|---|---|---|
| `unfused` | the library's product, then one kernel | everywhere |
| `two_pass` | one kernel: it reads the keys twice, for the row's sum and for the result | CUDA, softmax |
| `panels` | products and the words behind, some rows of one batch at a time in a core's cache | the CPU |

`two_pass` is for bfloat16 and float16, sm_80 and later, with E a multiple of 8 and at most 256; it does not round the
scores. On sm_90a, where S is a multiple of 8 too, warpgroups multiply and TMA brings the keys. `auto` takes
what is predicted to be faster; on the CPU `panels`, forward and backward, unless there are fewer than four of them.
Panels are for float32, float64 and, where the processor has AVX512_BF16, bfloat16; where `causal` stands right before
`softmax` they multiply only what it lets through.

## values

`values` ends a line that begins with `scores` with the product of each row, by now weights, and its batch's values:
(..., L, S) with values (..., S, N') gives (..., L, N'). Attention is
`scores | mul(0.125) | mask | softmax | dropout(0.1) | values`; `keep` right before `values` returns the weights, too.
Unless they are kept the weights are not saved for backward, but made again from x and the keys. The result lies in
memory as PyTorch's attention gives it, in x's order of dimensions, and a gradient in that of its tensor: heads that
were turned, `(B, L, H, D)` seen as `(B, H, L, D)`, are turned back without a copy. Where x's rows are not contiguous,
or x is broadcast, it is contiguous.

| strategy | does | where |
|---|---|---|
| `unfused` | the weights as a line of their own, then the library's product | everywhere |
| `flash` | flash attention in one kernel: weights are never written | CUDA, softmax, nothing kept |
| `panels` | as for `scores`: weights are never written, but where they are kept | the CPU |

The strategy is named by `scores`, as in `scores(flash) | softmax | values`. `flash` is for bfloat16 and float16,
sm_80 and later, with sizes of rows that are multiples of 8 and at most 256, and behind softmax words that multiply
(`mul`, `scale`, `dropout`). On sm_90a, where S is a multiple of 8 too, warpgroups multiply, tensors among the words are
read a tile ahead; elsewhere warps do. `auto` takes it on sm_90a, elsewhere where a model of the chip predicts a clear
gain. Backward writes no weights either: one kernel for the gradients of queries and of the words' tensors, one for
those of keys and values; by warps for rows of at most 128 numbers. In other cases on CUDA backward writes them.

## Lists

The first argument may be a list or tuple of tensors with the same row length, dtype and device: inputs that are
independent, one call. An operand is a tensor for all of them, or a list with one for each. Results are a list, or,
with `stack=True`, one tensor as `torch.stack` makes it (and a kept value likewise).

```python
line = onepass.Line("layer_norm(0) | tanh | linear | bias | relu")
ys = line(x.unbind(), W, c)              # a list
y = line(x.unbind(), W, c, stack=True)   # a tensor
```

Pieces of one tensor (`split`, `chunk`, `unbind`, slices at equal distances, views of those) are recognised: the line
runs on the tensor that they are pieces of, nothing is copied, and its gradient comes as one tensor. They are not taken
for such where a hook or `retain_grad` listens between the tensor and the piece, where one was written to since, or
under `torch.compile` and `torch.func`.

Other tensors may have any leading shapes, addresses and strides. They are one operator forward and one backward,
nothing is copied, and with `stack=True` results are written where they stand in the one tensor. On CUDA each tensor
has blocks of one launch, as many as its rows ask for, some 40 tensors a launch; those that are aligned, strided or
broadcast unlike others are in launches of their own, since a kernel is compiled for that. For lines with
`linear`, tensors are stacked or put behind each other first, which costs a copy of them; where their operands differ,
and for lines that begin with `scores`, each input is a call of its own.

An operand in a list has one dtype. Dropout's masks are those of all inputs taken together, in their order.

## In PyTorch

- A gradient may be differentiated again: the kernel computes it, and its own derivative is that of PyTorch's operators
  on what the kernel reads. Under `torch.compile` there is one derivative, as of everything there. Where the matrix of
  `linear` needs no gradient and a word behind it is nonlinear, a second one is refused.
- Under `torch.func.vmap` the batch joins the rows and the line stays one call. Where samples have a matrix of their
  own, or want its gradient, or columns of their own beside one, and with dropout, each is a call. Forward mode is
  computed by `Line.reference`. `is_grads_batched` of `torch.autograd.grad` is refused: use `torch.func.vmap`.
- `exported.run_decompositions(onepass.decompositions())` leaves PyTorch's operators; `torch.onnx.export` takes that.
- AOTInductor takes every line.
- A profile shows `onepass: <line>` and `onepass backward: <line>`.

## Dropout and training

`dropout(p)` zeroes an element with probability p, rounded to a multiple of 2^-16, and divides the others by the
rounded probability of keeping. No mask is stored: backward draws it again. The numbers come from PyTorch's generator of
x's device (`torch.manual_seed` governs it) or from the `generator` given. With `training=False` a line runs without its
dropout. Several dropouts of one line draw independent masks.

## Dtypes and layouts

`x` is float32, float64, bfloat16 or float16; operands may differ from it (bfloat16 x with float32 parameters).
Arithmetic is float32, or float64 where x is, with one rounding when a tensor is stored; see [numerics](numerics.md).
`x`, operands and incoming gradients may be strided, expanded, misaligned or empty. They are read in place where the
numbers of a row lie next to each other (or are one number, expanded) and at most four leading dimensions remain after
those that can be joined are joined; otherwise a contiguous copy is made first.

## Where a line runs

On the CPU the lines of the named functions and modules are compiled ahead of time; any other is compiled with the
system's C++ compiler at its first use with each dtype (two to five seconds) and kept in the disk cache. The
compiler is `$ONEPASS_CXX`, else `$CXX`, c++, g++ or clang++, of C++20; without one, or where it fails, such a line
runs as a composition of PyTorch's operators, and one warning says why and what to set. Of several processes that want
a line at once one compiles it. On CUDA every line is compiled with NVRTC at first use and kept in the same cache;
`onepass cache build` fills it beforehand. A CUDA graph can only capture a line whose kernels have been built: run it
once before the capture. Lines that differ in their numbers share their kernels.

The cache is `$ONEPASS_CACHE_DIR`, else `$XDG_CACHE_HOME/onepass` or `~/.cache/onepass`, for its user alone (modes 0700
and 0600). What lies there runs in the process that reads it: a directory or file that belongs to another user than
root, or that others may write, is not read but built again elsewhere, with one warning.

```python
line = onepass.Line("bias | dropout(0.1) | add | keep | rms_norm(1e-6) | scale")
line.words        # the words, with their numbers
line.cost((8192, 4096), torch.bfloat16)    # bytes that must move, flops, bytes saved for backward
line.reference(x, b, residual, g)          # the same as a composition of PyTorch's operators
```
"""

ACTIVATIONS = """Each is a word, and may stand in `gate(...)` and `gated(...)`. On the CPU lines of those from `exp` on
are not compiled ahead of time."""


def language() -> str:
    """The language reference, as Markdown."""
    from onepass.bench.report import markdown_table

    activations = [word for word in onepass.words() if word.kind == "activation"]
    others = [word for word in onepass.words() if word.kind != "activation"]
    text = [INTRODUCTION, "## Words", ""]
    text += markdown_table(
        ("word", "operand", "number", "formula", "meaning"),
        ((f"`{word.name}`", operand(word), number(word), word.formula, word.meaning) for word in others),
    )
    text += ["", "## Activations", "", ACTIVATIONS, ""]
    text += markdown_table(
        ("word", "number", "formula", "meaning"),
        ((f"`{word.name}`", number(word), word.formula, word.meaning) for word in activations),
    )
    return "\n".join(text) + "\n"


def number(word: Word) -> str:
    """What a word takes in parentheses, with its default."""
    if word.kind == "gate":
        return "an activation"
    if word.dtypes:
        return word.dtypes.replace(", ", " or ")
    if not word.parameters:
        return word.parameter_name
    if not word.numbers:
        return f"{word.parameter_name} = the machine epsilon"
    return ", ".join(f"{name} = {n:g}" for name, n in zip(word.parameter_name.split(", "), word.numbers))


def operand(word: Word) -> str:
    """What a word takes from the call."""
    if word.operand == "none":
        return ""
    shapes = {
        "column": "[N]",
        "matrix": "[N', N]",
        "keys": "[..., N', N]",
        "values": "[..., N, N']",
        "tensor": ", tables" if word.kind == "rotary" else ", x's shape",
        "target": "[...], integers",
    }
    return f"{word.operand_name}{shapes[word.operand]}"


def size(count: int) -> str:
    """Bytes as a person reads them: 1.5 MiB."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{count} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def fill_results(root: Path) -> int:
    """Puts what the benchmark's JSON files in bench/results say between the markers of docs/results.md: tables, and
    pictures of the curves and of whole models' training steps, into docs/pictures. A few rows of it into README.md, and
    into docs/models.md how near predictions are, and what of each architecture is in lines.

    Returns:
        How many files there were.

    Raises:
        ModuleNotFoundError: without matplotlib, where there are pictures to draw; nothing is written then.
    """
    from onepass.bench import head, predictions, report, shares, whole, whole_picture, whole_shapes

    paths = sorted((root / "bench" / "results").glob("*.json"), key=lambda path: path.stem)
    every = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    files = [found for found in every if "device" in found]
    of_models = [found for found in files if found.get("suite") in whole.SUITES]
    if any(found.get("suite") in CURVES for found in files) or any(map(whole_picture.has_pictures, of_models)):
        _check_matplotlib()
    pictures = root / "docs" / "pictures"
    blocks = [report.markdown(found) for found in files if found.get("suite", "table") in TABLES]
    blocks += [report.host_markdown(found) for found in files if found.get("suite") == "host"]
    blocks += whole.markdown(of_models)
    blocks += map(_shown, whole_picture.plot(of_models, pictures))
    blocks += whole_shapes.markdown(found for found in files if found.get("suite") == "fuse_shapes")
    blocks += head.markdown(found for found in files if found.get("suite") == "head")
    for found in files:
        if found.get("suite") in CURVES:
            blocks += map(_shown, report.plot_curves(found, pictures))
    _fill(root / "docs" / "results.md", RESULTS, blocks)
    _fill(root / "README.md", SUMMARY, [report.summary(files)])
    models = root / "docs" / "models.md"
    if models.is_file():
        _fill(models, PREDICTIONS, [predictions.markdown(paths)])
        _fill(models, SHARES, [shares.markdown(found) for found in every if found.get("suite") == "explain"])
    return len(files)


def _check_matplotlib() -> None:
    """Before anything is written."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError("`onepass docs --results` draws pictures with matplotlib: pip install matplotlib")


def _shown(picture: Path) -> str:
    """In a page of docs/."""
    return f"![{picture.stem}](pictures/{picture.name})"


def _fill(page: Path, markers: tuple[str, str], blocks: list[str]) -> None:
    """Puts paragraphs between two markers."""
    begin, end = markers
    text = page.read_text(encoding="utf-8")
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"{page} needs the markers {begin} and {end}, once each and in this order")
    before, rest = text.split(begin)
    after = rest.split(end)[1]
    page.write_text("\n\n".join([before + begin, *(block.strip() for block in blocks), end + after]), encoding="utf-8")
