"""The attention backend: what it answers vLLM, how it is chosen, and its layers against the reference in plain torch."""

import inspect
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from checkpoints import model_folder
from test_not_asked import RESOLVE, run

pytest.importorskip("vllm", reason="vLLM is not installed: `make test` installs it")
pytest.importorskip("triton", reason="the kernels need Triton")
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability, PlatformEnum
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

from vllm_w8a8_plugin import compat, envs
from vllm_w8a8_plugin.attention import layout, prefill, registration, warmup
from vllm_w8a8_plugin.attention.backend import W8A8AttentionBackend
from vllm_w8a8_plugin.attention.impl import W8A8AttentionImpl
from vllm_w8a8_plugin.attention.metadata import W8A8AttentionMetadata, W8A8AttentionMetadataBuilder
from w8a8_kernels.attention import launch, paged_attention, paged_attention_reference
from w8a8_kernels.quantize import quantize_reference

CANONICAL = compat.has_canonical_kv_layouts()
OTHERS = "choose another with --attention-backend"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in envs.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


# What vLLM asks.

ANSWERS = {
    "supports_sink": True,
    "supports_sliding_window": True,
    "supports_device_cpu_query_lens_mismatch": True,
    "supports_alibi_sqrt": False,
    "supports_mm_prefix": False,
    "supports_non_causal": False,
    "supports_batch_invariance": False,
    "supports_per_head_quant_scales": False,
    "supports_rswa": False,
    "supports_dcp": False,
    "supports_pcp": False,
    "supports_non_causal_dcp": False,
    "supports_kv_connector": True,
    "is_mla": False,
    "is_sparse": False,
    "is_ssm": False,
}
WITH_ARGUMENTS = {
    "supports_head_size",
    "supports_dtype",
    "supports_kv_cache_dtype",
    "supports_block_size",
    "supports_attn_type",
    "supports_compute_capability",
    "supports_combination",
}


def test_every_question_has_its_answer() -> None:
    names = {name for name in dir(AttentionBackend) if name.startswith(("supports_", "is_"))}
    questions = {name for name in names if callable(getattr(AttentionBackend, name))}
    assert names - questions <= {"supports_kv_cache_update_bypass"}, "vLLM asks something new"
    assert questions <= ANSWERS.keys() | WITH_ARGUMENTS, "vLLM asks something new"
    assert {name: getattr(W8A8AttentionBackend, name)() for name in questions - WITH_ARGUMENTS} == {
        name: answer for name, answer in ANSWERS.items() if name in questions
    }


def test_answers_with_arguments(pretend_gpu: Callable[[int, int], None]) -> None:
    backend = W8A8AttentionBackend
    sizes = [size for size in range(1, 600) if backend.supports_head_size(size)]
    assert sizes == list(range(64, 513, 8))
    assert {64, 80, 96, 112, 128, 192, 256, 512} <= set(sizes)
    assert [d for d in (torch.float16, torch.bfloat16, torch.float32) if backend.supports_dtype(d)] == [
        torch.float16,
        torch.bfloat16,
    ]
    from typing import get_args

    from vllm.config.cache import CacheDType

    assert {d for d in get_args(CacheDType) if backend.supports_kv_cache_dtype(d)} == {
        "auto",
        "float16",
        "bfloat16",
        "int8_per_token_head",
    }
    assert [size for size in (None, 1, 8, 16, 24, 32, 48, 544) if backend.supports_block_size(size)] == [None, 16, 32, 48, 544]
    types = ("decoder", "encoder", "encoder_only", "encoder_decoder")
    assert [t for t in types if backend.supports_attn_type(t)] == ["decoder"]
    assert not backend.supports_compute_capability(DeviceCapability(6, 1)), "no CUDA platform, or too old"
    pretend_gpu(9, 0)
    capabilities = [(6, 1), (7, 0), (7, 5), (8, 0), (9, 0), (12, 0)]
    assert [c for c in capabilities if backend.supports_compute_capability(DeviceCapability(*c))] == capabilities[1:]


