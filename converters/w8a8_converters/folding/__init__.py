"""Changes of the unquantized weights that leave the model's function as it is and make it easier to quantize.

`rotate.py` and `equalize.py` add operations to a `FoldedSource`, which every output format is then written from.
`quality.py` tries them out and keeps what helps.
"""
