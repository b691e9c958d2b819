"""What a tensor is, told from its name and shape: which weights are quantized unless the user says otherwise."""

import re

_IN_A_LAYER = re.compile(r"(^|\.)(layers|h|blocks|block)\.\d+\.")
# Path components, whole, of modules whose weights stay as they are, by what these are.
_KEPT = {
    what: re.compile(pattern)
    for what, pattern in {
        "vision and audio": r"(vision|visual|audio|speech|image).*",
        "embeddings and projectors": r".*(multi_modal|mm_proj|projector|embed).*|wte|wpe|relative_attention_bias",
        # A flipped expert costs more than the bytes.
        "routers": r"gate|router|router_gate|shared_expert_gate",
        # A wrong draft costs speed.
        "MTP heads": r"mtp.*|eh_proj|fc|shared_head",
        # Errors of a recurrent state add up over tokens.
        "recurrent layers": r"linear_attn|mamba.*|conv1d|x_proj|dt_proj|in_proj_ba|in_proj_b|in_proj_a",
        "norms": r".*norm.*|ln_.*",
    }.items()
}
# Mamba-2's projections where other layers' are called by the same parent (Nemotron-H).
_RECURRENT = re.compile(r"(^|\.)mixer\.(in_proj|out_proj)$")
_NOT_LINEAR = re.compile(r".*(embed|norm).*|ln_.*|wte|wpe|relative_attention_bias")
_LM_HEAD = "lm_head"
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings")
# Their linear layers are transposed (transformers' Conv1D, [in, out]), so that rows are not output channels.
TRANSPOSED_MODEL_TYPES = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer"}
# Their experts have biases and a clamped activation, which int8 experts do not have.
UNQUANTIZED_EXPERTS_MODEL_TYPES = {"gpt_oss"}


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


def kind_of_kept(tensor: str, ndim: int) -> str:
    """What a tensor is that `is_quantized_by_default` does not take, for people."""
    module = module_of(tensor)
    if is_lm_head(module):
        return _LM_HEAD
    for what, pattern in _KEPT.items():
        if any(map(pattern.fullmatch, module.split("."))):
            return what
    if _RECURRENT.search(module):
        return "recurrent layers"
    if is_stacked_experts(tensor, ndim):
        return "stacked experts"
    return "biases and other vectors" if ndim < 2 else "others"


def is_stacked_experts(tensor: str, ndim: int) -> bool:
    """Whether the tensor stacks the weights of several experts."""
    return ndim == 3 and bool(_IN_A_LAYER.search(tensor)) and "experts" in tensor.split(".")


def experts_module(tensor: str) -> str:
    """Name of the module that holds the experts to which a tensor belongs."""
    parts = tensor.split(".")
    return ".".join(parts[: parts.index("experts") + 1])


def is_token_embedding(tensor: str, ndim: int) -> bool:
    """Whether the tensor is the weight of an embedding to which an lm_head may be tied."""
    module, _, kind = tensor.rpartition(".")
    return kind == "weight" and ndim == 2 and module.rpartition(".")[2] in _EMBEDDINGS


def lm_head_of(embedding: str) -> str:
    """Name of the lm_head module that is tied to the embedding with this tensor name."""
    before = re.sub(r"(^|\.)(model|transformer)\..*", "", module_of(embedding))
    return f"{before}.{_LM_HEAD}" if before else _LM_HEAD


def _is_kept(module: str) -> bool:
    kept = any(pattern.fullmatch(component) for pattern in _KEPT.values() for component in module.split("."))
    return kept or is_lm_head(module) or bool(_RECURRENT.search(module))
