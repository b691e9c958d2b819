"""Our matrix product for vLLM's own int8 schemes (compressed-tensors, Quark): vLLM loads a checkpoint, our kernels run it.

Zero points. With asymmetric activations `y = s_x s_w (acc - z colsum)`, where `acc` is the int32 product of the codes and
`colsum` the sum of a weight row's codes. The two can be far greater than their difference, so it is taken in int32, in the
product's own accumulators: a weight row gets E more columns, whose codes sum to `-colsum`, and the activations hold z there.
What every int8 kernel then sums is `acc - z colsum` itself, and its epilogue rounds once, as for symmetric activations. E is
`max |colsum| / 127`, some percent of K for weights that are spread around zero, and a quarter more: weights that are loaded
again lie where those before lay, so their columns have to fit these. A bias of `-s_x s_w z colsum` would cost
nothing, but fp32 holds neither `acc` beyond 2^24 nor the products exactly; vLLM's Triton kernel subtracts after rounding.
"""

import torch
from vllm.model_executor.kernels.linear import Int8ScaledMMLinearKernel
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from vllm_w8a8_plugin import compat, log
from vllm_w8a8_plugin.config import fuse_when_compiled
from vllm_w8a8_plugin.packing import pack
from vllm_w8a8_plugin.warmup import WARMUP
from w8a8_kernels import int8_linear
from w8a8_kernels.ops import device_facts
from w8a8_kernels.select import ALIGNMENT, MAX_K, MIN_DP4A_CAPABILITY, describe_scaled_mm

CODE_MIN, CODE_MAX = -128, 127

# One column for the zero point in so many more is kept for weights that are loaded later. Random weights of other seeds have
# a largest |colsum| within some ten percent.
SPARE = 4


