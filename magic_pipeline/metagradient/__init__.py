"""Metagradients of a training run: state, step, pullback, segment plan and walk.

Torch only. No I/O, no Dagster, no logging and no knowledge of tasks belong here; callers bring tensors and get tensors.
"""
