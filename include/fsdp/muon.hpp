// SPDX-License-Identifier: Apache-2.0
// Muon: momentum, orthogonalised matrix by matrix by Newton-Schulz iterations, on flat shards.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/kernels/muon.hpp"
#include "fsdp/detail/kernels/norms.hpp"
#include "fsdp/detail/optim/optimizer_state.hpp"
#include "fsdp/error.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/memory.hpp"
#include "fsdp/optimizers.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Matrix products for Newton-Schulz iterations, by a kernel of the library. Give Muon a type with this interface to
/// use cuBLAS or OpenBLAS: on every rank, and for any address, a product must have the same bits.
struct BlockProducts {
  /// Enqueues C = alpha A B + beta C: see kernels::product.
  template <class D>
  void operator()(D const& device, typename D::Stream& stream, std::int64_t m, std::int64_t n, std::int64_t k,
                  float alpha, float const* a, float const* b, float beta, float* c) const {
    kernels::product(device, stream, m, n, k, alpha, a, b, beta, c);
  }
};

namespace detail {

/// The quintic Newton-Schulz iteration of Muon: X = a X + (b A + c A A) X with A = X X^T, a few times, from X with a
/// Frobenius norm of 1. It brings the singular values of X near 1.
template <Device D, class Products>
class Orthogonaliser {
 public:
  Orthogonaliser(Products products, int iterations, float eps)
      : products_(std::move(products)), iterations_(iterations), eps_(eps) {}

  /// Takes memory: for matrices of up to `elements`, of which one side is at most `rows`, 2 (elements + rows^2) floats.
  [[gnu::cold]] void allocate(D const& device, MemoryAccount& account, std::int64_t elements, std::int64_t rows) {
    auto const aligned = [](std::int64_t count) { return align_up(count, layout_alignment); };
    auto const floats = 2 * aligned(elements) + 2 * aligned(rows * rows);
    auto const doubles = aligned(kernels::norm_partial_count(elements) + 1);
    memory_ = {device, account, MemoryTag::workspace,
               static_cast<std::size_t>(floats) * sizeof(float) + static_cast<std::size_t>(doubles) * sizeof(double)};
    x_ = memory_.template as<float>();
    y_ = x_ + aligned(elements);
    gram_ = y_ + aligned(elements);
    polynomial_ = gram_ + aligned(rows * rows);
    squares_ = reinterpret_cast<double*>(polynomial_ + aligned(rows * rows));
  }

  /// to = scale * the orthogonalised `from`, both dense (rows, columns). Works on the transpose if there are more rows
  /// than columns.
  /// @note Stream: everything is enqueued on `stream`, always the same
  void operator()(D const& device, typename D::Stream& stream, std::int64_t rows, std::int64_t columns,
                  float const* from, float* to, float scale) {
    constexpr float a = 3.4445f, b = -4.7750f, c = 2.0315f;
    auto const elements = rows * columns;
    auto const r = std::min(rows, columns), n = std::max(rows, columns);
    auto const square = static_cast<std::size_t>(r * r) * sizeof(float);
    auto const whole = static_cast<std::size_t>(elements) * sizeof(float);
    auto *x = x_, *y = y_;
    auto* const partials = squares_ + 1;
    kernels::norm_partials(device, stream, from, elements, NormKind::l2, partials);
    kernels::norm_combine(device, stream, static_cast<double const*>(partials), kernels::norm_partial_count(elements),
                          NormKind::l2, squares_);
    if (rows > columns)
      kernels::transpose(device, stream, rows, columns, from, x);
    else
      device.copy_async(stream, x, from, whole);
    kernels::normalise(device, stream, x, elements, static_cast<double const*>(squares_), eps_);
    auto const multiply = [&](std::int64_t width, std::int64_t terms, float alpha, float const* left,
                              float const* right, float beta, float* sum) {
      products_(device, stream, r, width, terms, alpha, left, right, beta, sum);
    };
    for (int i = 0; i < iterations_; ++i) {
      kernels::transpose(device, stream, r, n, static_cast<float const*>(x), y);
      multiply(r, n, 1.0f, x, y, 0.0f, gram_);
      device.copy_async(stream, polynomial_, gram_, square);
      multiply(r, r, c, gram_, gram_, b, polynomial_);
      device.copy_async(stream, y, x, whole);
      multiply(n, r, 1.0f, polynomial_, x, a, y);
      std::swap(x, y);
    }
    if (rows > columns)
      kernels::transpose(device, stream, r, n, static_cast<float const*>(x), to);
    else
      device.copy_async(stream, to, x, whole);
    if (scale != 1.0f) kernels::scale(device, stream, to, elements, scale);
  }

