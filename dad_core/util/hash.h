// A 64-bit hash (FNV-1a) that is the same on every machine: it travels in headers.
#pragma once

#include <cstdint>
#include <string_view>

namespace dad {

inline constexpr uint64_t kHashSeed = 0xcbf29ce484222325ull;

inline uint64_t HashCombine(uint64_t hash, uint64_t value) {
  for (int i = 0; i < 8; ++i) {
    hash = (hash ^ (value & 0xff)) * 0x100000001b3ull;
    value >>= 8;
  }
  return hash;
}

inline uint64_t HashCombine(uint64_t hash, std::string_view text) {
  for (char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return HashCombine(hash, text.size());
}

}  // namespace dad
