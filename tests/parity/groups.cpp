// SPDX-License-Identifier: Apache-2.0
// Parameter groups, several optimizers in one step, and optimizers that move: against loops in double over whole
// tensors, for every strategy and 1 to 4 ranks.
//
// skip-sanitizers
#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/optimizers.hpp"
#include "tests/catch.hpp"
#include "tests/support/gradient_units.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/rank_checks.hpp"

namespace {

using fsdp::testing::has;
using fsdp::testing::what;
using Engine = fsdp::Engine<toy::LocalHost, fsdp::Fp32>;
using Tensors = std::map<std::string, std::vector<float>>;
using Whole = std::map<std::string, std::vector<double>>;

template <class E>
Tensors weights_of(E& engine) {
  Tensors tensors;
  fsdp::export_full(
      engine, [&](auto const& tensor, auto values) { tensors[tensor.name].assign(values.begin(), values.end()); });
  return tensors;
}
template <class E>
Tensors gradients_of(E& engine) {
  Tensors tensors;
  fsdp::export_gradients(
      engine, [&](auto const& tensor, auto values) { tensors[tensor.name].assign(values.begin(), values.end()); });
  return tensors;
}

/// Description of a tensor in a test.
struct Rule {
  enum class Kind { adamw, sgd, nesterov } kind = Kind::adamw;
  double lr = 0.0, weight_decay = 0.0, first = 0.0, second = 0.0;
};
using Rules = std::function<Rule(std::string const&)>;

/// Optimizers of whole tensors in double.
class Reference {
 public:
  explicit Reference(Tensors const& weights) {
    for (auto const& [name, values] : weights) {
      weights_[name].assign(values.begin(), values.end());
      first_[name].resize(values.size());
      second_[name].resize(values.size());
    }
  }
  void step(Tensors const& gradients, double factor, Rules const& rules) {
    ++steps_;
    for (auto& [name, weights] : weights_) {
      auto const rule = rules(name);
      for (std::size_t i = 0; i < weights.size(); ++i) {
        double const g = factor * static_cast<double>(gradients.at(name)[i]);
        auto &w = weights[i], &m = first_[name][i], &v = second_[name][i];
        if (rule.kind == Rule::Kind::adamw) {
          m = rule.first * m + (1 - rule.first) * g;
          v = rule.second * v + (1 - rule.second) * g * g;
          double const mean = m / (1 - std::pow(rule.first, steps_)), square = v / (1 - std::pow(rule.second, steps_));
          w = w * (1 - rule.lr * rule.weight_decay) - rule.lr * mean / (std::sqrt(square) + 1e-8);
        } else {
          double const slope = g + rule.weight_decay * w;
          m = rule.first * m + slope;
          w -= rule.lr * (rule.kind == Rule::Kind::nesterov ? slope + rule.first * m : m);
        }
      }
    }
  }
  double distance(Tensors const& weights) const {
    double most = 0;
    for (auto const& [name, values] : weights)
      for (std::size_t i = 0; i < values.size(); ++i)
        most = std::max(most, std::abs(static_cast<double>(values[i]) - weights_.at(name)[i]));
    return most;
  }

 private:
  Whole weights_, first_, second_;
  int steps_ = 0;
};

/// Trains 6 steps, two of them clipped, beside the reference. @return the weights on rank 0
/// @param make  called as make(engine); returns what is called as act(norm) for a step
template <class Make>
Tensors train(toy::World const& world, Rules const& rules, Make const& make) {
  return toy::on_patches<fsdp::Fp32>(world.strategy, world.ranks, world.group, [&](Engine& engine, auto& patches) {
    auto&& step = make(engine);
    Reference reference(weights_of(engine));
    for (int i = 0; i < 6; ++i) {
      patches.step({.step = i, .alike = true});
      bool const clips = i >= 4;
      auto norm = fsdp::clip_grad_norm(engine, clips ? 2.0f : 1e9f);
      double const factor = std::min(1.0, (clips ? 2.0 : 1e9) / (norm.value() + 1e-6));
      if (clips && engine.rank() == 0) RANK_CHECK(factor < 0.5);
      auto const gradients = gradients_of(engine);
      step(norm);
      auto const weights = weights_of(engine);
      if (engine.rank() != 0) continue;
      reference.step(gradients, factor, rules);
      RANK_CHECK(reference.distance(weights) <= 1e-6);
    }
    return weights_of(engine);
  });
}
template <class Make>
void check(Rules const& rules, Make const& make) {
  Tensors first;
  for (auto const& world : toy::worlds()) {
    auto const weights = train(world, rules, make);
    if (first.empty()) first = weights;
    INFO(world.strategy.name << " on " << world.ranks << " ranks");
    CHECK_RANKS();
    CHECK((weights == first));  // gradients are alike in all worlds
  }
}
bool is_bias(std::string const& name) { return name.ends_with("bias"); }

}  // namespace

