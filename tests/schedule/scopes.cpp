// SPDX-License-Identifier: Apache-2.0
// Every scope of an engine begins and ends at every point where another one, or a use, is open. Each call works or is
// refused by an exception of the library, and afterwards the engine trains as if nothing had happened.
// skip-sanitizers
// timeout: 900
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/ema.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/gradients.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "fsdp/paths.hpp"
#include "fsdp/scopes.hpp"
#include "tests/catch.hpp"
#include "tests/support/ramp.hpp"
#include "tests/support/rank_checks.hpp"

namespace {

using fsdp::Pass;
using fsdp::testing::Ramp;
using Comm = fsdp::local::Communicator<fsdp::host::Device>;
using Engine = fsdp::Engine<Comm>;

/// A scope of any type. Unlike a std::unique_ptr, it lets the destructor throw.
class Scope {
 public:
  Scope() = default;
  template <class Make>
  explicit Scope(Make const& make)
      : object_(new decltype(make())(make())),
        destroy_([](void* object) { delete static_cast<decltype(make())*>(object); }) {}
  Scope(Scope&& other) noexcept : object_(std::exchange(other.object_, nullptr)), destroy_(other.destroy_) {}
  Scope& operator=(Scope&& other) noexcept {
    std::swap(object_, other.object_);
    std::swap(destroy_, other.destroy_);
    return *this;
  }
  ~Scope() = default;
  bool is_open() const { return object_ != nullptr; }
  void end() { destroy_(std::exchange(object_, nullptr)); }

 private:
  void* object_ = nullptr;
  void (*destroy_)(void*) = nullptr;
};

struct Kind {
  std::string name;
  std::function<Scope()> begin;
};

/// Layers 0 and 1 are recomputed together.
struct Model {
  static constexpr std::size_t layer_count = 3;
  static constexpr std::int64_t elements = 150;
  fsdp::Mesh<Comm> mesh;
  Engine engine;
  std::vector<fsdp::ShardedModule<Ramp<>, Engine>> layers;
  fsdp::PathId path;
  fsdp::HeldUse<Engine> held{engine};
  Engine::Scope* use = nullptr;
  fsdp::Ema<Engine> ema;
  fsdp::Sgd<Engine> sgd;
  std::vector<Kind> kinds;
  int steps = 0;

  explicit Model(Comm comm)
      : mesh(std::move(comm)),
        engine(mesh, fsdp::HybridShard<>{.group = mesh.size()},
               {.allow_keep_unsharded = true,
                .allow_no_sync = true,
                .allow_no_replica_sync = true,
                .allow_frozen_parameters = true}),
        layers(engine.shard(std::vector<Ramp<>>(layer_count, Ramp<>{elements}), "layer")),
        path(declare()),
        ema(engine),
        sgd(engine, {.lr = 0.25f}) {
    auto const shards = engine.shards();
    auto const touch = [shards](std::size_t unit) {
      shards.core().compute->enqueue([w = shards[unit].master] { *w = *w + 0.0f; });
    };
    auto const look = [shards](std::size_t unit) {
      shards.core().compute->enqueue(
          [g = shards[unit].gradient] { static_cast<void>(*const_cast<float const volatile*>(g)); });
    };
    struct Trace {
      Engine* engine;
      bool again;
      ~Trace() noexcept(false) {
        if (again) engine->start_trace(100);
        engine->collect_trace();
        if (!again) engine->stop_trace();
      }
    };
    struct Writing {
      typename fsdp::Shards<Engine>::Write write;
      std::function<void()> last;
      ~Writing() { last(); }
    };
    struct Reading {
      typename fsdp::Shards<Engine>::Reading read;
      std::function<void()> last;
      ~Reading() { last(); }
    };
    struct Span {
      fsdp::TraceHook<fsdp::host::Device>::Scope span;
      ~Span() { span.end(); }
    };
    kinds = {
        {"evaluation", [this] { return Scope([this] { return engine.evaluation(); }); }},
        {"no_sync", [this] { return Scope([this] { return engine.no_sync(); }); }},
        {"no_replica_sync", [this] { return Scope([this] { return engine.no_replica_sync(); }); }},
        {"keep_unsharded", [this] { return Scope([this] { return engine.keep_unsharded(); }); }},
        {"frozen_parameters", [this] { return Scope([this] { return engine.frozen_parameters(); }); }},
        {"follow", [this] { return Scope([this] { return engine.follow(path); }); }},
        {"Ema::swap", [this] { return Scope([this] { return ema.swap(); }); }},
        {"trace",
         [this] {
           return Scope([this] {
             engine.start_trace(100);
             return Trace{&engine, false};
           });
         }},
        {"two traces",
         [this] {
           return Scope([this] {
             engine.start_trace(100);
             return Trace{&engine, true};
           });
         }},
        {"trace_update", [shards] { return Scope([shards] { return Span{shards.trace_update(shards[0])}; }); }},
        {"write",
         [shards, touch] {
           auto scope = Scope([&] { return Writing{shards.write(shards[0]), [touch] { touch(0); }}; });
           touch(0);
           return scope;
         }},
        {"read_gradients",
         [shards, look] {
           auto scope = Scope([&] { return Reading{shards.read_gradients(), [look] { look(1); }}; });
           look(1);
           return scope;
         }},
        {"GradScaler", [this] { return Scope([this] { return fsdp::GradScaler<Engine>(engine); }); }},
    };
  }

