"""W8A8 in torch models, without vLLM: a drop-in for `torch.nn.Linear`, and a function that puts it in place.

For inference: results have no gradient. Modules that read a layer's `weight` instead of calling it, as the fast path of
`torch.nn.TransformerEncoderLayer` does, cannot have their layers replaced: skip them.
"""

import difflib
import logging
from collections.abc import Sequence

import torch

from w8a8_kernels.hadamard import AUTO, check_block, chosen_block, parse_choice
from w8a8_kernels.names import is_row_parallel, name_matcher
from w8a8_kernels.ops import int8_linear
from w8a8_kernels.quantize.weight import quantize_weight, row_amax

log = logging.getLogger(__name__)

DEFAULT_SKIP = ("lm_head", r"re:.*embed")


class W8A8Linear(torch.nn.Module):
    """Linear layer with int8 weights whose input is quantized per token.

    Buffers: `weight` [out_features, in_features] int8 and `weight_scale` [out_features, 1] fp32, both zero until they are
    loaded. A state_dict does not say the block: load it into a module that was made with the same.

    Args:
        in_features, out_features: as in `torch.nn.Linear`.
        bias: [out_features] floating, or None.
        hadamard: size of the blocks that are transformed before the input is quantized, a divisor of `in_features`; 0: none.
        device: of the buffers.

    Raises:
        ValueError: no such block fits.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: torch.nn.Parameter | None = None,
        hadamard: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_block(hadamard, in_features, "W8A8Linear")
        self.in_features, self.out_features, self.hadamard = in_features, out_features, hadamard
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=torch.int8, device=device))
        self.register_buffer("weight_scale", torch.zeros(out_features, 1, device=device, dtype=torch.float32))
        self.register_parameter("bias", bias)

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, hadamard: str | int = AUTO, *, row_parallel: bool = False) -> "W8A8Linear":
        """Quantize a layer. Its bias is shared, not copied.

        Args:
            linear: weight bf16, fp16 or fp32; it is not changed.
            hadamard: `"auto"`, 0 or the largest block to use (`w8a8_kernels.hadamard.chosen_block`).
            row_parallel: what `"auto"` asks about the layer: whether tensor parallelism would cut its input.

        Raises:
            ValueError: `hadamard` is no such choice, or the weight holds NaN or inf, or nothing, on the meta device.
        """
        _check_holds_values(linear.weight, "W8A8Linear.from_linear")
        block = chosen_block(parse_choice(hadamard), linear.in_features, row_parallel=row_parallel)
        codes, scale = quantize_weight(linear.weight.detach(), hadamard=block)
        module = cls(linear.in_features, linear.out_features, linear.bias, block, device="meta")
        module.weight, module.weight_scale = codes, scale
        return module

    def _apply(self, fn, recurse: bool = True) -> "W8A8Linear":
        """Move or cast, as `.to` and `.half` do; the scale stays fp32."""
        scale = self.weight_scale
        super()._apply(fn, recurse)
        if self.weight_scale.dtype != torch.float32:
            self.weight_scale = scale.to(self.weight_scale.device)
        return self

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] bf16, fp16 or fp32; returns [..., out_features] in its dtype.

        Raises:
            ValueError: x has another width.
        """
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"W8A8Linear: got x of shape {tuple(x.shape)}, expected [..., {self.in_features}]")
        return int8_linear(x, self.weight, self.weight_scale, self.bias, hadamard=self.hadamard)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"hadamard={self.hadamard}"
        )


def quantize_module(model: torch.nn.Module, skip: str | Sequence[str] = DEFAULT_SKIP, hadamard: str | int = AUTO) -> list[str]:
    """Replace the `torch.nn.Linear` layers inside a model, in place, one after the other, once all of them are checked.

    Subclasses of Linear stay as they are: what they do besides is not known here.

    Args:
        model: any module that holds Linear layers.
        skip: patterns of names to leave alone, as `vllm-w8a8 convert --skip` takes them. Given, they replace the default,
            which is lm_head and whatever has a name with `embed` in it; one that matches no linear layer gets a warning.
        hadamard: as in `W8A8Linear.from_linear`; which layers are row-parallel is told from their names.

    Returns:
        names of the replaced layers. A layer that the model holds under several names is quantized once.

    Raises:
        TypeError: `model` is no module.
        ValueError: a pattern is malformed, `hadamard` is no choice, a weight cannot be quantized, as it holds NaN or inf or
            nothing, or `model` is a Linear layer itself. The model is as it was.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"quantize_module: got {model!r} of type {type(model).__name__}, expected a torch.nn.Module")
    hadamard = parse_choice(hadamard)
    if type(model) is torch.nn.Linear:
        raise ValueError(
            "quantize_module: got a Linear layer, expected a model that holds some: use W8A8Linear.from_linear, which returns "
            "the quantized one"
        )
    skip = [skip] if isinstance(skip, str) else skip
    matchers = {pattern: name_matcher(pattern) for pattern in skip}
    linear_names = []
    names_of: dict[torch.nn.Linear, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (torch.nn.Linear, W8A8Linear)):
            linear_names.append(name)
        if name and type(module) is torch.nn.Linear and not any(matches(name) for matches in matchers.values()):
            names_of.setdefault(module, []).append(name)
    groups = list(names_of.values())
    del names_of, module  # no reference but the model's, so that each layer goes when its successor has come
    unmatched = [pattern for pattern, matches in matchers.items() if not any(map(matches, linear_names))]
    _warn_unmatched([pattern for pattern in unmatched if pattern not in DEFAULT_SKIP], linear_names)
    blocks = [_checked_block(names[0], model.get_submodule(names[0]), hadamard) for names in groups]
    for names, block in zip(groups, blocks, strict=True):
        quantized = W8A8Linear.from_linear(model.get_submodule(names[0]), block)
        for name in names:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, quantized)
    return [name for names in groups for name in names]


def _check_holds_values(weight: torch.Tensor, name: str) -> None:
    if weight.is_meta:
        raise ValueError(f"{name}: got a weight on the meta device, which holds nothing: load the model's weights first")


def _warn_unmatched(patterns: list[str], names: list[str]) -> None:
    for pattern in patterns:
        near = difflib.get_close_matches(pattern, {name.rpartition(".")[2] for name in names})
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        log.warning("quantize_module: skip pattern %r matches no linear layer of this model%s", pattern, hint)


def _checked_block(name: str, linear: torch.nn.Linear, hadamard: str | int) -> int:
    """The layer's Hadamard block. Raises ValueError where `W8A8Linear.from_linear` would: reads the weight as that does."""
    shape = (linear.out_features, linear.in_features)
    if tuple(linear.weight.shape) != shape:
        raise ValueError(f"{name}: got a weight of shape {tuple(linear.weight.shape)}, expected {shape}: skip it")
    _check_holds_values(linear.weight, name)
    block = chosen_block(hadamard, linear.in_features, row_parallel=is_row_parallel(name))
    try:
        amax = row_amax(linear.weight.detach(), block)
    except ValueError as error:
        raise ValueError(f"{name}: {error}: skip it") from None
    if not torch.isfinite(amax).all():
        raise ValueError(f"{name}: the weight holds NaN or inf: mend the model, or skip it")
    return block
