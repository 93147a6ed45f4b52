// SPDX-License-Identifier: Apache-2.0
// A reader of Python's pickles that hold numbers, strings and dictionaries of them.
#include "transformer/data/pickle.hpp"

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <utility>

#include "fsdp/error.hpp"
#include "transformer/data/excerpt.hpp"
#include "transformer/tokenizer/utf8.hpp"

namespace transformer {
namespace {

/// Instructions, by their names in Lib/pickletools.py.
enum class Opcode : unsigned char {
  mark = '(',
  stop = '.',
  binint = 'J',
  binint1 = 'K',
  binint2 = 'M',
  binunicode = 'X',
  binget = 'h',
  long_binget = 'j',
  binput = 'q',
  long_binput = 'r',
  setitem = 's',
  setitems = 'u',
  empty_dict = '}',
  proto = 0x80,
  long1 = 0x8a,
  short_binunicode = 0x8c,
  binunicode8 = 0x8d,
  memoize = 0x94,
  frame = 0x95
};

/// Runs a pickle's instructions.
class PickleMachine {
 public:
  PickleMachine(std::string_view bytes, std::string_view what) : bytes_(bytes), what_(what) {}

  PickleValue run() {
    while (step()) {
    }
    if (place_ != bytes_.size()) wrong(place_, "bytes follow the end of the pickle");
    if (stack_.size() != 1 || !marks_.empty() || stack_[0].kind != PickleValue::Kind::dictionary)
      wrong(opcode_, "the pickle ends without a single dictionary");
    expect_different_keys(stack_[0]);
    return std::move(stack_[0]);
  }

 private:
  static constexpr int deepest = 8;

  [[noreturn]] void wrong(std::size_t place, std::string_view fault) const {
    fsdp::fail<fsdp::ConfigError>(
        "{}, byte {}: {}; expected a pickle of a dictionary of whole numbers, strings and dictionaries", what_, place,
        fault);
  }

  std::string_view take(std::uint64_t count) {
    if (count > bytes_.size() - place_) wrong(opcode_, "the pickle is truncated");
    auto const taken = bytes_.substr(place_, static_cast<std::size_t>(count));
    place_ += taken.size();
    return taken;
  }
  /// An unsigned number of so many bytes, the lowest first. @pre count <= 8
  std::uint64_t number(std::size_t count) {
    std::uint64_t value = 0;
    std::size_t shift = 0;
    for (auto const byte : take(count)) {
      value |= std::uint64_t{static_cast<unsigned char>(byte)} << shift;
      shift += 8;
    }
    return value;
  }
  /// A signed one.
  std::int64_t signed_number(std::size_t count) {
    auto value = number(count);
    if (count > 0 && count < 8 && (value >> (8 * count - 1)) != 0) value |= ~std::uint64_t{0} << (8 * count);
    return static_cast<std::int64_t>(value);
  }

  void push(std::int64_t value) { stack_.push_back({PickleValue::Kind::number, value}); }
  void push_text(std::uint64_t length) {
    auto const text = take(length);
    for (std::size_t offset = 0; offset < text.size();) {
      auto const character = utf8_at(text, offset);
      if (!character.valid) wrong(opcode_, "a string is not UTF-8");
      offset += character.length;
    }
    stack_.push_back({PickleValue::Kind::text, 0, text});
  }
  void push_long() {
    auto const count = number(1);
    if (count > 8) wrong(opcode_, "a number has more than 64 bits");
    push(signed_number(static_cast<std::size_t>(count)));
  }

  /// Remembers the value on top. Of a dictionary, which has no items yet, only that it is one.
  void remember(std::uint64_t index) {
    if (stack_.size() == bottom()) wrong(opcode_, "there is no value to remember");
    auto const& top = stack_.back();
    memo_[index] = {top.kind, top.number, top.text};
  }
  void recall(std::uint64_t index) {
    auto const found = memo_.find(index);
    if (found == memo_.end()) wrong(opcode_, "a value is named that was not remembered");
    if (found->second.kind == PickleValue::Kind::dictionary) wrong(opcode_, "a dictionary occurs twice");
    stack_.push_back(found->second);
  }

