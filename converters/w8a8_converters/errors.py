_MESSAGE_LIMIT = 2000  # characters


class ConversionError(ValueError):
    """The source, the options or the machine do not allow the conversion. The message says what to do."""


class BrokenFileError(ConversionError):
    """A file of the source is damaged, incomplete, contradicts itself or another one, or is of a version that is not read."""


class AlreadyW8A8Error(ConversionError):
    """The source is W8A8: there is nothing to convert, and nothing wrong."""


def one_line(message: object) -> str:
    """A message as it may be printed: what a checkpoint put into it can neither drive the terminal nor fill it."""
    text = str(message)
    text = text if len(text) <= _MESSAGE_LIMIT else f"{text[:_MESSAGE_LIMIT]}..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
