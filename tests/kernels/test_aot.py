"""Every kernel compiles for every GPU that it is chosen for, on a machine without one.

`--aot-full` (`make aot`) takes the full product instead of the cases that bound it. The Triton that is installed compiles, and
those in folders `triton-<version>` of the environment, as `make test` puts one there.
"""

import functools
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from aot import NUM_SMS, Case, Launch, Result, compile_cases

from w8a8_kernels.grouped_mm import experts_plan
from w8a8_kernels.tiles import CONFIG_DIR, Tile, read_table

triton = pytest.importorskip("triton")

TARGETS = tuple(NUM_SMS)
# 8.9 is compiled as 8.6 is and has its shared memory: in the full product only.
BOUNDING_TARGETS = tuple(target for target in TARGETS if target != 89)

# Shared memory that one program may have.
KB = 1024
MAX_SHARED = {70: 96, 75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}

OTHER_TRITONS = sorted(map(str, Path(sys.prefix).glob("triton-*")))
# With those: 7.0 takes the paths of 7.5, 8.6 and 8.9 those of 12.0, and their shared memory.
OTHER_TRITONS_TARGETS = (75, 80, 90, 100, 120)

# 7.0 takes the paths of 7.5, 8.0 those of 8.6 with more shared memory.
ATTENTION_TARGETS = (75, 86, 90, 100, 120)
OTHER_TRITONS_ATTENTION = (90, 120)

FP32_ROWS = ((32768, 0), (4096, 64))  # K and Hadamard block

QUANTIZERS = ("quantize", "rms_norm_quantize", "add_rms_norm_quantize", "silu_mul_quantize")


def bounding_cases() -> list[Case]:
    """Per target the largest tiles and the most registers of each rule, K that divides into steps and K that does not."""
    cases = []
    for target in BOUNDING_TARGETS:
        dtype = "bfloat16" if target >= 80 else "float16"
        products = [(1, 4096, 4096), (16, 1024, 4096), (64, 4096, 4096), (256, 4096, 4096), (4096, 4096, 4096)]
        products += [(64, 1024, 4112), (4096, 4096, 4112), (16, 1024, 4100), (64, 1024, 4097), (4096, 4096, 4097)]
        cases += [Case(target, "scaled_mm", M, K, N, dtype) for M, N, K in products]
        # One row in latency's tile, many in bandwidth's, a middle number in chunks, the longest in registers, a longer one.
        rows = [(1, 4096), (4096, 1024), (512, 3072), (1, 16384), (4096, 32768), (1, 40000)]
        cases += [Case(target, op, M, K, dtype=dtype) for M, K in rows for op in QUANTIZERS]
        # The Hadamard transform: a matrix product from 8.0 on, butterflies below; padded and looped rows, the largest block.
        rows = [(1, 4096, 64), (128, 4096, 64), (4096, 4096, 64), (4096, 12288, 64), (1, 1024, 128), (4096, 40960, 64)]
        cases += [Case(target, op, M, K, dtype=dtype, hadamard=block) for M, K, block in rows for op in QUANTIZERS]
        # With the row's maximum taken or given separately: the plain quantizer's tiles, with less to do.
        rows = [(4096, 4096, 0), (1, 4096, 64), (4096, 12288, 64)]
        parts = ("quantize_amax", "quantize_with_amax")
        cases += [Case(target, op, M, K, dtype=dtype, hadamard=block) for M, K, block in rows for op in parts]
    # Streamed rows: every tile of their rule.
    rows = [(512, 4096, 64), (512, 12288, 64), (512, 1024, 64), (512, 8192, 64), (4096, 8192, 64), (4096, 16384, 64)]
    rows += [(4096, 3072, 32), (4096, 4096, 16), (512, 1024, 16)]
    cases += [Case(90, op, M, K, hadamard=block) for M, K, block in rows for op in QUANTIZERS]
    # No hardware conversion to bf16; fp32 divides where other inputs multiply.
    cases += [Case(75, "scaled_mm", M, 4096, 4096, "bfloat16") for M in (1, 4096)]
    cases += [Case(75, op, 1, 4096, dtype="bfloat16") for op in QUANTIZERS]
    cases += [Case(target, "quantize", 4096, K, dtype="float32", hadamard=h) for target in (75, 90) for K, h in FP32_ROWS]
    cases += [Case(target, "scaled_mm", M, 4096, 4096, kernel="dp4a") for target in (90, 120) for M in (1, 4096)]
    cases += [
        Case(90, "scaled_mm", 512, 4096, 4096, dtype, bias, kernel="pingpong")
        for dtype, bias in (("bfloat16", False), ("float16", True))
    ]
    # Blocks loaded by the tensor memory accelerator: every tile of the rule.
    cases += [Case(90, "scaled_mm", M, K, N) for M, N, K in ((128, 1024, 1024), (128, 6144, 4096), (128, 24576, 4096))]
    return cases + attention_cases(ATTENTION_TARGETS) + expert_cases(BOUNDING_TARGETS) + shipped_cases()


