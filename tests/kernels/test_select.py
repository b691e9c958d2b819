import pytest

from w8a8_kernels.select import Facts, select_quantize, select_scaled_mm

CPU, CPU_ONEDNN = Facts(None), Facts(None, has_onednn=True)


def gpu(major: int, minor: int, has_triton: bool = True) -> Facts:
    return Facts((major, minor), has_triton=has_triton)


@pytest.mark.parametrize(
    ("facts", "product", "quantizer", "because"),
    [
        (gpu(7, 0), "torch", "torch", "needs compute capability 8.0, this GPU has 7.0"),
        (gpu(7, 5), "torch", "torch", "needs compute capability 8.0, this GPU has 7.5"),
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
        (CPU, "onednn", "is not loaded"),
        (gpu(9, 0), "onednn", "CPUs only"),
        (gpu(9, 0), "tritn", "no such kernel. Known: triton, onednn, torch"),
    ],
)
def test_forced_fails_loudly(facts: Facts, forced: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        select_scaled_mm(facts, forced=forced)


def test_forced_onednn_leaves_the_quantizer_ours() -> None:
    assert select_quantize(CPU_ONEDNN, forced="onednn").kernel == "torch"
