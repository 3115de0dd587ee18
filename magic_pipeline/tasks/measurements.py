"""What a query may measure of a classification, beside its loss."""

from __future__ import annotations

from torch import Tensor


def log_odds(logits: Tensor, targets: Tensor) -> Tensor:
    """`log(p / (1 - p))` of the target's probability, `[...]` from logits `[..., classes]` and targets `[...]`.

    It is the target's logit minus the logsumexp of all others: the margin that the MAGIC paper (arXiv 2504.16430) measures of
    classifiers. Unlike the loss it does not saturate where the model is sure. Higher is better: helpful examples have positive
    scores.

    >>> import torch
    >>> logits, targets = torch.tensor([[2.0, 0.5, -1.0]]), torch.tensor([0])
    >>> p = logits.softmax(-1)[0, 0]
    >>> torch.allclose(log_odds(logits, targets)[0], torch.log(p / (1 - p)))
    True
    """
    index = targets.unsqueeze(-1)
    others = logits.scatter(-1, index, float("-inf")).logsumexp(-1)
    return logits.gather(-1, index).squeeze(-1) - others
