import pytest
import torch
from inputs import activations, codes, same_bits
from torch import library

import w8a8_kernels
from w8a8_kernels.quantize import quantize_reference
from w8a8_kernels.scaled_mm import int32_mm_reference, scaled_mm_reference

SMALL = [(0, 8, 8), (1, 1, 1), (1, 17, 33), (3, 64, 128), (16, 33, 257), (17, 130, 96), (65, 70, 300)]
GPU = [
    (m, n, k)
    for m in (0, 1, 3, 16, 17, 64, 65, 257, 4096)
    for n, k in ((1, 1), (17, 33), (101, 257), (512, 1024), (1009, 4099), (6144, 4096), (4096, 12288))
]
OUT_DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def operands(M: int, N: int, K: int, dtype: torch.dtype, device: torch.device, bias: bool):
    """Codes and scales of real rows (bad ones included), weights over the whole int8 range, outputs of ordinary size."""
    x, x_scale = quantize_reference(activations(M, K, torch.float32, torch.device("cpu")))
    weight_scale = torch.rand(N, 1, generator=torch.Generator().manual_seed(2)) / (127 * max(K, 1) ** 0.5)
    bias = torch.randn(N, generator=torch.Generator().manual_seed(4)).to(dtype).to(device) if bias else None
    return x.to(device), x_scale.to(device), codes(N, K, device), weight_scale.to(device), bias


def assert_one_rounding(got: torch.Tensor, args: tuple, out_dtype: torch.dtype) -> None:
    """Each value is the exact result, rounded in fp32 by few operations and then once to the output dtype."""
    x, x_scale, weight, weight_scale, bias = (None if a is None else a.cpu() for a in args)
    acc = torch.tensor(x.double().numpy() @ weight.double().numpy().T)
    terms = acc * x_scale.double() * weight_scale.double().view(1, -1)
    exact = terms + (0 if bias is None else bias.double())
    magnitude = terms.abs() + (0 if bias is None else bias.double().abs())
    finfo = torch.finfo(out_dtype)
    # Half a unit in the last place of the output, and four fp32 roundings (sum to fp32, two scales, bias) of what is added.
    bound = exact.abs() * finfo.eps / 2 + magnitude * 4 * torch.finfo(torch.float32).eps + finfo.smallest_normal * finfo.eps
    got = got.cpu().double()
    assert got.shape == exact.shape
    assert torch.equal(got.isnan(), exact.isnan())
    error = (got - exact).abs().nan_to_num(0)
    assert bool((error <= bound.nan_to_num(0)).all()), (
        f"off by {(error / bound.nan_to_num(1)).max():.3f} of what rounding allows"
    )


def triton_mm(args: tuple, out_dtype: torch.dtype, tile_name: str = "default") -> torch.Tensor:
    split_k = pytest.importorskip("w8a8_kernels.scaled_mm.split_k")
    tile = {
        "default": None,
        "split-4": split_k.Tile(16, 32, 64, num_warps=4, num_stages=2, split_k=4),
        "swap": split_k.Tile(16, 64, 64, num_warps=4, num_stages=2, split_k=2, swap=True),
        "wide": split_k.Tile(64, 64, 64, num_warps=4, num_stages=2),
        "tma": split_k.Tile(64, 32, 128, num_warps=4, num_stages=3, split_k=2, tma=True),
        "preload": split_k.Tile(16, 64, 64, num_warps=4, num_stages=2, split_k=2, swap=True, preload=2),
        "tma-preload": split_k.Tile(64, 32, 64, num_warps=4, num_stages=3, split_k=2, tma=True, preload=1),
        "tma-swap": split_k.Tile(16, 64, 128, num_warps=4, num_stages=3, swap=True, tma=True),
    }[tile_name]
    return split_k.scaled_mm_split_k(*args, out_dtype, num_sms=132, capability=(9, 0), tile=tile)


@pytest.mark.parametrize(("M", "N", "K"), SMALL)
def test_int32_sums_are_exact(M: int, N: int, K: int) -> None:
    x, weight = codes(M, K, torch.device("cpu")), codes(N, K, torch.device("cpu"), seed=7)
    assert torch.equal(int32_mm_reference(x, weight), x.int() @ weight.int().t())


