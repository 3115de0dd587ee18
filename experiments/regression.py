"""Regression in plain PyTorch: copy this file, bring your own table and model."""

import torch
from sklearn.datasets import load_diabetes
from torch import nn

from magic_pipeline.tasks.datasets import InMemoryDataset
from magic_pipeline.tasks.protocol import Query


class DiabetesProgression:
    """How far does diabetes progress in a year? 442 patients, ten measurements each; 400 of them are trained on."""

    def __init__(self, hidden: int = 16):
        self.hidden = hidden
        table = load_diabetes()
        features = torch.tensor(table.data, dtype=torch.float32)
        targets = torch.tensor(table.target, dtype=torch.float32)
        features, targets = features / features.std(0), (targets - targets.mean()) / targets.std()
        order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0)).tolist()
        self.patients = [(f"patient-{row}", (features[row], targets[row])) for row in order]

    def build_model(self):
        return nn.Sequential(nn.Linear(10, self.hidden), nn.GELU(), nn.Linear(self.hidden, 1), nn.Flatten(0))

    def training_data(self):
        return InMemoryDataset([row for _, row in self.patients[:400]], [name for name, _ in self.patients[:400]])

    def queries(self):
        return [Query(name, [row]) for name, row in self.patients[400:404]]

    def collate(self, examples):
        return {"x": torch.stack([x for x, _ in examples]), "y": torch.stack([y for _, y in examples])}

    def example_losses(self, model, batch):
        return (model(batch["x"]) - batch["y"]) ** 2
