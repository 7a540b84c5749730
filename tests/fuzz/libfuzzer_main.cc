// All targets in one libFuzzer executable: DAD_FUZZ_TARGET names the one to run.
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "fuzz.h"

namespace {

const dad::fuzz::Target* Chosen() {
  const char* name = std::getenv("DAD_FUZZ_TARGET");
  for (const dad::fuzz::Target& target : dad::fuzz::Targets()) {
    if (name != nullptr && std::string_view(name) == target.name) return &target;
  }
  std::fprintf(stderr, "DAD_FUZZ_TARGET must be one of:");
  for (const dad::fuzz::Target& target : dad::fuzz::Targets()) {
    std::fprintf(stderr, " %s", target.name);
  }
  std::fprintf(stderr, "\n");
  std::exit(2);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const dad::fuzz::Target* const target = Chosen();
  dad::fuzz::RunTarget(*target, std::as_bytes(std::span(data, size)));
  return 0;
}
