"""States that vLLM saves as they are in memory (`save_sharded_state`) and loads with load_format="sharded_state".

A state saved from a model that was quantized while loading is int8, but its config.json is that of the unquantized model: it
is loaded with the same quantization="w8a8", and then there is nothing left to quantize. What config.json cannot say of it, the
Hadamard blocks, travels with the tensors, as an entry `w8a8_block` of each layer. So the entries tell which layers are int8,
too: `compare_when_loaded`.
"""

import functools
import os
from collections.abc import Iterable

import torch

from vllm_w8a8_plugin import compat, envs

LOAD_FORMATS = ("sharded_state", "runai_streamer_sharded")
ENTRY = "w8a8_block"
_PATCHED = "_w8a8_patched"
_MOST_NAMES = 3


def is_loaded() -> bool:
    """Whether the model that is being built gets its weights from a saved state."""
    vllm_config = compat.current_vllm_config()
    return vllm_config is not None and vllm_config.load_config.load_format in LOAD_FORMATS


def note_blocks(layer: torch.nn.Module) -> None:
    """Let the layer's state tell `layer.w8a8_hadamard`, which is an int or a tuple of ints."""
    # On the CPU and no buffer: sleep mode takes a GPU's memory away, and vLLM expects a loader to bring every buffer.
    setattr(layer, ENTRY, _blocks(layer))
    layer.register_state_dict_post_hook(_add_entry)


def forget_blocks(layer: torch.nn.Module) -> None:
    """Leave the entry out after all, for a layer that gets no int8 weights."""
    delattr(layer, ENTRY)


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
    if hasattr(layer, ENTRY):
        state[prefix + ENTRY] = getattr(layer, ENTRY)  # itself: vLLM copies what is loaded into the state's tensors


def compare_when_loaded() -> None:
    """Let vLLM's loader of saved states call `check_layers` first; else a tensor too many or too few is a bare KeyError."""
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

    original = ShardedStateLoader.load_weights
    if hasattr(original, _PATCHED):
        return

    @functools.wraps(original)
    def load_weights(self, model: torch.nn.Module, model_config) -> None:
        iterate = self.iterate_over_files

        def checked(paths: list[str]):
            if all(map(os.path.isfile, paths)):  # a stream from elsewhere would have to be read twice
                check_layers(_names_in(paths), model.state_dict())
            return iterate(paths)

        self.iterate_over_files = checked
        try:
            original(self, model, model_config)
        finally:
            del self.iterate_over_files

    setattr(load_weights, _PATCHED, True)
    ShardedStateLoader.load_weights = load_weights


def check_layers(saved: Iterable[str], built: Iterable[str]) -> None:
    """Compare a saved state with the model that it is to be loaded into.

    Args:
        saved, built: names of the tensors of each.

    Raises:
        ValueError: other layers are int8 in the one than in the other.
    """
    held, wanted = _int8_layers(saved), _int8_layers(built)
    said = []
    if held - wanted:
        said.append(f"it holds {_named(held - wanted)} in int8, which the options leave unquantized")
    if wanted - held:
        said.append(f"it does not hold {_named(wanted - held)} in int8, which the options quantize")
    if said:
        raise ValueError(
            f"the saved state does not fit the options that it is loaded with: {'; '.join(said)}. Load it with the "
            f"{envs.LM_HEAD}, the {envs.SKIP_MODULES} and the config.json of the model that was saved, or save it again with "
            "these"
        )


def _int8_layers(names: Iterable[str]) -> set[str]:
    return {name.removesuffix(f".{ENTRY}") for name in names if name.endswith(f".{ENTRY}")}


def _named(layers: set[str]) -> str:
    first = sorted(layers)[:_MOST_NAMES]
    more = len(layers) - len(first)
    return ", ".join(first) + (f" and {more} more" if more else "")


def _names_in(paths: list[str]) -> list[str]:
    from safetensors import safe_open

    names: list[str] = []
    for path in paths:
        with safe_open(path, framework="pt") as file:
            names += file.keys()
    return names
