"""What has to be fixed so that the same plan gives the same bits: threads, kernels, precision and random draws.

Everything that a context manager here changes, it restores.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def exact_numerics(threads: int | None = None) -> Iterator[None]:
    """Training, rematerialisation and walk run inside this: full precision, deterministic kernels, a fixed number of threads.

    Args:
        threads: intra-operation threads on the CPU; None leaves them as they are. Another number changes the last bits.
    """
    before = (
        torch.get_num_threads(),
        torch.get_deterministic_debug_mode(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
    )
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        # An operation without a deterministic kernel warns, naming itself: exact, but not to the last bit.
        # (Set through the debug mode, since torch.use_deterministic_algorithms imports the compiler: 3 s in every process.)
        torch.set_deterministic_debug_mode("warn")
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_deterministic_debug_mode(before[1])
        torch.set_float32_matmul_precision(before[2])
        torch.backends.cudnn.allow_tf32 = before[3]
        torch.backends.cudnn.benchmark = before[4]


@contextmanager
def twice_differentiable_kernels(*, recurrent: bool) -> Iterator[None]:
    """Forwards run inside this take kernels that have a double backward.

    Scaled dot product attention's fast backends have none, and neither have cuDNN's recurrent nets, so cuDNN is off where the model
    is `recurrent`.
    """
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if recurrent:
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random draws inside come from `seed`; the ambient generators (CPU's and `device`'s) are left as they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def shard_seed(seed: int, step: int, rank: int, microbatch: int) -> int:
    """The seed of one shard's random draws: 63 bits of a hash, so that no two shards share a stream."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}/{microbatch}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
