"""The compiled kernels of this process: when they are built and loaded, and whether they run for given tensors.

    off            HEADWISE_KERNELS=off
    not built      nothing has needed them yet
    building       a compiler runs in the background; torch's calls run meanwhile
    ready          loaded
    unavailable    no compiler, a failed build, a cache that others can write, …; `reason` says which

What fails once is not tried again in this process, and a failed build is not tried again by later ones either, until
`headwise kernels build`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Container, Iterator

import torch
from torch import Tensor

from headwise.errors import HeadwiseError, InputError
from headwise.operators._kernels.native import kernel_build, kernel_cache

MODES = ("auto", "build", "off")
DTYPES = (torch.float32, torch.bfloat16, torch.bool)  # bool: masks
_PLAIN = (Tensor, torch.nn.Parameter)  # any subclass (fake, wrapped, quantised, …) has meanings of its own


class KernelLibrary:
    """One per process; `ready` is asked before every use."""

    def __init__(self) -> None:
        self.loaded = False
        self.reason: str | None = None  # why they will not be ready in this process
        self._mode: str | None = None
        self._active = False  # loaded, and the mode is not off
        self._lock = threading.Lock()
        self._background: threading.Thread | None = None
        self._after_loading: list[Callable[[], None]] = []

    @property
    def mode(self) -> str:
        """HEADWISE_KERNELS as it was at the first use, or what `switched` has set."""
        if self._mode is None:
            self._mode = _checked(os.environ.get("HEADWISE_KERNELS") or "auto")
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self._mode = _checked(mode)
        self._active = self.loaded and mode != "off"

    @property
    def state(self) -> str:
        """off, not built, building, ready or unavailable."""
        if self.mode == "off":
            return "off"
        if self.loaded:
            return "ready"
        if self.reason is not None:
            return "unavailable"
        return "building" if self._is_building() else "not built"

    def ready(self) -> bool:
        """Whether the kernels can be called now; builds and loads them as the mode says."""
        return self._active or self._prepare()

    def after_loading(self, register: Callable[[], None]) -> Callable[[], None]:
        with self._lock:
            if self.loaded:
                register()
            else:
                self._after_loading.append(register)
        return register

    def _is_building(self) -> bool:
        return self._background is not None and self._background.is_alive()

    def _prepare(self) -> bool:
        if self.reason is not None or self.mode == "off" or self._is_building():
            return False
        with self._lock:
            if self.loaded or self.reason is not None or self._is_building():
                return self._active
            try:
                self._find_or_build()
            except (HeadwiseError, OSError) as error:
                self.reason = str(error)
            return self._active

    def _find_or_build(self) -> None:
        record = kernel_cache.read_record()
        if record is None or kernel_build.is_out_of_date(record):
            if (reason := kernel_build.cannot_build()) is not None:
                raise InputError(reason)
            if self._background is not None:
                raise InputError("the build in the background ended without a result; try `headwise kernels build`")
            if self.mode == "auto":
                kernel_cache.make_directory()  # fails here, where the reason is kept
                process = kernel_build.start_in_background()
                self._background = threading.Thread(target=process.wait, name="headwise-kernels", daemon=True)
                self._background.start()
                return
            record = kernel_build.build()
        if record.reason is not None:
            raise InputError(f"the build failed: {record.reason}")
        self._load()

    def _load(self) -> None:
        file = kernel_cache.library_file()
        for place in (file, file.parent):
            if (reason := kernel_cache.untrusted(place)) is not None:
                raise InputError(reason)
        try:
            torch.ops.load_library(str(file))
        except Exception as error:  # of the dynamic loader or of torch's registry
            raise InputError(f"the library cannot be loaded: {error}") from error
        for register in self._after_loading:
            register()
        self.loaded = True
        self._active = self.mode != "off"


def _checked(mode: str) -> str:
    if mode not in MODES:
        raise InputError(f"HEADWISE_KERNELS is {mode[:40]!r}; it must be auto, build or off")
    return mode


LIBRARY = KernelLibrary()


def after_loading(register: Callable[[], None]) -> Callable[[], None]:
    """Decorate a function that registers fakes and gradients: it runs once the schemas exist."""
    return LIBRARY.after_loading(register)


@after_loading
def _register() -> None:
    torch.library.register_fake("headwise::self_test", torch.empty_like)


@contextlib.contextmanager
def switched(mode: str) -> Iterator[None]:
    """Use another mode inside the block, for tests and measurements of both paths in one process."""
    before, LIBRARY.mode = LIBRARY.mode, mode
    try:
        yield
    finally:
        LIBRARY.mode = before


def usable(*tensors: Tensor | None, dtypes: Container[torch.dtype] = DTYPES) -> bool:
    """Whether a kernel may be called on these tensors now; None stands for an argument that was not given.

    Yes for plain CPU tensors of float32 or bfloat16, or of the dtypes of this kernel, outside of every transformation
    of the program: compiling, exporting, tracing, functorch, forward-mode derivatives and dispatch modes such as fake
    tensors and operation counters see the torch calls instead.
    """
    if torch.compiler.is_compiling():
        return False
    for x in tensors:
        if x is not None and not (type(x) in _PLAIN and x.is_cpu and x.dtype in dtypes and x.layout is torch.strided):
            return False
    if (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        or torch.autograd.forward_ad._current_level >= 0
    ):
        return False
    return LIBRARY.ready()