class W8A8Int8ScaledMMLinearKernel(Int8ScaledMMLinearKernel):
    """Layers whose scheme is vLLM's: int8 weights by channel or by tensor, int8 activations in every way that vLLM offers.

    | activations | quantized by |
    |---|---|
    | dynamic, symmetric: per token | our quantizer, as in our own checkpoints, without a Hadamard transform |
    | dynamic, asymmetric: per token | `quantize_asymmetric` |
    | static, with or without a zero point: per tensor | on CUDA vLLM's op `scaled_int8_quant`; else `quantize_static` |

    The two functions are plain torch, one kernel each when compiled (seen on CPUs).
    """

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        if current_platform.is_cpu():
            return True, None
        if not current_platform.is_cuda():
            return False, "runs on NVIDIA GPUs and CPUs only"
        major, minor = MIN_DP4A_CAPABILITY
        if compute_capability is None:
            capability = current_platform.get_device_capability()
            compute_capability = None if capability is None else capability.to_int()
        if compute_capability is not None and compute_capability < 10 * major + minor:
            return False, f"needs compute capability {major}.{minor}"
        return True, None

    @classmethod
    def can_implement(cls, c) -> tuple[bool, str | None]:
        return True, None

    def __init__(self, c, layer_param_names) -> None:
        """As vLLM calls it while the model is built.

        Raises:
            ValueError: VLLM_W8A8_KERNEL names a kernel that cannot run here.
        """
        super().__init__(c, layer_param_names)
        compat.check_forced_kernel()
        if self._quantizes_as_we_do:
            fuse_when_compiled()
        # The layer is not known yet, and later its model's limits are not.
        self._awaited = torch.nn.Module()
        WARMUP.expect(self._awaited)

    @property
    def _quantizes_as_we_do(self) -> bool:
        return self.config.input_symmetric and not self.config.is_static_input_scheme

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Bring what the scheme has loaded into our kernels' form; on a GPU, compile what the layer can reach.

        Args:
            layer: holds, under the scheme's names, weight [N, K] int8; weight scale [N, 1], or [P] for its P logical parts,
                of `logical_widths` channels each; static: input scale [1]; static and asymmetric: input zero point [1] int8.
                Afterwards: weight [N, K + E] int8; weight scale [N, 1] fp32; input scale [1] fp32; input zero point [1] int32.

        Raises:
            ValueError: scales of another number, a weight that is too long, or one that was loaded again and does not fit.
        """
        weight_name, scale_name, input_scale_name, zero_point_name, _ = self.layer_param_names
        # vLLM takes this flag away before it loads other weights; its own methods use it, too.
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        weight = getattr(layer, weight_name).data
        scale = channel_scales(getattr(layer, scale_name).data, layer.logical_widths, weight.shape[0])
        K = weight.shape[1]
        if not self.config.input_symmetric:
            weight = append_zero_point_columns(weight, getattr(layer, "w8a8_zero_point_columns", None))
        if weight.shape[1] > MAX_K:
            raise ValueError(f"int8 weight of {weight.shape[1]} columns: int32 sums of more than {MAX_K} could overflow")
        layer.w8a8_zero_point_columns = weight.shape[1] - K
        if self.config.is_static_input_scheme:
            replace_parameter(layer, input_scale_name, one_value(getattr(layer, input_scale_name), "input scale").float())
            if not self.config.input_symmetric:
                zero_point = one_value(getattr(layer, zero_point_name), "input zero point").to(torch.int32)
                replace_parameter(layer, zero_point_name, zero_point)
        replace_parameter(layer, weight_name, weight)
        replace_parameter(layer, scale_name, scale)
        layer._already_called_process_weights_after_loading = True

        dtype = getattr(layer, "params_dtype", torch.get_default_dtype())
        kernels = describe_scaled_mm(device_facts(weight.device), dtype)
        log.once(f"W8A8: vLLM's own int8 layers with {self._scheme()} run on {kernels}")
        pack(layer, weight, scale, dtype)
        self._warm_up(weight, scale, getattr(layer, "bias", None), dtype)

    def _scheme(self) -> str:
        weights = "per-channel" if self.config.is_channelwise else "per-tensor"
        inputs = "static per-tensor" if self.config.is_static_input_scheme else "dynamic per-token"
        return f"{weights} weights and {inputs} {'' if self.config.input_symmetric else 'a'}symmetric activations"

    def _warm_up(self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        awaited, self._awaited = self._awaited, None
        if awaited is None:
            return  # loaded again
        awaited.weight, awaited.weight_scale, awaited.bias = (
            None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False) for tensor in (weight, scale, bias)
        )
        awaited.w8a8_dtype, awaited.w8a8_hadamard, awaited.w8a8_shares_amax = dtype, 0, False
        WARMUP.ready(awaited)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., K] in bf16, fp16 or fp32 to [..., N] of the same dtype."""
        weight, scale, input_scale, zero_point, _ = self._get_layer_params(layer)
        if self._quantizes_as_we_do:
            return int8_linear(x, weight, scale, bias, layer.packed_weight)
        rows = x.reshape(-1, x.shape[-1])
        if input_scale is None:
            codes, x_scale, zero_point = quantize_asymmetric(rows)
        else:
            quantize = quantize_static_by_vllm if x.is_cuda else quantize_static
            codes = quantize(rows, input_scale, zero_point)
            x_scale = input_scale.expand(rows.shape[0], 1).contiguous()
        if layer.w8a8_zero_point_columns:
            zero_points = zero_point.to(torch.int8).view(-1, 1).expand(rows.shape[0], layer.w8a8_zero_point_columns)
            codes = torch.cat((codes, zero_points), dim=1)
        N = scale.shape[0]
        if layer.packed_weight is not None:
            out = torch.ops.w8a8.scaled_mm_packed(codes, x_scale, layer.packed_weight, N, bias, x.dtype)
        else:
            out = torch.ops.w8a8.scaled_mm(codes, x_scale, weight, scale, bias, x.dtype)
        return out.reshape(*x.shape[:-1], N)


def offer() -> None:
    """Put our kernel in front of vLLM's int8 kernels of this platform, unless it is there."""
    kernels = compat.int8_kernels()
    if W8A8Int8ScaledMMLinearKernel not in kernels:
        kernels.insert(0, W8A8Int8ScaledMMLinearKernel)


def channel_scales(scale: torch.Tensor, widths: list[int], N: int) -> torch.Tensor:
    """Scales of a checkpoint, one a channel.

    Args:
        scale: [N, 1], or one for each of a layer's logical parts (q, k and v of a fused layer), or one for all.
        widths: channels of each part, N in all.

    Returns:
        [N, 1] fp32, contiguous.

    Raises:
        ValueError: any other number of scales.
    """
    scale = scale.float().reshape(-1)
    if scale.numel() == N:  # first: a layer of one-channel parts has as many of both
        return scale.view(-1, 1).contiguous()
    if scale.numel() == 1:
        return scale.view(1, 1).repeat(N, 1)
    if scale.numel() == len(widths):
        return torch.cat([part.expand(width) for part, width in zip(scale, widths, strict=True)]).view(-1, 1)
    raise ValueError(f"got {scale.numel()} weight scales, expected 1, {N} (channels) or {len(widths)} (fused parts)")


