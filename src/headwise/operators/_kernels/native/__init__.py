"""Kernels in C++, compiled on the user's machine; every caller has a path made of torch calls beside them.

    if native.usable(q, k, v):
        return torch.ops.headwise.some_kernel(q, k, v)
    ...                                             # the same result to rounding, from torch calls

The wheel ships the sources `*.cpp` and `*.h` of this folder and no binary.  They are compiled as one program into one
shared library that torch.ops loads; nothing is compiled or loaded by an import.  `HEADWISE_KERNELS` says when:

    auto    (default) the first call of `usable` that would say yes starts a compiler in the background and says no
            until the library is there
    build   that call compiles and waits
    off     never

To add a kernel, write `<idea>.cpp`, which includes "common.h", declares its schema in TORCH_LIBRARY_FRAGMENT(headwise,
...) and its CPU implementation in TORCH_LIBRARY_IMPL(headwise, CPU, ...), and hand what torch.compile and autograd need
(`torch.library.register_fake`, `register_autograd`) to `after_loading`.

torch's stable ABI (torch/csrc/stable, torch >= 2.10) is not used.  It lets one binary serve many versions of torch, but
the library is compiled against the very torch that loads it; older versions have no such headers; they carry neither
the vectors of the CPU (`ATen/cpu/vec`) nor an inlined `at::parallel_for`.
"""

from headwise.operators._kernels.native.kernel_library import LIBRARY, after_loading, switched, usable

__all__ = ["LIBRARY", "after_loading", "switched", "usable"]
