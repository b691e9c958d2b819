"""The attention kernel against fp32 torch."""

import numpy as np
import pytest
import torch

from w8a8_kernels.attention import int8_cache_views, page_bytes, write_cache
from w8a8_kernels.attention.config import AttentionPlan, AttentionTile
from w8a8_kernels.attention.launch import paged_attention
from w8a8_kernels.attention.reference import paged_attention_reference
from w8a8_kernels.quantize.reference import quantize_reference
from w8a8_kernels.tiles import power_of_two

SMALL = AttentionTile(block_m=16, block_n=16, num_warps=4, num_stages=2)


@pytest.fixture(autouse=True)
def bf16_products(device, monkeypatch) -> None:
    """Triton's interpreter holds bf16 as the integers of its bits, and `tl.dot` multiplies these (3.9): widened to fp32."""
    if device.type == "cuda":
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot = InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    monkeypatch.setattr(
        InterpreterBuilder, "create_dot", lambda self, a, b, *rest: create_dot(self, widened(a), widened(b), *rest)
    )


def inputs(
    device,
    lens: list[tuple[int, int]],
    heads=4,
    kv_heads=2,
    D=64,
    block_size=16,
    dtype=torch.float32,
    int8=False,
    seed=0,
) -> dict:
    """Sequences of (queries, keys), whose blocks lie in the cache in a random order, among blocks of NaN.

    Keys beyond a sequence's own in its last block are NaN, too, or codes with a NaN scale.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    counts = [-(-keys // block_size) for _, keys in lens]
    n_blocks = 2 * sum(counts) + 3
    order = torch.randperm(n_blocks, generator=generator)
    table = torch.full((len(lens), max(counts) + 2), n_blocks + 7, dtype=torch.int32)
    cache = torch.full((2, n_blocks, block_size, kv_heads, D), float("nan"))
    used = 0
    for b, ((_, keys), count) in enumerate(zip(lens, counts, strict=True)):
        mine = order[used : used + count]
        table[b, :count] = mine.int()
        for kind in cache:
            values = torch.full((count * block_size, kv_heads, D), float("nan"))
            values[:keys] = random(keys, kv_heads, D)
            kind[mine] = values.reshape(count, block_size, kv_heads, D)
        used += count
    starts = torch.tensor([0, *torch.tensor([queries for queries, _ in lens]).cumsum(0)], dtype=torch.int32)
    args = {
        "q": random(int(starts[-1]), heads, D).to(dtype),
        "block_table": table,
        "seq_lens": torch.tensor([keys for _, keys in lens], dtype=torch.int32),
        "query_start_loc": starts,
    }
    if int8:
        pages = torch.randint(-128, 128, (n_blocks, page_bytes(block_size, kv_heads, D)), generator=generator).to(torch.int8)
        key, value, key_scale, value_scale = views = int8_cache_views(pages, block_size, kv_heads, D)
        scale = cache.abs().amax(-1) / 127
        codes = (cache / scale[..., None]).round()
        written = ~scale.isnan()
        for i, (to_codes, to_scale) in enumerate(((key, key_scale), (value, value_scale))):
            to_codes[written[i]] = codes[i][written[i]].to(torch.int8)
            to_scale.copy_(scale[i])
        args |= dict(zip(("key_cache", "value_cache", "key_scale", "value_scale"), views, strict=True))
    else:
        args |= {"key_cache": cache[0].to(dtype), "value_cache": cache[1].to(dtype)}
    return {name: value.to(device) for name, value in args.items()} | {"scale": D**-0.5}


def check(args: dict, lens, tolerance=2e-6, tile=SMALL, splits=1, **options) -> None:
    expected = paged_attention_reference(**args, **options)
    most = {"most_queries": max(queries for queries, _ in lens), "most_keys": max(keys for _, keys in lens)}
    group = args["q"].shape[1] // args["key_cache"].shape[2]
    one_tile, one_query = most["most_queries"] * power_of_two(group) <= tile.block_m, most["most_queries"] == 1
    plan = AttentionPlan(tile, one_tile, splits, one_query=tile.int8_dot and one_query)
    got = paged_attention(**args, **options, **most, plan=plan).float()
    error = (got - expected).norm() / expected.norm()
    assert error < tolerance, float(error)


DECODE = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 100)]
MIXED = [(5, 5), (1, 33), (17, 40), (0, 0), (16, 16), (31, 31)]


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
def test_lengths(device, lens, splits):
    check(inputs(device, lens), lens, splits=splits)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not causal"])
@pytest.mark.parametrize("window", [1, 15, 16, 17, 40])
def test_windows(device, window, causal):
    lens = [(1, 70), (20, 70), (33, 33)]
    check(inputs(device, lens), lens, window=window, causal=causal, splits=2)


def test_not_causal(device):
    check(inputs(device, MIXED), MIXED, causal=False)


@pytest.mark.parametrize("option", ["softcap", "sinks", "alibi_slopes"])
@pytest.mark.parametrize("splits", [1, 4])
def test_scores(device, option, splits):
    lens = [(1, 50), (9, 30)]
    args = inputs(device, lens)
    values = {
        "softcap": 2.0,
        "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]),
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]),
    }
    value = values[option]
    check(args, lens, splits=splits, **{option: value.to(device) if torch.is_tensor(value) else value})


@pytest.mark.parametrize("D", [64, 80, 96, 112, 128, 192, 256, 512])
def test_head_sizes(device, D):
    lens = [(1, 20), (3, 18)]
    check(inputs(device, lens, D=D), lens, splits=2)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (5, 1), (8, 1), (16, 1)])
def test_groups(device, heads, kv_heads):
    lens = [(1, 20), (3, 18)]
    check(inputs(device, lens, heads=heads, kv_heads=kv_heads), lens)


@pytest.mark.parametrize("block_size", [16, 32, 48, 128])
def test_block_sizes(device, block_size):
    lens = [(1, 130), (3, 49)]
    check(inputs(device, lens, block_size=block_size), lens, splits=2)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("D", [64, 80])
def test_int8_cache(device, splits, D):
    lens = [(1, 50), (9, 30)]
    check(inputs(device, lens, int8=True, D=D), lens, splits=splits)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("lens", "group"), [(DECODE, 4), (DECODE, 16), ([(3, 50), (1, 20), (4, 4)], 5)])
def test_int8_products(device, lens, group, splits):
    """Queries and weights of 16 bits: 1 / 127 / 254 / 2 of the greatest at most, from which relative errors of sums follow."""
    tile = AttentionTile(power_of_two(max(8, group * lens[0][0])), 32, num_warps=4, num_stages=2, int8_dot=True)
    check(inputs(device, lens, int8=True, heads=group, kv_heads=1), lens, tolerance=1e-4, tile=tile, splits=splits)


@pytest.mark.parametrize("one_tile", [True, False])
def test_a_plan_for_one_query_refuses_more(device, one_tile):
    tile = AttentionTile(block_m=8, block_n=32, num_warps=1, num_stages=3, int8_dot=True)
    plan = AttentionPlan(tile, one_tile, splits=1, one_query=True)
    with pytest.raises(ValueError, match="for 2 queries x 2 heads"):
        paged_attention(**inputs(device, [(2, 40)], int8=True), most_queries=2, most_keys=40, plan=plan)


@pytest.mark.parametrize("option", [{"softcap": 2.0}, {"window": 17}, {"causal": False}])
def test_int8_products_of_scores(device, option):
    lens = [(1, 50), (2, 33)]
    tile = AttentionTile(8, 32, num_warps=4, num_stages=2, int8_dot=True)
    check(inputs(device, lens, int8=True), lens, tolerance=1e-4, tile=tile, splits=2, **option)


@pytest.mark.parametrize("int8", [False, True])
def test_without_dot(device, int8):
    tile = AttentionTile(block_m=2, block_n=8, num_warps=4, num_stages=1, dot=False)
    check(inputs(device, DECODE, int8=int8), DECODE, tile=tile, splits=2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 6e-3), (torch.float16, 1e-3)])
def test_half_precision(device, dtype, tolerance):
    check(inputs(device, MIXED, dtype=dtype), MIXED, tolerance=tolerance)


def check_rule(args: dict, lens, tolerance: float, **options) -> None:
    """With the plan by rule."""
    expected = paged_attention_reference(**args, **options)
    most = {"most_queries": max(queries for queries, _ in lens), "most_keys": max(keys for _, keys in lens)}
    got = paged_attention(**args, **options, **most).float()
    error = (got - expected).norm() / expected.norm()
    assert error < tolerance, float(error)
    again = paged_attention(**args, **options, **most).float()
    assert torch.equal(got, again)


@pytest.mark.gpu
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    ("D", "heads", "kv_heads"),
    [
        *[(64, 8, 1), (80, 4, 4), (96, 4, 4), (112, 8, 2), (128, 8, 2)],
        *[(128, 14, 2), (128, 16, 1), (192, 6, 2), (256, 8, 4), (512, 8, 1)],
    ],
)
def test_rule_on_gpu(device, D, heads, kv_heads, int8):
    dtype, tolerance = (torch.float16, 1e-3) if D == 112 else (torch.bfloat16, 4e-3)
    for lens in ([(1, 1), (1, 700), (1, 3000)], [(4, 40), (2, 1500)], [(300, 300), (1, 33), (65, 900), (0, 0)]):
        check_rule(inputs(device, lens, heads, kv_heads, D, dtype=dtype, int8=int8), lens, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    "option",
    [{"softcap": 5.0}, {"window": 127}, {"window": 128}, {"window": 129}, {"causal": False}, {"sinks": 0}, {"alibi": 0}],
)
def test_options_on_gpu(device, option, int8):
    if "sinks" in option:
        option = {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)}
    if "alibi" in option:
        option = {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0], device=device)}
    for lens in ([(1, 127), (1, 128), (1, 129), (1, 1000)], [(200, 200), (70, 500)]):
        for block_size in (16, 48):
            args = inputs(device, lens, block_size=block_size, D=128, dtype=torch.bfloat16, int8=int8)
            check_rule(args, lens, 4e-3, **option)


@pytest.mark.gpu
@pytest.mark.parametrize("int8", [False, True])
def test_cache_beyond_32_bit_offsets_on_gpu(device, int8):
    """The last blocks of a cache of more than 2^31 elements."""
    kv_heads, D, block_size, lens = 8, 128, 16, [(1, 40), (20, 33)]
    small = inputs(device, lens, 16, kv_heads, D, dtype=torch.bfloat16, int8=int8)
    n_small = len(small["key_cache"])
    n_blocks = 2**31 // (kv_heads * D * block_size) + 2 * n_small
    if int8:
        pages = torch.zeros(n_blocks, page_bytes(block_size, kv_heads, D), dtype=torch.int8, device=device)
        views = int8_cache_views(pages, block_size, kv_heads, D)
        names = ("key_cache", "value_cache", "key_scale", "value_scale")
    else:
        views = torch.zeros(n_blocks, 2, block_size, kv_heads, D, dtype=torch.bfloat16, device=device).unbind(1)
        names = ("key_cache", "value_cache")
    large = dict(small)
    for name, view in zip(names, views, strict=True):
        view[-n_small:] = small[name]
        large[name] = view
    large["block_table"] = small["block_table"] + (n_blocks - n_small)
    most = {"most_queries": 20, "most_keys": 40}
    assert torch.equal(paged_attention(**large, **most), paged_attention(**small, **most))


@pytest.mark.gpu
def test_queries_beyond_32_bit_offsets_on_gpu(device):
    """Rows x heads x size beyond 2^31."""
    heads, D, T = 32, 128, 2**31 // (32 * 128) + 100
    args = inputs(device, [(64, 64)], heads, 8, D, dtype=torch.bfloat16)
    q = args["q"].repeat(-(-T // 64), 1, 1)
    n = len(q) // 64
    args |= {
        "q": q,
        "seq_lens": args["seq_lens"].expand(n).contiguous(),
        "block_table": args["block_table"].expand(n, -1),
        "query_start_loc": torch.arange(n + 1, dtype=torch.int32, device=device) * 64,
    }
    out = paged_attention(**args, most_queries=64, most_keys=64)
    assert torch.equal(out[:64], out[-64:])
    assert not out[-64:].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_written_cache_on_gpu(device, dtype):
    check_written(device, dtype, T=300, kv_heads=8, D=128)


@pytest.mark.parametrize(("T", "kv_heads", "D", "block_size"), [(3, 2, 64, 16), (70, 1, 80, 16), (66, 2, 64, 48)])
def test_written_cache(device, T, kv_heads, D, block_size):
    check_written(device, torch.float32, T, kv_heads, D, block_size)


def check_written(device, dtype, T, kv_heads, D, block_size=16) -> None:
    """Tokens in their slots, codes and scales those of the quantizer's reference, and nothing else touched."""
    generator = torch.Generator().manual_seed(0)
    n_blocks = 2 * -(-T // block_size)
    qkv = torch.randn(T + 2, 4 * kv_heads, D, generator=generator).to(device, dtype)
    key, value = qkv[:, kv_heads : 2 * kv_heads], qkv[:, 2 * kv_heads : 3 * kv_heads]
    key[0, 0] = 0
    slots = torch.randperm(n_blocks * block_size, generator=generator)[:T].to(device)
    slots[1] = -1
    written = slots[slots >= 0]
    where = (written // block_size, written % block_size)
    key, value = key[:T], value[:T]

    cache = torch.full((n_blocks, 2, block_size, kv_heads, D), 7.0, dtype=dtype, device=device)
    write_cache(key, value, *cache.unbind(1), slots)
    expected = torch.full_like(cache, 7.0)
    expected[where[0], 0, where[1]] = key[slots >= 0]
    expected[where[0], 1, where[1]] = value[slots >= 0]
    assert torch.equal(cache, expected)

    pages = torch.full((n_blocks, page_bytes(block_size, kv_heads, D)), 7, dtype=torch.int8, device=device)
    untouched = pages.clone()
    views = int8_cache_views(pages, block_size, kv_heads, D)
    write_cache(key, value, *views[:2], slots, *views[2:])
    for codes, scale, source in zip(views[:2], views[2:], (key, value), strict=True):
        expected_codes, expected_scale = quantize_reference(source[slots >= 0].reshape(-1, D))
        assert torch.equal(codes[where], expected_codes.view(-1, kv_heads, D))
        assert torch.equal(scale[where], expected_scale.view(-1, kv_heads))
        codes[where] = 7
        scale.view(torch.int32)[where] = 0x07070707
    assert torch.equal(pages, untouched)
