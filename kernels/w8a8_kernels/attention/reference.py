"""Attention over a paged key/value cache in plain torch: what the kernels are held against."""

import torch
from torch import Tensor


def paged_attention_reference(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """softmax(mask(softcap(scale * q k) + alibi)) v for each sequence, in fp32.

    Sequence b has `seq_lens[b]` keys. Its queries are rows `query_start_loc[b]` to `query_start_loc[b + 1]` of q, the last of
    its tokens: with n of them, query i is token `seq_lens[b] - n + i`.

    Args:
        q: [T, query heads, D].
        key_cache, value_cache: [blocks, block size, kv heads, D], in q's dtype, or int8 codes with `key_scale` and
            `value_scale`. Token t of sequence b lies in block `block_table[b, t // block size]`, at `t % block size`.
        block_table: int32 [B, most blocks of a sequence].
        seq_lens: int32 [B].
        query_start_loc: int32 [B + 1].
        scale: factor of the scores.
        causal: a query sees no key after its own token.
        window: how many keys a query sees, its own token's the last of them; None for all.
        softcap: scores become softcap * tanh(score / softcap); 0 for none.
        sinks: [query heads], a score more in each head's softmax, which has no value.
        alibi_slopes: [query heads], times the key's distance from the query, which is negative before it.
        key_scale, value_scale: fp32 [blocks, block size, kv heads].

    Returns:
        fp32 [T, query heads, D]. A query that sees no key gives 0.
    """
    T, heads, D = q.shape
    block_size, kv_heads = key_cache.shape[1:3]
    out = torch.zeros(T, heads, D, dtype=torch.float32, device=q.device)
    for b in range(len(seq_lens)):
        first, last, n_keys = int(query_start_loc[b]), int(query_start_loc[b + 1]), int(seq_lens[b])
        if first == last or n_keys == 0:
            continue
        tokens = torch.arange(n_keys, device=q.device)
        blocks, slots = block_table[b, tokens // block_size].long(), tokens % block_size
        k, v = key_cache[blocks, slots].float(), value_cache[blocks, slots].float()
        if key_scale is not None:
            k = k * key_scale[blocks, slots][..., None]
            v = v * value_scale[blocks, slots][..., None]
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[first:last].float(), k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        positions = torch.arange(n_keys - (last - first), n_keys, device=q.device)
        distance = tokens[None, :] - positions[:, None]
        if alibi_slopes is not None:
            scores = scores + alibi_slopes.float()[:, None, None] * distance
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if causal:
            hidden |= distance > 0
        if window is not None:
            hidden |= distance <= -window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.float()[:, None, None].expand(-1, last - first, 1)
            weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
        else:
            weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, v)
    return out
