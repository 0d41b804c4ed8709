"""Supervised fine-tuning by TRL's `SFTTrainer`, as it is and with the model's own loss after `onepass.fuse`: prompts
and completions, of which the completions alone are learnt. The loss curves are equal.

`SFTTrainer` asks a head of its own for log-probabilities and metrics. `FusedSFTTrainer` takes the loss that the model
returns, whose head and loss are then one call without logits.
"""

import tempfile

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, Trainer
from trl import SFTConfig, SFTTrainer

import onepass

STEPS, VOCABULARY, PROMPT, COMPLETION = 20, 16384, 28, 100
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}


class FusedSFTTrainer(SFTTrainer):
    """Trains with the model's own loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if return_outputs or not self.model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return Trainer.compute_loss(self, model, {**inputs, "use_cache": False}, num_items_in_batch=num_items_in_batch)


def tokenizer() -> PreTrainedTokenizerFast:
    """A word for each token, made here."""
    words = {"<pad>": 0, "<eos>": 1, **{str(number): number for number in range(2, VOCABULARY)}}
    model = models.WordLevel(words, unk_token="<pad>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), pad_token="<pad>", eos_token="<eos>")


def sentences() -> Dataset:
    """Tokens that count up from somewhere; the mask says which are the completion."""
    starts = torch.randint(2, 1000, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    mask = [0] * PROMPT + [1] * COMPLETION
    rows = [{"input_ids": list(range(start, start + len(mask))), "completion_mask": mask} for start in starts]
    return Dataset.from_list(rows)


def curve(fused: bool) -> list[float]:
    """The losses of a training from the same weights on the same tokens."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **SIZES))
    if fused:
        onepass.fuse(model, skip_logits=True)
    with tempfile.TemporaryDirectory() as directory:
        arguments = SFTConfig(
            directory,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        made = FusedSFTTrainer if fused else SFTTrainer
        trainer = made(model, arguments, train_dataset=sentences(), processing_class=tokenizer())
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    if fused:
        print("fused:", *sorted({found.line for found in onepass.report(model).lines}))
    return [step["loss"] for step in trainer.state.log_history if "loss" in step]


def main() -> None:
    """Both curves compared."""
    disable_progress_bars()
    theirs, ours = curve(fused=False), curve(fused=True)
    print(f"losses of {len(ours)} steps from {ours[0]:.4f} to {ours[-1]:.4f}, not fused to {theirs[-1]:.4f}")
    print(f"largest difference: {max(abs(a - b) for a, b in zip(ours, theirs)):.1e}")


if __name__ == "__main__":
    main()
