"""Adapters of low rank (LoRA, Hu et al., 2021) beside a model's linear layers, as the library peft has them."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["with_lora"]


class LoraLinear(nn.Module):
    """A layer that is not trained, and a product of two small matrices that is."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer, self.scaling, self.lora_dropout = base, 2.0, nn.Identity()
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)  # peft begins with zeros: A had no gradient

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        dtype = result.dtype
        x = x.to(self.lora_A.weight.dtype)
        result = result + self.lora_B(self.lora_A(self.lora_dropout(x))) * self.scaling
        return result.to(dtype)


def with_lora(model: nn.Module, rank: int) -> nn.Module:
    """The model with an adapter at each linear layer but its head, all else fixed."""
    model.requires_grad_(False)
    for module in [*model.modules()]:
        for name, layer in [*module.named_children()]:
            if isinstance(layer, nn.Linear) and name != "lm_head":
                setattr(module, name, LoraLinear(layer, rank))
    return model
