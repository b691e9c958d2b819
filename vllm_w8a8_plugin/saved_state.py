"""States that vLLM saves as they are in memory (`save_sharded_state`) and loads with load_format="sharded_state".

A state saved from a model that was quantized while loading is int8, but its config.json is that of the unquantized model: it
is loaded with the same quantization="w8a8", and then there is nothing left to quantize. What config.json cannot say of it, the
Hadamard blocks, travels with the tensors, as an entry `w8a8_block` of each layer.
"""

import torch

from vllm_w8a8_plugin import compat

LOAD_FORMATS = ("sharded_state", "runai_streamer_sharded")
ENTRY = "w8a8_block"


def is_loaded() -> bool:
    """Whether the model that is being built gets its weights from a saved state."""
    vllm_config = compat.current_vllm_config()
    return vllm_config is not None and vllm_config.load_config.load_format in LOAD_FORMATS


def note_blocks(layer: torch.nn.Module) -> None:
    """Let the layer's state tell `layer.w8a8_hadamard`, which is an int or a tuple of ints."""
    # On the CPU and no buffer: sleep mode takes a GPU's memory away, and vLLM expects a loader to bring every buffer.
    setattr(layer, ENTRY, _blocks(layer))
    layer.register_state_dict_post_hook(_add_entry)


def check_blocks(layer: torch.nn.Module) -> None:
    """For when the layer's weights are there.

    Raises:
        ValueError: they were saved from a layer with other Hadamard blocks than this one was built with.
    """
    saved, built = getattr(layer, ENTRY), _blocks(layer)
    if not torch.equal(saved, built):
        raise ValueError(
            f"{getattr(layer, 'prefix', 'a layer')}: the saved state has Hadamard blocks {saved.tolist()}, and this model was "
            f"built with {built.tolist()}: load it with the VLLM_W8A8_HADAMARD and the tensor parallelism of the model that "
            "was saved"
        )


def _blocks(layer: torch.nn.Module) -> torch.Tensor:
    return torch.tensor(layer.w8a8_hadamard, dtype=torch.int32, device="cpu").reshape(-1)


def _add_entry(layer: torch.nn.Module, state: dict[str, torch.Tensor], prefix: str, local_metadata: dict) -> None:
    state[prefix + ENTRY] = getattr(layer, ENTRY)  # itself: vLLM copies what is loaded into the state's tensors