  fsdp::PathId declare() {
    engine.recompute_segment(layers[0], layers[1]);
    return engine.add_path("short", {layers[0], layers[1]});
  }

  /// A use begins, as a HeldUse or as a scope, and has ended.
  void begin(Pass pass, std::size_t layer, bool scoped) {
    if (scoped) {
      use = new Engine::Scope(pass == Pass::forward    ? engine.forward_scope(layers[layer])
                              : pass == Pass::backward ? engine.backward_scope(layers[layer])
                                                       : engine.recompute_scope(layers[layer]));
      return use_buffers(*use);
    }
    held.begin(pass, layers[layer]);
    use_buffers(held);
  }
  bool has_begun() const { return use != nullptr || held.has_begun(); }
  void end() {
    if (use != nullptr) {
      use_buffers(*use);
      delete std::exchange(use, nullptr);
      return;
    }
    use_buffers(held);
    held.end();
  }
  /// As a module does.
  template <class Use>
  void use_buffers(Use const& open) {
    engine.compute().enqueue([w = open.parameters(), g = open.gradients()] {
      if (g != nullptr) *g += 0.0f * *w;
    });
  }
  /// Before the use of a pass.
  void come_to(Pass pass) {
    if (pass == Pass::forward) return;
    for (auto& layer : layers) layer.forward();
    if (pass == Pass::recompute) layers[2].backward(1.0f);
  }
  static std::size_t layer_of(Pass pass) { return pass == Pass::backward ? 2 : 0; }

  void train() {
    for (auto& layer : layers) layer.forward();
    layers[2].backward(1.0f);
    layers[0].recompute(), layers[1].recompute();
    layers[1].backward(1.0f), layers[0].backward(1.0f);
    sgd.step();
    ++steps;
  }
  /// Trains one step. @return "" if the weights are those of so many steps
  std::string trained() {
    train();
    engine.synchronize();
    for (std::size_t u = 0; u < layer_count; ++u) {
      auto const& unit = engine.shards()[u];
      for (auto const& part : unit.layout().segments(unit.shard()))
        for (std::int64_t i = 0; i < part.count; ++i)
          if (unit.master[part.offset + i] != -0.25f * static_cast<float>(steps * ((part.first + i) % 7 + 1)))
            return fsdp::formatted("layer {}, element {}: {}", u, part.first + i, unit.master[part.offset + i]);
    }
    return {};
  }
};

/// 0 and 1: scopes; 2: a use. Each number begins where it comes first, and ends where it comes again.
using Order = std::vector<std::size_t>;

/// @return what became of each call. '.': it works; 'x': the library refuses it; '-': it ends nothing, for its begin
/// was refused
std::string walk(Model& model, std::array<Kind const*, 2> kinds, Pass pass, bool scoped, Order const& order) {
  std::array<Scope, 2> scopes;
  std::array<bool, 3> begun{};
  std::string outcome;
  model.come_to(pass);
  for (auto const which : order) {
    bool const begins = !std::exchange(begun[which], true);
    bool const is_use = which == 2;
    if (!begins && !(is_use ? model.has_begun() : scopes[which].is_open())) {
      outcome += '-';
      continue;
    }
    try {
      if (begins && is_use) model.begin(pass, Model::layer_of(pass), scoped);
      if (begins && !is_use) scopes[which] = kinds[which]->begin();
      if (!begins && is_use) model.end();
      if (!begins && !is_use) scopes[which].end();
      outcome += '.';
    } catch (fsdp::UsageError const&) {
      outcome += 'x';
    } catch (fsdp::OrderError const&) {
      outcome += 'x';
    }
  }
  model.engine.discard_gradients();
  return outcome;
}

constexpr std::array passes{Pass::forward, Pass::backward, Pass::recompute};

}  // namespace