 private:
  Products products_;
  int iterations_;
  float eps_;
  AccountedMemory<D const> memory_;
  float *x_ = nullptr, *y_ = nullptr;              ///< a matrix each
  float *gram_ = nullptr, *polynomial_ = nullptr;  ///< (rows, rows) each
  double* squares_ = nullptr;                      ///< of a Frobenius norm; its partial sums follow
};

}  // namespace detail

/// Scale of a matrix's update by its shape.
enum class MuonScale : unsigned char {
  original,        ///< times sqrt(max(1, rows / columns)), as in K. Jordan's Muon
  match_rms_adamw  ///< times 0.2 sqrt(max(rows, columns)), so that AdamW's learning rate and decay fit
};

/// Defaults are those of torch.optim.Muon, but for the learning rate and weight decay.
struct MuonOptions {
  float lr = 0.02f;                       ///< learning rate of step() without an argument
  float momentum = 0.95f;                 ///< decay of the momentum, in [0, 1)
  bool nesterov = true;                   ///< Nesterov momentum
  float weight_decay = 0.0f;              ///< decoupled, of tensors whose TensorOptions::decay is set
  int iterations = 5;                     ///< of Newton-Schulz
  float eps = 1e-7f;                      ///< smallest Frobenius norm that a matrix is divided by
  MuonScale scale = MuonScale::original;  ///< scale of a matrix's update, by its shape
  bool stochastic_rounding = false;       ///< rounds masters narrower than fp32: [Note: Stochastic rounding]
  std::uint64_t seed = 0;                 ///< seeds stochastic rounding; equal on all ranks
};

/// Muon (K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024): the momentum of each
/// matrix is orthogonalised by a quintic Newton-Schulz iteration, and the result moves the matrix. Other tensors belong
/// to another optimizer: see Optimizers. The engine must outlive it.
///
/// [Note: Whole matrices] A matrix lies in the shards of several ranks, and the iteration needs it whole. So the ranks
/// of a shard group gather a unit's momenta; each orthogonalises the matrices that it owns, into a buffer that is zero
/// elsewhere; and a reduce-scatter brings each rank its slice of all results. Adding zeros is exact: updates have the
/// bits of whole matrices on one rank. A unit's matrices are dealt out by the number of multiplications, the largest
/// first, to the rank with the least so far.
///
/// Memory: one fp32 momentum for each element of its matrices, in shards; two buffers of the largest unit that has one,
/// in fp32; and for the largest matrix, (r, c) with r <= c, 2 (r c + r r) elements.
/// @tparam Products  multiplies matrices, as BlockProducts does
template <class E, class Products = BlockProducts>
class Muon {
 public:
  /// Seals the engine.
  /// @param tensors  those with two dimensions among them are its matrices; rest() has the others
  /// @param groups  settings of some of them
  /// @throws UsageError on options out of range, or if a pattern matches no tensor that trains, or `tensors` have no
  /// matrix; ConfigError on every rank if ranks' options differ
  /// @note Collective: yes. Waits for compute once.
  [[gnu::cold]] Muon(E& engine, TensorSelection const& tensors, MuonOptions const& options = {},
                     ParamGroups groups = {}, Products products = {})
      : options_(checked(options)),
        buffers_(engine.device()),
        orthogonalise_(std::move(products), options.iterations, options.eps),
        state_(engine, name(), text(options), 1,
               detail::OwnedTensors(name(), detail::OwnedTensors::Decays::momentum,
                                    {.weight_decay = options.weight_decay, .first = options.momentum},
                                    matrices_of(engine, tensors), std::move(groups)),
               options.stochastic_rounding) {
    deal_out();
    allocate();
  }

