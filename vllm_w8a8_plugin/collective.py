"""The maximum over vLLM's tensor-parallel ranks, as an op: vLLM's own collectives, which torch.compile can trace, only add."""

import torch
from torch import library
from torch.distributed import ReduceOp
from vllm.distributed import get_tp_group

# The library object must stay alive: dropping it unregisters the op.
_LIBRARY = library.Library("w8a8", "FRAGMENT")
_LIBRARY.define("max_over_ranks(Tensor amax) -> Tensor")


def max_over_ranks(amax: torch.Tensor) -> torch.Tensor:
    """Elementwise maximum of every tensor-parallel rank's `amax`, NaN where one has NaN; a collective: every rank must call.

    Args:
        amax: [M, 1] fp32 with no sign bit set, as `w8a8_kernels.quantize_amax` gives it; M from 0, the same on every rank.

    Returns:
        [M, 1] fp32, the same bits on every rank.
    """
    return torch.ops.w8a8.max_over_ranks(amax)


def _max_over_ranks(amax: torch.Tensor) -> torch.Tensor:
    if amax.numel() == 0:
        return amax.clone()
    group = get_tp_group()
    # As integers: magnitudes keep their order, and NaN lies above inf, where a maximum of floats may drop it.
    bits = amax.view(torch.int32)
    # What vLLM itself adds with on a GPU: on the current stream, and a CUDA graph can hold it.
    nccl = getattr(group.device_communicator, "pynccl_comm", None)
    if nccl is not None and not nccl.disabled:
        return nccl.all_reduce(bits, op=ReduceOp.MAX).view(torch.float32)
    bits = bits.clone()
    torch.distributed.all_reduce(bits, op=ReduceOp.MAX, group=group.device_group)
    return bits.view(torch.float32)


_LIBRARY.impl("max_over_ranks", _max_over_ranks, "CompositeExplicitAutograd")


@library.register_fake("w8a8::max_over_ranks")
def _max_over_ranks_fake(amax: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(amax)
