import pytest
import torch

from w8a8_kernels import int8_experts, quantize, quantize_amax, rms_norm_quantize, scaled_mm, silu_mul_quantize
from w8a8_kernels.scaled_mm import onednn
from w8a8_kernels.select import (
    Facts,
    cutlass_refusal,
    describe_scaled_mm,
    pingpong_refusal,
    select_quantize,
    select_scaled_mm,
)

CPU, CPU_ONEDNN = Facts(None), Facts(None, has_onednn=True)


def gpu(major: int, minor: int, has_triton: bool = True) -> Facts:
    return Facts((major, minor), has_triton=has_triton)


@pytest.mark.parametrize(
    ("facts", "product", "quantizer", "because"),
    [
        *[
            (gpu(*c), "dp4a", "triton", f"not triton: int8 tl.dot needs compute capability 8.0, this GPU has {c[0]}.{c[1]}")
            for c in ((7, 0), (7, 2), (7, 5))
        ],
        (gpu(6, 1), "torch", "torch", "not dp4a: Triton needs compute capability 7.0, this GPU has 6.1"),
        (gpu(7, 5, has_triton=False), "torch", "torch", "not dp4a: the package triton is not installed"),
        *[
            (gpu(*c), "triton", "triton", "tensor-core")
            for c in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
        ],
        (gpu(9, 0, has_triton=False), "torch", "torch", "triton is not installed"),
        (CPU_ONEDNN, "onednn", "torch", "oneDNN"),
        (CPU, "torch", "torch", "CPU build, which brings the oneDNN int8 op, is not loaded"),
    ],
)
def test_default_choice(facts: Facts, product: str, quantizer: str, because: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_W8A8_KERNEL", raising=False)
    choice = select_scaled_mm(facts)
    assert choice.kernel == product
    assert because in choice.reason
    assert select_quantize(facts).kernel == quantizer


# What vLLM's CUDA build finds on an H200.
WITH_ALL = Facts((9, 0), has_triton=True, has_cutlass=True, has_gluon=True)


def with_cutlass(major: int, minor: int) -> Facts:
    return Facts((major, minor), has_triton=True, has_cutlass=True)


@pytest.mark.parametrize(
    ("facts", "M", "N", "K", "dtype", "kernel"),
    [
        (with_cutlass(9, 0), 255, 4096, 4096, torch.bfloat16, "triton"),
        (with_cutlass(9, 0), 256, 4096, 4096, torch.bfloat16, "cutlass"),
        (with_cutlass(8, 0), 8192, 4096, 4096, torch.float16, "cutlass"),
        (with_cutlass(9, 0), 8192, 4100, 4096, torch.bfloat16, "triton"),
        (with_cutlass(9, 0), 8192, 4096, 4097, torch.bfloat16, "triton"),
        (with_cutlass(9, 0), 8192, 4096, 4096, torch.float32, "triton"),
        (gpu(9, 0), 8192, 4096, 4096, torch.bfloat16, "triton"),
        (with_cutlass(7, 5), 1, 4096, 4096, torch.float16, "cutlass"),
        (with_cutlass(7, 5), 1, 4097, 4096, torch.float16, "dp4a"),
        (with_cutlass(7, 0), 8192, 4096, 4096, torch.float16, "dp4a"),
        *[
            (with_cutlass(*c), 8192, 4096, 4096, torch.bfloat16, "triton")
            for c in ((10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
        ],
    ],
)
def test_cutlass_where_it_runs_and_wins(
    facts: Facts, M: int, N: int, K: int, dtype: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_W8A8_KERNEL", raising=False)
    assert select_scaled_mm(facts, M, N, K, dtype).kernel == kernel
    assert select_quantize(facts).kernel == "triton"


@pytest.mark.parametrize(
    ("facts", "M", "dtype", "measured", "kernel", "because"),
    [
        (with_cutlass(9, 0), 16, torch.bfloat16, "cutlass", "cutlass", "fastest here by measurement"),
        (with_cutlass(9, 0), 8192, torch.bfloat16, "cutlass", "cutlass", "fastest here by measurement"),
        (with_cutlass(9, 0), 8192, torch.bfloat16, "triton", "triton", "fastest here by measurement"),
        (with_cutlass(9, 0), 8192, torch.bfloat16, None, "cutlass", "faster from 256 rows on"),
        (with_cutlass(9, 0), 16, torch.bfloat16, None, "triton", "tensor-core"),
        (with_cutlass(9, 0), 16, torch.float32, "cutlass", "triton", "tensor-core"),
        (gpu(9, 0), 8192, torch.bfloat16, "cutlass", "triton", "tensor-core"),
        (with_cutlass(12, 0), 8192, torch.bfloat16, "cutlass", "triton", "tensor-core"),
        (gpu(9, 0), 8192, torch.bfloat16, "cutlass", "triton", "not cutlass, fastest here by measurement: vLLM's"),
        (WITH_ALL, 512, torch.bfloat16, "pingpong", "pingpong", "fastest here by measurement"),
        (
            WITH_ALL,
            512,
            torch.float32,
            "pingpong",
            "triton",
            "not pingpong, fastest here by measurement: the p",
        ),
        (
            with_cutlass(9, 0),
            512,
            torch.bfloat16,
            "pingpong",
            "cutlass",
            "not pingpong, fastest here by measurement: this",
        ),
        (with_cutlass(9, 0), 16, torch.bfloat16, "pingpong", "triton", "not pingpong, fastest here by measurement: this"),
        (with_cutlass(7, 5), 16, torch.float16, "triton", "cutlass", "not triton, fastest here by measurement: int8"),
    ],
)
def test_measurement_overrides_the_rule(
    facts: Facts,
    M: int,
    dtype: torch.dtype,
    measured: str | None,
    kernel: str,
    because: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_W8A8_KERNEL", raising=False)
    choice = select_scaled_mm(facts, M, 4096, 4096, dtype, measured=measured)
    assert choice.kernel == kernel
    assert because in choice.reason
    forced = select_scaled_mm(facts, M, 4096, 4096, dtype, measured=measured, forced="torch")
    assert forced.reason == "forced by VLLM_W8A8_KERNEL"


@pytest.mark.parametrize(
    ("facts", "N", "K", "dtype", "because"),
    [
        (with_cutlass(9, 0), 4096, 4096, torch.bfloat16, None),
        (with_cutlass(9, 0), 4100, 4096, torch.bfloat16, "multiples of 16"),
        (with_cutlass(9, 0), 4096, 4096, torch.float32, "bf16 and fp16 only"),
        (gpu(9, 0), 4096, 4096, torch.bfloat16, "is not loaded"),
        (with_cutlass(10, 0), 4096, 4096, torch.bfloat16, "raises elsewhere"),
    ],
)
def test_why_cutlass_cannot_run(facts: Facts, N: int, K: int, dtype: torch.dtype, because: str | None) -> None:
    refusal = cutlass_refusal(facts, N, K, dtype)
    assert refusal is None if because is None else because in refusal


@pytest.mark.parametrize(
    ("N", "K", "dtype", "because"),
    [
        (4096, 4096, torch.bfloat16, None),
        (4104, 4096, torch.bfloat16, "multiples of 16"),
        (4096, 4096, torch.float32, "bf16 and fp16 only"),
    ],
)
def test_why_pingpong_cannot_run(N: int, K: int, dtype: torch.dtype, because: str | None) -> None:
    refusal = pingpong_refusal(WITH_ALL, N, K, dtype)
    assert refusal is None if because is None else because in refusal


@pytest.mark.parametrize(
    "capability", [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]
)
def test_dp4a_can_be_forced_on_any_gpu(capability: tuple[int, int]) -> None:
    assert select_scaled_mm(gpu(*capability), forced="dp4a").kernel == "dp4a"
    assert select_quantize(gpu(*capability), forced="dp4a").kernel == "triton"


def test_forced_by_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_W8A8_KERNEL", "torch")
    assert select_scaled_mm(gpu(9, 0)).kernel == "torch"
    assert select_quantize(gpu(9, 0)).kernel == "torch"
    assert select_scaled_mm(CPU_ONEDNN).reason == "forced by VLLM_W8A8_KERNEL"


@pytest.mark.parametrize(
    ("facts", "forced", "message"),
    [
        (gpu(7, 5), "triton", "cannot run here: int8 tl.dot needs compute capability 8.0"),
        (CPU, "triton", "the Triton kernels need a GPU"),
        (CPU, "cutlass", "CUTLASS runs on GPUs only"),
        (gpu(9, 0), "cutlass", "brings the CUTLASS int8 op, is not loaded"),
        (with_cutlass(12, 0), "cutlass", "built for compute capability 7.5 to 9.0 and raises elsewhere"),
        (
            Facts(None, has_onednn=True, onednn_saturates=True),
            "onednn",
            "which has no VNNI instructions, the sums of oneDNN's",
        ),
        (CPU, "dp4a", "the Triton kernels need a GPU"),
        (gpu(6, 1), "dp4a", "Triton needs compute capability 7.0, this GPU has 6.1"),
        (gpu(9, 0, has_triton=False), "dp4a", "the package triton is not installed"),
        (CPU, "onednn", "is not loaded"),
        (gpu(9, 0), "onednn", "CPUs only"),
        (gpu(8, 9), "pingpong", "only GPUs of compute capability 9.0 have"),
        (gpu(10, 0), "pingpong", "only GPUs of compute capability 9.0 have"),
        (gpu(9, 0), "pingpong", "this version of triton has not the Gluon"),
        (gpu(9, 0), "tritn", "no such kernel. Known: triton, cutlass, pingpong, dp4a, onednn, torch"),
    ],
)
def test_forced_fails_loudly(facts: Facts, forced: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        select_scaled_mm(facts, forced=forced)


def test_forced_onednn_leaves_the_quantizer_ours() -> None:
    assert select_quantize(CPU_ONEDNN, forced="onednn").kernel == "torch"


@pytest.mark.parametrize(
    ("facts", "dtype", "kernels"),
    [
        (
            with_cutlass(9, 0),
            torch.bfloat16,
            ("triton (", "from 256 rows on cutlass where N and K are multiples of 16; weights"),
        ),
        (with_cutlass(9, 0), torch.float32, ("triton (",)),
        (gpu(9, 0), torch.bfloat16, ("triton (",)),
        (CPU_ONEDNN, torch.bfloat16, ("onednn (",)),
    ],
)
def test_the_log_names_the_kernels_of_few_and_of_many_rows(
    facts: Facts, dtype: torch.dtype, kernels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_W8A8_KERNEL", raising=False)
    text = describe_scaled_mm(facts, dtype)
    assert text.startswith(kernels[0])
    assert ("from 256 rows on" in text) == (len(kernels) > 1)
    assert all(kernel in text for kernel in kernels)


def test_an_unknown_measured_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="got 'fastest' as the kernel measured fastest, expected one of triton, cutlass"):
        select_scaled_mm(WITH_ALL, 1, 4096, 4096, measured="fastest")


@pytest.mark.parametrize("forced", ["triton", "onednn"])
def test_a_forced_kernel_fails_on_a_cpu_without_it(forced: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also outside vLLM, which asks when it starts."""
    monkeypatch.setenv("VLLM_W8A8_KERNEL", forced)
    monkeypatch.setattr("w8a8_kernels.ops.has_onednn", lambda: False)
    x, weight = torch.ones(2, 16, dtype=torch.int8), torch.ones(16, 16, dtype=torch.int8)
    with pytest.raises(ValueError, match=f"VLLM_W8A8_KERNEL={forced} cannot run here"):
        scaled_mm(x, torch.ones(2, 1), weight, torch.ones(16, 1))


def test_ops_of_a_cpu_fail_with_a_kernel_that_it_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_W8A8_KERNEL", "dp4a")
    x = torch.ones(2, 16)
    experts = torch.ones(1, 32, 16, dtype=torch.int8), torch.ones(1, 32, 1), torch.ones(1, 16, 16, dtype=torch.int8)
    for op in (
        lambda: quantize(x),
        lambda: quantize_amax(x),
        lambda: rms_norm_quantize(x, torch.ones(16), 1e-6),
        lambda: silu_mul_quantize(x),
        lambda: int8_experts(x, *experts, torch.ones(1, 16, 1), torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64)),
    ):
        with pytest.raises(ValueError, match="VLLM_W8A8_KERNEL=dp4a cannot run here: the Triton kernels need a GPU"):
            op()


def test_that_sums_saturate_is_asked_again_when_the_op_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may use the kernels first, and load vLLM's ops later."""
    monkeypatch.setattr(onednn, "has_onednn", lambda: False)
    assert not onednn.onednn_saturates()
    monkeypatch.setattr(onednn, "has_onednn", lambda: True)
    monkeypatch.setattr(onednn, "_saturates", lambda: True)
    assert onednn.onednn_saturates()
