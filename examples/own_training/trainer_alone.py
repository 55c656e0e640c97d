"""A script as people have one with Hugging Face's Trainer: short notes in folders of their labels, a small BERT."""

import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

LABELS = ("circle", "cross", "square", "triangle")
LETTERS = " abcdefghijklmnopqrstuvwxyz,"


class Notes(Dataset):
    """Notes of folder/<label>/<id>.txt, a token each letter."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*/*.txt"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = [LETTERS.find(letter) + 2 for letter in self.files[index].read_text().lower()[:48]]
        ids = torch.tensor(tokens + [0] * (48 - len(tokens)))
        label = LABELS.index(self.files[index].parent.name)
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor(label)}


def network() -> BertForSequenceClassification:
    """A small BERT with random weights."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(LETTERS) + 2, max_position_embeddings=48, num_labels=len(LABELS), **sizes)
    return BertForSequenceClassification(config)


def main() -> None:
    """Train on the notes in the folder that the command names; save the model."""
    notes = Notes(Path(sys.argv[1]))
    model = network()
    arguments = TrainingArguments(
        output_dir="out",
        num_train_epochs=10,
        per_device_train_batch_size=16,
        learning_rate=0.003,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(model, arguments, train_dataset=notes)
    trainer.train()
    model.save_pretrained("out")


if __name__ == "__main__":
    main()
