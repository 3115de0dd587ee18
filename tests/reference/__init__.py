"""Plain-PyTorch references that use nothing of magic_pipeline, so that agreement with them is evidence.

`problem` says what a small training run is; `models` and `families` build a few; `unrolled` differentiates the whole
run by autograd; `ordinary` trains with `torch.optim` and takes central differences.
"""
