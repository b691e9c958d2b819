"""Methods of an int8 lm_head: of its own, from a checkpoint or quantized while loading, or a copy beside a tied embedding.

A tied lm_head has no weight of its own. What vLLM then takes logits from depends on its release and on the model class:

| model class | `lm_head` | e.g. |
|---|---|---|
| `self.lm_head.tie_weights(embed_tokens)` | a `ParallelLMHead` with the embedding's weight | Llama, Gemma 3; in 0.32 most |
| `self.lm_head = embed_tokens` | the embedding | Qwen 3 in 0.25.1 |
| `logits_processor(embed_tokens, ...)` | none | Gemma 3n |

In all of them the int8 copy is held with the embedding, whose weight keeps its dtype and serves the lookup of rows.
"""

import difflib
from collections.abc import Callable, Iterable

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from vllm_w8a8_plugin import envs, log, saved_state
from vllm_w8a8_plugin.linear import W8A8LinearMethod, W8A8OnlineLinearMethod
from vllm_w8a8_plugin.warmup import WARMUP
from w8a8_kernels.quantize.weight import quantize_weight


class _LogitsMixin:
    """What sets logits apart from other products: no compiled graph holds them, so nothing is folded into their quantizer."""

    def _prepare(self, layer: torch.nn.Module, params_dtype: torch.dtype) -> None:
        super()._prepare(layer, params_dtype)
        WARMUP.expect(layer, fused=False)


