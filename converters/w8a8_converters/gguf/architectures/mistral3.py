"""mistral3: the text models of Mistral Small 3.x and of Ministral 3. A vision tower comes in a file of its own."""

from typing import Any

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.architectures import llama


class Model(llama.Model):
    """Ministral3ForCausalLM where queries grow with their position, MistralForCausalLM where they do not."""

    def config(self) -> dict[str, Any]:
        config = super().config()
        if config["model_type"] != "llama" or config["attention_bias"] or config["mlp_bias"]:
            raise ConversionError(f"{self.file.path}: {self.name} with experts or biases is not supported")
        for key in ("attention_bias", "mlp_bias"):
            config.pop(key)
        growth = self.number("attention.temperature_scale", 0.0)
        scaling = config.get("rope_scaling")
        if scaling is not None and scaling["rope_type"] == "yarn":
            scaling |= self._mscale()
        if not growth:
            return config | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
        if scaling is None or scaling["rope_type"] != "yarn":
            raise ConversionError(f"{self.file.path}: {self.name}.attention.temperature_scale asks for rope scaling yarn")
        # transformers reads the growth in the rope parameters, vLLM in llama_4_scaling.
        original = scaling["original_max_position_embeddings"]
        parameters = {"rope_theta": config.pop("rope_theta"), **config.pop("rope_scaling"), "llama_4_scaling_beta": growth}
        return config | {
            "architectures": ["Ministral3ForCausalLM"],
            "model_type": "ministral3",
            "llama_4_scaling": {"beta": growth, "original_max_position_embeddings": original},
            "rope_parameters": parameters,
            "sliding_window": None,
        }

    def _mscale(self) -> dict[str, Any]:
        """With an mscale_all_dim, which Mistral has as 1 only, attention is as strong as without scaling."""
        multiplier = self.number("rope.scaling.yarn_log_multiplier", 0.0)
        if multiplier not in (0.0, 1.0):
            raise ConversionError(
                f"{self.file.path}: {self.name}.rope.scaling.yarn_log_multiplier is {multiplier}, which is not supported; "
                "expected 0 or 1"
            )
        # vLLM 0.25 to 0.27 know neither and have a key of their own.
        return {"mscale": 1.0, "mscale_all_dim": 1.0, "apply_yarn_scaling": False} if multiplier else {}