def test_int32_sums_are_exact_at_full_range() -> None:
    K = 131072
    x, weight = torch.full((1, K), -128, dtype=torch.int8), torch.full((1, K), 127, dtype=torch.int8)
    assert int32_mm_reference(x, weight).item() == -128 * 127 * K


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize(("M", "N", "K"), SMALL)
def test_reference_rounds_once(M: int, N: int, K: int, out_dtype: torch.dtype, bias: bool) -> None:
    args = operands(M, N, K, out_dtype, torch.device("cpu"), bias)
    assert_one_rounding(scaled_mm_reference(*args, out_dtype), args, out_dtype)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("tile", ["default", "split-4", "swap", "wide", "tma", "tma-swap", "tma-preload", "preload"])
@pytest.mark.parametrize(("M", "N", "K"), SMALL)
def test_triton_rounds_once(M: int, N: int, K: int, tile: str, bias: bool, device: torch.device) -> None:
    # The interpreter truncates when it casts to bf16 (seen on 3.6.0 and 3.9.0); hardware rounds to nearest even.
    for out_dtype in OUT_DTYPES if device.type == "cuda" else (torch.float16, torch.float32):
        args = operands(M, N, K, out_dtype, device, bias)
        assert_one_rounding(triton_mm(args, out_dtype, tile), args, out_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("M", "N", "K"), GPU)
def test_op_rounds_once_on_gpu(M: int, N: int, K: int, out_dtype: torch.dtype, bias: bool, device: torch.device) -> None:
    args = operands(M, N, K, out_dtype, device, bias)
    got = w8a8_kernels.scaled_mm(*args, out_dtype)
    assert_one_rounding(got, args, out_dtype)
    assert same_bits(got, w8a8_kernels.scaled_mm(*args, out_dtype)), "two runs differ"


@pytest.mark.parametrize(("M", "N", "K"), [(1, 33, 128), (70, 100, 272), (65, 64, 16), (3, 200, 1040)])
def test_boxes_beyond_the_matrix_are_zero(M: int, N: int, K: int, device: torch.device) -> None:
    """Tiles that the tensor memory accelerator loads, which K % 16 == 0 allows, give the same bits as others."""
    if device.type == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    args = operands(M, N, K, torch.float16, device, bias=True)
    for tile in ("tma", "tma-swap"):
        assert same_bits(triton_mm(args, torch.float16, tile), triton_mm(args, torch.float16))


@pytest.mark.parametrize("K", [128, 256, 640, 272])
def test_preloaded_blocks_change_no_bit(K: int, device: torch.device) -> None:
    """All of K in registers before the loop, some, and a K that has no whole blocks."""
    if device.type == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    args = operands(5, 70, K, torch.float16, device, bias=False)
    for tile in ("preload", "tma-preload"):
        assert same_bits(triton_mm(args, torch.float16, tile), triton_mm(args, torch.float16))


@pytest.mark.parametrize("split_k", [1, 2, 3, 8])
def test_split_does_not_change_a_bit(split_k: int, device: torch.device) -> None:
    module = pytest.importorskip("w8a8_kernels.scaled_mm.split_k")
    args = operands(17, 70, 777, torch.bfloat16, device, bias=True)
    got = [
        module.scaled_mm_split_k(
            *args, torch.bfloat16, num_sms=1, capability=(9, 0), tile=module.Tile(16, 32, 64, 4, 2, split_k=s)
        )
        for s in (1, split_k)
    ]
    assert same_bits(got[0], got[1])


