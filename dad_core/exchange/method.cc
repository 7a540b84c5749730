#include "exchange/method.h"

#include <charconv>
#include <iterator>

namespace dad {
namespace {

// Cuts off and returns what stands before the next `separator`.
std::string_view Next(std::string_view& rest, char separator) {
  const size_t end = rest.find(separator);
  const std::string_view word = rest.substr(0, end);
  rest = end == std::string_view::npos ? std::string_view() : rest.substr(end + 1);
  return word;
}

template <typename T>
bool ParseNumber(std::string_view text, T* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size();
}

Status Wrong(std::string_view text, std::string_view why) {
  return Status::InvalidArgument("method \"" + std::string(text) + "\": " + std::string(why));
}

constexpr std::string_view kActivations[] = {"none",    "relu", "leaky_relu", "tanh",
                                             "sigmoid", "gelu", "gelu_tanh",  "silu"};

Result<LayerShape> ParseLayer(std::string_view text) {
  std::string_view rest = text;
  std::string_view size = Next(rest, ':');
  LayerShape layer;
  // A product that would not fit into 63 bits is no layer.
  constexpr int64_t kMaxExtent = int64_t{1} << 31;
  if (!ParseNumber(Next(size, 'x'), &layer.out) || !ParseNumber(size, &layer.in) || layer.out < 0 ||
      layer.in < 0 || layer.out > kMaxExtent || layer.in > kMaxExtent) {
    return Wrong(text, "a layer is OUTxIN");
  }
  while (!rest.empty()) {
    std::string_view slope = Next(rest, ':');
    const std::string_view mark = Next(slope, '=');
    if (mark == "bias") {
      layer.bias = true;
    } else if (mark == "pass") {
      layer.pass = true;
    } else {
      size_t kind = 0;
      while (kind < std::size(kActivations) && kActivations[kind] != mark) ++kind;
      if (kind == std::size(kActivations)) return Wrong(text, "unknown mark");
      layer.activation = static_cast<Activation>(kind);
      if (!slope.empty() && !ParseNumber(slope, &layer.slope)) return Wrong(text, "bad slope");
    }
  }
  return layer;
}

}  // namespace

Result<MethodText> MethodText::Parse(std::string_view text) {
  MethodText method;
  std::string_view rest = text;
  method.name_ = std::string(Next(rest, ';'));
  while (!rest.empty()) {
    std::string_view value = Next(rest, ';');
    const std::string_view key = Next(value, '=');
    if (key == "layer") {
      Result<LayerShape> layer = ParseLayer(value);
      if (!layer.ok()) return layer.status();
      method.layers_.push_back(layer.value());
    } else {
      method.options_.emplace_back(key, value);
    }
  }
  return method;
}

std::string MethodText::Text(std::string_view key, std::string_view otherwise) const {
  for (const auto& [name, value] : options_) {
    if (name == key) return value;
  }
  return std::string(otherwise);
}

Result<int64_t> MethodText::Integer(std::string_view key, int64_t otherwise) const {
  const std::string text = Text(key, "");
  int64_t value = otherwise;
  if (!text.empty() && !ParseNumber(std::string_view(text), &value)) {
    return Wrong(name_, std::string(key) + "=" + text + " is not an integer");
  }
  return value;
}

Result<double> MethodText::Real(std::string_view key, double otherwise) const {
  const std::string text = Text(key, "");
  double value = otherwise;
  if (!text.empty() && !ParseNumber(std::string_view(text), &value)) {
    return Wrong(name_, std::string(key) + "=" + text + " is not a number");
  }
  return value;
}

}  // namespace dad