  std::size_t bottom() const { return marks_.empty() ? 0 : marks_.back(); }
  /// Moves the values above `first` into the dictionary below them.
  void set_items(std::size_t first) {
    if (first == 0 || first > stack_.size() || (stack_.size() - first) % 2 != 0 ||
        stack_[first - 1].kind != PickleValue::Kind::dictionary)
      wrong(opcode_, "keys and values do not follow a dictionary");
    auto& into = stack_[first - 1];
    for (auto i = first; i < stack_.size(); ++i) {
      auto& item = stack_[i];
      bool const is_key = (i - first) % 2 == 0;
      if (is_key && item.kind == PickleValue::Kind::dictionary) wrong(opcode_, "a key is a dictionary");
      into.depth = std::max(into.depth, item.depth + 1);
      into.items.push_back(std::move(item));
    }
    if (into.depth > deepest) wrong(opcode_, "dictionaries are nested too deep");
    stack_.resize(first);
  }

  /// Runs one instruction. @return false if it was the last
  bool step() {
    opcode_ = place_;
    auto const code = static_cast<Opcode>(number(1));
    switch (code) {
      case Opcode::proto:
        if (number(1) > 5) wrong(opcode_, "the protocol is newer than 5");
        break;
      case Opcode::frame: number(8); break;  // bytes that Python reads at once
      case Opcode::mark: marks_.push_back(stack_.size()); break;
      case Opcode::empty_dict: stack_.push_back({PickleValue::Kind::dictionary, 0, {}, {}, 1}); break;
      case Opcode::binint: push(signed_number(4)); break;
      case Opcode::binint1: push(static_cast<std::int64_t>(number(1))); break;
      case Opcode::binint2: push(static_cast<std::int64_t>(number(2))); break;
      case Opcode::long1: push_long(); break;
      case Opcode::short_binunicode: push_text(number(1)); break;
      case Opcode::binunicode: push_text(number(4)); break;
      case Opcode::binunicode8: push_text(number(8)); break;
      case Opcode::memoize: remember(memo_.size()); break;
      case Opcode::binput: remember(number(1)); break;
      case Opcode::long_binput: remember(number(4)); break;
      case Opcode::binget: recall(number(1)); break;
      case Opcode::long_binget: recall(number(4)); break;
      case Opcode::setitem:
        if (stack_.size() < bottom() + 3) wrong(opcode_, "a key and a value do not follow a dictionary");
        set_items(stack_.size() - 2);
        break;
      case Opcode::setitems:
        if (marks_.empty()) wrong(opcode_, "there is no mark");
        set_items(std::exchange(marks_.back(), 0));
        marks_.pop_back();
        break;
      case Opcode::stop: return false;
      default:
        wrong(opcode_, fsdp::formatted("instruction 0x{:02x} builds another value or calls a function",
                                       static_cast<unsigned>(code)));
    }
    return true;
  }

  void expect_different_keys(PickleValue const& dictionary) const {
    std::set<std::int64_t> numbers;
    std::set<std::string_view> texts;
    for (std::size_t i = 0; i < dictionary.items.size(); i += 2) {
      auto const& key = dictionary.items[i];
      bool const is_text = key.kind == PickleValue::Kind::text;
      if (is_text ? !texts.insert(key.text).second : !numbers.insert(key.number).second)
        fsdp::fail<fsdp::ConfigError>("{}: the key {} occurs twice in a dictionary", what_,
                                      is_text ? "'" + excerpt(key.text) + "'" : std::to_string(key.number));
      auto const& value = dictionary.items[i + 1];
      if (value.kind == PickleValue::Kind::dictionary) expect_different_keys(value);
    }
  }

  std::string_view bytes_, what_;
  std::size_t place_ = 0, opcode_ = 0;  ///< what is read next, and the instruction that is run
  std::vector<PickleValue> stack_;
  std::vector<std::size_t> marks_;  ///< sizes of the stack
  std::map<std::uint64_t, PickleValue> memo_;
};

}  // namespace

PickleValue const* PickleValue::find(std::string_view key) const {
  for (std::size_t i = 0; i < items.size(); i += 2)
    if (items[i].kind == Kind::text && items[i].text == key) return &items[i + 1];
  return nullptr;
}

PickleValue read_pickle(std::string_view bytes, std::string_view what) { return PickleMachine(bytes, what).run(); }

}  // namespace transformer
