// SPDX-License-Identifier: Apache-2.0
#include "transformer/math/bf16_products.hpp"

#if TRANSFORMER_HAVE_ONEDNN

#include <dlfcn.h>

#include <cstddef>
#include <dnnl.hpp>
#include <memory>
#include <unordered_map>

namespace transformer {
namespace {

/// [Note: Products are made once a shape]
/// To generate code for a shape takes oneDNN milliseconds, to find that it has done so 15 us, and to run it 4 (2.6.3,
/// on a processor with AMX): each thread keeps what it has made, by shape. A model's steps have a dozen shapes. A
/// sample with its cache of keys has one more with every token, so that all are dropped when there are `most_products`.
constexpr std::size_t most_products = 512;

struct Hash {
  std::size_t operator()(Bf16Product const& p) const {
    std::uint64_t hash = static_cast<std::uint64_t>(p.op_a) | static_cast<std::uint64_t>(p.op_b) << 1 |
                         static_cast<std::uint64_t>(p.adds) << 2 | static_cast<std::uint64_t>(p.wide_result) << 3;
    for (auto const value : {p.m, p.n, p.k, p.lda, p.ldb, p.ldc})
      hash = (hash ^ static_cast<std::uint64_t>(value)) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 32;
  }
};

dnnl::engine& processor() {
  static dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

/// A product's code, with its operands to be filled in.
struct Made {
  dnnl::matmul run;
  dnnl::memory a, b, c;
  std::size_t scratch = 0;
};

/// A thread's products by oneDNN.
class Multiplier {
 public:
  Multiplier() {
    // Of this thread: cores are the streams' to divide. Whichever OpenMP oneDNN has brought, if any.
    using SetThreads = void (*)(int);
    if (auto* const set_threads = reinterpret_cast<SetThreads>(::dlsym(RTLD_DEFAULT, "omp_set_num_threads")))
      set_threads(1);
  }

  bool multiply(Bf16Product const& product, fsdp::bf16 const* a, fsdp::bf16 const* b, void* c) {
    auto found = made_.find(product);
    if (found == made_.end()) {
      if (made_.size() == most_products) made_.clear();
      found = made_.emplace(product, make(product)).first;
    }
    auto* const made = found->second.get();
    if (made == nullptr) return false;
    // oneDNN's handles are not const; it reads A and B alone.
    made->a.set_data_handle(const_cast<fsdp::bf16*>(a));
    made->b.set_data_handle(const_cast<fsdp::bf16*>(b));
    made->c.set_data_handle(c);
    made->run.execute(stream_, {{DNNL_ARG_SRC, made->a},
                                {DNNL_ARG_WEIGHTS, made->b},
                                {DNNL_ARG_DST, made->c},
                                {DNNL_ARG_SCRATCHPAD, scratch(made->scratch)}});
    return true;
  }

 private:
  static dnnl::memory::dims strides(Op op, std::int64_t leading) {
    return op == Op::none ? dnnl::memory::dims{leading, 1} : dnnl::memory::dims{1, leading};
  }

  /// @return null if there is no kernel for it
  static std::unique_ptr<Made> make(Bf16Product const& p) {
    using dnnl::memory;
    auto const bf16 = memory::data_type::bf16;
    memory::desc const a({p.m, p.k}, bf16, strides(p.op_a, p.lda)), b({p.k, p.n}, bf16, strides(p.op_b, p.ldb)),
        c({p.m, p.n}, p.wide_result ? memory::data_type::f32 : bf16, strides(Op::none, p.ldc));
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (p.adds) {
      dnnl::post_ops add;
      add.append_sum(1);
      attributes.set_post_ops(add);
    }
    try {
#if DNNL_VERSION_MAJOR >= 3
      dnnl::matmul::primitive_desc const chosen(processor(), a, b, c, attributes);
#else
      dnnl::matmul::primitive_desc const chosen({a, b, c}, attributes, processor());
#endif
      memory const none_a(a, processor(), DNNL_MEMORY_NONE), none_b(b, processor(), DNNL_MEMORY_NONE),
          none_c(c, processor(), DNNL_MEMORY_NONE);
      return std::make_unique<Made>(
          Made{dnnl::matmul(chosen), none_a, none_b, none_c, chosen.scratchpad_desc().get_size()});
    } catch (dnnl::error const& error) {
      if (error.status != dnnl_unimplemented) throw;
      return nullptr;
    }
  }

  /// At least `bytes` of memory, kept between products.
  dnnl::memory& scratch(std::size_t bytes) {
    if (bytes > scratch_bytes_ || !scratch_) {
      auto const size = static_cast<dnnl::memory::dim>(bytes);
      scratch_ =
          dnnl::memory(dnnl::memory::desc({size}, dnnl::memory::data_type::u8, dnnl::memory::dims{1}), processor());
      scratch_bytes_ = bytes;
    }
    return scratch_;
  }

  dnnl::stream stream_{processor()};
  std::unordered_map<Bf16Product, std::unique_ptr<Made>, Hash> made_;
  dnnl::memory scratch_;
  std::size_t scratch_bytes_ = 0;
};

}  // namespace

std::string_view bf16_units() {
  auto const here = static_cast<unsigned>(dnnl::get_effective_cpu_isa());  // a bit for each part
  auto const has = [&](unsigned isa) { return (here & isa) == isa; };
  if (has(dnnl_cpu_isa_avx512_core_amx)) return "AMX";
  if (has(dnnl_cpu_isa_avx512_core_bf16)) return "AVX-512 BF16";
  return {};
}

std::string onednn_version() {
  auto const& version = *dnnl_version();
  return std::to_string(version.major) + "." + std::to_string(version.minor) + "." + std::to_string(version.patch);
}

bool multiply_bf16(Bf16Product const& product, fsdp::bf16 const* a, fsdp::bf16 const* b, void* c) {
  thread_local Multiplier multiplier;
  return multiplier.multiply(product, a, b, c);
}

}  // namespace transformer

#else

namespace transformer {

std::string_view bf16_units() { return {}; }
std::string onednn_version() { return "not built in"; }
bool multiply_bf16(Bf16Product const&, fsdp::bf16 const*, fsdp::bf16 const*, void*) { return false; }

}  // namespace transformer

#endif
