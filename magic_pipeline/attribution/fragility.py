"""What is known to make scores predict retraining poorly although they are exact, told before hours are spent.

Scores are derivatives. Where training does not answer smoothly to the data weights, a derivative says little about leaving examples
out. docs/validation.md has the measurements behind some of these.
"""

from __future__ import annotations

from collections.abc import Sequence

from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.metagradient.kinks import NEAR, Kink, observed_kinks
from magic_pipeline.metagradient.parameter_groups import eps_root_of

# With a smaller term inside the square root, rounding moves coordinates with tiny gradients.
_TINY_EPS_ROOT = 1e-12
# With a smaller one than this, such coordinates jump between steps.
_STEADY_EPS_ROOT = 1e-7
_SMALL_BATCH = 16
# Shares of a layer's units and inputs above which it is told; a normal distribution has 0.008 of its inputs near.
_MANY_DEAD, _MANY_NEAR = 0.1, 0.05


def fragile_settings(opened: OpenExperiment) -> tuple[str, ...]:
    """One line for each, for a plan; empty where nothing is known against the settings. Makes one forward of the first batch."""
    kinks = kinks_of(opened)
    found = list(warnings_before_training(opened, kinks))
    eps_root, smallest = eps_root_of(opened.recipe.optimizer), _smallest_batch(opened)
    if eps_root is not None and _TINY_EPS_ROOT <= eps_root < _STEADY_EPS_ROOT:
        found.append(f"training.optimizer.eps_root is {eps_root:g}; 1e-6 is steadier")
    if kinks:
        functions = ", ".join(sorted({kink.function for kink in kinks}))
        found.append(f"the model has kinks ({functions}); tanh, GELU or SiLU are smooth, and so is an average pool")
    if 1 < smallest < _SMALL_BATCH <= len(opened.dataset):
        found.append(f"batches of {smallest} examples are small: one example moves a step far")
    return tuple(found)


def warnings_before_training(opened: OpenExperiment, kinks: Sequence[Kink]) -> tuple[str, ...]:
    """What nobody should train with unawares: each with the reason and what to change."""
    found, eps_root = list[str](), eps_root_of(opened.recipe.optimizer)
    if eps_root is not None and eps_root < _TINY_EPS_ROOT:
        found.append(
            f"training.optimizer.eps_root is {eps_root:g}: scores of coordinates with tiny gradients are fragile (changes of 1-2 % "
            "with the number of threads were seen at 1e-17); take 1e-6, or the default 1e-8"
        )
    if opened.recipe.model.draws_randomly:
        found.append(
            "dropout is active: scores are exact for these very draws, but may predict retraining poorly; set it to 0, or "
            "training.mode: eval"
        )
    if _smallest_batch(opened) == 1:
        alone = sum(len(batch) == 1 for batch in opened.order)
        found.append(
            f"{alone} of {opened.steps} steps have a batch of one example: it alone moves the step, and without it there is none, so "
            "its score may predict retraining poorly; take a larger training.batch_size, or one that divides the examples evenly"
        )
    return (*found, *_of_kinks(kinks))


def kinks_of(opened: OpenExperiment) -> tuple[Kink, ...]:
    """The kinks that the untrained model meets on the first batch; see `observed_kinks`."""
    return observed_kinks(opened.recipe.model, opened.initial_state, opened.data(0))


def _of_kinks(kinks: Sequence[Kink]) -> list[str]:
    found = []
    dead = [kink for kink in kinks if kink.dead_share > _MANY_DEAD]
    if dead:
        worst = max(dead, key=lambda kink: kink.dead_share)
        found.append(
            f"{worst.dead} of {worst.units} units of {_place(worst)} are dead{_others(dead)}: they pass no gradient on any example of "
            "the first batch, so no score counts what happens when training wakes them; take GELU, SiLU or tanh, or another "
            "initialisation or scale of the inputs"
        )
    near = [kink for kink in kinks if kink.near > _MANY_NEAR]
    if near:
        worst = max(near, key=lambda kink: kink.near)
        found.append(
            f"{worst.near:.0%} of the inputs of {_place(worst)} are within {NEAR:.0%} of their scale from a kink{_others(near)}: a "
            "little more or less of an example moves them across, where a derivative says nothing; take GELU, SiLU or tanh (for a "
            "max-pool an average pool), or another initialisation or scale of the inputs"
        )
    return found


def _place(kink: Kink) -> str:
    return f"{kink.function} in {kink.module!r}" if kink.module else f"{kink.function} in the model or its loss"


def _others(kinks: Sequence[Kink]) -> str:
    return f" (and more in {len(kinks) - 1} other places)" if len(kinks) > 1 else ""


def _smallest_batch(opened: OpenExperiment) -> int:
    return min(len(batch) for batch in opened.order)
