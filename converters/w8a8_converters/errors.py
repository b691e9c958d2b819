class ConversionError(ValueError):
    """The source, the options or the machine do not allow the conversion. The message says what to do."""


class BrokenFileError(ConversionError):
    """A file of the source is damaged, incomplete, contradicts itself or another one, or is of a version that is not read."""
