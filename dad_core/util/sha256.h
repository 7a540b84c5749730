// SHA-256 and HMAC-SHA256 (FIPS 180-4, RFC 2104), random bytes, and a comparison that takes as long
// for unequal bytes as for equal ones. Ours rather than OpenSSL's, which would be a second copy of
// libcrypto beside Python's in every process, or 5 MB in the wheel, for one function. The tests
// have the vectors of NIST and of RFC 4231 and one over all lengths from Python's hashlib, which
// also checks what ranks sign for the rendezvous store, in every job.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "dad/export.h"

namespace dad {

inline constexpr size_t kSha256Bytes = 32;

// The digest as bytes, not as text.
DAD_EXPORT std::string Sha256(std::string_view data);
DAD_EXPORT std::string HmacSha256(std::string_view key, std::string_view data);

DAD_EXPORT bool SameBytes(std::string_view a, std::string_view b);

// From the kernel. Ends the process if the kernel has none: nothing that follows would be safe.
DAD_EXPORT std::string RandomBytes(size_t count);

// Lower case.
DAD_EXPORT std::string HexOf(std::string_view bytes);

}  // namespace dad
