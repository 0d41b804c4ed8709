"""Which engine computes an attention, and torch's engines by name."""

from unittest import mock

import pytest
import torch

import onepass.functional as F
from onepass.functional import _engines
from onepass.functional._engines import Call, choose

BFLOAT16 = Call("cuda", torch.bfloat16, *3 * [(4, 16, 2048, 64)], capability=(9, 0), cudnn=91900)
ON_CPU = Call("cpu", torch.float32, *3 * [(2, 8, 128, 64)])
MASK = {"mask": (4, 1, 1, 2048), "mask_dtype": torch.bool}
ADDED = {"mask": (1, 1, 2048, 2048), "mask_dtype": torch.bfloat16}


def long(queries, keys, features=64):
    return {"query": (4, 16, queries, features), "key": (4, 16, keys, features), "value": (4, 16, keys, features)}


class TestChoice:
    @pytest.mark.parametrize(
        "facts, expected",
        [
            ({}, "torch"),
            (MASK, "onepass"),
            (ADDED, "onepass"),
            ({**ADDED, "needs_gradient": True}, "onepass"),
            ({**ADDED, "needs_gradient": True, **long(2048, 2048, 256)}, "onepass"),
            ({**ADDED, "needs_gradient": True, "dropout": True, **long(2048, 2048, 136)}, "torch"),
            ({**MASK, "needs_gradient": True, **long(2048, 2048, 136)}, "torch"),
            (ADDED | long(2048, 2048, 136), "onepass"),
            ({**ADDED, "needs_gradient": True, "dropout": True}, "onepass"),
            ({**MASK, "needs_gradient": True, "dropout": True}, "torch"),
            ({**MASK, "needs_gradient": True, "dropout": True, **long(2048, 2048, 128)}, "onepass"),
            (MASK | long(2048, 2044), "onepass"),
            ({**MASK, "needs_gradient": True, **long(2048, 2044)}, "torch"),
            (MASK | long(2048, 2044, 72), "torch"),
            (MASK | long(1, 2044), "torch"),
            ({**ADDED, "mask_dtype": torch.float32}, "onepass"),
            ({"dtype": torch.float32}, "torch"),
            ({"needs_gradient": True, **long(1, 2048)}, "flash"),
            ({"needs_gradient": True, **long(1, 2048, 256), **MASK}, "efficient"),
            ({"needs_gradient": True, **long(704, 704, 256), **MASK}, "efficient"),
            ({"needs_gradient": True, **long(704, 704), **MASK}, "onepass"),
            ({"needs_gradient": True, **long(704, 704)}, "torch"),
            (long(704, 704) | MASK, "onepass"),
            ({"capability": (8, 0), "needs_gradient": True, **long(704, 704), **MASK}, "torch"),
            # before torch prefers cuDNN
            ({"cudnn": 91002}, "cudnn"),
            ({"cudnn": 91002, **ADDED, "needs_gradient": True}, "onepass"),
            ({"cudnn": 91002, "needs_gradient": True}, "cudnn"),
            ({"cudnn": 91002, "dtype": torch.float32}, "torch"),
            ({"cudnn": 91002, "dropout": True}, "torch"),
            ({"cudnn": 91002, **ADDED, "needs_gradient": True, "mask_needs_gradient": True}, "onepass"),
            ({"cudnn": 91002, **long(2000, 2048)}, "torch"),
            ({"cudnn": 91002, "capability": (8, 0)}, "torch"),
            ({"cudnn": 0}, "torch"),
            ({"cudnn": 91002, "query": (4, 16, 2048, 68), "key": (4, 16, 2048, 68)}, "torch"),
        ],
    )
    def test_on_cuda(self, facts, expected):
        assert choose(BFLOAT16._replace(**facts)) == expected

    @pytest.mark.parametrize(
        "facts, expected",
        [
            ({}, "onepass"),
            (long(1, 512), "torch"),
            ({"needs_gradient": True, **long(1, 512)}, "onepass"),
            ({"dtype": torch.float16, "needs_gradient": True}, "torch"),
            ({"query": (1, 2, 32, 64), "key": (1, 2, 32, 64)}, "torch"),
            ({"dropout": True}, "onepass"),
            ({"dtype": torch.float64}, "onepass"),
            ({"dtype": torch.float16, "dropout": True}, "torch"),
            ({"dtype": torch.bfloat16}, "onepass"),
            ({"dtype": torch.bfloat16, **long(1, 512)}, "onepass"),
            ({"dtype": torch.bfloat16, **long(2, 8)}, "torch"),
            ({"dtype": torch.bfloat16, "grouped": True, "key": (2, 4, 128, 64), "value": (2, 2, 128, 64)}, "torch"),
        ],
    )
    def test_on_the_cpu(self, facts, expected):
        assert choose(ON_CPU._replace(**facts)) == expected

    def test_elsewhere(self):
        assert choose(ON_CPU._replace(device="mps", dropout=True)) == "torch"

    def test_facts_of_a_call(self, device):
        query, key, value = (
            torch.randn(shape, device=device, dtype=torch.bfloat16)
            for shape in ((2, 4, 6, 32), (2, 2, 20, 32), (2, 2, 20, 24))
        )
        mask = torch.zeros(2, 1, 1, 20, device=device, requires_grad=True)
        call = _engines.call_of(query, key, value, mask, False, 0.1, True)
        assert (call.device, call.dtype, call.mask_dtype) == (device, torch.bfloat16, torch.float32)
        assert (call.query, call.key, call.value) == ((2, 4, 6, 32), (2, 2, 20, 32), (2, 2, 20, 24))
        assert call.dropout and call.grouped and call.mask_needs_gradient
        assert (call.capability > (0, 0)) == (device == "cuda")
        with torch.no_grad():
            call = _engines.call_of(query, key, value, mask, False, 0.0, False)
        assert not (call.needs_gradient or call.mask_needs_gradient or call.dropout)


