"""A causal language model trained by transformers' `Trainer` with gradient accumulation, as it is and after
`onepass.fuse`: the loss curves are equal, and the fused model makes no logits while it trains.

`Trainer` passes the number of tokens in all accumulated batches to the model, which divides the sum of its losses by
it.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

import onepass

STEPS, VOCABULARY, TOKENS = 50, 16384, 128
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}


def sentences() -> list[dict[str, torch.Tensor]]:
    """Each counts up from somewhere; a prompt of its own length has no loss."""
    starts = torch.randint(0, 1000, (64,), generator=torch.Generator().manual_seed(0))
    tokens = (starts[:, None] + torch.arange(TOKENS)) % 1000
    labels = tokens.masked_fill(torch.arange(TOKENS) < starts[:, None] % 50, -100)
    return [{"input_ids": ids, "labels": of_ids} for ids, of_ids in zip(tokens, labels)]


def curve(fused: bool) -> list[float]:
    """The losses of a training from the same weights on the same tokens."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **SIZES))
    if fused:
        onepass.fuse(model, skip_logits=True)
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            logging_steps=1,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=sentences())
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    if fused:
        print("fused:", *sorted({found.line for found in onepass.report(model).lines}))
    return [step["loss"] for step in trainer.state.log_history if "loss" in step]


def main() -> None:
    """Both curves compared."""
    theirs, ours = curve(fused=False), curve(fused=True)
    print(f"losses of {len(ours)} steps from {ours[0]:.4f} to {ours[-1]:.4f}, not fused to {theirs[-1]:.4f}")
    print(f"largest difference: {max(abs(a - b) for a, b in zip(ours, theirs)):.1e}")


if __name__ == "__main__":
    main()
