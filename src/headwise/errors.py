"""The errors raised for bad input.  A message is one sentence: who, what was given, what to do."""

import contextlib
import importlib.util
from collections.abc import Iterator


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


@contextlib.contextmanager
def needs_extra(extra: str, purpose: str) -> Iterator[None]:
    """Around imports of optional packages: a missing one raises InputError with the command that installs it.

    >>> with needs_extra("report", "the figure"):
    ...     import no_such_package
    Traceback (most recent call last):
    headwise.errors.InputError: the figure needs no_such_package, which is not installed; pip install ...
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise _missing(extra, purpose, error.name) from error


def check_extra(extra: str, purpose: str, *packages: str) -> None:
    """Raise the error of `needs_extra` now, before hours of work, if one of the packages is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise _missing(extra, purpose, package)


def shown(path: object) -> str:
    """A path for a message: with escapes if it has line breaks or other characters that cannot be printed.

    >>> print(shown("out/runs[exp] 1"), shown("two\\nlines"))
    out/runs[exp] 1 'two\\nlines'
    """
    text = str(path)
    return text if text.isprintable() else ascii(text)


def _missing(extra: str, purpose: str, package: str | None) -> InputError:
    return InputError(
        f"{purpose} needs {package}, which is not installed; pip install 'headwise[{extra}]', or in a checkout "
        f"pip install '.[{extra}]'"
    )
