"""tools/hub-kernel: the folder that it assembles, loaded by `kernels` and put into a model in every mode."""

import copy
import importlib.machinery
import importlib.util
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onepass

kernels = pytest.importorskip("kernels", reason="needs onepass[train]")
from kernels import Mode  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "hub-kernel"
PAGE = ROOT / "docs/how-to/hub-kernel.md"
LAYERS = (
    "RMSNorm",
    "LlamaRMSNorm",
    "LayerNorm",
    "SiluAndMul",
    "GeluAndMul",
    "GeluTanhAndMul",
    "RotaryPosEmb",
    "CrossEntropyLoss",
    "LinearCrossEntropyLoss",
)
HEADS, WIDTH, CLASSES = 2, 32, 50


def assemble(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), "--output", str(folder)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    done = assemble(folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def mapping(folder):
    """Every layer, for every mode; what `kernelize` remembers of it goes with the context."""
    repositories = {name: {"cpu": kernels.LocalLayerRepository(folder, layer_name=name)} for name in LAYERS}
    with kernels.use_kernel_mapping(repositories, inherit_mapping=False):
        yield


def rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def model_of_all_layers() -> nn.Module:
    """Each of LAYERS once, as PyTorch's operators; classes of its own, of which `kernelize` takes note."""

    @kernels.use_kernel_forward_from_hub("LlamaRMSNorm")
    class LlamaRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.randn(WIDTH)), 1e-6

        def forward(self, hidden_states: Tensor) -> Tensor:
            mean_square = hidden_states.pow(2).mean(-1, keepdim=True)
            return self.weight * hidden_states * torch.rsqrt(mean_square + self.variance_epsilon)

    @kernels.use_kernel_forward_from_hub("SiluAndMul")
    class SiluAndMul(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            gate, up = x.chunk(2, -1)
            return F.silu(gate) * up

    @kernels.use_kernel_forward_from_hub("GeluAndMul")
    class GeluAndMul(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            gate, up = x.chunk(2, -1)
            return F.gelu(gate) * up

    @kernels.use_kernel_forward_from_hub("GeluTanhAndMul")
    class GeluTanhAndMul(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            gate, up = x.chunk(2, -1)
            return F.gelu(gate, approximate="tanh") * up

    @kernels.use_kernel_forward_from_hub("RotaryPosEmb")
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return q * cos + rotated(q) * sin, k * cos + rotated(k) * sin

    @kernels.use_kernel_forward_from_hub("LinearCrossEntropyLoss")
    class LinearCrossEntropyLoss(nn.Module):
        """That of torch 2.13 and newer has these members."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, CLASSES)
            self.weight, self.reduction, self.ignore_index, self.label_smoothing = None, "mean", None, 0.1

        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(self.linear(input), target, label_smoothing=self.label_smoothing)

    def of_torch(name: str) -> type[nn.Module]:
        return kernels.use_kernel_forward_from_hub(name)(type(name, (getattr(nn, name),), {}))

    @kernels.use_kernelized_func(rotate)
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(
                [LlamaRMSNorm(), of_torch("RMSNorm")(WIDTH, eps=1e-5), of_torch("LayerNorm")(WIDTH)]
            )
            self.widen = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(3))
            self.gates = nn.ModuleList([SiluAndMul(), GeluAndMul(), GeluTanhAndMul()])
            self.head = nn.Linear(WIDTH, CLASSES)
            self.losses = nn.ModuleList([of_torch("CrossEntropyLoss")(ignore_index=1), LinearCrossEntropyLoss()])

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            for norm, widen, gate in zip(self.norms, self.widen, self.gates):
                x = x + gate(widen(norm(x)))
            q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            q, k = rotate(q, 2 * q, cos, sin)
            x = x + (q * k).transpose(1, 2).flatten(-2)
            of_logits, of_rows = self.losses
            rows, target = x.flatten(0, 1), target.flatten()
            return x, of_logits(self.head(rows), target) + of_rows(rows, target)

    model = Model()
    model.extensible = lambda: [*model.norms, *model.gates, *model.losses, rotate]
    return model


def inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 5, WIDTH, generator=generator, dtype=torch.float64)
    angles = torch.randn(2, 5, WIDTH // HEADS // 2, generator=generator, dtype=torch.float64).repeat(1, 1, 2)
    target = torch.randint(0, CLASSES, (2, 5), generator=generator)
    target[0, :2] = 1  # that CrossEntropyLoss ignores
    return x.to(dtype).requires_grad_(), angles.cos().to(dtype), angles.sin().to(dtype), target


def run(model: nn.Module, call: Callable, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Results, and gradients of the loss."""
    taken = inputs(dtype)
    y, loss = call(*taken)
    return (y, loss), torch.autograd.grad(loss, [taken[0], *model.parameters()])


@pytest.fixture
def both():
    """A model in float32 that is to be kernelized, and what it gives before, in float64."""
    model = model_of_all_layers()
    state = copy.deepcopy(model.state_dict())
    results, gradients = run(model, model.double(), torch.float64)
    model.float().load_state_dict(state)
    return model, results, gradients


def check_kernelized(model: nn.Module, folder: Path) -> None:
    layers = kernels.get_local_kernel(folder).layers
    found = {module.forward.__func__ for module in model.extensible()}
    assert found == {getattr(layers, name).forward for name in LAYERS}


def close(actual, expected) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=1e-5)


def test_inference(folder, mapping, both):
    model, results, _ = both
    kernels.kernelize(model.eval(), mode=Mode.INFERENCE, device="cpu", use_fallback=False)
    check_kernelized(model, folder)
    with torch.no_grad():
        close(model(*inputs(torch.float32)), results)


def test_training(folder, mapping, both):
    model, results, gradients = both
    kernels.kernelize(model, mode=Mode.TRAINING, device="cpu", use_fallback=False)
    check_kernelized(model, folder)
    actual, actual_gradients = run(model, model, torch.float32)
    close(actual, results)
    close(actual_gradients, gradients)


@pytest.mark.parametrize("mode", [Mode.TRAINING | Mode.TORCH_COMPILE, Mode.INFERENCE | Mode.TORCH_COMPILE], ids=str)
def test_compiled(folder, mapping, both, mode):
    model, results, gradients = both
    kernels.kernelize(model, mode=mode, device="cpu", use_fallback=False)
    check_kernelized(model, folder)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    if Mode.TRAINING in mode:
        actual, actual_gradients = run(model, compiled, torch.float32)
        close(actual_gradients, gradients)
    else:
        with torch.no_grad():
            actual = compiled(*inputs(torch.float32))
    close(actual, results)


def test_the_metadata_is_of_the_files(folder):
    variants = sorted((folder / "build").iterdir())
    assert [re.sub(r"-[a-z0-9_]+-linux$", "", path.name) for path in variants] == [
        f"torch-stable-abi210-{backend}" for backend in ("cpu", "cu126", "cu130")
    ]
    found = [kernels.Metadata.read_from_file(path / "metadata.json") for path in variants]
    assert len({metadata.id for metadata in found}) == len(found)
    for metadata, path in zip(found, variants):
        assert metadata.id.isidentifier() and str(metadata.name) == "onepass" and metadata.version == 0
        assert metadata.backend.archs == (None if "-cpu-" in path.name else ["8.0+PTX"])
        digest = metadata.digest
        digest.validate(type(digest).hash_variant(digest.algorithm, path))
        assert "package/onepass/lib/libonepass.so" in digest.files


def test_another_backend_has_a_variant_of_its_own(folder):
    kernels.get_local_kernel(folder)
    kernel = kernels.get_local_kernel(folder, backend="cpu")
    assert "-cpu-" in Path(kernel.__file__).parent.name
    assert kernel.functional is onepass.functional
    assert set(kernel.__all__) == {"functional", "fused", "layers"}


def load(name: str, path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_older_versions_find_the_same_in_the_folder_of_its_name(folder):
    (variant,) = (folder / "build").glob("*-cpu-*")
    kernel = load("onepass_as_before", variant / "onepass" / "__init__.py")
    assert kernel.fused is onepass.fused
    defined = {
        of.__name__ for of in vars(kernel.layers).values() if getattr(of, "__module__", "") == kernel.layers.__name__
    }
    assert defined == set(LAYERS)


def test_another_version_in_the_process_is_refused(folder, monkeypatch):
    (variant,) = (folder / "build").glob("*-cpu-*")
    other = types.ModuleType("onepass")
    other.__version__, other.__file__ = "0.0.9", "elsewhere/onepass/__init__.py"
    monkeypatch.setitem(sys.modules, "onepass", other)
    path = list(sys.path)
    with pytest.raises(ImportError, match=r"has loaded onepass 0\.0\.9 from elsewhere/onepass"):
        load("onepass_beside_another", variant / "__init__.py")
    assert sys.path == path


ALONE = """
import sys
import torch
from kernels import get_local_kernel
from pathlib import Path

folder = Path(sys.argv[1])
kernel, variant = get_local_kernel(folder), get_local_kernel(folder, backend="cpu")
import onepass

assert Path(onepass.__file__).is_relative_to(folder.resolve()), onepass.__file__
assert kernel.fused is variant.fused is onepass.fused
norm = torch.nn.LayerNorm(16)
x = torch.randn(3, 16, requires_grad=True)
y = kernel.layers.LayerNorm.forward(norm, x)
torch.testing.assert_close(y, norm(x))
y.sum().backward()
assert y.grad_fn is not None and x.grad is not None
"""


def test_it_brings_the_package_along(folder):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", ALONE, str(folder)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_no_kernel_is_not_overwritten(tmp_path):
    kept = tmp_path / "build" / "objects" / "kept"
    kept.parent.mkdir(parents=True)
    kept.touch()
    done = assemble(tmp_path)
    assert done.returncode == 1 and "is no build variant" in done.stderr
    assert kept.exists()


def test_a_second_call_takes_the_place_of_the_first(tmp_path):
    written = []
    for _ in range(2):
        assert assemble(tmp_path).returncode == 0
        written.append({path.parent.name: path.read_text() for path in tmp_path.glob("build/*/metadata.json")})
    assert len(written[0]) == 3 and written[0] == written[1]


def test_glibc_needed_is_the_newest_that_is_named(tmp_path):
    loader = importlib.machinery.SourceFileLoader("hub_kernel", str(TOOL))
    tool = importlib.util.module_from_spec(importlib.util.spec_from_loader("hub_kernel", loader))
    loader.exec_module(tool)
    libraries = tmp_path / "a.so", tmp_path / "b.so"
    libraries[0].write_bytes(b"\x7fELF\0GLIBC_2.2.5\0GLIBC_2.29\0GLIBC_PRIVATE\0")
    libraries[1].write_bytes(b"\x7fELF\0GLIBCXX_3.4.30\0GLIBC_2.4\0")
    assert tool.glibc_needed(libraries) == (2, 29)


def test_the_pages_examples_run(folder, tmp_path, monkeypatch):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="needs onepass[demo]")
    for extended in (nn.LayerNorm, llama.LlamaRMSNorm):  # by the page; taken back behind the test
        for name in ("kernel_layer_name", "kernel_condition"):
            monkeypatch.setattr(extended, name, None, raising=False)
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/hub").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert blocks
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), namespace)
    assert (
        namespace["model"].model.norm.forward.__func__
        is kernels.get_local_kernel(Path("dist/hub")).layers.LlamaRMSNorm.forward
    )
