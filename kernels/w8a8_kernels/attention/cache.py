"""Writes tokens into the paged cache."""

import triton
import triton.language as tl
from torch import Tensor

from w8a8_kernels.attention.device import device_of
from w8a8_kernels.launch import launch_options
from w8a8_kernels.quantize.device import amax_bits, chain_launches, encode, row_reciprocal, row_scale
from w8a8_kernels.select import has_dependent_launch
from w8a8_kernels.tiles import power_of_two

# Tokens of one program, from so many tokens on: neighbours in a block write neighbouring bytes of V's codes.
TOKENS = 16
MIN_TOKENS = 64


@triton.jit(do_not_specialize=["n_tokens"])
def write_cache_kernel(
    key_ptr,
    value_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slot_ptr,
    n_tokens,
    stride_key,
    stride_key_h,
    stride_value,
    stride_value_h,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_vd,
    stride_sb,
    stride_st,
    stride_sh,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    INT8: tl.constexpr,
    PDL: tl.constexpr,
):
    """TOKENS tokens of one head of key and value [n_tokens, kv heads, D] to their slots; a negative slot is none.

    INT8: as codes, with a scale each, by the rule of `quantize_reference`.
    PDL: programmatic dependent launch, see `chain_launches`.
    """
    if PDL:
        chain_launches()
    i_h = tl.program_id(1).to(tl.int64)
    o_t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    b_slot = tl.load(slot_ptr + o_t, mask=o_t < n_tokens, other=-1).to(tl.int64)
    m_t = b_slot >= 0
    b_block = b_slot // BLOCK_SIZE
    o_slot = b_slot % BLOCK_SIZE
    o_d = tl.arange(0, BLOCK_D)
    mask = m_t[:, None] & (o_d < D)[None, :]
    p_k = (k_ptr + b_block * stride_kb + o_slot * stride_kt + i_h * stride_kh)[:, None] + o_d[None, :]
    p_v = (v_ptr + b_block * stride_vb + o_slot * stride_vt + i_h * stride_vh)[:, None] + (o_d * stride_vd)[None, :]
    b_k = tl.load(key_ptr + (o_t * stride_key + i_h * stride_key_h)[:, None] + o_d[None, :], mask=mask, other=0.0)
    b_v = tl.load(value_ptr + (o_t * stride_value + i_h * stride_value_h)[:, None] + o_d[None, :], mask=mask, other=0.0)
    if INT8:
        p_scale = b_block * stride_sb + o_slot * stride_st + i_h * stride_sh
        b_codes, b_scale = quantize_rows(b_k)
        tl.store(p_k, b_codes, mask=mask)
        tl.store(k_scale_ptr + p_scale, b_scale, mask=m_t)
        b_codes, b_scale = quantize_rows(b_v)
        tl.store(p_v, b_codes, mask=mask)
        tl.store(v_scale_ptr + p_scale, b_scale, mask=m_t)
    else:
        tl.store(p_k, b_k, mask=mask)
        tl.store(p_v, b_v, mask=mask)


@triton.jit
def quantize_rows(b_x):
    """Codes int8 of b_x [rows, columns] and a scale fp32 [rows]."""
    b_amax = amax_bits(b_x)
    b_scale, b_stored, b_coded = row_scale(b_amax, 0)
    b_factor, b_multiply, multiply_all = row_reciprocal(b_amax, b_scale, b_coded, b_x.dtype == tl.float32)
    return encode(b_x, b_scale, b_coded, b_factor, b_multiply, multiply_all, 0), b_stored


def write_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Write tokens into a paged cache, quantized where it is int8.

    Args:
        key, value: [T or more, kv heads, D], the last stride 1.
        key_cache, value_cache: [blocks, block size, kv heads, D] in key's dtype, or int8 codes with `key_scale` and
            `value_scale`, fp32 [blocks, block size, kv heads]; any strides, K's last one 1.
        slot_mapping: int64 [T], the token's block times block size, plus its place there; negative: it is not written.

    A row of codes and its scale are those of `quantize_reference`: a row with NaN or inf has a scale of NaN.
    """
    T, (_, kv_heads, D) = len(slot_mapping), key.shape
    if T == 0:
        return
    tokens = TOKENS if T >= MIN_TOKENS else 1
    int8 = key_scale is not None
    pdl = has_dependent_launch(device_of(key.device)[0])
    write_cache_kernel[(triton.cdiv(T, tokens), kv_heads)](
        key,
        value,
        key_cache,
        value_cache,
        key_scale if int8 else key,
        value_scale if int8 else key,
        slot_mapping,
        T,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride(),
        *(key_scale.stride() if int8 else (0, 0, 0)),
        D=D,
        BLOCK_D=power_of_two(D),
        BLOCK_SIZE=key_cache.shape[1],
        TOKENS=tokens,
        INT8=int8,
        PDL=pdl,
        num_warps=1 if tokens == 1 else 4,
        **launch_options(pdl),
    )
