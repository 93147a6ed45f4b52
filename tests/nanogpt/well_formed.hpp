// SPDX-License-Identifier: Apache-2.0
// Whether a text is well-formed XML, as far as pages and pictures use it: elements, quoted attributes, references.
#pragma once

#include <cctype>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace nanogpt::testing {

/// Reads elements; remembers how many of each name, and the first fault.
class XmlCheck {
 public:
  explicit XmlCheck(std::string_view text) : rest_(text), size_(text.size()) {
    while (fault_.empty() && !rest_.empty()) step();
    if (fault_.empty() && !open_.empty()) fault_ = "'" + open_.back() + "' is never closed";
  }
  /// Empty: well-formed.
  std::string const& fault() const { return fault_; }
  std::size_t count(std::string_view name) const {
    std::size_t sum = 0;
    for (auto const& found : names_) if (found == name) ++sum;
    return sum;
  }

 private:
  void step() {
    if (rest_.front() != '<') return characters(rest_.find('<'));
    if (rest_.starts_with("<!DOCTYPE html>")) return rest_.remove_prefix(15);
    if (rest_.starts_with("</")) return close();
    open();
  }
  void characters(std::size_t end) {
    check(rest_.substr(0, end));
    rest_.remove_prefix(end == std::string_view::npos ? rest_.size() : end);
  }
  /// Characters and references of a text or an attribute.
  void check(std::string_view text) {
    for (std::size_t at = 0; at < text.size(); ++at) {
      auto const code = static_cast<unsigned char>(text[at]);
      if (code < 0x20 && code != '\n' && code != '\t') return fail("a control character");
      if (text[at] != '&') continue;
      bool known = false;
      for (std::string_view const name : {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"})
        known = known || text.substr(at).starts_with(name);
      if (!known) return fail("a reference to nothing known");
    }
  }
  void close() {
    auto const end = rest_.find('>');
    if (end == std::string_view::npos) return fail("an end tag that is cut off");
    auto const name = rest_.substr(2, end - 2);
    if (open_.empty() || open_.back() != name) return fail("the end of '" + std::string(name) + "', which is not open");
    open_.pop_back();
    rest_.remove_prefix(end + 1);
  }
  void open() {
    rest_.remove_prefix(1);
    auto const name = word();
    if (name.empty()) return fail("a tag without a name");
    names_.push_back(name);
    std::vector<std::string> attributes;
    for (;;) {
      bool const blank = !rest_.empty() && std::isspace(static_cast<unsigned char>(rest_.front())) != 0;
      while (!rest_.empty() && std::isspace(static_cast<unsigned char>(rest_.front())) != 0) rest_.remove_prefix(1);
      if (rest_.starts_with("/>")) return rest_.remove_prefix(2);
      if (rest_.starts_with(">")) {
        rest_.remove_prefix(1);
        return open_.push_back(name);
      }
      auto const attribute = word();
      if (attribute.empty() || !blank || !rest_.starts_with("=\"")) return fail("an attribute that is none in " + name);
      for (auto const& other : attributes)
        if (other == attribute) return fail("a second " + attribute);
      attributes.push_back(attribute);
      rest_.remove_prefix(2);
      auto const end = rest_.find('"');
      auto const value = rest_.substr(0, end);
      if (end == std::string_view::npos || value.find('<') != std::string_view::npos) return fail("an open quote");
      check(value);
      rest_.remove_prefix(end + 1);
    }
  }
  std::string word() {
    std::size_t length = 0;
    while (length < rest_.size() && (std::isalnum(static_cast<unsigned char>(rest_[length])) != 0 ||
                                     rest_[length] == '-' || rest_[length] == ':'))
      ++length;
    std::string const found(rest_.substr(0, length));
    rest_.remove_prefix(length);
    return found;
  }
  void fail(std::string const& what) {
    if (fault_.empty())
      fault_ = what + " at " + std::to_string(size_ - rest_.size()) + ": " + std::string(rest_.substr(0, 60));
    rest_ = {};
  }

  std::string_view rest_;
  std::size_t size_;
  std::string fault_;
  std::vector<std::string> open_, names_;
};

}  // namespace nanogpt::testing
