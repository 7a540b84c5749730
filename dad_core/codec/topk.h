// The k largest magnitudes of a tensor; of equal ones those that come first. Zeros are never among
// them.
#pragma once

#include <cstdint>
#include <vector>

namespace dad {

// What separates the largest from the others.
struct TopKLimit {
  uint64_t magnitude = 0;  // bits of a float or double without the sign: what is above is taken,
  int64_t equal = 0;       // and so many of those that are equal
};

// By radix selection: three (float) or six passes over r, whatever its values are.
template <typename T>
TopKLimit FindTopK(const T* r, int64_t count, int64_t k);

// Appends index and value of the taken elements of a chunk of r. `limit.equal` goes down as equal
// ones are taken: chunks come in order.
template <typename T>
void TakeTopK(const T* r, int64_t count, TopKLimit& limit, std::vector<uint32_t>& index,
              std::vector<T>& value);

}  // namespace dad
