"""Your own model in plain PyTorch: copy this file, replace the data and the model; own_model.yaml names the class."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_wine
from torch import nn

from magic_pipeline.tasks.datasets import InMemoryDataset
from magic_pipeline.tasks.protocol import Query


class WineClassifier:
    """Which of three growers made the wine? 178 chemical analyses, of which 150 are trained on."""

    def __init__(self, hidden: int = 16):
        self.hidden = hidden
        wine = load_wine()
        features = torch.tensor(wine.data, dtype=torch.float32)
        features = (features - features.mean(0)) / features.std(0)
        order = torch.randperm(178, generator=torch.Generator().manual_seed(0)).tolist()
        self.wines = [(f"wine-{row}", (features[row], int(wine.target[row]))) for row in order]

    def build_model(self):
        return nn.Sequential(nn.Linear(13, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 3))

    def training_data(self):
        return InMemoryDataset([wine for _, wine in self.wines[:150]], [name for name, _ in self.wines[:150]])

    def queries(self):
        return [Query(name, [wine]) for name, wine in self.wines[150:156]]

    def collate(self, examples):
        return {"features": torch.stack([x for x, _ in examples]), "growers": torch.tensor([y for _, y in examples])}

    def example_losses(self, model, batch):
        return F.cross_entropy(model(batch["features"]), batch["growers"], reduction="none")