TEST_CASE("a scope that begins or ends inside a use works or is refused, as the table says") {
  std::vector<Order> const orders{{2, 0, 0, 2}, {2, 0, 2, 0}, {0, 2, 0, 2}, {0, 2, 2, 0}};
  std::string table;
  fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
    Model model(std::move(comm));
    std::string mine;
    for (auto const& kind : model.kinds) {
      mine += kind.name + ":";
      for (auto const pass : passes) {
        for (auto const& order : orders) {
          auto const outcome = walk(model, {&kind, nullptr}, pass, false, order);
          RANK_CHECK(walk(model, {&kind, nullptr}, pass, true, order) == outcome);
          mine += " " + outcome;
        }
        RANK_CHECK(model.trained() == "");
        mine += pass == Pass::recompute ? "\n" : " |";
      }
    }
    if (model.engine.rank() == 0) table = mine;
  });
  CHECK_RANKS();
  // For uses of forward, backward and recompute: inside the use; from within it to behind it; from before it to within
  // it; around it.
  CHECK(table ==
        R"(evaluation: .x-. .x.- ...x .... | .x-. .x.- .x.- .x-. | .x-. .x.- x.-. x..-
no_sync: .... .... .... .... | .... .... .... .... | .... .... .... ....
no_replica_sync: .... .... .... .... | .... .... .... .... | .... .... .... ....
keep_unsharded: .... .... .... .... | .... .... .... .... | .... .... .... ....
frozen_parameters: .... .... .... .... | .... .... .... .... | .... .... .... ....
follow: .x-. .x.- .... .... | .x-. .x.- .... .... | .x-. .x.- x.-. x..-
Ema::swap: .x-. .x.- ...x .... | .x-. .x.- .x.- .x-. | .x-. .x.- x.-. x..-
trace: .... .... .... .... | .... .... .... .... | .... .... .... ....
two traces: .... .... .... .... | .... .... .... .... | .... .... .... ....
trace_update: .... .... .... .... | .... .... .... .... | .... .... .... ....
write: .... ..x. .x.- .x-. | .... ..x. .x.- .x-. | .... ..x. .x.- .x-.
read_gradients: .... ..x. .x.- .x-. | .... ..x. .x.- .x-. | .... ..x. .x.- .x-.
GradScaler: .... .... .... .... | .... .... .... .... | .... .... .... ....
)");
}

TEST_CASE("scopes begin and end in each order while a use begins and ends among them") {
  std::vector<Order> orders;  // all three are open at once
  Order begins{0, 1, 2}, ends{0, 1, 2};
  do {
    do {
      orders.push_back(begins);
      orders.back().insert(orders.back().end(), ends.begin(), ends.end());
    } while (std::next_permutation(ends.begin(), ends.end()));
  } while (std::next_permutation(begins.begin(), begins.end()));
  REQUIRE(orders.size() == 36);
  fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
    Model model(std::move(comm));
    std::size_t pair = 0;
    for (auto const& first : model.kinds)
      for (auto const& second : model.kinds) {
        if (&first > &second) continue;
        ++pair;
        for (std::size_t i = 0; i < orders.size(); ++i) {
          auto const pass = passes[(pair + i) % 3];
          auto const outcome = walk(model, {&first, &second}, pass, (pair + i / 3) % 2 == 0, orders[i]);
          auto const wrong = model.trained();
          if (wrong.empty()) continue;
          throw std::logic_error(fsdp::formatted("{}, {}, {} in order {}: {}; {}", first.name, second.name,
                                                 fsdp::name(pass), fsdp::listed(orders[i]), outcome, wrong));
        }
      }
  });
}