def validate(**changes) -> list[str]:
    """vLLM's reasons against an ordinary layer with some changes."""
    known = inspect.signature(AttentionBackend.validate_configuration).parameters
    for name in changes:
        if name not in known:
            pytest.skip(f"this vLLM does not ask about {name}")
    ordinary = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": None,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": "decoder",
    }
    return W8A8AttentionBackend.validate_configuration(**(ordinary | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"has_sink": True},
        {"has_sliding_window": True},
        {"block_size": 32},
        {"kv_cache_dtype": "int8_per_token_head"},
        {"kv_cache_dtype": "bfloat16"},
        {"use_kv_connector": True},
        {"use_adaptive_verification": True},
        {"dtype": torch.float16, "device_capability": DeviceCapability(7, 5)},
        {"dtype": torch.float16, "device_capability": DeviceCapability(7, 0), "kv_cache_dtype": "int8_per_token_head"},
    ],
    ids=str,
)
def test_configurations_that_run(changes: dict, pretend_gpu: Callable[[int, int], None]) -> None:
    pretend_gpu(9, 0)
    assert validate(**changes) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_size": 60}, "head_size not supported (multiples of 8 from 64 to 512 are)"),
        ({"dtype": torch.float32}, "dtype not supported (float16 and bfloat16 are)"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported (auto, float16, bfloat16 and int8_per_token_head are)"),
        ({"block_size": 24}, "block_size not supported (multiples of 16 are)"),
        ({"use_mm_prefix": True}, "token full attention not supported (--attention-backend TRITON_ATTN has it)"),
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_per_head_quant_scales": True}, "per-head quant scales not supported"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"use_batch_invariant": True}, "batch invariance not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"use_dcp": True}, "DCP not supported"),
        ({"use_rswa": True}, "R-SWA not supported"),
        (
            {"kv_cache_dtype": "int8_per_token_head", "use_kv_connector": True},
            "KV connector not supported with an int8 KV cache, whose pages are laid out otherwise than vLLM's",
        ),
        ({"device_capability": DeviceCapability(6, 1)}, "compute capability not supported (7.0 and newer NVIDIA GPUs are)"),
        ({"device_capability": DeviceCapability(7, 5)}, "bfloat16 needs compute capability 8.0, got 7.5: --dtype float16"),
        (
            {"dtype": torch.float16, "kv_cache_dtype": "bfloat16"},
            "a bfloat16 KV cache needs activations of that dtype, got torch.float16: --kv-cache-dtype auto",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_configurations_that_are_refused(changes: dict, reason: str, pretend_gpu: Callable[[int, int], None]) -> None:
    pretend_gpu(9, 0)
    assert any(reason in found for found in validate(**changes))


def test_gpus_of_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_platform, "_enum", PlatformEnum.ROCM)
    assert any("NVIDIA GPUs" in reason for reason in validate())
    with pytest.raises(ValueError, match=f"it runs on NVIDIA GPUs: {OTHERS}"):
        W8A8AttentionImpl(4, 64, 0.1)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"head_size": 72, "attn_type": "encoder_only"}, "attention of type encoder_only is not supported"),
        ({"head_size": 33}, "got heads of 33 channels, expected a multiple of 8 from 64 to 512"),
        ({"kv_cache_dtype": "fp8"}, "got a KV cache of fp8, expected one of auto, float16, bfloat16, int8_per_token_head"),
        ({"use_alibi_sqrt": True}, "ALiBi with a square root (use_alibi_sqrt) is not supported"),
        ({"chunk_lookback": 1}, "chunked attention with a look back (chunk_lookback) is not supported"),
        ({"sinks": torch.zeros(3)}, "got 3 sinks, expected one for each of 4 query heads"),
        ({"score_mod": print, "other": None}, "score_mod not supported"),
    ],
)
def test_layers_that_are_refused(arguments: dict, problem: str) -> None:
    with pytest.raises(ValueError) as error:
        W8A8AttentionImpl(**({"num_heads": 4, "head_size": 64, "scale": 0.1, "num_kv_heads": 2} | arguments))
    assert problem in str(error.value)
    assert str(error.value).endswith(OTHERS)
    assert "\n" not in str(error.value)


def test_context_parallelism_is_refused() -> None:
    impl = W8A8AttentionImpl.__new__(W8A8AttentionImpl)
    impl.dcp_world_size = 2  # as vLLM's base class sets it
    with pytest.raises(ValueError, match=re.escape(f"context parallelism (DCP, PCP) is not supported: {OTHERS}")):
        impl.__init__(4, 64, 0.1)


def test_what_only_the_profiling_run_shows_is_refused_there() -> None:
    impl = W8A8AttentionImpl(4, 64, 0.1, 2)
    query, out = torch.ones(3, 4, 64, dtype=torch.bfloat16), torch.ones(3, 4, 64, dtype=torch.bfloat16)
    value = torch.ones(3, 2, 64, dtype=torch.bfloat16)
    assert impl.forward(None, query, value, value, torch.tensor([]), None, out).abs().max() == 0
    with pytest.raises(ValueError, match=r"got activations of torch.float32, expected float16 or bfloat16"):
        impl.forward(None, query.float(), value, value, torch.tensor([]), None, out)
    with pytest.raises(ValueError, match="keys have 64 channels and values 32, expected as many of both"):
        impl.forward(None, query, value, value[..., :32], torch.tensor([]), None, out)
    with pytest.raises(ValueError, match="a quantized output is not supported"):
        impl.forward(None, query, value, value, torch.tensor([]), None, out, output_scale=torch.ones(1))


# The cache.

BLOCK, KV_HEADS, HEADS, D = 16, 2, 4, 64
LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC") if CANONICAL else ("NHD", "HND")


def spec(cache_dtype: str, dtype: torch.dtype = torch.float16, **changes):
    """A layer's spec as vLLM makes it."""
    sizes = {"block_size": BLOCK, "num_kv_heads": KV_HEADS, "head_size": D}
    dtype = torch.int8 if cache_dtype == layout.INT8 else dtype
    made = FullAttentionSpec(**(sizes | changes), dtype=dtype, kv_quant_mode=get_kv_quant_mode(cache_dtype))
    return W8A8AttentionBackend.customize_spec(made) if CANONICAL else made


