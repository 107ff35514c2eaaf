// Adam on the host: one pass over memory, on all threads, SIMD by the compiler.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cmath>

namespace {

constexpr int64_t GRAIN = 16384;  // elements that are worth a thread

template <typename T>
void update(at::Tensor& p_, const at::Tensor& grad_, at::Tensor& m_, at::Tensor& v_,
            float beta1, float rest1, float beta2, float rest2, float rate,
            float root, float eps, float decay, bool decoupled) {
  T* P = p_.mutable_data_ptr<T>();
  const T* G = grad_.const_data_ptr<T>();
  T* M = m_.mutable_data_ptr<T>();
  T* V = v_.mutable_data_ptr<T>();
  at::parallel_for(0, p_.numel(), GRAIN, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      float p = P[i], grad = G[i], m = M[i], v = V[i];
      if (decoupled) {
        p *= decay;
      } else {
        grad += decay * p;
      }
      m = beta1 * m + rest1 * grad;
      v = beta2 * v + rest2 * (grad * grad);
      p -= rate * m / (std::sqrt(v) * root + eps);
      P[i] = p, M[i] = m, V[i] = v;
    }
  });
}

void adam_step(at::Tensor p, const at::Tensor& grad, at::Tensor m, at::Tensor v,
               double beta1, double rest1, double beta2, double rest2, double rate,
               double root, double eps, double decay, bool decoupled) {
  const auto step = p.scalar_type() == at::kHalf       ? update<at::Half>
                    : p.scalar_type() == at::kBFloat16 ? update<at::BFloat16>
                                                       : update<float>;
  step(p, grad, m, v, beta1, rest1, beta2, rest2, rate, root, eps, decay, decoupled);
}

}  // namespace

TORCH_LIBRARY(minizero, library) {
  library.def(
      "adam_step(Tensor(a!) p, Tensor grad, Tensor(b!) m, Tensor(c!) v, float beta1, "
      "float rest1, float beta2, float rest2, float rate, float root, float eps, "
      "float decay, bool decoupled) -> ()");
}

TORCH_LIBRARY_IMPL(minizero, CPU, library) { library.impl("adam_step", adam_step); }
