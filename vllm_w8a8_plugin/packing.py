"""The packed copy of a layer's weight, where the device's kernel wants one: made whenever weights are loaded."""

import torch

from w8a8_kernels import pack_weight, release_packed_weight


def pack(layer: torch.nn.Module, weight: torch.Tensor, weight_scale: torch.Tensor, dtype: torch.dtype) -> None:
    """Set `layer.packed_weight` for `int8_linear(packed=...)`, None where the kernel reads the weight as it is.

    The weight must stay with the layer all the same: LoRA and model classes ask for its device and dtype, a saved state is
    made of it, and weights that are loaded again are copied into it.

    Args:
        layer: packed before, its copy is replaced, under the same address.
        weight: codes [N, K] int8.
        weight_scale: [N, 1] fp32.
        dtype: of the layer's activations.
    """
    # The packed copy reads the scale for as long as it lives, and a parameter's storage may be replaced before.
    scale = weight_scale.clone()
    packed, before = pack_weight(weight, scale, dtype), getattr(layer, "packed_weight", None)
    if packed is None or before is None:
        # No buffer: vLLM would save the handle of this process with the weights, and put an old one back after a reload.
        layer.packed_weight = packed
    else:
        stale = before.clone()
        before.copy_(packed)  # a compiled graph may hold the tensor
        release_packed_weight(stale)
    layer.w8a8_packed_scale = None if packed is None else scale