def set_layout(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What VLLM_KV_CACHE_LAYOUT does where the backend gives the order."""
    if not CANONICAL:
        module = AttentionBackendEnum.TRITON_ATTN.get_class().__module__
        monkeypatch.setattr(f"{module}.get_kv_cache_layout", lambda: order)


def vllm_cache(
    cache_dtype: str, order: str, blocks: int, monkeypatch: pytest.MonkeyPatch, padding: int = 0, **changes
) -> torch.Tensor:
    """The second of three layers' caches, as vLLM's own code makes it; every byte of it is 0x7F at first."""
    set_layout(order, monkeypatch)
    made = spec(cache_dtype, **changes)
    page = made.page_size_bytes
    if not CANONICAL:
        from dataclasses import replace

        from vllm.v1.worker.gpu.attn_utils import _reshape_attention_kv_cache

        made = replace(made, page_size_padded=page + padding) if padding else made
        raw = torch.full((blocks * (page + padding),), 0x7F, dtype=torch.int8)
        shape = W8A8AttentionBackend.get_kv_cache_shape(blocks, made.block_size, made.num_kv_heads, D, cache_dtype)
        return _reshape_attention_kv_cache(raw, made, shape, W8A8AttentionBackend.get_kv_cache_stride_order(), blocks, None)
    from vllm.v1.kv_cache_interface import KVCacheLayout, KVCacheTensor, compute_layout_strides, create_kv_cache_views

    chosen = KVCacheLayout[order]
    strides = compute_layout_strides(made, blocks, 3, chosen)
    tensor = KVCacheTensor(3 * page * blocks, ["a", "b", "c"], layer_stride=strides[0], block_stride=strides[1])
    raw = torch.full((tensor.size,), 0x7F, dtype=torch.int8)
    return create_kv_cache_views(raw, made, blocks, chosen, tensor)[1]


@pytest.mark.parametrize("block_size", [16, 48])
def test_an_int8_page_has_the_bytes_that_vllm_reserves(block_size: int) -> None:
    from w8a8_kernels.attention import page_bytes

    made = spec(layout.INT8, block_size=block_size)
    assert made.page_size_bytes == page_bytes(block_size, KV_HEADS, D) == 2 * block_size * KV_HEADS * (D + 4)
    assert spec("auto", block_size=block_size).page_size_bytes == 2 * block_size * KV_HEADS * D * 2


@pytest.mark.skipif(CANONICAL, reason="the backend gives no shape here")
def test_shapes_and_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of vLLM's own TRITON_ATTN, so that whatever else handles its caches handles ours."""
    ours, stock = W8A8AttentionBackend, AttentionBackendEnum.TRITON_ATTN.get_class()
    for cache_dtype, content in (("auto", 128), ("bfloat16", 128), (layout.INT8, 132)):
        shape = ours.get_kv_cache_shape(10, 32, 2, 128, cache_dtype)
        assert shape == stock.get_kv_cache_shape(10, 32, 2, 128, cache_dtype)
        assert shape[0] == 10
        assert math.prod(shape) == 10 * 2 * 32 * 2 * content
    with pytest.raises(ValueError, match="got a KV cache block of 24 tokens, expected a multiple of 16"):
        ours.get_kv_cache_shape(10, 24, 2, 128)
    for order in LAYOUTS:
        monkeypatch.setattr(f"{stock.__module__}.get_kv_cache_layout", lambda order=order: order)
        for with_layers in (False, True):
            assert ours.get_kv_cache_stride_order(with_layers) == stock.get_kv_cache_stride_order(with_layers)
        assert ours.indexes_kv_by_block_stride()


@pytest.mark.skipif(not CANONICAL, reason="the backend gives a shape here")
def test_canonical_layouts() -> None:
    from vllm.v1.kv_cache_interface import KVCacheLayout

    found = W8A8AttentionBackend.supported_kv_cache_layouts()
    assert set(found) == {member for member in KVCacheLayout if member.is_block_compact}
    assert [member.name for member in found] == list(LAYOUTS)
    with pytest.raises(ValueError, match="keys have 64 channels and values 32"):
        spec("auto", head_size_v=32)


@pytest.mark.parametrize("order", LAYOUTS)
def test_int8_pages_hold_what_is_written_and_nothing_else_is_touched(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = vllm_cache(layout.INT8, order, 5, monkeypatch)
    views = layout.cache_views(cache, D, int8=True)
    assert [tuple(view.shape) for view in views] == [(5, BLOCK, KV_HEADS, D)] * 2 + [(5, BLOCK, KV_HEADS)] * 2
    views[0][2], views[1][2], views[2][2], views[3][2] = 1, 2, 3.0, 4.0
    assert [float(view[2].float().mean()) for view in views] == [1, 2, 3, 4], "the views overlap"
    assert bool((cache[[0, 1, 3, 4]] == 0x7F).all()), "another block was written"
    storage = cache.untyped_storage().nbytes()
    touched = int((torch.empty(0, dtype=torch.int8).set_(cache.untyped_storage()) != 0x7F).sum())
    assert touched <= cache[0].numel() < storage


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4)], ids=["NHD", "HND"])
def test_the_cache_of_0_25(order: tuple[int, ...]) -> None:
    """Five axes, [blocks, 2, block size, kv heads, content], on whichever vLLM is installed."""
    for int8, content in ((False, D), (True, D + 4)):
        shape = (4, 2, BLOCK, KV_HEADS, content)
        memory = torch.zeros([shape[axis] for axis in order], dtype=torch.int8 if int8 else torch.float16)
        cache = memory.permute(*(order.index(axis) for axis in range(5)))
        key, value, *scales = layout.cache_views(cache, D, int8)
        assert key.shape == value.shape == (4, BLOCK, KV_HEADS, D)
        key[1], value[1] = 1, 2
        assert int((cache[1] == 1).sum()) == int((cache[1] == 2).sum()) == BLOCK * KV_HEADS * D
        assert int((cache != 0).sum()) == 2 * BLOCK * KV_HEADS * D
        if int8:
            assert [scale.shape for scale in scales] == [(4, BLOCK, KV_HEADS)] * 2
        else:
            assert cache[1, 0].equal(key[1])
            assert cache[1, 1].equal(value[1])