  template <class None = void>
  Muon(E&, ...) = delete;  // fsdp: expected (engine, tensors[, MuonOptions[, groups]]); check the names in braces

  void step() { step(options_.lr); }  ///< takes a step with MuonOptions::lr, without clipping
  void step(GradNorm<E> const& norm) { step(options_.lr, norm); }  ///< takes a clipped step with MuonOptions::lr
  /// Takes a step. All tensors that train must be its matrices; otherwise use Optimizers.
  /// @throws UsageError as AdamW::step
  /// @note Stream: on compute, and collectives on the gather stream, each ordered with the other.
  /// @note Collective: for each unit with a matrix that several ranks share, an all-gather and a reduce-scatter of the
  /// unit in fp32.
  void step(float lr, GradNorm<E> const& norm = {}) {
    state_.step(lr, norm, [this](auto& unit) { update(unit); });
  }

  /// Begins a step of fsdp::Optimizers: see OptimizerPart. @param clip  nullptr: nothing is clipped
  void begin_step(float lr, ClipScalars const* clip) { state_.begin_step(lr, clip); }
  /// Enqueues the update of the unit's matrices: see OptimizerPart. @note Collective: as step, for one unit.
  void update(typename E::Unit& unit) {
    auto const& work = work_[unit.index()];
    if (!work.some) return;
    auto& engine = state_.engine();
    auto const& device = engine.device();
    auto& compute = engine.compute();
    auto const begin = unit.shard().begin;
    bool const shared = unit.placement().shards > 1;
    auto *const gathered = buffers_.gathered.template as<float>(), *const moves = buffers_.moves.template as<float>();
    // Collectives that compute waits for say that peers have ended those before them: a unit's gather of the last
    // scatter, its scatter of that gather. A unit that is not shared has none.
    bool const told = shared && order_among_peers(engine.world());
    if (!told) wait_for_peers(buffers_.gather);
    state_.for_each_part(unit, [&](auto const& part) {
      kernels::muon_momentum(device, compute, part.chunks, part.chunk_count, part.step,
                             SgdScalars{part.first, options_.nesterov}, static_cast<float const*>(unit.gradient),
                             state_.moment(0, part), gathered + begin);
    });
    auto const elements = static_cast<std::size_t>(unit.shard_numel());
    if (shared)
      buffers_.gather = collective([&](auto& stream) {
        return engine.shards().gather_communicator().all_gather(stream, static_cast<float const*>(gathered + begin),
                                                                gathered, elements, Label{unit.name(), "optimizer"});
      });
    if (!told) wait_for_peers(buffers_.scatter);
    if (shared) device.zero_async(compute, moves, static_cast<std::size_t>(unit.full_numel()) * sizeof(float));
    for (auto const index : work.own) {
      auto const& tensor = unit.layout().tensors()[index];
      orthogonalise_(device, compute, tensor.shape[0], tensor.shape[1], gathered + tensor.offset, moves + tensor.offset,
                     scale_of(tensor));
    }
    if (shared)
      buffers_.scatter = collective([&](auto& stream) {
        return engine.shards().gather_communicator().reduce_scatter(
            stream, static_cast<float const*>(moves), moves + begin, elements, Label{unit.name(), "optimizer"});
      });
    state_.for_each_part(unit, [&](auto const& part) {
      unit.with_master([&](auto* master) {
        if constexpr (!std::is_same_v<typename E::Master, float>) {
          if (options_.stochastic_rounding)
            return kernels::muon_update<true>(device, compute, part.chunks, part.chunk_count, part.step, master,
                                              static_cast<float const*>(moves + begin), options_.seed);
        }
        kernels::muon_update(device, compute, part.chunks, part.chunk_count, part.step, master,
                             static_cast<float const*>(moves + begin));
      });
    });
  }
  bool owns(TensorInfo const& tensor) const { return state_.owns(tensor); }  ///< whether it updates the tensor
  /// The tensors of `among` that this optimizer does not own.
  TensorSelection rest(TensorSelection among = TensorSelection::all()) const { return state_.rest(std::move(among)); }

  E& engine() const { return state_.engine(); }  ///< engine whose parameters it updates
  /// Steps taken; skipped ones do not count. @note Waits for compute.
  std::int64_t steps() const { return state_.steps(); }
  MuonOptions const& options() const { return options_; }  ///< as given to the constructor