def one_value(value: torch.Tensor | None, name: str) -> torch.Tensor:
    """`value` as [1].

    Raises:
        ValueError: it is missing or has several elements.
    """
    if value is None or value.numel() != 1:
        got = "none" if value is None else f"shape {tuple(value.shape)}"
        raise ValueError(f"static int8 activations need one {name} a layer, got {got}")
    return value.data.reshape(1)


def append_zero_point_columns(weight: torch.Tensor, columns: int | None = None) -> torch.Tensor:
    """`weight` with columns that, where activations hold a zero point z, add `-z colsum` to the int32 product.

    Args:
        weight: codes [N, K] int8.
        columns: E, where it is given. Default: as many as are needed and a quarter more.

    Returns:
        [N, K + E] int8: E codes in [-127, 127] that sum to minus the sum of the row's; by default, K + E is a multiple of 16,
        or E is 0.

    Raises:
        ValueError: more than `columns` are needed.
    """
    colsum = weight.sum(dim=1, dtype=torch.int32)
    magnitude = colsum.abs()
    E = -(-int(magnitude.max()) // CODE_MAX) if weight.numel() else 0
    if columns is not None:
        if E > columns:
            raise ValueError(
                f"the weight that is loaded again needs {E} columns for the zero point of its activations, and the one before "
                f"left {columns}: its rows sum to far greater numbers. Start the engine with the new weights instead"
            )
        E = columns
    elif E:
        E += -(-E // SPARE)
        E += -(weight.shape[1] + E) % ALIGNMENT
    before = CODE_MAX * torch.arange(E, dtype=torch.int32, device=weight.device)
    digits = (magnitude[:, None] - before).clamp(0, CODE_MAX) * -colsum.sign()[:, None]
    return torch.cat((weight, digits.to(torch.int8)), dim=1)


def quantize_asymmetric(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize every row with a zero point, `x ≈ scale * (codes - zero_point)`, as compressed-tensors defines it.

    The row's range always includes 0, so that the zero point is a code. vLLM's op does not see to that: for a row far from
    zero its zero point lies beyond int8.

    Args:
        x: [M, K], bf16, fp16 or fp32, K >= 1.

    Returns:
        codes [M, K] int8 in [-128, 127], scale [M, 1] fp32 and zero point [M, 1] int8. A row of zeros has scale 1, codes and
        zero point -128. A row that holds NaN or inf has scale NaN.
    """
    low = x.amin(dim=-1, keepdim=True).float().clamp(max=0)
    high = x.amax(dim=-1, keepdim=True).float().clamp(min=0)
    # A tensor, since torch on CUDA multiplies by the reciprocal of a number instead of dividing by it.
    scale = (high - low) / high.new_full((), CODE_MAX - CODE_MIN)
    scale = torch.where(scale == 0, 1.0, scale)
    finite = scale < float("inf")  # False for NaN, too
    divisor = torch.where(finite, scale, 1.0)
    zero_point = torch.where(finite, (CODE_MIN - low / divisor).round().clamp(CODE_MIN, CODE_MAX), 0.0)
    codes = ((x / divisor).round() + zero_point).clamp(CODE_MIN, CODE_MAX)
    codes = torch.where(finite, codes, 0.0).to(torch.int8)
    return codes, torch.where(finite, scale, float("nan")), zero_point.to(torch.int8)


def quantize_static(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
    """Quantize with a checkpoint's scale and zero point: `clamp(round(x / scale) + zero_point, -128, 127)`.

    Args:
        x: [M, K], bf16, fp16 or fp32.
        scale: [1] fp32.
        zero_point: [1] int32, or None.

    Returns:
        codes [M, K] int8. NaN becomes the code of 0, as in vLLM's op.
    """
    codes = (x.float() / scale).round().nan_to_num(nan=0.0)
    if zero_point is not None:
        codes = codes + zero_point
    return codes.clamp(CODE_MIN, CODE_MAX).to(torch.int8)


def quantize_static_by_vllm(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
    """`quantize_static` by vLLM's op, whose division may differ in the last bit: codes differ by one at ties."""
    from vllm import _custom_ops

    codes, _, _ = _custom_ops.scaled_int8_quant(x.contiguous(), scale, zero_point, symmetric=zero_point is None)
    return codes
