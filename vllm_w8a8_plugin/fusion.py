"""Compile pass: RMSNorm and SiLU·mul are folded into the int8 quantizer that reads their result.

The patterns are traced from vLLM's own norms and activation, so they follow the release and the torch that are installed:

- RMSNorm and GemmaRMSNorm with and without residual, as the nodes of vLLM's IR that they are until they are lowered, which
  comes after this pass;
- the same as plain torch operations, where vLLM runs Inductor without its own lowering (the CPU build);
- SiluAndMul as plain torch operations, and as vLLM's compiled op (`custom_ops` with "+silu_and_mul").

A result that anything but quantizers reads stays as it is: the pattern matcher refuses to swallow it.
"""

import functools
import inspect
import logging
import operator
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch._higher_order_ops import auto_functionalized
from torch._inductor import pattern_matcher
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq
from vllm import ir
from vllm.compilation.passes.inductor_pass import InductorPass, enable_fake_mode
from vllm.config import CompilationMode
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.platforms import current_platform

import w8a8_kernels  # noqa: F401  registers torch.ops.w8a8
from vllm_w8a8_plugin import envs, log

if TYPE_CHECKING:
    from vllm.config import VllmConfig

QUANTIZE = torch.ops.w8a8.quantize.default
RMS_NORM_QUANTIZE = torch.ops.w8a8.rms_norm_quantize.default
ADD_RMS_NORM_QUANTIZE = torch.ops.w8a8.add_rms_norm_quantize.default
SILU_MUL_QUANTIZE = torch.ops.w8a8.silu_mul_quantize.default

# GemmaRMSNorm multiplies by 1 + weight.
GEMMA_OFFSET = 1.0

# Any value that no norm has as a constant: it stands for epsilon while a pattern is traced, and becomes a wildcard.
_EPS = 1.2345e-6


class FusionPass(InductorPass):
    """The pass. It holds no state but `before`, so that vLLM may copy, pickle and hash it.

    Args:
        before: the pass that the compile config held already; it runs first.
    """

    def __init__(self, before: InductorPass | None = None) -> None:
        self.before = before
        self._run_before = True

    def is_applicable_for_range(self, compile_range) -> bool:
        """Always; vLLM asks before every call, so the answer of `before` is kept for it."""
        self._run_before = self.before is None or self.before.is_applicable_for_range(compile_range)
        return True

    def __call__(self, graph: fx.Graph) -> None:
        if self.before is not None and self._run_before:
            self.before(graph)
        fuse(graph)

    def uuid(self) -> str:
        """Hash of this file and of `before`: part of the keys of vLLM's and Inductor's compile caches."""
        source = inspect.getsource(sys.modules[__name__])
        return InductorPass.hash_dict({"source": source, "before": self.before and self.before.uuid()})


def install(vllm_config: "VllmConfig") -> None:
    """Add the pass to the compile config of the model that is being built, unless it is there or VLLM_W8A8_FUSION=0."""
    if not envs.fusion():
        log.once(f"{envs.FUSION}=0: norms and activations are not fused with the quantizer")
        return
    compilation = vllm_config.compilation_config
    if compilation.ir_enable_torch_wrap:
        key = current_platform.pass_key
    else:
        # No IR node in the graph: match before Inductor drops the rounding between one norm's residual and the next norm.
        key = "joint_custom_pre_pass"
    present = compilation.inductor_compile_config.get(key)
    if isinstance(present, FusionPass):
        return
    if present is not None and not isinstance(present, InductorPass):
        log.once(f"no fusion with the quantizer: {key} already holds a {type(present).__name__}", logging.WARNING)
        return
    compilation.inductor_compile_config[key] = FusionPass(present)


def is_installed(vllm_config: "VllmConfig") -> bool:
    """Whether graphs that are compiled with this config go through the pass. In eager mode there are none."""
    compilation = vllm_config.compilation_config
    held = compilation.inductor_compile_config.values()
    return compilation.mode != CompilationMode.NONE and any(isinstance(value, FusionPass) for value in held)


def fuse(graph: fx.Graph) -> None:
    """Fuse in place, and log how many fusions there were; a line that was logged for an earlier graph is not repeated."""
    quantizers = graph.find_nodes(op="call_function", target=QUANTIZE)
    if not quantizers:
        return
    kinds = {(node.args[0].meta["val"].dtype, _hadamard(node)) for node in quantizers}
    _read_through_views(graph)
    _share_quantizers(graph)
    for dtype, hadamard in sorted(kinds, key=str):
        _patterns(dtype, hadamard).apply(graph)
    norms = _count(graph, RMS_NORM_QUANTIZE) + _count(graph, ADD_RMS_NORM_QUANTIZE)
    activations = _count(graph, SILU_MUL_QUANTIZE)
    if norms or activations:
        log.once(
            f"folded {norms} RMSNorm and {activations} SiluAndMul into the quantizer in a compiled graph, "
            f"{_count(graph, QUANTIZE)} quantizers stay"
        )


def _count(graph: fx.Graph, target: torch._ops.OpOverload) -> int:
    return len(graph.find_nodes(op="call_function", target=target))