  /// Name of its state in checkpoints: see fsdp::checkpoint::Checkpointable.
  static constexpr std::string_view name() { return "Muon"; }
  static std::vector<std::string_view> state_names() { return {"momentum_buffer"}; }  ///< name of the momentum
  /// Momentum of a unit that it owns whole, laid out as the shard; else nullptr. @note Waits for offloaded state.
  float* state(std::size_t which, std::size_t unit) const { return state_.moment(which, unit); }
  /// Momentum for a part of the unit's shard. @pre it owns the part's tensor. @note Waits for offloaded state.
  float* state(std::size_t which, std::size_t unit, Segment const& part) const {
    return state_.moment(which, unit, part);
  }
  /// Continues as after `steps` steps. @note Waits for compute.
  void set_steps(std::int64_t steps) { state_.set_steps(steps); }

  Muon(Muon&&) noexcept = default;  ///< moves no memory; the other object must not be used then
  /// Waits for kernels of this optimizer, frees its memory, and takes over that of `other`.
  Muon& operator=(Muon&& other) noexcept {
    state_ = std::move(other.state_);  // first: it waits for kernels that use the buffers
    options_ = other.options_;
    buffers_ = std::move(other.buffers_);
    orthogonalise_ = std::move(other.orthogonalise_);
    work_ = std::move(other.work_);
    return *this;
  }

 private:
  using State = OptimizerState<E, float>;
  using Device = std::remove_cvref_t<typename E::Device>;

  struct Buffers {
    AccountedMemory<typename E::Comm> gathered;  ///< momenta of a unit
    AccountedMemory<typename E::Comm> moves;     ///< of a unit
    typename Device::Event computed, exchanged;
    Ticket gather{}, scatter{};
    explicit Buffers(Device const& device) : computed(device.make_event()), exchanged(device.make_event()) {}
  };
  /// Work on a unit.
  struct Work {
    bool some = false;             ///< some rank has a matrix to orthogonalise
    std::vector<std::size_t> own;  ///< tensors that this rank orthogonalises
  };

