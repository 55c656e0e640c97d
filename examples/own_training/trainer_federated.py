"""The script of trainer_alone.py as the trainer of a device."""

import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from edgefl.client import Round, TrainedParts, save

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


def train(this: Round) -> TrainedParts:
    """Train on the notes in the folder that the device's --data names."""
    notes = Notes(Path(this.data))
    model = network()
    this.load(model)
    arguments = TrainingArguments(
        output_dir="out",
        num_train_epochs=this.epochs,
        per_device_train_batch_size=this.batch_size,
        learning_rate=this.lr,
        seed=this.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(model, arguments, train_dataset=notes, callbacks=[this.callback()])
    trainer.train()
    return this.trained(model, samples=len(notes))


if __name__ == "__main__":
    parts = {"embeddings": ["bert.embeddings"], "body": ["bert.encoder"], "head": ["bert.pooler", "classifier"]}
    save(network(), parts, sys.argv[1])
