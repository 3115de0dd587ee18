"""What is known to make scores predict retraining poorly although they are exact, told before hours are spent.

Scores are derivatives. Where training does not answer smoothly to the data weights, a derivative says little about leaving examples
out. docs/validation.md has the measurements behind each of these.
"""

from __future__ import annotations

from torch import nn

from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.metagradient.parameter_groups import eps_root_of

# With a smaller term inside the square root, coordinates with tiny gradients jump between steps.
_STEADY_EPS_ROOT = 1e-7
_SMALL_BATCH = 16
_KINKED = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.PReLU,
    nn.Hardtanh,
    nn.Hardswish,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
)


def fragile_settings(opened: OpenExperiment) -> tuple[str, ...]:
    """One line for each; empty where nothing is known against the settings."""
    found, model, eps_root = list[str](), opened.recipe.model, eps_root_of(opened.recipe.optimizer)
    if model.draws_randomly:
        found.append("dropout is active")
    if eps_root is not None and eps_root < _STEADY_EPS_ROOT:
        found.append(f"training.optimizer.eps_root is {eps_root:g}; 1e-6 is steadier")
    kinks = sorted({type(module).__name__ for module in model.module.modules() if isinstance(module, _KINKED)})
    if kinks:
        found.append(f"the model has kinks ({', '.join(kinks)}); tanh, GELU or SiLU are smooth")
    smallest = min(len(batch) for batch in opened.order)
    if smallest < _SMALL_BATCH <= len(opened.dataset):
        found.append(f"batches of {smallest} examples are small: one example moves a step far")
    return tuple(found)
