"""Layers for multi-token prediction (MTP), which a file counts among its others."""

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.architectures.dense import DenseArchitecture
from w8a8_converters.gguf.reader import GGUFFile


class MTPArchitecture(DenseArchitecture):
    """MTP layers follow the others.

    Attributes:
        main_layers: layers without those for MTP, of which `n_layers` counts those in the file.
    """

    def __init__(self, file: GGUFFile) -> None:
        super().__init__(file)
        mtp = self.integer("nextn_predict_layers", 0, minimum=0)
        self.main_layers = self.n_layers - mtp
        if self.main_layers < 1:
            raise ConversionError(
                f"{file.path}: {self.name}.nextn_predict_layers is {mtp}, expected fewer than all {self.n_layers} layers"
            )
        # As in llama.cpp, a file may name MTP layers that it has left out.
        if f"blk.{self.main_layers}.nextn.eh_proj.weight" not in file.tensors:
            self.n_layers = self.main_layers
