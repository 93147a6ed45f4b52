// SPDX-License-Identifier: Apache-2.0
// A trial in double, by one thread, without an engine, on the rows of all ranks: what every strategy must come close
// to.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "tests/support/trial/model.hpp"
#include "tests/support/trial/part.hpp"

namespace trial {

class Reference {
 public:
  /// @param initial  every tensor of the model
  Reference(Trial const& of, Tensors<float> const& initial) : trial_(&of), outcomes_(ranks()) {
    for (auto const& tensor : initial)
      parameters_.push_back({tensor.name, std::vector<double>(tensor.values.begin(), tensor.values.end())});
    gradients_ = first_ = second_ = zeros_like(parameters_);
    largest_.assign(parameters_.size(), 0.0);
    note_sizes();
  }

  void run(Script const& script) {
    for (auto const& op : script) run(op);
  }
  void run(Op const& op) {
    switch (op.kind) {
      case Op::forward:
        if (op.to >= model().order(op.path).size()) forward(op.data, op.path);
        break;
      case Op::backward:
        if (op.from == 0) factor_ = 1.0, backward(op.data, static_cast<double>(op.value), op.path);
        break;
      case Op::evaluate:
      case Op::activations: forward(op.data, op.path); break;
      case Op::discard: gradients_ = zeros_like(parameters_), factor_ = 1.0, has_gradient_.clear(); break;
      case Op::gradients: {
        auto& all = exported_.emplace_back(gradients_);
        // A tensor without elements may lie in a unit of its own, which is exported in every path.
        std::erase_if(all, [this](auto const& tensor) { return tensor.values.empty() || !trains(tensor.name); });
        break;
      }
      case Op::import: import(); break;
      case Op::clip: clip(op); break;
      case Op::step: step(static_cast<double>(op.value)); break;
      case Op::gradient_sync:
      case Op::replica_sync:
      case Op::reshard: break;
    }
  }

  Tensors<double> const& parameters() const { return parameters_; }
  /// The largest l2 norm that each parameter has had: what its error is relative to.
  std::vector<double> const& largest() const { return largest_; }
  std::vector<Tensors<double>> const& gradients() const { return exported_; }
  std::vector<double> const& norms() const { return norms_; }
  std::vector<double> const& outputs(int rank) const { return outcomes_[static_cast<std::size_t>(rank)]; }

  static double norm(std::vector<double> const& values) {
    double squares = 0.0;
    for (double const value : values) squares += value * value;
    return std::sqrt(squares);
  }

 private:
  Model const& model() const { return trial_->model; }
  std::size_t ranks() const { return static_cast<std::size_t>(trial_->ranks); }
  static Tensors<double> zeros_like(Tensors<double> tensors) {
    for (auto& tensor : tensors) tensor.values.assign(tensor.values.size(), 0.0);
    return tensors;
  }
  template <class T>
  Weights<T> bind(PartSpec const& part, Tensors<double>& tensors) {
    Weights<T> bound{};
    for (auto const& spec : part.tensors)
      for (auto& tensor : tensors)
        if (tensor.name == part.prefix + "." + spec.name) bound[spec.shape.size() - 1] = tensor.values.data();
    return bound;
  }

  /// All activations of one rank's rows.
  std::vector<std::vector<double>> activations(Index data, int rank, std::vector<std::size_t> const& order) {
    auto const rows = rows_of(model(), data, rank);
    std::vector<std::vector<double>> h(order.size() + 1,
                                       std::vector<double>(static_cast<std::size_t>(rows * model().width)));
    for (std::size_t i = 0; i < h[0].size(); ++i)
      h[0][i] = static_cast<double>(input_of(model(), data, rank, static_cast<Index>(i)));
    for (std::size_t at = 0; at < order.size(); ++at) {
      auto const& part = model().parts[order[at]];
      forward_rows<double, double>(PartSizes::of(model(), part), bind<double const>(part, parameters_), h[at].data(),
                                   h[at + 1].data(), rows);
    }
    return h;
  }
  void forward(Index data, std::size_t path) {
    for (int rank = 0; rank < trial_->ranks; ++rank) {
      auto const y = activations(data, rank, model().order(path)).back();
      auto& outputs = outcomes_[static_cast<std::size_t>(rank)];
      outputs.insert(outputs.end(), y.begin(), y.end());
    }
  }
  void backward(Index data, double value, std::size_t path) {
    auto const order = model().order(path);
    for (auto const part : order)
      for (auto const& tensor : model().parts[part].tensors)
        if (!model().is_frozen(model().parts[part], tensor)) has_gradient_.insert(model().parts[part].unit);
    auto const mean = static_cast<double>(loss_scale(model(), data, trial_->ranks, 1.0f)) / trial_->ranks;
    for (int rank = 0; rank < trial_->ranks; ++rank) {
      auto const h = activations(data, rank, order);
      std::vector<double> dy(h.back().size()), dx(dy.size());
      loss_gradient<double>(model(), data, rank, h.back().data(), dy.data(), mean * value);
      for (std::size_t at = order.size(); at-- > 0; std::swap(dx, dy)) {
        auto const& part = model().parts[order[at]];
        backward_rows<double, double>(PartSizes::of(model(), part), bind<double const>(part, parameters_),
                                      bind<double>(part, gradients_), {}, h[at].data(), dy.data(), dx.data(),
                                      rows_of(model(), data, rank));
      }
    }
  }

