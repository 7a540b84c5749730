#include "exchange/method/sparse/sparse_settings.h"

#include <limits>
#include <string>

namespace dad {

Result<SparseSettings> ParseSparseSettings(const Method& method) {
  SparseSettings settings;
  auto wrong = [](const std::string& what) { return Status::InvalidArgument(what); };
  const std::string rule = method.Text("rule", "vgc");
  if (rule == "vgc") {
    settings.rule = SparseRule::kVgc;
  } else if (rule == "vgc_strom") {
    settings.rule = SparseRule::kVgcStrom;
  } else if (rule == "strom") {
    settings.rule = SparseRule::kStrom;
  } else if (rule == "topk") {
    settings.rule = SparseRule::kTopK;
  } else {
    return wrong("rule=" + rule + " is none of vgc, vgc_strom, strom, topk");
  }
  const std::string coding = method.Text("coding", "rice");
  if (coding != "rice" && coding != "word")
    return wrong("coding=" + coding + " is neither rice nor word");
  settings.coding = coding == "word" ? Coding::kWord : Coding::kRice;
  const std::string variance = method.Text("variance", "row");
  if (variance != "row" && variance != "sample")
    return wrong("variance=" + variance + " is neither row nor sample");
  settings.by_sample = variance == "sample";
  const auto feedback = method.Integer("feedback", settings.rule == SparseRule::kTopK ? 1 : 0);
  DAD_RETURN_IF_ERROR(feedback.status());
  settings.feedback = feedback.value() != 0;
  struct Number {
    const char* name;
    double* value;
    double low, high;
  };
  constexpr double kMost = std::numeric_limits<float>::max();
  for (const Number& number :
       {Number{"alpha", &settings.alpha, 0, kMost}, Number{"zeta", &settings.zeta, 0, 1},
        Number{"tau", &settings.tau, 0, kMost},
        Number{"tau_absolute", &settings.tau_absolute, 0, kMost},
        Number{"ratio", &settings.ratio, 0, 1}}) {
    if (method.Text(number.name, "").empty()) continue;
    const auto value = method.Real(number.name, 0);
    DAD_RETURN_IF_ERROR(value.status());
    if (!(value.value() >= number.low && value.value() <= number.high)) {
      return wrong(std::string(number.name) + " is out of range");
    }
    *number.value = value.value();
  }
  if (method.layers().size() != 1) return wrong("it needs one layer");
  settings.layer = method.layers()[0];
  return settings;
}

}  // namespace dad
