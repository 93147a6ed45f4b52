// SPDX-License-Identifier: Apache-2.0
// Runs a trial under several settings: to the last bit alike where that is promised, and close to the reference.
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/trial/model.hpp"
#include "tests/support/trial/reference.hpp"
#include "tests/support/trial/trainer.hpp"

namespace trial {

using Outcomes = std::vector<Outcome<float>>;  ///< by rank

/// @param hashes_program  Outcome::program is set
inline Outcomes run_setting(Trial const& trial, Setting const& setting, bool hashes_program = false) {
  Outcomes outcomes(static_cast<std::size_t>(trial.ranks));
  fsdp::local::run(trial.ranks, fsdp::host::Device{}, [&](Local comm) {
    auto const rank = static_cast<std::size_t>(comm.rank());
    auto const trainer = make_trainer(std::move(comm), trial, setting);
    trainer->begin();
    trainer->run(trial.script);
    trainer->end();
    outcomes[rank] = std::move(trainer->outcome());
    if (hashes_program) outcomes[rank].program = trainer->hashed_program();
  });
  return outcomes;
}

/// The order of additions, as docs/numerics.md defines it. Settings with equal orders must agree in every bit.
///
/// Over ranks it is one tree, unless shard groups are no powers of two. Over micro-steps it depends on when they are
/// reduced: shards add up means, the slots of groups of one rank are averaged again with what came before, and partial
/// shards add up before replicas do.
/// @param declared  the unit shards, if only over a group of one rank
/// @param offloads  gradients: where no other rank shares a unit, backward does not add to the sum itself, and a group
///                  of one rank has a partial shard
inline std::string order_of_sums(Trial const& trial, int shards, bool declared, bool offloads) {
  bool const tree = (shards & (shards - 1)) == 0 || shards == trial.ranks;
  bool const direct = shards == 1 && !(offloads && declared), replicated = shards < trial.ranks;
  bool gradients = true, replicas = true;
  bool once = true, waited = false;
  std::string reductions, partial;
  bool reduced = false;  // since the last step
  for (auto const& op : trial.script) {
    if (op.kind == Op::gradient_sync) gradients = op.value != 0.0f;
    if (op.kind == Op::replica_sync) replicas = op.value != 0.0f;
    if (op.kind == Op::step || op.kind == Op::discard) reduced = false, reductions += '|', partial += '|';
    if (op.kind != Op::backward) continue;
    once = once && !reduced;
    bool const waits = !replicas && replicated;
    reduced = reduced || (gradients && !(direct && waits));
    waited = waited || (gradients && waits && !direct);
    reductions += gradients && !(direct && waits) ? '1' : '0';
    partial += waits ? '0' : '1';
  }
  auto order = tree ? std::string("tree") : "groups of " + std::to_string(shards);
  if (once) return order + ", reduced once a step";
  order += (shards == 1 && !offloads ? ", averaged again " : ", averaged ") + reductions;
  return waited ? order + ", replicas " + partial + " of " + std::to_string(shards) : order;
}
/// Texts of all units: one text, if all are equal.
inline std::string order_of_sums(Trial const& trial, Setting const& setting) {
  // Norms add up the sums of units, in whose number these settings differ. Vectors are apart where others are sharded.
  auto const apart = [&](std::size_t unit) { return setting.replicates_vectors && setting.strategy(unit).shards; };
  if (trial.ranks == 1) {
    auto order =
        setting.offloads_gradients ? order_of_sums(trial, 1, false, true) : std::string("tree, reduced once a step");
    for (std::size_t unit = 0; unit < trial.model.units.size(); ++unit)
      if (apart(unit)) order += fmt::format(", vectors of {} apart", unit);
    return order;
  }
  std::string all, first;
  bool equal = true;
  for (std::size_t unit = 0; unit < trial.model.units.size(); ++unit) {
    auto const shards = setting.shards(trial.ranks, unit);
    bool const declared = setting.strategy(unit).shards, offloads = setting.offloads_gradients;
    auto order = order_of_sums(trial, shards, declared, offloads);
    if (setting.rounds(trial.ranks)) order += ", rounded";
    bool const groups = shards < trial.ranks && (shards > 1 || (declared && offloads));
    if (setting.rounds(trial.ranks) && groups)  // in groups, and over replicas if not fp32
      order += fmt::format(" in groups of {}, {}", shards, setting.options.allow_no_replica_sync ? "once" : "twice");
    if (apart(unit)) order += ", vectors apart " + order_of_sums(trial, 1, false, offloads);
    if (unit == 0) first = order;
    equal = equal && order == first;
    all += order + "; ";
  }
  return equal ? first : all;
}

namespace detail {

template <class T>
std::string bits_differ(std::string const& what, std::vector<T> const& a, std::vector<T> const& b) {
  if (a.size() != b.size()) return what + ": " + std::to_string(a.size()) + " and " + std::to_string(b.size());
  for (std::size_t i = 0; i < a.size(); ++i)
    if (std::memcmp(&a[i], &b[i], sizeof(T)) != 0) return fmt::format("{}[{}]: {} and {}", what, i, a[i], b[i]);
  return {};
}
template <class T>
std::string bits_differ(std::string const& what, Tensors<T> const& a, Tensors<T> const& b) {
  if (a.size() != b.size()) return what + ": another number of tensors";
  for (std::size_t t = 0; t < a.size(); ++t)
    if (auto text = bits_differ(what + " '" + a[t].name + "'", a[t].values, b[t].values); !text.empty()) return text;
  return {};
}

/// @param scale  what the l2 norm of the difference is relative to
inline std::string far(std::string const& what, std::vector<float> const& got, std::vector<double> const& expected,
                       double scale) {
  constexpr double tolerance = 1e-5;  // of docs/numerics.md
  if (got.size() != expected.size())
    return fmt::format("{}: {} elements, {} expected", what, got.size(), expected.size());
  double squares = 0.0;
  std::size_t worst = 0;
  double largest = -1.0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    double const difference = std::abs(static_cast<double>(got[i]) - expected[i]);
    squares += difference * difference;
    if (!(difference <= largest)) largest = difference, worst = i;
  }
  if (std::sqrt(squares) <= tolerance * scale) return {};
  return fmt::format("{}[{}]: {}, {} expected; the tensor is off by {:.3e} of its norm", what, worst, got[worst],
                     expected[worst], std::sqrt(squares) / scale);
}
inline std::string far(std::string const& what, Tensors<float> const& got, Tensors<double> const& expected,
                       std::vector<double> const* scales) {
  if (got.size() != expected.size()) return what + ": another number of tensors";
  for (std::size_t t = 0; t < got.size(); ++t) {
    auto const scale = scales != nullptr ? (*scales)[t] : Reference::norm(expected[t].values);
    auto text = far(what + " '" + got[t].name + "'", got[t].values, expected[t].values, scale);
    if (!text.empty()) return text;
  }
  return {};
}

}  // namespace detail

