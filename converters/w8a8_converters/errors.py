class ConversionError(ValueError):
    """The source, the options or the machine do not allow the conversion. The message says what to do."""