TEST_CASE("groups of AdamW have their own learning rate, decay and betas; a later group overrides an earlier one") {
  check(
      [](std::string const& name) {
        Rule rule{Rule::Kind::adamw, 0.02, is_bias(name) ? 0.0 : 0.1, 0.9, 0.99};
        if (name.starts_with("patches.1.")) rule.lr *= 3.0, rule.first = 0.8, rule.weight_decay = 0.2;
        if (is_bias(name)) rule.weight_decay = 0.3, rule.second = 0.95;
        return rule;
      },
      [](Engine& engine) {
        auto adamw = std::make_shared<fsdp::AdamW<Engine>>(
            engine, fsdp::AdamWOptions{.beta2 = 0.99f, .weight_decay = 0.1f},
            fsdp::ParamGroups{{.tensors = "patches.1.*", .lr_scale = 3.0f, .weight_decay = 0.2f, .beta1 = 0.8f},
                              {.tensors = "*.bias", .weight_decay = 0.3f, .beta2 = 0.95f}});
        return [adamw](auto const& norm) { adamw->step(0.02f, norm); };
      });
  CHECK_RANKS();
}

TEST_CASE("groups of Sgd have their own momentum, with Nesterov's rule and without") {
  bool const nesterov = GENERATE(false, true);
  check(
      [&](std::string const& name) {
        Rule rule{nesterov ? Rule::Kind::nesterov : Rule::Kind::sgd, 0.05, is_bias(name) ? 0.0 : 0.01, 0.9, 0.0};
        if (name.starts_with("patches.2.")) rule.first = 0.0, rule.lr = 0.0;
        if (name == "patches.0.weight") rule.first = 0.5, rule.lr *= 2.0;
        return rule;
      },
      [&](Engine& engine) {
        std::vector<fsdp::ParamGroup> const groups{{.tensors = "patches.2.*", .lr_scale = 0.0f, .momentum = 0.0f},
                                                   {.tensors = "patches.0.weight", .lr_scale = 2.0f, .momentum = 0.5f}};
        auto sgd = std::make_shared<fsdp::Sgd<Engine>>(
            engine, fsdp::SgdOptions{.momentum = 0.9f, .nesterov = nesterov, .weight_decay = 0.01f}, groups);
        return [sgd](auto const& norm) { sgd->step(0.05f, norm); };
      });
  CHECK_RANKS();
}

namespace {

/// A user's optimizer: weight -= lr * clipped gradient. It keeps no state, and counts its calls.
struct Plain {
  struct Kernel {
    template <class Block>
    FSDP_HD void operator()(Block const& block, std::int64_t, float* w, float const* g, std::int64_t n, float lr,
                            fsdp::ClipScalars const* clip) const {
      float const factor = clip == nullptr ? 1.0f : clip->factor;
      if (factor < 0.0f) return;
      block.update(
          n, [=](float& weight, float gradient) { weight -= lr * factor * gradient; }, w, g);
    }
  };
  Engine* engine;
  fsdp::TensorSelection tensors;
  float rate = 0.0f;
  fsdp::ClipScalars const* clip = nullptr;

  static std::string_view name() { return "Plain"; }
  bool owns(fsdp::TensorInfo const& tensor) const { return tensors.contains(tensor.name); }
  void begin_step(float lr, fsdp::ClipScalars const* decided) { rate = lr, clip = decided; }
  void update(Engine::Unit& unit) const {
    for (auto const& part : unit.layout().segments(unit.shard()))
      if (owns(unit.layout().tensors()[part.tensor]))
        engine->device().launch(engine->compute(), std::int64_t{1}, Kernel{}, unit.master + part.offset,
                                static_cast<float const*>(unit.gradient + part.offset), part.count, rate, clip);
  }
};

}  // namespace

