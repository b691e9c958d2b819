"""Compiles what the package's ops would launch on a GPU that is not there. Run as a program by `test_aot.py`.

`compile_cases` runs this file in processes of its own: the tests' process may have decorated the kernels for the interpreter.
There, every launch of a Triton kernel is turned into a compilation for the case's target, so that kernels, tiles, options and
argument specialization are those of the package itself, chosen by `w8a8_kernels.select` for that target.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

# Multiprocessors of a usual GPU of each target: tile rules read them. V100, T4, A100, A10, L40S, H100, B200, RTX 5090.
NUM_SMS = {70: 80, 75: 40, 80: 108, 86: 72, 89: 142, 90: 132, 100: 148, 120: 170}

INSTRUCTIONS = {
    "dp4a": r"dp4a\.s32\.s32",
    "mma.sync": r"mma\.sync\S*\.s8\.s8",
    "wgmma": r"wgmma\.mma_async\S*\.s8\.s8",
    "tcgen05": r"tcgen05\.mma\S*kind::i8",
}

WORKERS = 2


@dataclass(frozen=True)
class Case:
    """One call of an op: `scaled_mm` on [M, K] and [N, K], or a quantizer that writes codes [M, K].

    Or `int8_experts` on [M, K], with N intermediate columns, on one of two ranks. Or `paged_attention` of up to M queries and
    N query heads to a key/value head, or `write_cache` of M tokens, with heads of K.
    """

    target: int
    op: str
    M: int
    K: int
    N: int = 0
    dtype: str = "bfloat16"
    bias: bool = True
    kernel: str = ""  # what VLLM_W8A8_KERNEL forces; empty: the default choice
    hadamard: int = 0  # size of a quantizer's blocks
    experts: int = 0  # that one rank holds
    top_k: int = 0
    int8: bool = False  # the cache
    keys: int = 0  # most of a sequence
    gpu: str = ""  # whose measured tiles are taken; empty: none's
    triton: str = ""  # folder of the Triton that compiles; empty: the one that is installed

    def __str__(self) -> str:
        shape = f"{self.M}x{self.N}x{self.K}" if self.N else f"{self.M}x{self.K}"
        flags = "-".join(
            f
            for f in (self.dtype, self.kernel, "" if self.bias else "no-bias", self.hadamard and f"h{self.hadamard}", self.gpu)
            if f
        )
        flags += f"-{self.top_k}of{self.experts}" if self.experts else ""
        flags += f"-{self.keys}keys" if self.keys else ""
        flags += "-int8" if self.int8 else ""
        return f"sm{self.target}-{self.op}-{shape}-{flags}" + (f"-{Path(self.triton).name}" if self.triton else "")


@dataclass
class Launch:
    """One kernel that a case launches, compiled. `constants` are the integer compile-time arguments."""

    kernel: str
    constants: dict[str, int]
    shared: int
    registers: int
    spilled_bytes: int
    instructions: list[str]


@dataclass
class Result:
    """What became of a case; `error` is empty where everything compiled."""

    launches: list[Launch] = field(default_factory=list)
    error: str = ""


def compile_cases(cases: list[Case]) -> tuple[dict[Case, Result], set[str]]:
    """Compile all cases on `WORKERS` processes.

    Returns:
        each case's result, and the names of all kernels of the package.

    Raises:
        RuntimeError: a process failed as a whole.
    """
    lists: list[list[Case]] = []
    for triton in sorted({case.triton for case in cases}):
        mine = [case for case in cases if case.triton == triton]
        by_worker: list[list[Case]] = [[] for _ in range(WORKERS)]
        # All cases of a target go to one process, which compiles a variant once.
        for target in sorted({case.target for case in mine}, key=lambda t: -sum(case.target == t for case in mine)):
            min(by_worker, key=len).extend(case for case in mine if case.target == target)
        lists += filter(None, by_worker)
    with ThreadPoolExecutor(WORKERS) as pool:
        answers = list(pool.map(_run_worker, lists))
    results: dict[Case, Result] = {}
    for each, answer in zip(lists, answers, strict=True):
        for case, result in zip(each, answer["results"], strict=True):
            results[case] = Result([Launch(**launch) for launch in result["launches"]], result["error"])
    return results, {name for answer in answers for name in answer["kernels"]}


def _run_worker(cases: list[Case]) -> dict:
    import w8a8_kernels

    with tempfile.TemporaryDirectory() as cache:
        # A cache of its own: what ptxas says is seen only where it runs.
        env = {
            **os.environ,
            "TRITON_CACHE_DIR": cache,
            "TRITON_DUMP_PTXAS_LOG": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [cases[0].triton, str(Path(w8a8_kernels.__file__).parents[1])])),
        }
        env.pop("TRITON_INTERPRET", None)
        done = subprocess.run(
            [sys.executable, __file__],
            input=json.dumps([asdict(case) for case in cases]),
            capture_output=True,
            text=True,
            env=env,
        )
    if done.returncode:
        raise RuntimeError(f"the compiling process exited with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout)


class _OfflineDriver:
    """As much of a Triton driver as compiling needs. Its device number is the target: Triton keeps variants per device."""

    def __init__(self, target: int) -> None:
        self.target = target

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.target, 32)

    def get_current_device(self) -> int:
        return self.target

    def get_current_stream(self, device: int) -> int:
        return 0


def _package_kernels() -> list[str]:
    """Names of all functions `*_kernel` of the package that Triton compiles."""
    import importlib
    import pkgutil

    import triton

    import w8a8_kernels

    names = set()
    for module in pkgutil.walk_packages(w8a8_kernels.__path__, "w8a8_kernels."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, triton.JITFunction) and name.endswith("_kernel"):
                names.add(name)
    return sorted(names)


def _call(case: Case) -> None:
    """Call the op as CUDA tensors would; `meta` tensors have shapes, strides and aligned addresses, but no memory."""
    import torch

    from w8a8_kernels import ops
    from w8a8_kernels.select import Facts

    ops.device_facts = lambda device: Facts(divmod(case.target, 10), has_triton=True, has_gluon=True)
    ops._num_sms = lambda device: NUM_SMS[case.target]
    ops._device_name = lambda device: case.gpu or f"sm_{case.target}"
    os.environ.pop("VLLM_W8A8_KERNEL", None)
    if case.kernel:
        os.environ["VLLM_W8A8_KERNEL"] = case.kernel

    dtype = getattr(torch, case.dtype)

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    M, N, K = case.M, case.N, case.K
    if case.op == "scaled_mm":
        operands = [
            tensor(*shape, dtype=kind)
            for rows in (M, N)
            for shape, kind in (((rows, K), torch.int8), ((rows, 1), torch.float32))
        ]
        ops._scaled_mm_cuda(*operands, tensor(N) if case.bias else None, dtype)
    elif case.op == "quantize":
        ops._quantize_cuda(tensor(M, K), case.hadamard)
    elif case.op == "quantize_amax":
        ops._quantize_amax_cuda(tensor(M, K), case.hadamard)
    elif case.op == "quantize_with_amax":
        ops._quantize_with_amax_cuda(tensor(M, K), tensor(M, 1, dtype=torch.float32), case.hadamard)
    elif case.op == "rms_norm_quantize":
        ops._rms_norm_quantize_cuda(tensor(M, K), tensor(K), 1e-6, 0.0, case.hadamard)
    elif case.op == "add_rms_norm_quantize":
        ops._add_rms_norm_quantize_cuda(tensor(M, K), tensor(M, K), tensor(K), 1e-6, 0.0, case.hadamard)
    elif case.op == "silu_mul_quantize":
        ops._silu_mul_quantize_cuda(tensor(M, 2 * K), case.hadamard)
    elif case.op == "int8_experts":
        E, int8, fp32 = case.experts, torch.int8, torch.float32
        ops._int8_experts_cuda(
            tensor(M, K),
            tensor(E, 2 * N, K, dtype=int8),
            tensor(E, 2 * N, 1, dtype=fp32),
            tensor(E, K, N, dtype=int8),
            tensor(E, K, 1, dtype=fp32),
            tensor(M, case.top_k, dtype=fp32),
            tensor(M, case.top_k, dtype=torch.int32),
            expert_map=tensor(2 * E, dtype=torch.int32),
            w13_bias=tensor(E, 2 * N) if case.bias else None,
            w2_bias=tensor(E, K) if case.bias else None,
        )
    elif case.op in ("paged_attention", "write_cache"):
        _call_attention(case, tensor)
    else:
        raise ValueError(f"no such op: {case.op}")


def _call_attention(case: Case, tensor: Callable) -> None:
    """As an engine does, with 8 key/value heads, for one sequence or, with 4,096 keys, for 128."""
    import torch

    from w8a8_kernels.attention import int8_cache_views, page_bytes, paged_attention, write_cache

    kv_heads, block, D, int32 = 8, 16, case.K, torch.int32
    if case.int8:
        pages = tensor(64, page_bytes(block, kv_heads, D), dtype=torch.int8)
        key_cache, value_cache, *scales = int8_cache_views(pages, block, kv_heads, D)
    else:
        key_cache, value_cache = tensor(64, 2, block, kv_heads, D).unbind(1)
        scales = [None, None]
    if case.op == "write_cache":
        key, value = tensor(case.M, 48 * D)[:, -2 * kv_heads * D :].view(case.M, 2, kv_heads, D).unbind(1)
        write_cache(key, value, key_cache, value_cache, tensor(case.M, dtype=torch.int64), *scales)
        return
    n = 128 if case.keys == 4096 else 1
    paged_attention(
        tensor(n * case.M, case.N * kv_heads, D),
        key_cache,
        value_cache,
        tensor(n, 1024, dtype=int32),
        tensor(n, dtype=int32),
        tensor(n + 1, dtype=int32),
        D**-0.5,
        most_queries=case.M,
        most_keys=case.keys,
        window=1024 if D == 256 else None,
        softcap=50.0 if D == 256 else 0.0,
        sinks=tensor(case.N * kv_heads) if D == 64 else None,
        key_scale=scales[0],
        value_scale=scales[1],
    )


def _compile_here(cases: list[Case]) -> list[Result]:
    import triton

    launches: list[Launch] = []
    ptxas: dict[str, tuple[int, int]] = {}  # by hash: registers, spilled bytes
    run = triton.JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        with contextlib.redirect_stdout(io.StringIO()) as log:
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in ptxas:
            registers = re.search(r"Used (\d+) registers", log.getvalue())
            spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log.getvalue())
            ptxas[kernel.hash] = (int(registers[1]), sum(map(int, spills)))
        constants = {name: int(value) for name, value in kwargs.items() if isinstance(value, int)}
        found = [name for name, pattern in INSTRUCTIONS.items() if re.search(pattern, kernel.asm["ptx"])]
        launches.append(Launch(self.fn.__name__, constants, kernel.metadata.shared, *ptxas[kernel.hash], found))

    triton.JITFunction.run = compile_only
    results = []
    for case in cases:
        launches = []
        triton.runtime.driver.set_active(_OfflineDriver(case.target))
        try:
            _call(case)
            results.append(Result(launches))
        except Exception as error:  # any failure is the case's result, and the others still count
            results.append(Result(launches, f"{type(error).__name__}: {error}"))
    return results


if __name__ == "__main__":
    todo = [Case(**case) for case in json.load(sys.stdin)]
    answer = {"results": [asdict(result) for result in _compile_here(todo)], "kernels": _package_kernels()}
    print(json.dumps(answer))
