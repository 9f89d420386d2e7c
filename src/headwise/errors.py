"""Every complaint headwise makes on purpose: one sentence that names the thing, the sizes and the fix."""


class HeadwiseError(ValueError):
    """The base of all errors raised for bad input; catch this one to catch them all."""


class ShapeError(HeadwiseError):
    """Axes disagree, are empty, or are missing."""


class DtypeError(HeadwiseError):
    """Tensors of different dtypes or devices, or of a dtype the operation has no meaning for."""


class NonFiniteError(HeadwiseError):
    """NaN or infinity where a number is needed."""


class UnsupportedError(HeadwiseError):
    """The idea does not permit what was asked; the message says why and what to use instead."""


class InputError(HeadwiseError):
    """A file, option or argument that cannot be used."""