TEST_CASE("three optimizers step together, one of them a user's; each tensor by its owner") {
  check(
      [](std::string const& name) {
        if (name == "patches.1.weight") return Rule{Rule::Kind::sgd, 0.05, 0.02, 0.9, 0.0};
        if (name == "patches.2.bias") return Rule{Rule::Kind::sgd, 0.125, 0.0, 0.0, 0.0};
        Rule rule{Rule::Kind::adamw, 0.02, is_bias(name) ? 0.0 : 0.1, 0.9, 0.99};
        if (name == "patches.0.bias") rule.lr *= 0.5;
        return rule;
      },
      [](Engine& engine) {
        struct Three {
          fsdp::Sgd<Engine> sgd;
          Plain plain;
          fsdp::AdamW<Engine> adamw;
          fsdp::Optimizers<fsdp::Sgd<Engine>, Plain, fsdp::AdamW<Engine>> all{sgd, plain, adamw};
          explicit Three(Engine& on)
              : sgd(on, fsdp::matching("*.1.weight"), {.momentum = 0.9f, .weight_decay = 0.02f}),
                plain{&on, fsdp::matching("patches.2.bias")},
                adamw(on, sgd.rest().remove("patches.2.bias"), {.beta2 = 0.99f, .weight_decay = 0.1f},
                      {{.tensors = "patches.0.bias", .lr_scale = 0.5f}}) {}
        };
        auto three = std::make_shared<Three>(engine);
        return [three](auto const& norm) { three->all.step({0.05f, 0.125f, 0.02f}, norm); };
      });
  CHECK_RANKS();
}

TEST_CASE("optimizers keep moments of their own tensors only") {
  for (auto const& world : toy::worlds()) {
    auto const bytes = toy::on_patches<fsdp::Fp32>(world.strategy, world.ranks, world.group, [](Engine& engine, auto&) {
      std::pair<std::int64_t, std::int64_t> result;
      auto const reserved = [&] { return engine.account().reserved(fsdp::MemoryTag::optimizer); };
      fsdp::Sgd sgd{engine, fsdp::matching("patches.1.weight", "patches.2.*"), {.momentum = 0.5f}};
      result.first = reserved();
      fsdp::AdamW<Engine, fsdp::bf16> adamw{engine, sgd.rest()};
      result.second = reserved() - result.first;
      std::int64_t expected_sgd = 0, expected_adamw = 0;
      auto const shards = engine.shards();
      for (std::size_t u = 0; u < shards.size(); ++u)
        for (auto const& part : shards[u].layout().segments(shards[u].shard())) {
          auto const count = fsdp::align_up(part.count, fsdp::layout_alignment);
          if (u == 1) (part.tensor == 0 ? expected_sgd : expected_adamw) += count;
        }
      expected_sgd += shards[2].shard_numel();  // whole units have their padding
      expected_adamw += shards[0].shard_numel();
      result.first -= 4 * expected_sgd;
      result.second -= 2 * 2 * expected_adamw;
      RANK_CHECK(engine.account().live(fsdp::MemoryTag::optimizer) == reserved());
      return result;
    });
    CHECK(bytes.first == 0);
    CHECK(bytes.second == 0);
  }
  CHECK_RANKS();
}

TEST_CASE("an optimizer that is moved goes on with the same bits; the one that it was moved from throws") {
  auto const run = [](bool moves) {
    return toy::on_patches<fsdp::Fp32>(fsdp::FullShard{}, 3, 0, [&](Engine& engine, auto& patches) {
      fsdp::AdamW adamw{engine, {.weight_decay = 0.1f}};
      for (int i = 0; i < 3; ++i) {
        patches.step({.step = i});
        adamw.step(0.01f);
      }
      if (moves) {
        auto other = std::move(adamw);
        RANK_CHECK(has(what([&] { adamw.step(0.01f); }), "AdamW was used after it was moved from"));
        adamw = fsdp::AdamW{engine};  // a state of its own, which is dropped
        patches.step({.step = 3});
        other.step(0.01f);
        adamw = std::move(other);
      } else {
        patches.step({.step = 3});
        adamw.step(0.01f);
      }
      RANK_CHECK(adamw.steps() == 4);
      RANK_CHECK(engine.account().live(fsdp::MemoryTag::optimizer) ==
                 engine.account().reserved(fsdp::MemoryTag::optimizer));
      patches.step({.step = 4});
      adamw.step(0.01f);
      return weights_of(engine);
    });
  };
  CHECK((run(false) == run(true)));
  CHECK_RANKS();
}