def test_pages_that_are_not_contiguous_are_refused() -> None:
    cache = torch.zeros(KV_HEADS, 4, BLOCK, 2 * (D + 4), dtype=torch.int8).transpose(0, 1)
    with pytest.raises(ValueError, match="an int8 KV cache needs contiguous pages"):
        layout.cache_views(cache, D, int8=True)


@pytest.mark.parametrize("cache_dtype", ["auto", layout.INT8])
@pytest.mark.parametrize("order", LAYOUTS)
def test_the_warm_ups_cache_is_laid_out_as_the_real_one(cache_dtype: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = vllm_cache(cache_dtype, order, 2, monkeypatch)
    resolved = SimpleNamespace(cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: _layout(order)))
    example = layout.example_cache(2, BLOCK, KV_HEADS, D, torch.float16, cache_dtype == layout.INT8, resolved, "cpu")
    assert (example.shape, example.dtype) == (real.shape, real.dtype)
    assert example.stride()[1:] == real.stride()[1:]
    assert example.stride(0) % 16 == real.stride(0) % 16 == 0, "Triton compiles a kernel for either"


def _layout(order: str):
    from vllm.v1.kv_cache_interface import KVCacheLayout

    return KVCacheLayout[order]


# Layers.


def batch_metadata(
    lens: list[tuple[int, int]], table: torch.Tensor, slots: torch.Tensor, padding: int = 0, **changes
) -> CommonAttentionMetadata:
    """vLLM's own metadata of sequences of (queries, keys), with so many tokens and sequences of padding."""
    starts = [0]
    for queries, _ in lens:
        starts.append(starts[-1] + queries)
    starts += [starts[-1]] * padding
    query_start_loc = torch.tensor(starts, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=query_start_loc,
        query_start_loc_cpu=query_start_loc,
        seq_lens=torch.tensor([keys for _, keys in lens] + [0] * padding, dtype=torch.int32),
        num_reqs=len(lens) + padding,
        num_actual_tokens=starts[-1] + padding,
        max_query_len=max(queries for queries, _ in lens),
        max_seq_len=max(keys for _, keys in lens),
        block_table_tensor=torch.cat([table, torch.zeros(padding, table.shape[1], dtype=torch.int32)]),
        slot_mapping=torch.cat([slots, torch.full((padding,), -1)]),
        **changes,
    )


def builder(cache_dtype: str = "auto", **model) -> W8A8AttentionMetadataBuilder:
    config = SimpleNamespace(model_config=SimpleNamespace(**({"max_model_len": 4096, "rswa_window": None} | model)))
    return W8A8AttentionMetadataBuilder(spec(cache_dtype), ["layer"], config, torch.device("cpu"))


@dataclass
class Case:
    """Sequences of (queries of this batch, all keys), and a layer's options."""

    lens: list[tuple[int, int]]
    cache_dtype: str = "auto"
    order: str = LAYOUTS[0]
    options: dict | None = None
    captured: bool = False