class W8A8LMHeadMethod(_LogitsMixin, W8A8LinearMethod):
    """lm_head whose checkpoint holds int8 codes `weight` [V, K] and `weight_scale` [V, 1]; vLLM pads V and cuts it by rank.

    Args:
        ignore: the checkpoint's `ignore`, for the message where the lm_head turns out to be tied.
        hadamard, all_built: as in `W8A8LinearMethod`.
    """

    def __init__(
        self, ignore: Iterable[str] = (), hadamard: str | int = 0, all_built: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(hadamard, all_built)
        self._ignore = list(ignore)

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        """Refuse: a tied lm_head is what the embedding is, and that is not quantized.

        Raises:
            ValueError: always.
        """
        near = difflib.get_close_matches("lm_head", self._ignore, n=1)
        hint = f" (it has {near[0]!r}: is that a misspelling?)" if near else ""
        raise ValueError(
            "lm_head: the model ties it to the embedding (tie_word_embeddings), which is not quantized, but `ignore` in "
            f"quantization_config does not name lm_head{hint}. Correct `ignore` in config.json; to have a tied lm_head in "
            f"int8, name it there all the same and set {envs.LM_HEAD}=1"
        )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Give rows of padding the scale of a row of zeros, then do as for other layers."""
        # vLLM's loader fills weight and scale with zeros behind the rows that it loads.
        layer.weight_scale.data[layer.shard_indices.num_org_elements :] = 1
        super().process_weights_after_loading(layer)


class W8A8OnlineLMHeadMethod(_LogitsMixin, W8A8OnlineLinearMethod):
    """lm_head whose checkpoint holds a floating-point `weight` [V, K], or which is tied to the embedding.

    Args:
        hadamard, all_built: as in `W8A8LinearMethod`.
    """

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        """Let the embedding hold the int8 copy, and give the lm_head no weight but the embedding's."""
        WARMUP.forget(layer)
        method = embed_tokens.quant_method
        if not isinstance(method, W8A8TiedEmbeddingMethod):  # the model class gave its embedding no quantization config
            method = W8A8TiedEmbeddingMethod(self._hadamard, self._all_built)
            method.prepare(embed_tokens.weight.shape[1], embed_tokens.weight.dtype)
            embed_tokens.quant_method = method
        method.gives_logits = lambda: True
        layer.weight = embed_tokens.weight
        # A saved state has nothing of the copy: it is made of the embedding again, so the state fits either way.
        if hasattr(layer, "weight_scale"):
            del layer.weight_scale
        saved_state.forget_blocks(layer)
        layer.quant_method = _TiedLMHeadMethod(embed_tokens)
        return layer

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Quantize as other layers: vLLM fills rows of padding with zeros."""
        N, K = layer.weight.shape
        before = _megabytes(N, K, layer.w8a8_dtype.itemsize)
        log.once(f"W8A8: lm_head is int8, {_megabytes(N, K, 1)} on each rank instead of {before}")
        super().process_weights_after_loading(layer)


class W8A8TiedEmbeddingMethod(UnquantizedEmbeddingMethod):
    """Embedding [V, K] that gives logits, too: rows from its own weight, logits from an int8 copy of it.

    Args:
        hadamard, all_built: as in `W8A8LinearMethod`.
        gives_logits: asked when weights are there for the first time; where it says no, there is no copy, all is vLLM's own.
    """

    # vLLM would hand over weights of another process without the copy.
    supports_pre_processed_weights = False

    def __init__(
        self,
        hadamard: str | int = 0,
        all_built: Callable[[], None] = lambda: None,
        gives_logits: Callable[[], bool] = lambda: True,
    ) -> None:
        self._method = _CopyMethod(hadamard, all_built)
        self.gives_logits = gives_logits
        # Not a child of the layer: vLLM would look for its tensors in the checkpoint, and put old ones back when it reloads.
        self._copy = torch.nn.Module()

    def create_weights(self, layer: torch.nn.Module, *sizes_and_dtype, **extra_weight_attrs) -> None:
        """As for an unquantized embedding: `weight` [V, K], whole rows on every rank."""
        super().create_weights(layer, *sizes_and_dtype, **extra_weight_attrs)
        self.prepare(layer.weight.shape[1], layer.weight.dtype)

    def prepare(self, K: int, params_dtype: torch.dtype) -> None:
        """Make the copy ready for a weight of K columns, and for activations of params_dtype."""
        self._method.prepare(self._copy, K, params_dtype)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Quantize the weight that has been loaded; loaded again, into the copy that is there."""
        if self._copy.weight is None and not self.gives_logits():
            WARMUP.forget(self._copy)
            super().process_weights_after_loading(layer)
            return
        N, K = layer.weight.shape
        self._method.fill(self._copy, layer.weight.data)
        dtype = str(layer.weight.dtype).removeprefix("torch.")
        log.once(
            f"W8A8: lm_head is int8, a copy of {_megabytes(N, K, 1)} on each rank beside the embedding to which it is tied, "
            f"whose rows stay {dtype} ({_megabytes(N, K, layer.weight.dtype.itemsize)})"
        )

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Logits: x [M, K] in bf16, fp16 or fp32 to [M, V] of the same dtype."""
        if self._copy.weight is None:
            return super().apply(layer, x, bias)
        return self._method.apply(self._copy, x, bias)


class _CopyMethod(_LogitsMixin, W8A8LinearMethod):
    """Method of the int8 copy, which is a module without any of vLLM's."""

    def prepare(self, copy: torch.nn.Module, K: int, params_dtype: torch.dtype) -> None:
        copy.prefix = "lm_head"
        copy.weight = copy.weight_scale = None
        self._choose_block(copy, K, K)
        self._choose_scales(copy, K, K)
        self._prepare(copy, params_dtype)

    def fill(self, copy: torch.nn.Module, weight: torch.Tensor) -> None:
        codes, scale = quantize_weight(weight, None, copy.w8a8_hadamard)
        for name, tensor in (("weight", codes), ("weight_scale", scale)):
            held = getattr(copy, name)
            if held is None:
                setattr(copy, name, torch.nn.Parameter(tensor, requires_grad=False))
            else:  # in place: a CUDA graph of a draft model may hold the address
                held.data.copy_(tensor)
        self.process_weights_after_loading(copy)


class _TiedLMHeadMethod(QuantizeMethodBase):
    """lm_head that computes as the embedding to which it is tied."""

    def __init__(self, embed_tokens: torch.nn.Module) -> None:
        self._embed_tokens = embed_tokens

    def create_weights(self, layer: torch.nn.Module, *weight_args, **extra_weight_attrs) -> None:
        raise NotImplementedError("a tied lm_head has the embedding's weight")

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._embed_tokens.quant_method.apply(self._embed_tokens, x, bias)


def _megabytes(N: int, K: int, itemsize: int) -> str:
    """Size of a weight [N, K]; of int8, with its scales."""
    return f"{(N * K * itemsize + (4 * N if itemsize == 1 else 0)) / 1e6:.1f} MB"