/// The first bit in which two settings differ; empty: none.
inline std::string bits_differ(Outcomes const& a, Outcomes const& b) {
  using detail::bits_differ;
  for (std::size_t rank = 0; rank < a.size(); ++rank) {
    auto const on = " of rank " + std::to_string(rank);
    if (auto text = bits_differ("outputs" + on, a[rank].outputs, b[rank].outputs); !text.empty()) return text;
    if (auto text = bits_differ("norms" + on, a[rank].norms, b[rank].norms); !text.empty()) return text;
    for (std::size_t i = 0; i < a[rank].gradients.size(); ++i)
      if (auto text = bits_differ("gradient", a[rank].gradients[i], b[rank].gradients[i]); !text.empty()) return text;
  }
  if (auto text = bits_differ("initial parameter", a[0].initial, b[0].initial); !text.empty()) return text;
  return bits_differ("parameter", a[0].parameters, b[0].parameters);
}

/// Hash of the bits of all results, and of the engines' programs. Bits depend on the compiler and the processor.
struct Digests {
  std::uint64_t results = 0, programs = 0;

  void add(Outcomes const& outcomes) {
    for (auto const& of : outcomes) {
      add(of.initial), add(of.parameters), add(of.outputs), add(of.norms);
      for (auto const& gradients : of.gradients) add(gradients);
      programs = 31 * programs + of.program;
    }
  }

 private:
  template <class T>
  void add(std::vector<T> const& values) {
    results = 31 * results + fsdp::hash_name({reinterpret_cast<char const*>(values.data()), values.size() * sizeof(T)});
  }
  template <class T>
  void add(Tensors<T> const& tensors) {
    for (auto const& tensor : tensors) add(tensor.values);
  }
};

/// The first value of a rank that is not the reference's within 1e-5; empty: none. Gradients are relative to their
/// norm, parameters to the largest norm that they have had (one that starts at zero may come near it again).
inline std::string far_from(Reference const& reference, int rank, Outcome<float> const& outcome) {
  using detail::far;
  auto const on = " of rank " + std::to_string(rank);
  auto const& expected = reference.outputs(rank);
  if (auto text = far("outputs" + on, outcome.outputs, expected, Reference::norm(expected)); !text.empty()) return text;
  std::vector<float> const norms(outcome.norms.begin(), outcome.norms.end());
  if (auto text = far("norms" + on, norms, reference.norms(), Reference::norm(reference.norms())); !text.empty())
    return text;
  if (rank != 0) return {};
  if (outcome.gradients.size() != reference.gradients().size()) return "gradients: another number of exports";
  for (std::size_t i = 0; i < reference.gradients().size(); ++i)
    if (auto text = far("gradient", outcome.gradients[i], reference.gradients()[i], nullptr); !text.empty())
      return text;
  return far("parameter", outcome.parameters, reference.parameters(), &reference.largest());
}

/// Runs all settings. Trials in bf16 and with Muon, whose iterations enlarge roundings, and settings that round
/// gradients are far from the reference. @return what differs; empty: nothing
/// @param compared  counts the pairs that were compared bit for bit
inline std::string compare(Trial const& trial, std::vector<Setting> const& settings, int* compared = nullptr) {
  std::vector<Outcomes> outcomes;
  std::optional<Reference> reference;
  for (std::size_t s = 0; s < settings.size(); ++s) {
    outcomes.push_back(run_setting(trial, settings[s]));
    if (!reference && !trial.narrow && !trial.optimizer.muon) {
      reference.emplace(trial, outcomes[0][0].initial);
      reference->run(trial.script);
    }
    auto const name = "setting " + std::to_string(s);
    for (int rank = 0; rank < trial.ranks && reference && !settings[s].rounds(trial.ranks); ++rank)
      if (auto const text = far_from(*reference, rank, outcomes[s][static_cast<std::size_t>(rank)]); !text.empty())
        return name + ": " + text;
    for (std::size_t other = 0; other < s; ++other) {
      if (order_of_sums(trial, settings[s]) != order_of_sums(trial, settings[other])) continue;
      auto const text = bits_differ(outcomes[other], outcomes[s]);
      if (!text.empty()) return fmt::format("settings {} and {}: {}", other, s, text);
      if (compared != nullptr) ++*compared;
      break;
    }
  }
  return {};
}

}  // namespace trial