  void import() {
    for (auto& tensor : parameters_)
      for (std::size_t i = 0; i < tensor.values.size(); ++i)
        tensor.values[i] = static_cast<double>(imported_value(tensor.name, static_cast<Index>(i)));
    note_sizes();
  }

  void clip(Op const& op) {
    double sum = 0.0, largest = 0.0, squares = 0.0;
    for (auto const& tensor : gradients_) {
      if (is_frozen(tensor.name)) continue;
      for (double const g : tensor.values) {
        sum += std::abs(g), squares += g * g;
        largest = std::max(largest, std::abs(g));
      }
    }
    double const norm = factor_ * (op.norm == fsdp::NormKind::l1   ? sum
                                   : op.norm == fsdp::NormKind::l2 ? std::sqrt(squares)
                                                                   : largest);
    if (op.data != 0) norms_.push_back(norm);
    factor_ = std::isfinite(sum) ? factor_ * std::min(1.0, static_cast<double>(op.value) / (norm + 1e-6)) : skip;
  }

  void step(double of_step) {
    auto const factor = std::exchange(factor_, 1.0);
    if (factor == skip) {
      gradients_ = zeros_like(parameters_);
      has_gradient_.clear();
      return;
    }
    ++steps_;
    auto const& how = trial_->optimizer;
    auto const owners = owners_of(model(), how);
    for (std::size_t t = 0; t < parameters_.size(); ++t) {
      auto const& name = parameters_[t].name;
      if (!trains(name)) continue;
      if (Owners::has(owners.centred, name)) {
        centre(t, of_step, factor);
        continue;
      }
      bool const second = Owners::has(owners.second, name), grouped = name == owners.grouped;
      bool const adamw = how.adamw && !second;
      double const decay = second         ? 0.0
                           : grouped      ? static_cast<double>(grouped_weight_decay)
                           : decays(name) ? static_cast<double>(how.weight_decay)
                                          : 0.0;
      double const momentum = static_cast<double>(second ? second_momentum : grouped ? grouped_momentum : how.momentum);
      double const rate = of_step * (grouped ? static_cast<double>(grouped_lr_scale) : 1.0);
      for (std::size_t i = 0; i < parameters_[t].values.size(); ++i) {
        double const slope = std::exchange(gradients_[t].values[i], 0.0) * factor;
        auto& p = parameters_[t].values[i];
        auto& m = first_[t].values[i];
        auto& v = second_[t].values[i];
        if (adamw) {
          fsdp::AdamWOptions const constants{};
          double const beta1 = static_cast<double>(grouped ? grouped_momentum : constants.beta1),
                       beta2 = static_cast<double>(constants.beta2);
          m = beta1 * m + (1 - beta1) * slope;
          v = beta2 * v + (1 - beta2) * slope * slope;
          double const root = std::sqrt(v / (1 - std::pow(beta2, steps_)));
          p = p * (1 - rate * decay) -
              rate * (m / (1 - std::pow(beta1, steps_))) / (root + static_cast<double>(constants.eps));
        } else {
          m = momentum * m + slope + decay * p;
          p -= rate * m;
        }
      }
    }
    has_gradient_.clear();
    note_sizes();
  }
  void centre(std::size_t tensor, double rate, double factor) {
    auto& slopes = gradients_[tensor].values;
    double sum = 0.0;
    for (double const slope : slopes) sum += slope;
    for (std::size_t i = 0; i < slopes.size(); ++i)
      parameters_[tensor].values[i] -= rate * factor * (slopes[i] - sum / static_cast<double>(slopes.size()));
    std::fill(slopes.begin(), slopes.end(), 0.0);
  }
  /// The tensor has a gradient in the step to come.
  bool trains(std::string const& name) const {
    return !is_frozen(name) &&
           (model().zeros || model().paths.empty() || first_use(name, [this](PartSpec const& part, TensorSpec const&) {
              return has_gradient_.count(part.unit) > 0;
            }));
  }
  /// @param holds  bool(PartSpec, TensorSpec): asked of the first use of the tensor
  template <class Holds>
  bool first_use(std::string const& name, Holds const& holds) const {
    for (auto const& part : model().parts)
      for (auto const& tensor : part.tensors)
        if (part.prefix + "." + tensor.name == name) return holds(part, tensor);
    return false;
  }
  bool decays(std::string const& name) const {
    return first_use(name, [](PartSpec const&, TensorSpec const& tensor) { return tensor.decay; });
  }
  bool is_frozen(std::string const& name) const {
    return first_use(
        name, [this](PartSpec const& part, TensorSpec const& tensor) { return model().is_frozen(part, tensor); });
  }
  void note_sizes() {
    for (std::size_t t = 0; t < parameters_.size(); ++t)
      largest_[t] = std::max(largest_[t], norm(parameters_[t].values));
  }

  Trial const* trial_;
  Tensors<double> parameters_, gradients_, first_, second_;
  std::vector<double> largest_;
  std::vector<Tensors<double>> exported_;
  std::vector<double> norms_;
  std::vector<std::vector<double>> outcomes_;  ///< outputs by rank
  static constexpr double skip = -1.0;
  std::set<std::size_t> has_gradient_;  ///< units that backward passes since the last step have come to
  double factor_ = 1.0;                 ///< of clipping; `skip`: the norm is not finite
  int steps_ = 0;
};

}  // namespace trial