TEST_CASE("a step that clipping or a GradScaler skips changes no optimizer's tensors, and counts once") {
  for (int const ranks : {1, 3}) {
    toy::on_patches<fsdp::Fp32>(fsdp::FullShard{}, ranks, 0, [](Engine& engine, auto& patches) {
      fsdp::Sgd sgd{
          engine, fsdp::matching("patches.1.*"), {.momentum = 0.5f}, {{.tensors = "*.bias", .lr_scale = 2.0f}}};
      fsdp::AdamW adamw{engine, sgd.rest()};
      fsdp::Optimizers both{sgd, adamw};
      fsdp::GradScaler scaler{engine, {.init_scale = 8.0f}};
      auto const before = weights_of(engine);
      patches.step({.step = 0, .scale = scaler.scale()}, 1);
      scaler.step(both, {0.1f, 0.2f});
      RANK_CHECK(weights_of(engine) == before);
      RANK_CHECK(scaler.skipped() == 1);
      RANK_CHECK((sgd.steps() == 0 && adamw.steps() == 0));
      patches.step({.step = 1, .scale = scaler.scale()});
      scaler.step(both, {0.1f, 0.2f}, fsdp::clip_grad_norm(engine, 1.0f));
      auto const after = weights_of(engine);
      RANK_CHECK((engine.rank() != 0 || after != before));
      RANK_CHECK(scaler.skipped() == 1);
      RANK_CHECK((sgd.steps() == 1 && adamw.steps() == 1));
      fsdp::AdamW all{engine};
      fsdp::Optimizers one{all};
      patches.step({.step = 2, .scale = scaler.scale()});
      scaler.step(one, {0.1f});
      RANK_CHECK(all.steps() == 1);
      return 0;
    });
  }
  CHECK_RANKS();
}

TEST_CASE("a skipped step is counted once, whatever optimizers take it") {
  toy::on_patches<fsdp::Fp32>(fsdp::FullShard{}, 2, 0, [](Engine& engine, auto& patches) {
    fsdp::AdamW adamw{engine, fsdp::matching("patches.1.*")};
    struct First : Plain {
      Engine& engine() const { return *Plain::engine; }
    } first{{&engine, adamw.rest()}};
    fsdp::Optimizers own_first{first, adamw};
    int step = 0;
    auto const skipped_after = [&](auto&& take) {
      patches.step({.step = step++}, 1);
      auto const norm = fsdp::clip_grad_norm(engine, 1.0f);
      take(norm);
      return norm.skipped();
    };
    RANK_CHECK(skipped_after([&](auto const& norm) { own_first.step({0.1f, 0.1f}, norm); }) == 1);
    RANK_CHECK(skipped_after([&](auto const& norm) {  // an optimizer of a user's own, alone
                 auto const shards = engine.shards();
                 shards.begin_step("own", 0.1f, norm);
                 for (std::size_t u = 0; u < shards.size(); ++u) auto const updating = shards.update(shards[u]);
               }) == 2);
    patches.step({.step = step});
    auto const norm = fsdp::clip_grad_norm(engine, 1.0f);
    own_first.step({0.1f, 0.1f}, norm);
    RANK_CHECK(norm.skipped() == 2);
    return 0;
  });
  CHECK_RANKS();
}

TEST_CASE("optimizers that do not own every tensor once, and groups that match nothing, are refused by name") {
  toy::on_patches<fsdp::Fp32>(fsdp::FullShard{}, 2, 0, [](Engine& engine, auto& patches) {
    auto const before = engine.account().reserved(fsdp::MemoryTag::optimizer);
    RANK_CHECK(has(what([&] {
                     fsdp::AdamW{engine, fsdp::matching("patch.*")};
                   }),
                   "AdamW: the pattern 'patch.*' matches no tensor"));
    RANK_CHECK(has(what([&] {
                     fsdp::AdamW{engine, fsdp::matching("*").remove("*")};
                   }),
                   "AdamW: no tensor that trains is among its tensors: '*', without '*'"));
    RANK_CHECK(has(what([&] { fsdp::AdamW(engine, {}, {{.tensors = "head.*", .lr_scale = 2.0f}}); }),
                   "AdamW: the group 'head.*' matches no tensor"));
    RANK_CHECK(has(what([&] { fsdp::AdamW(engine, fsdp::matching("*.0.*"), {}, {{.tensors = "*.1.*"}}); }),
                   "AdamW: the group '*.1.*' matches no tensor of the optimizer"));
    RANK_CHECK(has(what([&] { fsdp::AdamW(engine, {}, {{.tensors = "*", .momentum = 0.5f}}); }),
                   "AdamW: group '*': AdamW has no momentum; set beta1"));
    RANK_CHECK(has(what([&] { fsdp::Sgd(engine, {}, {{.tensors = "*", .beta1 = 0.5f}}); }),
                   "Sgd: group '*': Sgd has no betas"));
    RANK_CHECK(has(what([&] { fsdp::AdamW(engine, {}, {{.tensors = "*", .beta1 = 1.0f}}); }),
                   "group '*': beta1 must be finite, not negative and below 1, got 1"));
    RANK_CHECK(
        has(what([&] { fsdp::AdamW(engine, {}, {{.tensors = "*", .lr_scale = -1.0f}}); }), "lr_scale must be finite"));
    RANK_CHECK(
        has(what([&] { fsdp::Sgd(engine, {.nesterov = true}); }), "nesterov needs SgdOptions::momentum above 0"));
    RANK_CHECK(engine.account().reserved(fsdp::MemoryTag::optimizer) == before);

    fsdp::AdamW some{engine, fsdp::matching("patches.0.*", "*.bias")};
    fsdp::Sgd others{engine, fsdp::matching("*.1.weight")}, rest{engine, some.rest()};
    RANK_CHECK(has(what([&] {
                     fsdp::Optimizers{some, others};
                   }),
                   "Optimizers: no optimizer owns tensor 'patches.2.weight'; give one of them rest()"));
    RANK_CHECK(has(what([&] {
                     fsdp::Optimizers{some, others, rest};
                   }),
                   "Optimizers: tensor 'patches.1.weight' belongs to 'Sgd' and to 'Sgd'"));
    fsdp::Optimizers both{some, rest};
    auto const weights = weights_of(engine);
    patches.step({.step = 0});
    RANK_CHECK(has(what([&] { some.step(0.1f); }),
                   "AdamW: tensor 'patches.1.weight' belongs to another optimizer; step with fsdp::Optimizers"));
    RANK_CHECK(has(what([&] {
                     both.step({0.1f, -0.1f});
                   }),
                   "learning rates must be finite and not negative, got -0.1"));
    RANK_CHECK(weights_of(engine) == weights);
    auto const norm = fsdp::clip_grad_norm(engine, 1.0f);
    RANK_CHECK(has(what([&] { both.step({0.1f, 0.1f}); }), "without the norm that clip_grad_norm returned"));
    both.step(norm);
    auto const after = weights_of(engine);
    RANK_CHECK((engine.rank() != 0 || after != weights));
    return 0;
  });
  CHECK_RANKS();
}