def attention_cases(targets: tuple[int, ...]) -> list[Case]:
    """Every tile of the rule at the head sizes that bound it: decoding by few and many, 16 and 64 rows, prefill."""
    shapes = [(1, 4, 128, 4096), (1, 4, 128, 8192), (1, 16, 128, 8192), (2048, 4, 128, 8192), (1, 4, 256, 8192)]
    shapes += [(2048, 4, 256, 8192), (1, 8, 512, 8192), (2048, 8, 512, 8192)]
    cases = []
    for target in targets:
        dtype = "bfloat16" if target >= 80 else "float16"
        cases += [
            Case(target, "paged_attention", M, D, N, dtype, keys=keys, int8=int8)
            for M, N, D, keys in shapes
            for int8 in (False, True)
        ]
        cases += [Case(target, "paged_attention", 4, D, 16, dtype, keys=8192) for D in (128, 512)]
        cases += [Case(target, "paged_attention", M, 64, 4, dtype, keys=2048) for M in (1, 2048)]
        cases += [Case(target, "write_cache", M, 128, dtype=dtype, int8=M > 1) for M in (1, 4096)]
    return cases


def expert_cases(targets: tuple[int, ...]) -> list[Case]:
    """Every tile of the rule for experts, at the fewest tokens that get it: K that divides into steps and K that does not."""
    cases: dict[tuple, Case] = {}
    for target in targets:
        if target < 80:
            continue  # the reference in torch
        for hidden, inner in ((2048, 768), (1024, 96), (200, 100)):
            for M in [1 << i for i in range(14)]:
                plan = experts_plan(
                    M,
                    8,
                    experts=64,
                    num_global_experts=128,
                    hidden=hidden,
                    intermediate=inner,
                    capability=divmod(target, 10),
                    num_sms=NUM_SMS[target],
                )
                case = Case(target, "int8_experts", M, hidden, inner, bias=inner != 768, experts=64, top_k=8)
                cases.setdefault((target, hidden, plan), case)
    return list(cases.values())


def shipped_cases() -> list[Case]:
    """Every tile of the shipped files, at a weight and number of rows that get it."""
    cases: dict[Tile, Case] = {}
    for path in CONFIG_DIR.glob("*.json"):
        content = json.loads(path.read_text())
        gpu, capability = content["device"], tuple(content["capability"])
        for (N, K), buckets in read_table(path, gpu, capability).items():
            for M, entry in buckets.items():
                if entry.tile is not None:
                    target = capability[0] * 10 + capability[1]
                    cases.setdefault(entry.tile, Case(target, "scaled_mm", M, K, N, bias=False, gpu=gpu))
    return list(cases.values())


