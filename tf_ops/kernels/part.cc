#include "tf_ops/kernels/part.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include "dad/method.h"

namespace dad_tensorflow {
namespace {

using dad::Result;
using dad::Status;

Status Wrong(const std::string& text, const std::string& why) {
  return Status::InvalidArgument("parts: \"" + text + "\": " + why);
}

// "0,32": numbers of a list, which may be empty.
Result<std::vector<int64_t>> ParseList(std::string_view list) {
  std::vector<int64_t> numbers;
  while (!list.empty()) {
    const std::string_view one = list.substr(0, list.find(','));
    int64_t number = 0;
    const auto [end, error] = std::from_chars(one.data(), one.data() + one.size(), number);
    if (error != std::errc() || end != one.data() + one.size()) {
      return Status::InvalidArgument("\"" + std::string(one) + "\" is not an integer");
    }
    numbers.push_back(number);
    list.remove_prefix(std::min(one.size() + 1, list.size()));
  }
  return numbers;
}

}  // namespace

Result<Part> ParsePart(const std::string& text) {
  const dad::Method options("part;" + text);
  DAD_RETURN_IF_ERROR(options.status());
  Part part;
  const struct {
    const char* key;
    int* number;
  } numbers[] = {{"pair", &part.pair}, {"rows", &part.rows}, {"indexed", &part.indexed}};
  const struct {
    const char* key;
    bool* flag;
  } flags[] = {{"dense", &part.has_dense},
               {"bias", &part.has_bias},
               {"transposed", &part.transposed},
               {"forms", &part.forms}};
  const struct {
    const char* key;
    std::vector<int64_t>* list;
  } lists[] = {{"begin", &part.begins}, {"samples", &part.samples}};
  std::vector<std::string_view> known;
  for (const auto& [key, number] : numbers) {
    const Result<int64_t> value = options.Integer(key, 0);
    if (!value.ok()) return Wrong(text, value.status().message());
    *number = static_cast<int>(value.value());
    known.emplace_back(key);
  }
  for (const auto& [key, flag] : flags) {
    const Result<int64_t> value = options.Integer(key, 0);
    if (!value.ok()) return Wrong(text, value.status().message());
    *flag = value.value() != 0;
    known.emplace_back(key);
  }
  for (const auto& [key, list] : lists) {
    Result<std::vector<int64_t>> value = ParseList(options.Text(key, ""));
    if (!value.ok()) return Wrong(text, value.status().message());
    *list = std::move(value).value();
    known.emplace_back(key);
  }
  const std::string unknown = options.FirstUnknown(known);
  if (!unknown.empty()) return Wrong(text, "unknown key \"" + unknown + "\"");
  return part;
}

}  // namespace dad_tensorflow
