// exp(x): run once after a build.  A library that cannot be loaded, that uses instructions this CPU lacks or whose
// vectors compute something else is found here, in a process of its own.
#include "common.h"

namespace headwise::self_test {

at::Tensor run(const at::Tensor& x) {
  TORCH_CHECK(x.dtype() == at::kFloat && x.is_contiguous(), "self_test: x must be contiguous and float32");
  at::Tensor y = at::empty(x.sizes(), x.options());
  const float* in = x.const_data_ptr<float>();
  float* out = y.mutable_data_ptr<float>();
  const int64_t n = x.numel();
  at::parallel_for(0, (n + W - 1) / W, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * W; i < std::min(n, end * W); i += W) {
      const int64_t count = std::min(W, n - i);
      load(in + i, count).exp().store(out + i, count);
    }
  });
  return y;
}

TORCH_LIBRARY_FRAGMENT(headwise, library) { library.def("self_test(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(headwise, CPU, library) { library.impl("self_test", run); }

}  // namespace headwise::self_test
