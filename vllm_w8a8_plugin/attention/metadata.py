"""What a batch tells the kernels."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata

from vllm_w8a8_plugin.attention import unsupported
from vllm_w8a8_plugin.attention.warmup import WARMUP


@dataclass
class W8A8AttentionMetadata:
    """One batch of B sequences with T tokens, the last of which may be padding.

    `max_query_len` and `max_seq_len` are upper bounds of the lengths in `query_start_loc` and `seq_lens`.
    """

    num_actual_tokens: int  # T
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor  # int32 [B + 1]
    seq_lens: torch.Tensor  # int32 [B], tokens of this batch included
    block_table: torch.Tensor  # int32 [B, most blocks of a sequence]
    slot_mapping: torch.Tensor  # int64 [T]
    captured: bool = False  # into a CUDA graph, whose replays have other lengths


class W8A8AttentionMetadataBuilder(AttentionMetadataBuilder[W8A8AttentionMetadata]):
    """References the runner's own buffers: nothing is computed, so a recorded launch sees each replay's lengths."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_draft_decode_metadata_update: bool = True

    def __init__(self, kv_cache_spec, layer_names: list[str], vllm_config, device: torch.device) -> None:
        """As vLLM calls it once the cache is known; compiles, on a GPU, what the layers can reach.

        Raises:
            ValueError: the model has Reference Sliding Window Attention.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Releases without the question `supports_rswa` leave it to the backend.
        if getattr(vllm_config.model_config, "rswa_window", None) is not None:
            raise unsupported("R-SWA (a prefix that stays visible beside a window) is not supported")
        WARMUP.run(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> W8A8AttentionMetadata:
        """The batch as it is.

        Raises:
            ValueError: sequences that are not causal, or are so one by one; or multimodal tokens that see each other.
        """
        batch = common_attn_metadata
        if batch.causal is not True:
            raise unsupported("only causal attention is supported")
        if getattr(batch, "mm_req_doc_ranges", None) is not None:
            raise unsupported("multimodal tokens that see each other are not supported")
        return W8A8AttentionMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table_tensor,
            slot_mapping=batch.slot_mapping,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> W8A8AttentionMetadata:
        """A batch whose launches serve every replay: as many keys as the model can have, of which this one has few."""
        metadata = self.build(0, common_attn_metadata)
        metadata.captured = True
        metadata.max_seq_len = self.vllm_config.model_config.max_model_len
        # The launch is recorded, but it also runs: with all keys of a long context, slowly.
        metadata.seq_lens.fill_(max(1, metadata.max_query_len))
        return metadata

    def update_draft_decode_metadata(self, metadata: W8A8AttentionMetadata) -> None:
        """Nothing to do: `metadata` references buffers that vLLM has updated."""
