"""What a tensor is, told from its name and shape: which weights are quantized unless the user says otherwise."""

import re

_IN_A_LAYER = re.compile(r"(^|\.)(layers|h|blocks|block)\.\d+\.")
# Path components, whole, of modules whose weights stay as they are.
_KEPT = re.compile(
    r"(vision|visual|audio|speech|image).*|.*(multi_modal|mm_proj|projector|embed).*"  # towers, projectors, embeddings
    r"|gate|router|router_gate|shared_expert_gate"  # routers: a flipped expert costs more than the bytes
    r"|mtp.*|eh_proj|fc|shared_head"  # MTP heads: a wrong draft costs speed
    r"|linear_attn|mamba.*|conv1d|x_proj|dt_proj|in_proj_ba|in_proj_b|in_proj_a"  # recurrent state: errors add up over tokens
    r"|.*norm.*|ln_.*|wte|wpe|relative_attention_bias"
)
# Mamba-2's projections where other layers' are called by the same parent (Nemotron-H).
_RECURRENT = re.compile(r"(^|\.)mixer\.(in_proj|out_proj)$")
_NOT_LINEAR = re.compile(r".*(embed|norm).*|ln_.*|wte|wpe|relative_attention_bias")
_LM_HEAD = "lm_head"
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings")
# Their linear layers are transposed (transformers' Conv1D, [in, out]), so that rows are not output channels.
TRANSPOSED_MODEL_TYPES = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer"}


def module_of(tensor: str) -> str:
    """Name of the module that owns a tensor."""
    return tensor.rpartition(".")[0]


def is_lm_head(module: str) -> bool:
    return module.rpartition(".")[2] == _LM_HEAD


def is_linear(tensor: str, ndim: int) -> bool:
    """Whether the tensor looks like the weight of a Linear module, quantized or not."""
    module, _, kind = tensor.rpartition(".")
    return kind == "weight" and ndim == 2 and not any(map(_NOT_LINEAR.fullmatch, module.split(".")))


def is_quantized_by_default(tensor: str, ndim: int) -> bool:
    """Whether the tensor is the weight of a projection inside a transformer layer."""
    module = module_of(tensor)
    return is_linear(tensor, ndim) and bool(_IN_A_LAYER.search(tensor)) and not _is_kept(module)


def is_stacked_experts(tensor: str, ndim: int) -> bool:
    """Whether the tensor stacks the weights of several experts."""
    return ndim == 3 and bool(_IN_A_LAYER.search(tensor)) and "experts" in tensor.split(".")


def is_token_embedding(tensor: str, ndim: int) -> bool:
    """Whether the tensor is the weight of an embedding to which an lm_head may be tied."""
    module, _, kind = tensor.rpartition(".")
    return kind == "weight" and ndim == 2 and module.rpartition(".")[2] in _EMBEDDINGS


def lm_head_of(embedding: str) -> str:
    """Name of the lm_head module that is tied to the embedding with this tensor name."""
    before = re.sub(r"(^|\.)(model|transformer)\..*", "", module_of(embedding))
    return f"{before}.{_LM_HEAD}" if before else _LM_HEAD


def _is_kept(module: str) -> bool:
    return is_lm_head(module) or any(map(_KEPT.fullmatch, module.split("."))) or bool(_RECURRENT.search(module))