def full_cases() -> list[Case]:
    """Targets x ops x buckets of M x matrices of models, odd ones among them x dtypes x with and without bias."""
    matrices = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (57344, 8192), (1024, 3072), (1009, 4099), (96, 520)]
    buckets = [1 << i for i in range(14)]
    cases = []
    for target in TARGETS:
        for dtype in ("bfloat16", "float16", "float32"):
            cases += [
                Case(target, "scaled_mm", M, K, N, dtype, bias, kernel)
                for M in buckets
                for N, K in matrices
                for bias in (True, False)
                for kernel in ("", "dp4a")
            ]
            cases += [
                Case(target, op, M, K, dtype=dtype)
                for op in QUANTIZERS
                for M in (1, 4096)
                for K in (64, 520, 1024, 3072, 4099, 8192, 14336, 16384, 28672, 32768, 40000)
            ]
            cases += [
                Case(target, op, M, K, dtype=dtype, hadamard=block)
                for op in QUANTIZERS
                for M in (1, 128, 512, 4096)
                for K in (128, 896, 1024, 4096, 11008, 12288, 14336, 28672)
                for block in (16, 32, 64, 128)
                if K % block == 0
            ]
            cases += [
                Case(target, "paged_attention", M, D, N, dtype, keys=keys, int8=int8)
                for D in (64, 80, 96, 112, 128, 192, 256, 512)
                for N in (1, 4, 8, 16)
                for M, keys in ((1, 4096), (1, 32768), (4, 8192), (2048, 2048), (2048, 8192))
                for int8 in (False, True)
                if dtype == ("bfloat16" if target >= 80 else "float16")
            ]
    return cases + attention_cases(TARGETS) + expert_cases(TARGETS) + shipped_cases()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        full = metafunc.config.getoption("--aot-full", default=False)
        cases = full_cases() if full else bounding_cases()
        attention = dict.fromkeys(("paged_attention", "write_cache"), OTHER_TRITONS_ATTENTION)
        again = [case for case in cases if full or case.target in attention.get(case.op, OTHER_TRITONS_TARGETS)]
        cases += [replace(case, triton=other) for other in OTHER_TRITONS for case in again]
        metafunc.parametrize("case", cases, ids=str)


@functools.cache
def _compiled(cases: tuple[Case, ...]) -> tuple[dict[Case, Result], set[str]]:
    return compile_cases(list(cases))


@pytest.fixture
def compiled(request: pytest.FixtureRequest) -> tuple[dict[Case, Result], set[str]]:
    """Results of all cases that this run has selected, compiled together at the first use; names of the package's kernels."""
    selected = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return _compiled(tuple(item.callspec.params["case"] for item in selected))


def has_int8_tcgen05(case: Case) -> bool:
    """Triton 3.6 has no int8 product on the tensor cores of sm_100, 3.9 has."""
    version = Path(case.triton).name.removeprefix("triton-") if case.triton else triton.__version__
    return tuple(map(int, version.split(".")[:2])) >= (3, 9)


def expected_instruction(launch: Launch, case: Case) -> str | None:
    """What the launch is for: the instruction that its inner loop must have come to; None where it multiplies nothing."""
    if "dp4a" in launch.kernel:
        return "dp4a"
    if launch.kernel == "paged_attention_kernel":
        return "mma.sync" if launch.constants["INT8_DOT"] else None
    if launch.kernel == "scaled_mm_pingpong_kernel":
        return "wgmma"
    if launch.kernel not in ("scaled_mm_split_k_kernel", "grouped_mm_kernel"):
        return None
    rows = launch.constants["BLOCK_N" if launch.constants.get("SWAP") else "BLOCK_M"]
    if case.target == 90 and rows >= 64:
        return "wgmma"
    if case.target == 100 and rows >= 64 and has_int8_tcgen05(case):
        return "tcgen05"
    return "mma.sync"


def test_compiles(case: Case, compiled: tuple[dict[Case, Result], set[str]]) -> None:
    result = compiled[0][case]
    if "is not defined for option 'gpu-name'" in result.error:
        pytest.skip(f"the ptxas that comes with this Triton does not know sm_{case.target}")
    assert not result.error
    assert result.launches, "the op launched no Triton kernel"
    for launch in result.launches:
        assert launch.shared <= MAX_SHARED[case.target] * KB, launch
        assert launch.spilled_bytes == 0, launch
        expected = expected_instruction(launch, case)
        assert launch.instructions == ([expected] if expected else []), launch
        if launch.kernel == "quantize_stream_kernel" and "rms_norm" in case.op and launch.constants["CHUNKS"] > 1:
            # Long rows: two programs a multiprocessor, of which each takes 1 KB more than it asks for.
            assert 2 * (launch.shared + KB) <= 228 * KB, launch
            assert 2 * 32 * launch.constants["num_warps"] * -(-launch.registers // 8) * 8 <= 65536, launch


def test_every_kernel_is_compiled(compiled: tuple[dict[Case, Result], set[str]]) -> None:
    """A kernel that no case reaches is a gap in the cases, or is reached by nobody."""
    results, kernels = compiled
    if not results:
        pytest.skip("no case is selected")
    launched = {launch.kernel for result in results.values() for launch in result.launches}
    assert launched == kernels
