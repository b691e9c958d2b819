"""What the launches of attention's kernels ask about a device."""

import torch

from w8a8_kernels import ops

# The machine that Triton's interpreter plays on a CPU: without dependent launches, and with few multiprocessors.
INTERPRETED = ((8, 0), 8)


def device_of(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors."""
    capability = ops.device_facts(device).capability
    return INTERPRETED if capability is None else (capability, ops._num_sms(device))
