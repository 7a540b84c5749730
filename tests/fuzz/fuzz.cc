#include "fuzz.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define DAD_SANITIZED_MALLOC
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define DAD_SANITIZED_MALLOC
#endif
#if defined(DAD_SANITIZED_MALLOC)
// Of sanitizer/allocator_interface.h, which not every compiler brings.
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*malloc_hook)(const volatile void*,
                                                                             size_t),
                                                         void (*free_hook)(const volatile void*));
#endif

namespace {

// One thread fuzzes; others, if any, may allocate too.
std::atomic<size_t> largest_allocation{0};

void Note(size_t num_bytes) {
  size_t seen = largest_allocation.load(std::memory_order_relaxed);
  while (num_bytes > seen && !largest_allocation.compare_exchange_weak(seen, num_bytes)) {
  }
}

#if defined(DAD_SANITIZED_MALLOC)

// The sanitizer has its own `new`, and tells of every allocation.
void OnMalloc(const volatile void*, size_t num_bytes) { Note(num_bytes); }
void OnFree(const volatile void*) {}
[[maybe_unused]] const int hooks = __sanitizer_install_malloc_and_free_hooks(OnMalloc, OnFree);

#else

void* Allocate(size_t num_bytes) {
  Note(num_bytes);
  // A huge one is refused like any that fails.
  constexpr size_t kMost = size_t{1} << 32;
  void* memory = num_bytes > kMost ? nullptr : std::malloc(std::max<size_t>(num_bytes, 1));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

#endif

}  // namespace

#if !defined(DAD_SANITIZED_MALLOC)
void* operator new(size_t num_bytes) { return Allocate(num_bytes); }
void* operator new[](size_t num_bytes) { return Allocate(num_bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
#endif

namespace dad::fuzz {

std::vector<Target>& Targets() {
  static std::vector<Target> targets;
  return targets;
}

void RunTarget(const Target& target, ByteSpan input) {
  largest_allocation = 0;
  try {
    target.run(input);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fuzz: largest allocation %zu bytes\n", LargestAllocation());
    Require(false, error.what());
  }
  if (LargestAllocation() > kAllocationBase + kAllocationPerByte * input.size()) {
    std::fprintf(stderr, "fuzz: %zu bytes allocated for %zu bytes of input\n", LargestAllocation(),
                 input.size());
    Require(false, "an allocation that the input does not justify");
  }
}

void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: %s\n", what);
  std::abort();
}

void Require(const Status& status, const char* what) {
  if (status.ok()) return;
  std::fprintf(stderr, "fuzz: %s\n", status.ToString().c_str());
  Require(false, what);
}

size_t LargestAllocation() { return largest_allocation.load(std::memory_order_relaxed); }

Bytes Input::Chunk() {
  const size_t wanted = Short();  // before what is left is counted
  const size_t length = std::min(wanted, rest_.size());
  const ByteSpan bytes = rest_.first(length);
  rest_ = rest_.subspan(length);
  return {bytes.begin(), bytes.end()};
}

}  // namespace dad::fuzz
