// SPDX-License-Identifier: Apache-2.0
// A device that measures every kernel, copy and matrix product inside a step, on its stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "classes.hpp"
#include "fsdp/concepts.hpp"
#include "marks.hpp"
#include "transformer/attention/host_attention.hpp"
#include "transformer/math/gemm.hpp"

namespace bench {

/// Time and launches of one kernel, or of one kind of call.
struct KernelTime {
  std::string_view kernel;
  KernelClass of{};
  std::int64_t launches = 0;
  double seconds = 0;
};

/// [Note: Where the table of classes comes from]
/// The step is run again on a device that puts a mark on the stream before and after every launch, copy, zeroing and
/// matrix product. A kernel's class is that of its name, so a kernel that is new, or launched from another place, is
/// counted without a change here. What a mark and a launch cost by themselves is in every figure; the table says how
/// much that is. Kernels of two streams that run at once are counted twice.
///
/// Used by one host thread.
template <class D>
class Profile {
 public:
  using Stream = typename D::Stream;

  explicit Profile(D const& device) : device_(device) {}

  /// Until stop(), up to `capacity` calls are measured.
  void start(std::size_t capacity) {
    marks_ = std::make_unique<Marks<D>>(device_, 2 * capacity);
    calls_.clear();
    lost_ = 0;
  }
  /// Times by kernel, in the order of their first launch. @pre the streams have been synchronised
  std::vector<KernelTime> stop() {
    std::vector<KernelTime> times;
    for (std::size_t i = 0; i < calls_.size(); ++i) {
      std::size_t row = 0;
      while (row < times.size() && times[row].kernel != calls_[i].first) ++row;
      if (row == times.size()) times.push_back({calls_[i].first, calls_[i].second});
      ++times[row].launches;
      times[row].seconds += marks_->seconds(2 * i, 2 * i + 1);
    }
    marks_.reset();
    return times;
  }
  /// Number of calls since start() that exceeded the capacity.
  std::int64_t lost() const { return lost_; }
  /// All calls so far, measured or not.
  std::int64_t seen() const { return seen_; }

  /// Runs `call`, which enqueues on `stream`.
  template <class Call>
  void measure(Stream& stream, std::string_view kernel, KernelClass of, Call&& call) {
    ++seen_;
    if (marks_ == nullptr) return call();
    if (2 * calls_.size() == marks_->size()) {
      ++lost_;
      return call();
    }
    auto const index = calls_.size();
    calls_.emplace_back(kernel, of);
    marks_->set(stream, 2 * index);
    call();
    marks_->set(stream, 2 * index + 1);
  }

 private:
  D device_;
  std::unique_ptr<Marks<D>> marks_;
  std::vector<std::pair<std::string_view, KernelClass>> calls_;
  std::int64_t lost_ = 0, seen_ = 0;
};

/// A device whose work goes through a Profile, which must outlive it.
template <class D>
class Profiled : public D {
 public:
  using Stream = typename D::Stream;
  using Event = typename D::Event;

  Profiled(D const& device, Profile<D>& profile) : D(device), profile_(&profile) {}

  Profile<D>& profile() const { return *profile_; }

  template <class Kernel, class... Args>
  void launch(Stream& stream, std::int64_t blocks, Kernel kernel, Args... args) const {
    static auto const kernel_text = kernel_name<Kernel>();
    static auto const of = class_of(kernel_text);
    profile_->measure(stream, kernel_text, of, [&] { D::launch(stream, blocks, kernel, args...); });
  }
  void copy_async(Stream& stream, void* to, void const* from, std::size_t bytes) const {
    profile_->measure(stream, "copy", KernelClass::other, [&] { D::copy_async(stream, to, from, bytes); });
  }
  void zero_async(Stream& stream, void* to, std::size_t bytes) const {
    profile_->measure(stream, "zero", KernelClass::casts, [&] { D::zero_async(stream, to, bytes); });
  }

 private:
  Profile<D>* profile_;
};

}  // namespace bench

namespace transformer {

/// The products of the device below. Batched ones are attention's.
template <class D>
class Gemm<bench::Profiled<D>> : public Gemm<D> {
 public:
  using Stream = typename D::Stream;

  explicit Gemm(bench::Profiled<D> const& device) : Gemm<D>(device), profile_(&device.profile()) {}

  template <class T, class Out>
  void run(Stream& stream, Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k, GemmScalar<Out> alpha,
           T const* a, std::int64_t lda, T const* b, std::int64_t ldb, GemmScalar<Out> beta, Out* c, std::int64_t ldc) {
    profile_->measure(stream, "Gemm::run", bench::KernelClass::matrix_products,
                      [&] { Gemm<D>::run(stream, op_a, op_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc); });
  }
  /// Where the device's own has it.
  template <class T, class Out>
  void run_with_bias(Stream& stream, Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k,
                     GemmScalar<Out> alpha, T const* a, std::int64_t lda, T const* b, std::int64_t ldb, Out const* bias,
                     Out* c, std::int64_t ldc) {
    profile_->measure(stream, "Gemm::run_with_bias", bench::KernelClass::matrix_products, [&] {
      Gemm<D>::run_with_bias(stream, op_a, op_b, m, n, k, alpha, a, lda, b, ldb, bias, c, ldc);
    });
  }
  template <class T, class Out>
  void batched(Stream& stream, Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k, GemmScalar<Out> alpha,
               T const* a, std::int64_t lda, std::int64_t stride_a, T const* b, std::int64_t ldb, std::int64_t stride_b,
               GemmScalar<Out> beta, Out* c, std::int64_t ldc, std::int64_t stride_c, std::int64_t batch,
               Lower lower = Lower::none) {
    profile_->measure(stream, "Gemm::batched", bench::KernelClass::attention, [&] {
      Gemm<D>::batched(stream, op_a, op_b, m, n, k, alpha, a, lda, stride_a, b, ldb, stride_b, beta, c, ldc, stride_c,
                       batch, lower);
    });
  }

 private:
  bench::Profile<D>* profile_;
};

/// Attention of the host's own kernels.
template <class D, class T>
void host_attention_forward(bench::Profiled<D> const& device, typename D::Stream& stream, HostAttention const& shape,
                            T const* qkv, T* mixed, LaneScratch scratch) {
  device.profile().measure(stream, "HostAttention, forward", bench::KernelClass::attention, [&] {
    host_attention_forward(static_cast<D const&>(device), stream, shape, qkv, mixed, scratch);
  });
}
template <class D, class T>
void host_attention_backward(bench::Profiled<D> const& device, typename D::Stream& stream, HostAttention const& shape,
                             T const* qkv, T const* mixed_gradient, T* qkv_gradient, LaneScratch scratch) {
  device.profile().measure(stream, "HostAttention, backward", bench::KernelClass::attention, [&] {
    host_attention_backward(static_cast<D const&>(device), stream, shape, qkv, mixed_gradient, qkv_gradient, scratch);
  });
}

}  // namespace transformer