def _hadamard(quantizer: fx.Node) -> int:
    """The block of a quantizer; tracing leaves the argument out where it is the default."""
    return quantizer.args[1] if len(quantizer.args) > 1 else quantizer.kwargs.get("hadamard", 0)


def _read_through_views(graph: fx.Graph) -> None:
    """Let quantizers read past views that change no shape, as `int8_linear` makes one of every two-dimensional input."""
    for node in graph.find_nodes(op="call_function", target=QUANTIZE):
        view = node.args[0]
        if view.target is not torch.ops.aten.view.default:
            continue
        x = view.args[0]
        if statically_known_true(sym_eq(view.meta["val"].shape, x.meta["val"].shape)):
            view.replace_all_uses_with(x)
            graph.erase_node(view)


def _share_quantizers(graph: fx.Graph) -> None:
    """Let layers that read the same tensor share one quantizer."""
    first: dict[tuple, fx.Node] = {}
    for node in list(graph.nodes):
        is_result = node.target is operator.getitem and node.args[0].target is QUANTIZE
        if node.target is QUANTIZE or is_result:
            kept = first.setdefault((node.target, node.args), node)
            if kept is not node:
                node.replace_all_uses_with(kept)
                graph.erase_node(node)


@functools.cache
@enable_fake_mode
def _patterns(dtype: torch.dtype, hadamard: int) -> pattern_matcher.PatternMatcherPass:
    """Patterns for activations of `dtype` before quantizers of one block, which the second look at a match compares."""
    patterns = pattern_matcher.PatternMatcherPass(pass_name="w8a8_fusion")

    def register(search: Callable, replace: Callable, *shapes: tuple[int, ...], **scalars: float) -> None:
        pattern_matcher.register_replacement(
            search,
            replace,
            [torch.empty(shape, dtype=dtype, device=current_platform.device_type) for shape in shapes],
            pattern_matcher.fwd_only,
            patterns,
            extra_check=_same_dtype,
            scalar_workaround=scalars,
        )

    rows, hidden = 5, 16
    # With the residual first: in fp32, where nothing is rounded, the other pattern finds its norm, too.
    for offset in (0.0, GEMMA_OFFSET):
        for norm in (ir.ops.fused_add_rms_norm.torch_op, ir.ops.fused_add_rms_norm.impls["native"].impl_fn):
            register(*_add_rms_norm(norm, offset, hadamard), (rows, hidden), (rows, hidden), (hidden,), eps=_EPS)
        for norm in (ir.ops.rms_norm.torch_op, ir.ops.rms_norm.impls["native"].impl_fn):
            register(*_rms_norm(norm, offset, hadamard), (rows, hidden), (hidden,), eps=_EPS)
    activations = [SiluAndMul.forward_native]
    if hasattr(torch.ops._C, "silu_and_mul"):
        activations.append(_functional_silu_and_mul)
    for activation in activations:
        register(*_silu_mul(activation, hadamard), (rows, 2 * hidden))
    return patterns


def _rms_norm(norm: Callable, offset: float, hadamard: int) -> tuple[Callable, Callable]:
    def search(x, weight, eps):
        codes, scale = QUANTIZE(norm(x, _with_offset(weight, offset), eps), hadamard)
        return codes, scale

    def replace(x, weight, eps):
        codes, scale = RMS_NORM_QUANTIZE(x, weight, eps, offset, hadamard)
        return codes, scale

    return search, replace


def _add_rms_norm(norm: Callable, offset: float, hadamard: int) -> tuple[Callable, Callable]:
    def search(x, residual, weight, eps):
        normed, total = norm(x, residual, _with_offset(weight, offset), eps)
        codes, scale = QUANTIZE(normed, hadamard)
        return codes, scale, total

    def replace(x, residual, weight, eps):
        codes, scale, total = ADD_RMS_NORM_QUANTIZE(x, residual, weight, eps, offset, hadamard)
        return codes, scale, total

    return search, replace


def _with_offset(weight: torch.Tensor, offset: float) -> torch.Tensor:
    """The weight as RMSNorm (no offset) or GemmaRMSNorm hands it to the norm."""
    return weight.float() + offset if offset else weight


def _silu_mul(activation: Callable, hadamard: int) -> tuple[Callable, Callable]:
    def search(x):
        codes, scale = QUANTIZE(activation(x), hadamard)
        return codes, scale

    def replace(x):
        codes, scale = SILU_MUL_QUANTIZE(x, hadamard)
        return codes, scale

    return search, replace


def _functional_silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """vLLM's compiled SiluAndMul as AOTAutograd leaves it in the graph."""
    op = torch.ops._C.silu_and_mul.default
    out_name, x_name = (argument.name for argument in op._schema.arguments)  # they differ between builds
    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    return auto_functionalized(op, **{out_name: out, x_name: x})[1]


def _same_dtype(match: pattern_matcher.Match) -> bool:
    """With a weight of another dtype than the activations, vLLM's norm rounds in other places than the fused op."""
    tensors = [node.meta["val"] for node in match.kwargs.values() if isinstance(node, fx.Node)]
    return len({tensor.dtype for tensor in tensors if isinstance(tensor, torch.Tensor)}) == 1