TEST_CASE("patterns: any number of characters, and one") {
  CHECK(fsdp::matches("h.*.weight", "h.0.attn.weight"));
  CHECK(fsdp::matches("*", ""));
  CHECK(fsdp::matches("a?c*", "abc"));
  CHECK(fsdp::matches("*ab*ab", "xabyabab"));
  CHECK_FALSE(fsdp::matches("h.*.weight", "h.weight"));
  CHECK_FALSE(fsdp::matches("a?c", "ac"));
  CHECK_FALSE(fsdp::matches("", "a"));
  auto const listed = fsdp::matching({"h.0.*", "h.1.*"}), several = fsdp::matching("h.0.*", "h.1.*");
  for (auto const* name : {"h.0.w", "h.1.w", "h.2.w"}) CHECK(listed.contains(name) == several.contains(name));
  CHECK(listed.except("*.b").contains("h.0.w"));
  CHECK_FALSE(listed.except("*.b").contains("h.1.b"));
}

TEST_CASE("ranks with other groups, tensors or learning rates get an error") {
  auto const run = [](auto const& differs) {
    return what([&] {
      toy::on_patches<fsdp::Fp32>(fsdp::FullShard{}, 3, 0, [&](Engine& engine, auto& patches) {
        return differs(engine, patches, engine.rank() == 2);
      });
    });
  };
  CHECK(has(run([](Engine& engine, auto&, bool other) {
              fsdp::AdamW(engine, {}, {{.tensors = "*.bias", .lr_scale = other ? 2.0f : 3.0f}});
              return 0;
            }),
            "group '*.bias', lr_scale 2"));
  CHECK(has(run([](Engine& engine, auto&, bool other) {
              fsdp::AdamW(engine, fsdp::matching(other ? "*.bias" : "*.weight"));
              return 0;
            }),
            "tensors '*.bias'"));
  CHECK(has(run([](Engine& engine, auto&, bool other) {  // optimizers of a user say nothing by themselves
              engine.seal();
              auto const mine = fsdp::matching("*.bias"), rest = fsdp::matching("*.weight");
              Plain first{&engine, other ? rest : mine}, second{&engine, other ? mine : rest};
              struct Known : Plain {
                Engine& engine() const { return *Plain::engine; }
              } known{first};
              fsdp::Optimizers(known, second);
              return 0;
            }),
            "tensor 'patches.0.weight'"));
  CHECK(has(run([](Engine& engine, auto& patches, bool other) {
              fsdp::Sgd sgd{engine, fsdp::matching("*.bias")}, rest{engine, sgd.rest()};
              fsdp::Optimizers both{sgd, rest};
              patches.step({.step = 0});
              both.step({0.1f, other ? 0.2f : 0.1f});
              weights_of(engine);
              return 0;
            }),
            "learning rate 0.2"));
  CHECK_RANKS();
}
