"""Tells which kernel variants compile late on a GPU that is not there. Run as a program by `test_compilation.py`.

Triton's own launcher finds each launch's variant, as on the GPU: from tiles, options, and what it specializes arguments on.
Only the compiler is left out. A process of its own: the tests' process may have decorated the kernels for the interpreter.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from aot import NUM_SMS, _OfflineDriver


@dataclass(frozen=True)
class Case:
    """A layer that serves 1 to `most` rows after a warm-up to `warm_up_to` rows (0: none) with the ops `fused` or without."""

    target: int
    N: int
    K: int
    most: int
    dtype: str = "bfloat16"
    bias: bool = False
    hadamard: int = 0
    cutlass: bool = False
    kernel: str = ""  # what VLLM_W8A8_KERNEL forces; empty: the default choice
    warm_up_to: int | None = None  # default: `most`
    warm_up_fused: bool = True
    shared_amax: bool = False  # the layer's quantizer takes its rows' maxima from outside
    # Activations are K (SiLU·mul: 2K) columns, from `offset` on, of a tensor that is `wider` by so many columns.
    wider: int = 0
    offset: int = 0
    config_dir: str = ""  # VLLM_W8A8_CONFIG_DIR; the GPU is called sm_90 for target 90

    def __str__(self) -> str:
        return "-".join(f"{name}={value}" for name, value in asdict(self).items() if value not in ("", False, None, 0))


@dataclass
class Result:
    """Kernels that the warm-up compiled, and late ones: "M rows: kernel" of every variant that a served batch compiled."""

    warm: list[str]
    late: list[str]


def serve_cases(cases: list[Case]) -> list[Result]:
    """Serve each case; what an earlier one compiled does not count for it.

    Raises:
        RuntimeError: the process failed.
    """
    import w8a8_kernels

    roots = [str(Path(w8a8_kernels.__file__).parents[1]), str(Path(__file__).parent)]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_INTERPRET", "VLLM_W8A8"))}
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps([asdict(case) for case in cases]),
        capture_output=True,
        text=True,
        env=env | {"PYTHONPATH": os.pathsep.join(roots)},
    )
    if done.returncode:
        raise RuntimeError(f"the serving process exited with {done.returncode}:\n{done.stderr[-4000:]}")
    return [Result(**result) for result in json.loads(done.stdout)]


def _without_compiler(events: list[str]) -> None:
    """Let Triton launch nothing and compile nothing; a variant that it had to compile is noted, and its hook called."""
    import triton
    from triton.runtime.jit import JitFunctionInfo

    run = triton.JITFunction.run

    def launch(self, *args, grid, warmup, **kwargs):
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    def compile_nothing(self, key, signature, device, *_):
        self.device_caches[device][0][key] = self  # stands for a compiled kernel
        events.append(self.fn.__name__)
        triton.knobs.runtime.jit_post_compile_hook(fn=JitFunctionInfo(self.fn.__module__, self.fn.__name__, self))
        return self

    triton.JITFunction.run = launch
    triton.JITFunction._do_compile = compile_nothing


def _serve(case: Case, events: list[str]) -> Result:
    import torch
    import triton
    from torch.utils._python_dispatch import TorchDispatchMode

    from w8a8_kernels import compilation, ops
    from w8a8_kernels.select import Facts
    from w8a8_kernels.tiles import forget_files

    gpu_impls = {
        torch.ops.w8a8.quantize.default: ops._quantize_cuda,
        torch.ops.w8a8.quantize_amax.default: ops._quantize_amax_cuda,
        torch.ops.w8a8.quantize_with_amax.default: ops._quantize_with_amax_cuda,
        torch.ops.w8a8.rms_norm_quantize.default: ops._rms_norm_quantize_cuda,
        torch.ops.w8a8.add_rms_norm_quantize.default: ops._add_rms_norm_quantize_cuda,
        torch.ops.w8a8.silu_mul_quantize.default: ops._silu_mul_quantize_cuda,
        torch.ops.w8a8.scaled_mm.default: ops._scaled_mm_cuda,
    }

    class OnGpu(TorchDispatchMode):
        """Runs on meta tensors what CUDA tensors would get; these have shapes, strides and addresses, but no memory."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return gpu_impls.get(func, func)(*args, **(kwargs or {}))

    ops.device_facts = lambda device: Facts(divmod(case.target, 10), has_triton=True, has_cutlass=case.cutlass, has_gluon=True)
    ops._num_sms = lambda device: NUM_SMS[case.target]
    ops._device_name = lambda device: f"sm_{case.target}"
    ops.scaled_mm_cutlass = lambda x, x_scale, weight, *_: x.new_empty((x.shape[0], weight.shape[0]))
    os.environ["VLLM_W8A8_KERNEL"] = case.kernel
    os.environ["VLLM_W8A8_CONFIG_DIR"] = case.config_dir
    forget_files()
    triton.runtime.driver.set_active(_OfflineDriver(case.target))
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("w8a8_kernels"):
            for value in vars(module).values():
                if isinstance(value, triton.JITFunction):
                    value.device_caches.clear()

    dtype = getattr(torch, case.dtype)
    N, K = case.N, case.K

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    assert case.offset <= case.wider, "the columns end beyond the tensor"

    def rows(M: int, columns: int) -> torch.Tensor:
        return tensor(M, columns + case.wider)[:, case.offset : case.offset + columns]

    weight, weight_scale = tensor(N, K, dtype=torch.int8), tensor(N, 1, dtype=torch.float32)
    bias = tensor(N) if case.bias else None
    warm_up_to = case.most if case.warm_up_to is None else case.warm_up_to
    events.clear()
    counted = compilation.compilations()
    with OnGpu():
        if warm_up_to:
            compilation.warm_up_linear(
                weight,
                weight_scale,
                bias,
                warm_up_to,
                dtype,
                fused=case.warm_up_fused,
                hadamard=case.hadamard,
                shared_amax=case.shared_amax,
            )
        warm, late = list(events), []
        assert compilation.compilations() - counted == len(warm), "the counter missed a variant"
        for M in range(1, case.most + 1):
            events.clear()
            if case.shared_amax:
                amax = torch.ops.w8a8.quantize_amax(rows(M, K), case.hadamard)
                codes, scale = torch.ops.w8a8.quantize_with_amax(rows(M, K), amax, case.hadamard)
            else:
                codes, scale = torch.ops.w8a8.quantize(rows(M, K), case.hadamard)
                torch.ops.w8a8.rms_norm_quantize(rows(M, K), tensor(K), 1e-6, 1.0, case.hadamard)
                torch.ops.w8a8.add_rms_norm_quantize(rows(M, K), rows(M, K), tensor(K), 1e-5, 0.0, case.hadamard)
                torch.ops.w8a8.silu_mul_quantize(rows(M, 2 * K), case.hadamard)
            torch.ops.w8a8.scaled_mm(codes, scale, weight, weight_scale, bias, dtype)
            late += [f"{M} rows: {kernel}" for kernel in events]
    return Result(warm, late)


def _main() -> None:
    events: list[str] = []
    _without_compiler(events)
    print(json.dumps([asdict(_serve(Case(**case), events)) for case in json.load(sys.stdin)]))


if __name__ == "__main__":
    _main()