def test_attention_engine_says_who_computes_a_call(device):
    """As the call itself does: the engine's name, and a reason."""
    tensors = [torch.randn(2, 4, 128, 64, device=device) for _ in range(3)]
    ways = [
        dict(),
        dict(is_causal=True, dropout_p=0.1),
        dict(attn_mask=torch.ones(128, 128, dtype=torch.bool, device=device)),
    ]
    for way in ways:
        with mock.patch.object(_engines, "run", wraps=_engines.run) as run:
            F.scaled_dot_product_attention(*tensors, **way)
        name, reason = F.attention_engine(*tensors, **way)
        assert name == (run.call_args.args[0] if run.called else "onepass") and reason
    with pytest.raises(RuntimeError, match=r"attention_engine\(\): "):
        F.attention_engine(tensors[0], tensors[1][..., :3], tensors[2])
    trains = F.attention_engine(*(t.cpu().requires_grad_() for t in tensors))
    assert trains == ("onepass", "a gradient is needed: faster than torch's engine, and can be differentiated again")


@pytest.mark.parametrize("name", _engines.ENGINES)
def test_named_engines(name, device, monkeypatch):
    """Those that cannot serve leave it to others, and torch's settings are as before."""
    torch.manual_seed(0)
    torch._dynamo.reset()  # one function, compiled for each engine
    monkeypatch.setattr(_engines, "choose", lambda call: name)
    before = torch._C._get_sdp_priority_order(), torch.backends.cuda.cudnn_sdp_enabled()
    tensors = [torch.randn(2, 4, 128, 64, device=device, dtype=torch.bfloat16) for _ in range(3)]
    mask = torch.rand(2, 1, 128, 128, device=device) < 0.8
    for function in (
        F.scaled_dot_product_attention,
        torch.compile(F.scaled_dot_product_attention, fullgraph=True, backend="aot_eager"),
    ):
        for given in ([], [mask]):
            ours = function(*tensors, *given)
            torch.testing.assert_close(
                ours, torch.nn.functional.scaled_dot_product_attention(*tensors, *given), atol=2e-2, rtol=2e-2
            )
    assert before == (torch._C._get_sdp_priority_order(), torch.backends.cuda.cudnn_sdp_enabled())