MIXED = [(1, 40), (7, 7), (20, 53), (1, 1)]  # a prefix of 33 tokens was hit, or was another chunk
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
CASES = {
    "mixed": Case(MIXED),
    "decode": Case([(1, 40), (1, 17), (1, 1)]),
    "speculative": Case([(4, 40), (4, 17), (4, 4)]),
    "captured": Case([(1, 40), (1, 17)], captured=True),
    "window": Case(MIXED, options={"sliding_window": 9}),
    "softcap and sinks": Case(MIXED, options={"logits_soft_cap": 3.0, "sinks": SINKS}),
    "alibi": Case(MIXED, options={"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]}),
    "int8": Case(MIXED, layout.INT8),
    "int8 decode and window": Case([(1, 40), (1, 17)], layout.INT8, options={"sliding_window": 20}),
    **{f"{order}": Case(MIXED, order=order) for order in LAYOUTS[1:]},
    **{f"int8 {order}": Case([(1, 40), (5, 23)], layout.INT8, order) for order in LAYOUTS[1:]},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_layer_against_the_reference(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens come in two batches, into blocks in random order; then vLLM's metadata, with padding, leads to the reference."""
    generator = torch.Generator().manual_seed(0)
    options = case.options or {}
    blocks = 24
    order = torch.randperm(blocks - 1, generator=generator) + 1  # block 0 is vLLM's null block
    cache = vllm_cache(case.cache_dtype, case.order, blocks, monkeypatch)
    impl = W8A8AttentionImpl(
        HEADS, D, D**-0.5, KV_HEADS, **({"kv_cache_dtype": case.cache_dtype, "attn_type": "decoder"} | options)
    )
    int8 = case.cache_dtype == layout.INT8

    key_ref, value_ref = torch.zeros(2, blocks, BLOCK, KV_HEADS, D)
    table = torch.zeros(len(case.lens), 8, dtype=torch.int32)
    early, late, used = [], [], 0
    for b, (queries, keys) in enumerate(case.lens):
        count = -(-keys // BLOCK)
        table[b, :count] = order[used : used + count]
        used += count
        tokens = torch.arange(keys)
        slots = table[b, tokens // BLOCK].long() * BLOCK + tokens % BLOCK
        early.append(slots[: keys - queries])
        late.append(slots[keys - queries :])
    for part in (early, late):
        slots = torch.cat(part)
        padding = 0 if part is early else 3
        # As views of what one projection has made.
        key, value = torch.randn(len(slots) + padding, 2, KV_HEADS, D, generator=generator).half().unbind(1)
        if len(slots):
            impl.do_kv_cache_update(None, key, value, cache, torch.cat([slots, torch.full((padding,), -1)]))
        for new, ref in ((key, key_ref), (value, value_ref)):
            new = new[: len(slots)].float()
            if int8:
                codes, scale = quantize_reference(new.reshape(-1, D))
                new = (codes * scale).reshape(new.shape)
            ref.view(-1, KV_HEADS, D)[slots] = new

    common = batch_metadata(case.lens, table, torch.cat(late), padding=3)
    lens, T = common.seq_lens.clone(), common.num_actual_tokens
    if case.captured:
        metadata = builder(case.cache_dtype).build_for_cudagraph_capture(common)
        assert metadata.captured
        assert metadata.max_seq_len == 4096
        metadata.seq_lens.copy_(lens)  # as for a replay
    else:
        metadata = builder(case.cache_dtype).build(0, common)
    query = torch.randn(T + 2, HEADS, D, generator=generator).half()
    out = torch.full((T + 2, HEADS, D), 7.0, dtype=torch.float16)
    assert impl.forward(None, query, key, value, cache, metadata, out) is out
    expected = paged_attention_reference(
        query[: T - 3],
        key_ref,
        value_ref,
        table,
        lens[:-3],
        common.query_start_loc[:-3],
        D**-0.5,
        window=options.get("sliding_window"),
        softcap=options.get("logits_soft_cap", 0.0),
        sinks=options.get("sinks"),
        alibi_slopes=None if "alibi_slopes" not in options else torch.tensor(options["alibi_slopes"]),
    )
    assert bool((out[T:] == 7).all()), "rows beyond the batch were written"
    got = out[: T - 3].float()
    assert (got - expected).norm() / expected.norm() < 1e-3


def test_a_layer_that_shares_a_cache_does_not_write_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = vllm_cache("auto", LAYOUTS[0], 2, monkeypatch)
    before = cache.clone()
    key = torch.ones(4, KV_HEADS, D, dtype=torch.float16)
    for shares in ("model.layers.0.self_attn.attn", None):
        impl = W8A8AttentionImpl(HEADS, D, 0.1, KV_HEADS, kv_sharing_target_layer_name=shares)
        impl.do_kv_cache_update(None, key, key, cache, torch.arange(4))
        assert cache.view(torch.int16).equal(before.view(torch.int16)) == (shares is not None)


def test_views_are_made_once_for_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    impl = W8A8AttentionImpl(HEADS, D, 0.1, KV_HEADS)
    first, second = (vllm_cache("auto", LAYOUTS[0], 2, monkeypatch) for _ in range(2))
    assert impl.views(first) is impl.views(first)
    assert impl.views(second)[0].data_ptr() == layout.cache_views(second, D, False)[0].data_ptr()
    assert impl.views(first)[0].data_ptr() != impl.views(second)[0].data_ptr()


def test_metadata_references_the_runners_buffers() -> None:
    common = batch_metadata([(3, 20)], torch.zeros(1, 4, dtype=torch.int32), torch.arange(3))
    metadata = builder().build(0, common)
    assert isinstance(metadata, W8A8AttentionMetadata)
    names = {"block_table": "block_table_tensor"}
    for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
        assert getattr(metadata, name).data_ptr() == getattr(common, names.get(name, name)).data_ptr()
    assert (metadata.num_actual_tokens, metadata.max_query_len, metadata.max_seq_len) == (3, 3, 20)
    assert not metadata.captured
    metadata = builder().build_for_cudagraph_capture(common)
    assert metadata.captured
    assert metadata.max_seq_len == 4096
    assert metadata.seq_lens.tolist() == [3]
    assert W8A8AttentionMetadataBuilder.get_cudagraph_support(None, None) is AttentionCGSupport.ALWAYS


@pytest.mark.parametrize("causal", [False, torch.tensor([True])], ids=["none", "by sequence"])
def test_what_is_not_causal_is_refused(causal: bool | torch.Tensor) -> None:
    common = batch_metadata([(3, 20)], torch.zeros(1, 4, dtype=torch.int32), torch.arange(3), causal=causal)
    with pytest.raises(ValueError, match=f"only causal attention is supported: {OTHERS}"):
        builder().build(0, common)


def test_a_visible_prefix_beside_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="R-SWA"):
        builder(rswa_window=128)


def test_tokens_of_images_that_see_each_other_are_refused() -> None:
    common = batch_metadata([(3, 20)], torch.zeros(1, 4, dtype=torch.int32), torch.arange(3), mm_req_doc_ranges={0: [(0, 2)]})
    with pytest.raises(ValueError, match="multimodal tokens that see each other are not supported"):
        builder().build(0, common)


# Prefill.

LAYER = prefill.Layer(128)
AUTO, TRITON, FLASH, FA4 = envs.PREFILL_KERNELS


@pytest.mark.parametrize(
    ("layer", "version", "problem", "capability", "kernel", "reason"),
    [
        (LAYER, 3, None, (9, 0), FLASH, "FlashAttention 3 is faster on compute capability 9.0"),
        (LAYER, 2, None, (9, 0), TRITON, "FlashAttention 2 is not chosen by itself"),
        (LAYER, 2, None, (8, 0), TRITON, "FlashAttention 2 is not chosen by itself"),
        (LAYER, 4, None, (10, 0), TRITON, "FlashAttention 4 is not chosen by itself"),
        (LAYER, None, None, (9, 0), TRITON, "not FlashAttention: vLLM has none for this device"),
        (LAYER, 3, "head_size not supported", (9, 0), TRITON, "not FlashAttention: head_size not supported"),
        (prefill.Layer(128, int8_cache=True), 3, None, (9, 0), TRITON, "not FlashAttention: it reads no int8 KV cache"),
        (LAYER, None, "vLLM has it for NVIDIA GPUs only", None, TRITON, "vLLM has it for NVIDIA GPUs only"),
    ],
)
def test_prefill_by_itself(layer, version, problem, capability, kernel: str, reason: str) -> None:
    choice = prefill.choose(AUTO, layer, version, problem, capability)
    assert (choice.kernel, choice.version) == (kernel, version if kernel == FLASH else None)
    assert reason in choice.reason


def test_prefill_by_name() -> None:
    assert prefill.choose(TRITON, LAYER, 3, None, (9, 0)).kernel == TRITON
    choice = prefill.choose(FLASH, LAYER, 2, None, (8, 0))
    assert (choice.kernel, choice.version) == (FLASH, 2)
    with pytest.raises(
        ValueError, match="=flash_attn: vLLM's FlashAttention cannot run this layer: it reads no int8 KV cache"
    ):
        prefill.choose(FLASH, prefill.Layer(128, int8_cache=True), 3, None, (9, 0))
    with pytest.raises(ValueError, match="cannot run this layer: vLLM has none for this device"):
        prefill.choose(FLASH, LAYER, None, None, (7, 5))
    with pytest.raises(
        ValueError, match=r"flash_attn_4 is not supported yet \(the package flash_attn_4_sm120 is not installed"
    ):
        prefill.choose(FA4, LAYER, None, None, (12, 0))


def test_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (envs.attention(), envs.prefill_attention()) == (False, AUTO)
    monkeypatch.setenv(envs.ATTENTION, "1")
    monkeypatch.setenv(envs.PREFILL_ATTENTION, " Flash_Attn ")
    assert (envs.attention(), envs.prefill_attention()) == (True, FLASH)
    monkeypatch.setenv(envs.PREFILL_ATTENTION, "fastest")
    message = "VLLM_W8A8_PREFILL_ATTENTION='fastest': expected auto, triton, flash_attn or flash_attn_4"
    for check in (envs.check, lambda: W8A8AttentionImpl(HEADS, D, 0.1)):
        with pytest.raises(ValueError, match=message):
            check()
    monkeypatch.delenv(envs.PREFILL_ATTENTION)
    monkeypatch.setenv(envs.ATTENTION, "perhaps")
    with pytest.raises(ValueError, match="VLLM_W8A8_ATTENTION='perhaps': expected 1 or 0"):
        envs.check()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may have it")
def test_flash_attention_is_asked_for_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.PREFILL_ATTENTION, FLASH)
    with pytest.raises(ValueError, match="cannot run this layer: vLLM has it for NVIDIA GPUs only"):
        W8A8AttentionImpl(HEADS, D, 0.1)


@pytest.mark.parametrize(("queries", "captured", "expected"), [(16, False, 0), (17, False, 1), (17, True, 0)])
def test_long_queries_go_to_flash_attention(
    queries: int, captured: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With vLLM's function played by ours: the arguments say the same."""
    calls = []

    def flash_attn_varlen_func(**arguments) -> None:
        calls.append(arguments)
        window = arguments["window_size"]
        paged_attention(
            *(arguments[name] for name in ("q", "k", "v", "block_table", "seqused_k", "cu_seqlens_q", "softmax_scale")),
            most_queries=arguments["max_seqlen_q"],
            most_keys=arguments["max_seqlen_k"],
            causal=arguments["causal"],
            window=None if window is None else window[0] + 1,
            out=arguments["out"],
        )

    from vllm.v1.attention.backends import fa_utils

    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", flash_attn_varlen_func, raising=False)
    cache = vllm_cache("auto", LAYOUTS[0], 3, monkeypatch)
    key = torch.randn(queries, KV_HEADS, D).half()
    query, outs = torch.randn(queries, HEADS, D).half(), []
    for choice in (prefill.Prefill(FLASH, "", 3), prefill.Prefill(TRITON, "")):
        impl = W8A8AttentionImpl(HEADS, D, 0.1, KV_HEADS, sliding_window=5)
        impl.prefill = choice
        slots = torch.arange(BLOCK, BLOCK + queries)
        impl.do_kv_cache_update(None, key, key, cache, slots)
        metadata = builder().build(0, batch_metadata([(queries, queries)], torch.tensor([[1, 2]], dtype=torch.int32), slots))
        metadata.captured = captured
        outs.append(impl.forward(None, query, key, key, cache, metadata, torch.empty_like(query)))
    assert len(calls) == expected
    assert outs[0].equal(outs[1])
    if calls:
        assert (calls[0]["window_size"], calls[0]["causal"], calls[0]["fa_version"]) == ([4, 0], True, 3)


@pytest.mark.parametrize("cache_dtype", ["auto", layout.INT8])
def test_what_runs_is_said_once(cache_dtype: str, said: list[str]) -> None:
    for _ in range(3):
        W8A8AttentionImpl(32, 128, 0.1, 8, kv_cache_dtype=cache_dtype)
    paths = [line for line in said if "queries of up to 16 tokens run on triton; batches with longer ones on triton (" in line]
    assert len(paths) == 1
    sizes = [line for line in said if "bytes per token" in line]
    if cache_dtype == layout.INT8:
        (line,) = sizes
        assert "takes 2112 bytes per token and layer, its scales included; 16 bits take 4096" in line
    else:
        assert sizes == []


# Warm-up.


class Recorded:
    """Stands for a kernel and notes what its launches are compiled for."""

    def __init__(self) -> None:
        self.seen: set[tuple] = set()

    def __getitem__(self, grid: tuple) -> Callable:
        return lambda *args, **constants: self.seen.add(tuple(sorted(constants.items())))


@pytest.mark.parametrize("own_prefill", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "cache_dtype"), [(32, 8, "auto"), (4, 1, layout.INT8), (7, 1, "auto")])
def test_the_warm_up_leaves_nothing_to_compile(
    heads: int, kv_heads: int, cache_dtype: str, own_prefill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every launch that batches of all kinds lead to was compiled, by the launcher's own rules."""
    kernels = {name: Recorded() for name in ("paged_attention_kernel", "merge_splits_kernel")}
    for name, kernel in kernels.items():
        monkeypatch.setattr(launch, name, kernel)
    monkeypatch.setattr(warmup, "compiles_on", lambda device: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    order = LAYOUTS[0]
    set_layout(order, monkeypatch)
    from vllm.config import CUDAGraphMode

    impl = W8A8AttentionImpl(heads, 128, 0.1, kv_heads, kv_cache_dtype=cache_dtype)
    impl.prefill = prefill.Prefill(TRITON if own_prefill else FLASH, "")
    most_keys = 40_000
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=most_keys, dtype=torch.bfloat16),
        scheduler_config=SimpleNamespace(max_num_seqs=256),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: _layout(order)),
        compilation_config=SimpleNamespace(
            static_forward_context={"a": SimpleNamespace(impl=impl)}, cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
        ),
    )
    ours = warmup.AttentionWarmup()
    device = torch.device("cpu")
    ours.run(spec(cache_dtype, num_kv_heads=kv_heads, head_size=128), ["a"], config, device)
    warmed = {name: set(kernel.seen) for name, kernel in kernels.items()}
    assert 1 < len(warmed["paged_attention_kernel"]) <= 32
    ours.run(spec(cache_dtype, num_kv_heads=kv_heads, head_size=128), ["a"], config, device)  # another model of its kind

    cache = layout.example_cache(1, BLOCK, kv_heads, 128, torch.bfloat16, cache_dtype == layout.INT8, config, device)
    key_cache, value_cache, key_scale, value_scale = layout.cache_views(cache, 128, impl.int8)
    lengths = [*range(1, 80), 127, 128, 129, 255, 256, 300, 5000] if own_prefill else range(1, 17)
    for queries in lengths:
        for sequences in (1, 2, 3, 7, 32, 256):
            for keys in (queries, 513, 2100, 9000, most_keys):
                q = torch.empty(1, heads, 128, dtype=torch.bfloat16).expand(queries, -1, -1)
                ints = torch.empty(sequences, dtype=torch.int32)
                paged_attention(
                    q,
                    key_cache,
                    value_cache,
                    ints[:, None],
                    ints,
                    ints,
                    0.1,
                    most_queries=queries,
                    most_keys=keys,
                    key_scale=key_scale,
                    value_scale=value_scale,
                    out=q,
                )
    for name, kernel in kernels.items():
        assert kernel.seen <= warmed[name], f"{name} would be compiled at a request"
        kernel.seen.clear()


# Choosing.


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's table of overrides, empty and put back at the end."""
    from vllm.v1.attention.backends import registry

    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})


def test_custom_is_ours(registry: None, said: list[str]) -> None:
    for _ in range(2):
        registration.register()
    assert AttentionBackendEnum.CUSTOM.get_class() is W8A8AttentionBackend
    # vLLM looks the class's name up in its enumeration.
    assert AttentionBackendEnum[W8A8AttentionBackend.get_name()] is AttentionBackendEnum.CUSTOM
    assert said == []


@pytest.mark.parametrize("asked", [False, True])
def test_custom_of_another_plugin(asked: bool, registry: None, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if asked:
        monkeypatch.setenv(envs.ATTENTION, "1")
    register_backend(AttentionBackendEnum.CUSTOM, "another.plugin.Backend")
    registration.register()
    (line,) = said
    assert line.startswith("WARNING ")
    assert "another.plugin.Backend" in line
    assert registration.registered() == (registration.CLASS_PATH if asked else "another.plugin.Backend")


def engine_args(backend=None, in_config=None, cache="auto") -> SimpleNamespace:
    config = SimpleNamespace(backend=in_config)
    return SimpleNamespace(model="some/model", attention_backend=backend, attention_config=config, kv_cache_dtype=cache)


@pytest.mark.parametrize(
    ("variable", "asked", "args", "chosen", "message"),
    [
        (None, True, engine_args(), None, None),
        ("0", True, engine_args(), None, None),
        ("1", True, engine_args(), AttentionBackendEnum.CUSTOM, "INFO VLLM_W8A8_ATTENTION=1: attention runs on this plugin's"),
        ("1", True, engine_args("auto"), None, None),
        ("1", False, engine_args(), None, "WARNING VLLM_W8A8_ATTENTION=1 has no effect on some/model, which is not served in"),
        ("1", True, engine_args("TRITON_ATTN"), "TRITON_ATTN", "INFO VLLM_W8A8_ATTENTION=1: attention stays on TRITON_ATTN"),
        (
            "1",
            True,
            engine_args(in_config=AttentionBackendEnum.FLASHINFER),
            None,
            "INFO VLLM_W8A8_ATTENTION=1: attention stays on FLASHINFER",
        ),
        (None, False, engine_args("CUSTOM"), "CUSTOM", None),
    ],
)
def test_choosing(
    variable: str | None,
    asked: bool,
    args: SimpleNamespace,
    chosen,
    message: str | None,
    registry: None,
    pretend_gpu: Callable[[int, int], None],
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_gpu(8, 0)
    registration.register()
    if variable is not None:
        monkeypatch.setenv(envs.ATTENTION, variable)
    args = engine_args(args.attention_backend, args.attention_config.backend)
    automatic = args.attention_backend == "auto"
    registration.select(args, asked)
    assert args.attention_backend == (AttentionBackendEnum.CUSTOM if automatic else chosen)
    if message is not None:
        assert [line.startswith(message) for line in said] == [True]


def test_a_bad_variable_stops_only_models_that_ask(monkeypatch: pytest.MonkeyPatch, registry: None, said: list[str]) -> None:
    monkeypatch.setenv(envs.ATTENTION, "perhaps")
    registration.register()
    registration.select(engine_args(), asked=False)
    with pytest.raises(ValueError, match="VLLM_W8A8_ATTENTION='perhaps': expected 1 or 0"):
        registration.select(engine_args(), asked=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("backend", [None, "CUSTOM"])
def test_on_a_cpu_it_is_said_that_nothing_changes(
    backend: str | None, registry: None, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    registration.register()
    if backend is None:
        monkeypatch.setenv(envs.ATTENTION, "1")
    for _ in range(2):
        args = engine_args(backend)
        registration.select(args, asked=True)
        assert args.attention_backend == backend
    assert said == ["WARNING W8A8: the attention backend is for NVIDIA GPUs; here attention stays on vLLM's own"]


@pytest.mark.parametrize("backend", [None, "CUSTOM"])
def test_an_int8_cache_is_refused_on_a_cpu(backend: str | None, registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU attention takes the option, and answers with noise."""
    monkeypatch.setattr(current_platform, "_enum", PlatformEnum.CPU)
    registration.register()
    if backend is None:
        monkeypatch.setenv(envs.ATTENTION, "1")
    with pytest.raises(ValueError, match="int8_per_token_head: got a device without NVIDIA GPU"):
        registration.select(engine_args(backend, cache=layout.INT8), asked=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_vllm_asks_when_it_makes_its_config(tmp_path) -> None:
    folder = model_folder(tmp_path / "model", None)
    printed, said = run(RESOLVE, [str(folder)], {envs.ENABLE: "1", envs.ATTENTION: "1"})
    assert json.loads(printed)[str(folder)][0] == "w8a8"
    assert said.count("the attention backend is for NVIDIA GPUs") == 1


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "with --attention-backend CUSTOM: triton; queries of more than 16 tokens: triton (not FlashAttention:"),
        ({envs.ATTENTION: "1"}, "with W8A8 (VLLM_W8A8_ATTENTION=1), or with --attention-backend CUSTOM: triton;"),
        ({envs.PREFILL_ATTENTION: FA4}, "problem VLLM_W8A8_PREFILL_ATTENTION=flash_attn_4 is not supported yet"),
        (None, "for NVIDIA GPUs; here attention stays on vLLM's own"),
    ],
)
def test_the_doctors_line(
    variables: dict[str, str] | None, said: str, pretend_gpu: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_w8a8_plugin import doctor

    if variables is None and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    if variables is not None:
        pretend_gpu(8, 0)
        monkeypatch.setattr(prefill, "_flash_problem", lambda *arguments: "none in this test")
    for name, value in (variables or {}).items():
        monkeypatch.setenv(name, value)
    result = doctor.Diagnosis()
    doctor._diagnose_attention(result)
    (line,) = [value for name, value in result.facts if name == "attention backend"] + [
        "problem " + p for p in result.problems
    ]
    assert line.startswith(said)
