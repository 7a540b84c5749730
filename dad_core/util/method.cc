#include "dad/method.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <unordered_map>
#include <utility>

#include "util/mutex.h"

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

struct Method::Parsed {
  explicit Parsed(const std::string& method) : text(method) {
    std::string_view rest = text;
    name = std::string(Next(rest, ';'));
    while (!rest.empty()) {
      std::string_view value = Next(rest, ';');
      const std::string_view key = Next(value, '=');
      if (key != "layer") {
        options.emplace_back(key, value);
        continue;
      }
      Result<LayerShape> layer = ParseLayer(value);
      if (!layer.ok()) {
        status = layer.status();
        return;
      }
      layers.push_back(layer.value());
    }
  }

  std::string text;
  std::string name;
  std::vector<std::pair<std::string, std::string>> options;
  std::vector<LayerShape> layers;
  Status status;
};

Method::Method(const std::string& text) {
  // A job has a few texts per layer. The bound is for texts that other ranks send.
  constexpr size_t kMost = 1 << 16;
  static auto* const mutex = new Mutex;
  static auto* const known = new std::unordered_map<std::string, std::shared_ptr<const Parsed>>;
  MutexLock lock(*mutex);
  if (const auto found = known->find(text); found != known->end()) {
    parsed_ = found->second;
    return;
  }
  if (known->size() >= kMost) known->clear();
  parsed_ = std::make_shared<const Parsed>(text);
  known->emplace(text, parsed_);
}

Method::Method() {
  static const auto* const none = new Method("none");
  *this = *none;
}

const std::string& Method::text() const { return parsed_->text; }
const std::string& Method::name() const { return parsed_->name; }
const Status& Method::status() const { return parsed_->status; }
bool Method::none() const { return parsed_->text == "none"; }
const std::vector<LayerShape>& Method::layers() const { return parsed_->layers; }

bool Method::operator==(const Method& other) const {
  return parsed_ == other.parsed_ || parsed_->text == other.parsed_->text;
}

std::string Method::Text(std::string_view key, std::string_view otherwise) const {
  for (const auto& [name, value] : parsed_->options) {
    if (name == key) return value;
  }
  return std::string(otherwise);
}

Result<int64_t> Method::Integer(std::string_view key, int64_t otherwise) const {
  const std::string text = Text(key, "");
  int64_t value = otherwise;
  if (!text.empty() && !ParseNumber(std::string_view(text), &value)) {
    return Wrong(name(), std::string(key) + "=" + text + " is not an integer");
  }
  return value;
}

std::string Method::FirstUnknown(std::span<const std::string_view> known) const {
  for (const auto& [name, value] : parsed_->options) {
    if (std::find(known.begin(), known.end(), name) == known.end()) return name;
  }
  return "";
}

Result<double> Method::Real(std::string_view key, double otherwise) const {
  const std::string text = Text(key, "");
  double value = otherwise;
  if (!text.empty() && !ParseNumber(std::string_view(text), &value)) {
    return Wrong(name(), std::string(key) + "=" + text + " is not a number");
  }
  return value;
}

}  // namespace dad
