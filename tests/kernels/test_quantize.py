import pytest
import torch
from inputs import GPU_SHAPES, SMALL_SHAPES, activations, same_bits

import w8a8_kernels
from w8a8_kernels.quantize import quantize_reference

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def triton_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return pytest.importorskip("w8a8_kernels.quantize.row").quantize_row(x)


def assert_same(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    for name, a, b in zip(("codes", "scale"), got, expected, strict=True):
        assert a.shape == b.shape
        assert same_bits(a.cpu(), b.cpu()), f"{name} differ in {(a.cpu() != b.cpu()).sum()} places"


@pytest.mark.parametrize(
    ("row", "codes", "scale"),
    [
        pytest.param([127.0, 0.5, 1.5, 2.5, -0.5, -127.0], [127, 0, 2, 2, 0, -127], 1.0, id="ties-to-even"),
        pytest.param([0.0, 0.0], [0, 0], 1.0, id="zero-row"),
        pytest.param([1.0, float("nan")], [0, 0], float("nan"), id="nan-row"),
        pytest.param([1.0, float("-inf")], [0, 0], float("nan"), id="inf-row"),
        pytest.param([1e-45, 0.0], [0, 0], 1.0, id="scale-underflows"),
        pytest.param([-254.0, 3.0], [-127, 2], 2.0, id="half-codes"),
    ],
)
@pytest.mark.parametrize(
    "quantize", [quantize_reference, triton_quantize, w8a8_kernels.quantize], ids=["reference", "triton", "op"]
)
def test_known_answers(quantize, row: list[float], codes: list[int], scale: float, device: torch.device) -> None:
    got_codes, got_scale = quantize(torch.tensor([row], device=device))
    assert got_codes.tolist() == [codes]
    assert same_bits(got_scale.cpu(), torch.tensor([[scale]]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("M", "K"), [*SMALL_SHAPES, (2, 8193)], ids=lambda v: str(v))
def test_triton_equals_reference(M: int, K: int, dtype: torch.dtype, device: torch.device) -> None:
    x = activations(M, K, dtype, device)
    assert_same(triton_quantize(x), quantize_reference(x.cpu()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("M", "K"), GPU_SHAPES, ids=lambda v: str(v))
def test_op_equals_cpu_reference_on_gpu(M: int, K: int, dtype: torch.dtype, device: torch.device) -> None:
    x = activations(M, K, dtype, device)
    assert_same(w8a8_kernels.quantize(x), quantize_reference(x.cpu()))


@pytest.mark.parametrize("view", ["row-stride", "column-stride", "offset", "expanded"])
def test_strided_rows(view: str, device: torch.device) -> None:
    base = activations(24, 200, torch.bfloat16, device)
    x = {
        "row-stride": base[::3, :77],
        "column-stride": base.t(),
        "offset": base[5:, 3:],
        "expanded": base[:1].expand(7, -1),
    }[view]
    assert_same(triton_quantize(x), quantize_reference(x.cpu().contiguous()))
    assert_same(w8a8_kernels.quantize(x), quantize_reference(x.cpu().contiguous()))


def test_bad_rows_leave_the_others_alone(device: torch.device) -> None:
    x = torch.randn(9, 130, generator=torch.Generator().manual_seed(3)).to(device)
    clean = w8a8_kernels.quantize(x)
    x[4, 7], x[6, 129] = float("nan"), float("inf")
    codes, scale = w8a8_kernels.quantize(x)
    others = [0, 1, 2, 3, 5, 7, 8]
    assert torch.equal(codes[others], clean[0][others])
    assert torch.equal(scale[others], clean[1][others])
    assert scale[[4, 6]].isnan().all()
    assert not codes[[4, 6]].any()


def test_op_contract(device: torch.device) -> None:
    """Schema, fake implementation and tracing agree with what the op does."""
    x = activations(5, 33, torch.bfloat16, device)[:1]
    torch.library.opcheck(torch.ops.w8a8.quantize.default, (x,))


@pytest.mark.parametrize(
    "x", [torch.zeros(3), torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int32)], ids=["1-D", "3-D", "int32"]
)
def test_refuses(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected \\[M, K\\] in bf16"):
        w8a8_kernels.quantize(x)
