// SPDX-License-Identifier: Apache-2.0
// Support for the model's tests: an engine without sharding in any precision, and finite differences.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/host.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/memory.hpp"
#include "fsdp/options.hpp"

namespace model_test {

using Device = fsdp::host::Device;
using Stream = Device::Stream;

/// Values and gradients of the tensors of a model, by full name.
template <class T>
struct Store {
  struct Entry {
    std::vector<std::int64_t> shape;
    std::vector<T> value, gradient;
    bool decay = true;
    bool fresh = false;  ///< the gradient is undefined
  };
  std::map<std::string, Entry> tensors;

  Entry& at(std::string const& name) { return tensors.at(name); }

  /// Uniform values in [-scale, scale], LayerNorm weights around one.
  void randomise(std::uint32_t seed, double scale) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<double> uniform(-scale, scale);
    for (auto& [name, entry] : tensors) {
      bool const norm = name.find("ln_") != std::string::npos && name.ends_with("weight");
      for (auto& value : entry.value) value = static_cast<T>(uniform(random) + (norm ? 1.0 : 0.0));
    }
  }
  /// The next backward begins all sums.
  void forget_gradients() {
    for (auto& [name, entry] : tensors) {
      entry.gradient.assign(entry.gradient.size(), static_cast<T>(NAN));
      entry.fresh = true;
    }
  }
};

/// Creates or checks entries of a store.
template <class T>
struct Create {
  std::string prefix;
  Store<T>* store;

  template <class E, std::size_t Rank>
  void operator()(std::string_view name, fsdp::Tensor<E, Rank>&, fsdp::Extents<Rank> extents,
                  fsdp::TensorOptions options = {}) const {
    auto& entry = store->tensors[prefix.empty() ? std::string(name) : prefix + "." + std::string(name)];
    std::int64_t count = 1;
    for (auto const extent : extents) count *= extent;
    entry.shape.assign(extents.begin(), extents.end());
    entry.decay = options.decay;
    entry.value.resize(static_cast<std::size_t>(count));
    entry.gradient.resize(static_cast<std::size_t>(count));
  }
};

/// Points the tensors of a Params at values, or at gradients, which are fresh once.
template <class T>
struct Bind {
  std::string prefix;
  Store<T>* store;

  template <class E, std::size_t Rank>
  void operator()(std::string_view name, fsdp::Tensor<E, Rank>& tensor, fsdp::Extents<Rank> extents,
                  fsdp::TensorOptions = {}) const {
    auto& entry = store->at(prefix.empty() ? std::string(name) : prefix + "." + std::string(name));
    if constexpr (requires { tensor.fresh = true; }) {
      tensor = {{entry.gradient.data(), extents}, std::exchange(entry.fresh, false)};
    } else {
      tensor = {entry.value.data(), extents};
    }
  }
};

template <class M, class E>
class DirectModule {
 public:
  using T = typename E::Element;
  DirectModule(E& engine, M module, std::string prefix)
      : engine_(&engine), module_(module), prefix_(std::move(prefix)) {
    typename M::template Params<T> probe;
    module_.describe(probe, Create<T>{prefix_, &engine_->store()});
  }
  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    return module_.forward(engine_->compute(), weights(), std::forward<Args>(args)...);
  }
  template <class... Args>
  decltype(auto) recompute(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }
  template <class... Args>
  decltype(auto) backward(Args&&... args) {
    typename M::template Params<fsdp::Gradient<T>> gradients;
    module_.describe(gradients, Bind<T>{prefix_, &engine_->store()});
    return module_.backward(engine_->compute(), weights(), gradients, std::forward<Args>(args)...);
  }

 private:
  typename M::template Params<T const> weights() {
    typename M::template Params<T const> bound;
    module_.describe(bound, Bind<T>{prefix_, &engine_->store()});
    return bound;
  }
  E* engine_;
  M module_;
  std::string prefix_;
};

/// An engine that shards nothing: one rank, values and gradients in a Store. T may be double.
template <class T>
class DirectEngine {
 public:
  using Element = T;
  using Device = model_test::Device;
  using Stream = model_test::Stream;
  struct Precision {
    using Param = T;
    using Reduce = T;
  };
  struct Scope {
    Scope() {}
    ~Scope() {}
  };

  Device const& device() const { return device_; }
  Stream& compute() { return stream_; }
  fsdp::MemoryAccount& account() { return account_; }
  Store<T>& store() { return store_; }
  int rank() const { return 0; }
  int world_size() const { return 1; }
  template <class M>
  using Sharded = DirectModule<M, DirectEngine>;
  fsdp::UnitId add_unit(std::string_view, fsdp::UnitOptions const& = {}) { return {units_++}; }
  template <class M>
  DirectModule<M, DirectEngine> shard(M module, std::string_view prefix) {
    return {*this, module, std::string(prefix)};
  }
  template <class M>
  DirectModule<M, DirectEngine> shard(M module, std::string_view prefix, fsdp::UnitId) {
    return {*this, module, std::string(prefix)};
  }
  template <class M>
  std::vector<DirectModule<M, DirectEngine>> shard(std::vector<M> modules, std::string_view prefix) {
    std::vector<DirectModule<M, DirectEngine>> wrapped;
    for (std::size_t i = 0; i < modules.size(); ++i) {
      wrapped.push_back({*this, modules[i], std::string(prefix) + "." + std::to_string(i)});
    }
    return wrapped;
  }
  template <class M>
  void recompute_segment(DirectModule<M, DirectEngine> const&, DirectModule<M, DirectEngine> const&) {}
  Scope evaluation() { return {}; }

 private:
  Device device_;
  Stream stream_ = device_.make_stream("compute");
  fsdp::MemoryAccount account_;
  Store<T> store_;
  std::size_t units_ = 0;
};

/// Random values in [-1, 1].
template <class T>
std::vector<T> random_vector(std::int64_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform(-1, 1);
  std::vector<T> values(static_cast<std::size_t>(count));
  for (auto& value : values) value = static_cast<T>(uniform(random));
  return values;
}

/// Largest difference between `gradient` and the central differences of `loss` at `value`, over at most `samples`
/// spread elements, relative to the largest of those differences (or to `floor` where that is smaller).
template <class Loss>
double gradient_error(std::vector<double>& value, std::vector<double> const& gradient, Loss&& loss,
                      std::size_t samples = 40, double floor = 1e-3) {
  double const step = 1e-5;
  std::size_t const stride = std::max<std::size_t>(1, value.size() / samples);
  double worst = 0, largest = floor;
  for (std::size_t i = 0; i < value.size(); i += stride) {
    double const kept = value[i];
    value[i] = kept + step;
    double const above = loss();
    value[i] = kept - step;
    double const below = loss();
    value[i] = kept;
    double const expected = (above - below) / (2 * step);
    worst = std::max(worst, std::abs(expected - gradient[i]));
    largest = std::max(largest, std::abs(expected));
  }
  return worst / largest;
}

}  // namespace model_test
