"""The config and tokenizer of a Hugging Face folder in place of what a GGUF file's metadata give."""

from pathlib import Path
from typing import Any

from w8a8_converters.checkpoint import TOKENIZER_FILES, check_side_file, read_config
from w8a8_converters.errors import ConversionError

_BESIDE_A_TOKENIZER = (
    "added_tokens.json",
    "additional_chat_templates/*.jinja",
    "chat_template.*",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
_GENERATION = "generation_config.json"
_REQUIRED_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_SIZES = (
    *_REQUIRED_SIZES,
    "head_dim",
    "intermediate_size",
    "kv_lora_rank",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts",
    "num_key_value_heads",
    "num_local_experts",
)
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Of how the folder's own weights are stored; and of Python files, which are not taken.
_NOT_TAKEN = ("quantization_config", "compression_config", "dtype", "torch_dtype", "auto_map")


class HFConfigFolder:
    """A folder whose config.json is that of a GGUF file's model.

    Attributes:
        side_files: generation_config.json and the files of the tokenizer, those that it has: name -> file.
        has_tokenizer: whether these hold a tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / "config.json").is_file():
            raise ConversionError(
                f"{folder} has no config.json: give a folder with the Hugging Face config of the GGUF file's model"
            )
        self.path = folder
        self._config = read_config(folder)
        names = [*TOKENIZER_FILES, *_BESIDE_A_TOKENIZER]
        found = (path for name in names for path in sorted(folder.glob(name)))
        tokenizer = {str(path.relative_to(folder)): check_side_file(folder, path) for path in found}
        self.has_tokenizer = any(name in tokenizer for name in TOKENIZER_FILES)
        self.side_files: dict[str, Path] = tokenizer if self.has_tokenizer else {}
        if (folder / _GENERATION).is_file():
            self.side_files[_GENERATION] = check_side_file(folder, folder / _GENERATION)

    def config_for(self, file: Path, metadata_config: dict[str, Any]) -> dict[str, Any]:
        """The folder's config.json, with the dtype and, where it has none, the special token ids of the metadata's.

        Args:
            file: the GGUF file.
            metadata_config: what its metadata give.

        Raises:
            ConversionError: the file's weights do not fit it.
        """
        expected, given = metadata_config, self._config
        for key in _SIZES:
            optional = key not in _REQUIRED_SIZES and None in (expected.get(key), given.get(key))
            if not optional and given.get(key) != expected[key]:
                has = f"{key} {given[key]}" if key in given else f"no {key}"
                raise ConversionError(
                    f"{self.path / 'config.json'} does not fit {file}: it has {has}, the file {expected[key]}; give the "
                    "config of this model, that of its language part alone"
                )
        if expected.get("tie_word_embeddings") and given.get("tie_word_embeddings") is False:
            raise ConversionError(
                f"{self.path / 'config.json'} does not fit {file}: it has tie_word_embeddings false, the file no output.weight"
            )
        ids = {key: expected[key] for key in _SPECIAL_IDS}
        taken = {key: value for key, value in given.items() if key not in _NOT_TAKEN}
        return {**ids, **taken, "torch_dtype": expected["torch_dtype"]}
