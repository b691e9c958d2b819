"""vLLM's loader for the weights of a GGUF file: tensors under their Hugging Face names, one at a time, to `load_weights`."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.weight_utils import enable_tqdm

from vllm_w8a8_plugin import gguf

if TYPE_CHECKING:
    from vllm.config import ModelConfig

    from w8a8_converters.checkpoint import TensorInfo
    from w8a8_converters.gguf.source import GGUFSource

# fp32 size of a block of rows, which is what dequantization takes beside the tensor itself.
_BLOCK_BYTES = 16 * 1024**2


class GGUFModelLoader(DefaultModelLoader):
    """Reads the GGUF file of a model that `gguf.resolve` has prepared; every rank reads all of it, and vLLM shards.

    Other weights that vLLM loads by the same load format, those of a draft model or of a reload from a folder, are read as
    with load format `auto`.
    """

    def download_model(self, model_config: "ModelConfig") -> None:
        if gguf.weights_file(model_config) is None:
            self._for_folders().download_model(model_config)

    def get_all_weights(self, model_config: "ModelConfig", model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, tensor on the CPU in the model's dtype), in the file's order.

        Raises:
            ConversionError: the file cannot be served; the front process has said so before, unless it changed.
        """
        path = gguf.weights_file(model_config)
        self.counter_before_loading_weights = time.perf_counter()
        if path is None:
            yield from self._for_folders().get_all_weights(model_config, model)
            return
        from w8a8_converters.gguf.source import GGUFSource

        source = GGUFSource(path, hf_config=gguf.local_config(model_config.hf_config_path))
        shown = enable_tqdm(self.load_config.use_tqdm_on_load)
        for info in tqdm(source.tensors.values(), desc="Loading GGUF tensors", disable=not shown):
            yield info.name, _tensor(source, info, model_config.dtype)

    def _for_folders(self) -> DefaultModelLoader:
        return DefaultModelLoader(replace(self.load_config, load_format="auto"))


def register() -> None:
    """Make vLLM know the load format. Calling it again changes nothing."""
    if gguf.LOAD_FORMAT not in _LOAD_FORMAT_TO_MODEL_LOADER:
        register_model_loader(gguf.LOAD_FORMAT)(GGUFModelLoader)


def _tensor(source: "GGUFSource", info: "TensorInfo", dtype: torch.dtype) -> torch.Tensor:
    """A whole tensor, rounded once from fp32 to `dtype`, or fp32 where the model needs that."""
    tensor = torch.empty(info.shape, dtype=info.dtype if info.keeps_dtype else dtype, device="cpu")
    rows = tensor.reshape(info.n_rows, -1)
    step = max(1, _BLOCK_BYTES // (4 * rows.shape[1]))
    for start in range(0, info.n_rows, step):
        stop = min(start + step, info.n_rows)
        rows[start:stop] = source.rows(info.name, start, stop).reshape(stop - start, -1)
    return tensor