PINGPONG = [(1, 16, 16), (17, 48, 32), (129, 272, 1040), (300, 144, 4096), (512, 4096, 4096), (1000, 6144, 1024)]
PINGPONG += [(2048, 1024, 3072), (8192, 2064, 768), (65536, 256, 128), (257, 4096, 12288)]


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("layout", ["contiguous", "apart", "misaligned"])
@pytest.mark.parametrize(("M", "N", "K"), PINGPONG)
def test_pingpong_gives_the_same_bits(
    M: int, N: int, K: int, layout: str, bias: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As split-K's, for fewer tiles than programs and more, fewer steps than stages and more, and tiles that reach beyond."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    dtype = torch.float16 if bias else torch.bfloat16
    x, x_scale, weight, weight_scale, b = operands(M, N, K, dtype, device, bias)
    expected = triton_mm((x, x_scale, weight, weight_scale, b), dtype)
    if layout != "contiguous":
        first = 0 if layout == "apart" else 3
        x = x.new_zeros(M, K + 16)[:, first : first + K].copy_(x)
        weight = weight.new_zeros(N, K + 16)[:, first : first + K].copy_(weight)
    monkeypatch.setenv("VLLM_W8A8_KERNEL", "pingpong")
    for _ in range(2):
        poison = torch.full((M, N), float("nan"), dtype=dtype, device=device)
        del poison  # the op is given its memory
        assert same_bits(w8a8_kernels.scaled_mm(x, x_scale, weight, weight_scale, b, dtype), expected)


def test_zero_and_nan_rows(device: torch.device) -> None:
    args = operands(9, 40, 64, torch.float16, device, bias=True)
    out = triton_mm(args, torch.float16)
    assert torch.equal(out[1], args[4]), "a zero row gives exactly the bias"
    assert out[[2, 3]].isnan().all()
    assert not out[[0, 1, 4, 5, 6, 7, 8]].isnan().any()


def test_fp16_overflow_is_inf(device: torch.device) -> None:
    x, weight = (
        torch.full((1, 64), 127, dtype=torch.int8, device=device),
        torch.full((2, 64), 127, dtype=torch.int8, device=device),
    )
    one = torch.ones(2, 1, device=device)
    assert w8a8_kernels.scaled_mm(x, one[:1], weight, one, None, torch.float16).isinf().all()


@pytest.mark.gpu
def test_cuda_graph_replays_on_changed_inputs(device: torch.device) -> None:
    K, N = 1024, 768
    weight, weight_scale = codes(N, K, device), torch.rand(N, 1, device=device) / 1e4
    x = torch.randn(5, K, device=device, dtype=torch.bfloat16)
    for _ in range(2):
        w8a8_kernels.int8_linear(x, weight, weight_scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = w8a8_kernels.int8_linear(x, weight, weight_scale)
    for seed in range(3):
        x.copy_(torch.randn(5, K, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert same_bits(out, w8a8_kernels.int8_linear(x, weight, weight_scale))


@pytest.mark.gpu
def test_offsets_beyond_int32(device: torch.device) -> None:
    """Rows of x more than 2^31 elements apart."""
    base = torch.zeros(2**31 + 4096, dtype=torch.bfloat16, device=device)
    x = base.as_strided((2, 512), (2**31 + 512, 1))
    x.copy_(torch.randn(2, 512))
    weight, weight_scale = codes(64, 512, device), torch.rand(64, 1, device=device)
    assert same_bits(
        w8a8_kernels.int8_linear(x, weight, weight_scale), w8a8_kernels.int8_linear(x.contiguous(), weight, weight_scale)
    )


def test_compiled_equals_eager(device: torch.device) -> None:
    weight, weight_scale = codes(24, 40, device), torch.rand(24, 1, device=device) / 1e3
    x = activations(9, 40, torch.bfloat16, device)
    compiled = torch.compile(w8a8_kernels.int8_linear, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (x, x[:3], x.view(3, 3, 40)):
        assert same_bits(compiled(rows, weight, weight_scale), w8a8_kernels.int8_linear(rows, weight, weight_scale))


def test_op_contract(device: torch.device) -> None:
    args = operands(3, 24, 40, torch.bfloat16, device, bias=True)
    library.opcheck(torch.ops.w8a8.scaled_mm.default, (*args, torch.bfloat16))


BAD = {
    "x": lambda a: a.__setitem__("x", a["x"].float()),
    "x_scale": lambda a: a.__setitem__("x_scale", a["x_scale"].view(-1)),
    "weight": lambda a: a.__setitem__("weight", a["weight"][:, 1:]),
    "weight_scale": lambda a: a.__setitem__("weight_scale", a["weight_scale"].half()),
    "bias": lambda a: a.__setitem__("bias", torch.zeros(3)),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses(name: str) -> None:
    values = operands(3, 24, 40, torch.bfloat16, torch.device("cpu"), bias=True)
    args = dict(zip(("x", "x_scale", "weight", "weight_scale", "bias"), values, strict=True))
    BAD[name](args)
    with pytest.raises(ValueError, match=f"scaled_mm: got {name} of shape .*expected"):
        w8a8_kernels.scaled_mm(**args)


def test_refuses_overflowing_sums() -> None:
    K = 132105
    with pytest.raises(ValueError, match="could overflow"):
        w8a8_kernels.scaled_mm(
            torch.zeros(1, K, dtype=torch.int8), torch.ones(1, 1), torch.zeros(1, K, dtype=torch.int8), torch.ones(1, 1)
        )


@pytest.mark.parametrize("wrong", [{"out_dtype": torch.int8}, {"x": torch.zeros(40, dtype=torch.int8)}])
def test_refuses_what_is_no_matrix_or_no_dtype_of_results(wrong: dict) -> None:
    values = operands(3, 24, 40, torch.bfloat16, torch.device("cpu"), bias=False)
    args = dict(zip(("x", "x_scale", "weight", "weight_scale"), values, strict=False))
    with pytest.raises(ValueError, match=r"scaled_mm: got (out_dtype torch.int8|x of shape \(40,\))"):
        w8a8_kernels.scaled_mm(**(args | wrong))


@pytest.mark.parametrize(
    ("weight", "scale", "message"),
    [
        (torch.zeros(8, 64), torch.ones(8, 1), "pack_weight: got weight of shape .* torch.float32"),
        (torch.zeros(8, 64, dtype=torch.int8), torch.ones(4, 1), r"pack_weight: got weight_scale of shape \(4, 1\)"),
        (torch.zeros(1, 132105, dtype=torch.int8), torch.ones(1, 1), "pack_weight: got K = 132105"),
    ],
)
def test_packing_refuses(weight: torch.Tensor, scale: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        w8a8_kernels.pack_weight(weight, scale, torch.bfloat16)


LINEAR = {
    "x": torch.zeros(5, 64),
    "weight": torch.zeros(8, 64, dtype=torch.int8),
    "weight_scale": torch.ones(8, 1),
    "bias": torch.zeros(8),
    "hadamard": 0,
    "amax": None,
}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": torch.zeros(5, 64, dtype=torch.int32)}, "got x of shape .* dtype torch.int32"),
        ({"x": torch.tensor(1.0)}, r"got x of shape \(\)"),
        ({"x": torch.zeros(5, 32)}, r"got weight of shape \(8, 64\) .* expected \(8, 32\)"),
        ({"weight": torch.zeros(8, 64, dtype=torch.uint8)}, "got weight .* torch.uint8"),
        ({"weight_scale": torch.ones(8)}, r"got weight_scale of shape \(8,\)"),
        ({"bias": torch.zeros(1)}, r"got bias of shape \(1,\) .* expected \(8,\)"),
        ({"amax": torch.ones(1, 1)}, r"got amax of shape \(1, 1\) .* expected \(5, 1\)"),
        ({"hadamard": 48}, "int8_linear: got a block of 48"),
        ({"weight": None}, "int8_linear: got neither weight nor packed"),
        ({"weight": torch.zeros(8, 64, dtype=torch.int8, device="meta")}, "got weight on meta, expected cpu"),
        ({"packed": torch.tensor(1)}, "got a packed weight one that was released or packed by another process"),
        (
            {"x": torch.zeros(1, 132160), "weight": torch.zeros(8, 132160, dtype=torch.int8)},
            "int8_linear: got K = 132160, expected at most 132104",
        ),
    ],
)
def test_linear_refuses(wrong: dict, message: str) -> None:
    w8a8_kernels.int8_linear(**LINEAR)
    with pytest.raises(ValueError, match=message):
        w8a8_kernels.int8_linear(**(LINEAR | wrong))
