"""The errors raised for bad input.  A message is one sentence: who, what was given, what to do."""


class HeadwiseError(ValueError):
    """The base of all errors raised for bad input."""


class ShapeError(HeadwiseError):
    """Axes disagree, are empty, or are missing."""


class DtypeError(HeadwiseError):
    """Tensors of different dtypes or devices, or of a dtype the operation has no meaning for."""


class NonFiniteError(HeadwiseError):
    """NaN or infinity in an argument that must be finite."""


class UnsupportedError(HeadwiseError):
    """An argument that the operator or model cannot honour; the message names an alternative."""


class InputError(HeadwiseError):
    """A file, option or argument that cannot be used."""
