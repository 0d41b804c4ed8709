"""fuse on models of diffusers, timm, peft and sentence-transformers, tiny and with random weights: as eager."""

import copy
import io
import tempfile
from functools import partial

import pytest
import torch
from torch import nn

import onepass
from models import DECODER, SMALL, TOKENS, assert_as_near, moved, output, trained

library = partial(pytest.importorskip, reason="needs onepass[libraries]")
ids = partial(torch.randint, 5, 50)


def unet():
    """Of Stable Diffusion: residual blocks, a transformer block with cross attention."""
    model = library("diffusers").UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        mid_block_type=None,
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    images = {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 40])}
    return model, images | {"encoder_hidden_states": torch.randn(2, 5, 16)}


def flux():
    """A block of two streams and one of one, whose queries and keys are normalised and rotated."""
    options = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    options |= {"joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)}
    model = library("diffusers").FluxTransformer2DModel(patch_size=1, in_channels=4, **options)
    images = {"hidden_states": torch.randn(2, 16, 4), "img_ids": torch.rand(16, 3)}
    texts = {"encoder_hidden_states": torch.randn(2, 6, 32), "txt_ids": torch.zeros(6, 3)}
    return model, images | texts | {"pooled_projections": torch.randn(2, 32), "timestep": torch.rand(2)}


def timm(name, **options):
    """The models that timm has for tests."""
    return library("timm").create_model(name, num_classes=10, **options), {"x": torch.randn(2, 3, 32, 32)}


def lora():
    """Adapters of every linear layer, which change what it gives; all else is frozen."""
    peft, transformers = library("peft"), library("transformers")
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(DECODER | {"num_hidden_layers": 1})))
    return peft.get_peft_model(model, config), {"input_ids": ids((2, TOKENS)), "use_cache": False}


WORDS = ("<pad>", "<unk>", *map(str, range(2, 50)))


def sentence_transformer():
    """With a tokenizer of words that are numbers. Its modules are called one after the other, which add to a dict."""
    st, transformers, tokenizers = map(library, ("sentence_transformers", "transformers", "tokenizers"))
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    words = tokenizers.Tokenizer(model)
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    with tempfile.TemporaryDirectory() as directory:
        transformers.BertModel(transformers.BertConfig(**(SMALL | {"num_hidden_layers": 1}))).save_pretrained(directory)
        names = {"pad_token": "<pad>", "unk_token": "<unk>", "model_max_length": 64}
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(directory)
        model = st.SentenceTransformer(directory, device="cpu")
    return model, {"input": dict(model.preprocess(["3 1 4 1 5 9 2 6 5", "2 7 1 8"]))}


MODELS = {
    "diffusers-unet": (unet, "bias(channels) | layer_norm(1e-05) | scale(channels) | bias(channels) | silu"),
    "diffusers-flux": (flux, "bias | scale | add | keep | layer_norm(1e-06) | scale(1.0) | add"),
    "timm-vit": (partial(timm, "test_vit", img_size=32), "bias | add | keep | layer_norm(1e-06) | scale | bias"),
    "timm-convnext": (partial(timm, "test_convnext"), "bias | gelu_tanh"),
    "timm-efficientnet": (partial(timm, "test_efficientnet"), "gate(sigmoid)"),
    "peft-lora": (lora, "mul(2.0) | add | keep | gate(silu)"),
    "sentence-transformers": (sentence_transformer, "bias | add | keep | layer_norm(1e-12) | scale | bias"),
}
"""What makes a model and its inputs, and a line that is found in it."""


def made(name, seed=3):
    """In double precision, without dropout, and no parameter being zero or one: a term left out would not be seen."""
    torch.manual_seed(seed)
    model, inputs = MODELS[name][0]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.double(), inputs


@pytest.mark.parametrize("name", MODELS)
def test_trained_as_eager(name):
    """Results, all gradients and buffers; unfused, the model is bit for bit what it was."""
    exact_model, inputs = made(name)
    model, inputs = copy.deepcopy(exact_model).float(), moved(inputs, torch.float32, "cpu")
    fused = onepass.fuse(copy.deepcopy(model))
    exact, eager = trained(exact_model.train(), moved(inputs, torch.float64, "cpu")), trained(model.train(), inputs)
    assert_as_near(trained(fused.train(), inputs), eager, exact)
    torch.testing.assert_close(dict(fused.named_buffers()), dict(model.named_buffers()))
    assert MODELS[name][1] in {found.line for found in onepass.report(fused).lines}
    onepass.unfuse(fused).load_state_dict(model.state_dict())
    for ours, theirs in zip(trained(fused, inputs), trained(model, inputs), strict=True):
        assert torch.equal(ours, theirs)


@torch.no_grad()
def evaluated(model, inputs):
    return output(model.eval()(**copy.deepcopy(inputs)))


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.parametrize("name", MODELS)
def test_saved_copied_and_hooked(name):
    """A fused model is saved as any other, and takes another's weights after it was captured; a hook is called that
    comes after it; copies are not fused."""
    (model, inputs), (fused, _) = made(name), made(name, seed=4)
    model, inputs = model.float(), moved(inputs, torch.float32, "cpu")
    onepass.fuse(fused.float())
    assert (evaluated(fused, inputs) - evaluated(model, inputs)).abs().max() > 1e-3
    fused.load_state_dict(model.state_dict())
    captures = len(onepass.report(fused).graphs)
    assert_close(evaluated(fused, inputs), evaluated(model, inputs))
    assert len(onepass.report(fused).graphs) == captures

    file = io.BytesIO()
    torch.save(fused.state_dict(), file)
    file.seek(0)
    loaded, copied = made(name, seed=5)[0].float(), copy.deepcopy(fused)
    loaded.load_state_dict(torch.load(file))
    for other in (loaded, copied):
        assert torch.equal(evaluated(other, inputs), evaluated(model, inputs))

    seen = []

    def hook(module, inputs, result):
        seen.append(result.shape)
        return 1.5 * result

    for other in (model, fused):
        layers = [module for module in other.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
        layers[len(layers) // 2].register_forward_hook(hook)
    assert_close(evaluated(fused, inputs), evaluated(model, inputs))
    assert len(seen) == 2 and seen[0] == seen[1]
