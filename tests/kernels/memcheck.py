"""Every Triton kernel once, at sizes that its tiles do not divide: what `test_memcheck` runs under compute-sanitizer."""

import torch

import w8a8_kernels
from w8a8_kernels.ops import device_facts
from w8a8_kernels.quantize import quantize_reference
from w8a8_kernels.quantize.config import MAX_BLOCK_BYTES
from w8a8_kernels.scaled_mm import scaled_mm_reference
from w8a8_kernels.scaled_mm.dp4a import scaled_mm_dp4a
from w8a8_kernels.scaled_mm.split_k import scaled_mm_split_k
from w8a8_kernels.select import has_dependent_launch
from w8a8_kernels.tiles import Tile

DTYPE = torch.bfloat16
LOOPED = MAX_BLOCK_BYTES // 2 + 64


def quantizers() -> None:
    for M, K, hadamard in ((3, 1000, 0), (3, LOOPED, 0), (300, 192, 64), (3, LOOPED, 64)):
        x, weight = torch.randn(M, K, device="cuda", dtype=DTYPE), torch.randn(K, device="cuda", dtype=DTYPE)
        codes, _ = w8a8_kernels.quantize(x, hadamard)
        expected, _ = quantize_reference(x.cpu(), hadamard)
        assert int((codes.cpu().int() - expected.int()).abs().max()) <= (1 if hadamard else 0)
        w8a8_kernels.rms_norm_quantize(x, weight, 1e-6, hadamard=hadamard)
        w8a8_kernels.add_rms_norm_quantize(x, x.clone(), weight, 1e-6, hadamard=hadamard)
        w8a8_kernels.silu_mul_quantize(torch.randn(M, 2 * K, device="cuda", dtype=DTYPE), hadamard)


def products() -> None:
    facts = device_facts(torch.device("cuda"))
    pdl = has_dependent_launch(facts.capability)
    tiles = [Tile(16, 64, 64, 4, 3, 2, swap=True), Tile(64, 64, 64, 4, 3)]
    if pdl:
        tiles += [
            Tile(16, 64, 64, 4, 3, swap=True, prefetch=128),
            Tile(16, 64, 64, 4, 3, 2, swap=True, preload=1),
            Tile(64, 64, 128, 4, 3, prefetch=128, tma=True),
            Tile(64, 64, 64, 4, 3, 2, tma=True, preload=1),
        ]
    for M, N, K in ((5, 70, 512), (70, 101, 528), (5, 33, 257)):
        args = (
            torch.randint(-127, 128, (M, K), dtype=torch.int8),
            torch.rand(M, 1),
            torch.randint(-127, 128, (N, K), dtype=torch.int8),
            torch.rand(N, 1),
            torch.randn(N).to(DTYPE),
        )
        expected = scaled_mm_reference(*args, DTYPE)
        on_gpu = [arg.cuda() for arg in args]
        for tile in tiles:
            options = {"num_sms": 132, "capability": facts.capability, "tile": tile, "pdl": pdl}
            torch.testing.assert_close(scaled_mm_split_k(*on_gpu, DTYPE, **options).cpu(), expected)
        torch.testing.assert_close(scaled_mm_dp4a(*on_gpu, DTYPE, num_sms=132).cpu(), expected)


if __name__ == "__main__":
    quantizers()
    products()
    torch.cuda.synchronize()
    print("all kernels ran")