  static MuonOptions const& checked(MuonOptions const& options) {
    FSDP_EXPECTS(options.momentum >= 0.0f && options.momentum < 1.0f, "Muon: the momentum must be in [0, 1), got {}",
                 options.momentum);
    FSDP_EXPECTS(math::is_finite(options.weight_decay) && options.weight_decay >= 0.0f &&
                     math::is_finite(options.eps) && options.eps > 0.0f,
                 "Muon: weight decay {} must be finite and not negative, eps {} finite and positive",
                 options.weight_decay, options.eps);
    FSDP_EXPECTS(options.iterations > 0 && options.iterations <= 100,
                 "Muon: the number of iterations must be from 1 to 100, got {}", options.iterations);
    State::expect_learning_rate("Muon", options.lr);
    return options;
  }
  [[gnu::cold]] static std::string text(MuonOptions const& options) {
    return formatted(
        "lr {}, momentum {}, nesterov {}, weight decay {}, iterations {}, eps {}, scale {}, stochastic rounding {}, "
        "seed {}",
        options.lr, options.momentum, options.nesterov, options.weight_decay, options.iterations, options.eps,
        static_cast<int>(options.scale), options.stochastic_rounding, options.seed);
  }
  /// The tensors of the selection that train and have two dimensions.
  [[gnu::cold]] static TensorSelection matrices_of(E& engine, TensorSelection tensors) {
    engine.seal();
    auto const shards = engine.shards();
    auto const text = tensors.text();
    bool some = false;
    for (std::size_t u = 0; u < shards.size(); ++u)
      for (auto const& tensor : shards[u].layout().tensors()) {
        if (shards[u].frozen || !tensors.contains(tensor.name)) continue;
        some = some || tensor.shape.size() == 2;
        if (tensor.shape.size() != 2) tensors.remove(tensor.name);
      }
    FSDP_EXPECTS(some, "rank {}: Muon: expected a tensor that trains and has two dimensions, got none among: {}",
                 engine.rank(), text);
    return tensors;
  }
  /// Divides the matrices over ranks: see [Note: Whole matrices].
  [[gnu::cold]] void deal_out() {
    auto const shards = engine().shards();
    work_ = detail::FixedArray<Work>(shards.size());
    for (std::size_t u = 0; u < shards.size(); ++u) {
      auto const& unit = shards[u];
      auto const& tensors = unit.layout().tensors();
      std::vector<std::size_t> order;
      for (std::size_t i = 0; i < tensors.size(); ++i)
        if (!unit.frozen && owns(tensors[i]) && tensors[i].numel > 0) order.push_back(i);
      auto const cost = [&](std::size_t i) {
        return static_cast<double>(tensors[i].numel) *
               static_cast<double>(std::min(tensors[i].shape[0], tensors[i].shape[1]));
      };
      work_[u].some = !order.empty();
      std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return cost(a) > cost(b); });
      std::vector<double> load(static_cast<std::size_t>(unit.placement().shards), 0.0);
      for (auto const i : order) {
        auto const least = std::min_element(load.begin(), load.end());
        *least += cost(i);
        if (least - load.begin() == unit.placement().shard) work_[u].own.push_back(i);
      }
    }
  }
  /// All ranks of a world allocate as much where it is collective.
  [[gnu::cold]] void allocate() {
    auto& engine = state_.engine();
    auto const shards = engine.shards();
    std::int64_t unit_elements = 0, matrix = 0, rows = 0;
    for (std::size_t u = 0; u < shards.size(); ++u)
      for (auto const& tensor : shards[u].layout().tensors()) {
        if (shards[u].frozen || !owns(tensor)) continue;
        unit_elements = std::max(unit_elements, shards[u].full_numel());
        matrix = std::max(matrix, tensor.numel);
        rows = std::max(rows, std::min(tensor.shape[0], tensor.shape[1]));
      }
    auto const bytes = static_cast<std::size_t>(unit_elements) * sizeof(float);
    engine.synchronize();  // no rank reads memory of peers that these buffers may get
    auto& account = engine.account();
    buffers_.gathered = {engine.world(), account, MemoryTag::workspace, bytes};
    buffers_.moves = {engine.world(), account, MemoryTag::workspace, bytes};
    orthogonalise_.allocate(engine.device(), account, matrix, rows);
    // Gathered parts of tensors of other optimizers are not written.
    for (auto* memory : {&buffers_.gathered, &buffers_.moves})
      if (bytes > 0) engine.device().zero_async(engine.compute(), memory->data(), bytes);
  }

  /// A collective on the gather stream, behind what compute has; compute waits for it.
  template <class Enqueue>
  Ticket collective(Enqueue const& enqueue) {
    auto& engine = state_.engine();
    auto const shards = engine.shards();
    auto const& device = engine.device();
    auto& stream = shards.gather_stream();
    device.record(buffers_.computed, engine.compute());
    device.wait(stream, std::as_const(buffers_.computed), WaitSite::optimizer_exchange);
    auto const ticket = shards.with_cause([&] { return enqueue(stream); });
    device.record(buffers_.exchanged, stream);
    device.wait(engine.compute(), std::as_const(buffers_.exchanged), WaitSite::optimizer_exchange);
    return ticket;
  }
  /// Compute waits until peers have read this rank's input of the collective, once.
  void wait_for_peers(Ticket& ticket) {
    auto const read = std::exchange(ticket, {});
    if (read.sequence == 0) return;
    auto const shards = state_.engine().shards();
    shards.with_cause([&] {
      shards.gather_communicator().wait_for_peers(state_.engine().compute(), read, WaitSite::optimizer_peers_read);
    });
  }

  float scale_of(TensorInfo const& tensor) const {
    auto const rows = static_cast<float>(tensor.shape[0]), columns = static_cast<float>(tensor.shape[1]);
    if (options_.scale == MuonScale::original) return std::sqrt(std::max(1.0f, rows / columns));
    return 0.2f * std::sqrt(std::max(rows, columns));
  }

  MuonOptions options_;
  Buffers buffers_;  // before the state, whose destructor waits for kernels that use them
  detail::Orthogonaliser<Device, Products> orthogonalise_;
  detail::FixedArray<Work> work_;
  State state_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
