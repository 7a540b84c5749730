// Whether a function as we declare it is called like the one that a library's header declares. Only
// the files that are compiled where such headers are (abi_check) need it.
#pragma once

#include <type_traits>

namespace dad {

// How our types stand for theirs: pointers for pointers, int for an enum of that size.
template <typename Ours, typename Theirs>
constexpr bool SameOnTheWire() {
  if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    return true;
  } else if constexpr (std::is_class_v<Ours>) {
    return std::is_class_v<Theirs> && sizeof(Ours) == sizeof(Theirs) &&
           alignof(Ours) == alignof(Theirs);
  } else if constexpr (std::is_enum_v<Theirs>) {
    return std::is_same_v<Ours, int> && sizeof(Theirs) == sizeof(int);
  } else {
    return std::is_same_v<Ours, Theirs>;
  }
}

template <typename Ours, typename Theirs>
struct SameCall : std::false_type {};
template <typename R, typename... A, typename S, typename... B>
requires(sizeof...(A) == sizeof...(B)) struct SameCall<R (*)(A...), S (*)(B...)>
    : std::bool_constant<SameOnTheWire<R, S>() && (SameOnTheWire<A, B>() && ...)> {
};

}  // namespace dad
