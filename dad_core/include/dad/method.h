// How a tensor is compressed: the text of a request's method, and what it says.
//
// Ranks compare the text letter by letter before a result is used, so it carries everything that
// an exchange depends on:
//
//   none
//   factor;wire=fp32;rows=32;layer=1024x784:bias:relu;layer=10x1024:bias
//   low_rank;rank=4;wire=int4;combine=owner;owner=2;feedback=dense;layer=1024x784:bias
//   int8;bucket=512;feedback=1
//
// A layer is OUTxIN with marks: `bias`, `pass` (hands D down; its own gradient is exchanged
// elsewhere), and the activation between it and the layer above (`leaky_relu=0.01` has a slope).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dad/contribution.h"
#include "dad/export.h"
#include "dad/status.h"

namespace dad {

struct LayerShape {
  int64_t out = 0;
  int64_t in = 0;
  bool bias = false;
  bool pass = false;
  Activation activation = Activation::kNone;
  double slope = 0.0;

  int64_t num_elements() const { return out * (in + (bias ? 1 : 0)); }
};

// A parsed text. Immutable, and cheap to copy: equal texts share one parse, so a step that sends
// what the previous one sent parses nothing. Any thread.
class DAD_EXPORT Method {
 public:
  Method();  // none
  // Implicit, so that a text is a method. A malformed text is reported by status().
  Method(const std::string& text);                         // NOLINT(google-explicit-constructor)
  Method(const char* text) : Method(std::string(text)) {}  // NOLINT(google-explicit-constructor)
  Method(const Method&) = default;  // also in place of a move: a method is never empty
  Method& operator=(const Method&) = default;

  const std::string& text() const;
  const std::string& name() const;  // up to the first semicolon
  const Status& status() const;     // InvalidArgument for a malformed text
  bool none() const;                // no compression

  // The value of an option, or `otherwise` when the text does not have it.
  std::string Text(std::string_view key, std::string_view otherwise) const;
  Result<int64_t> Integer(std::string_view key, int64_t otherwise) const;
  Result<double> Real(std::string_view key, double otherwise) const;
  const std::vector<LayerShape>& layers() const;
  // The first option that is not among these; empty: there is none.
  std::string FirstUnknown(std::span<const std::string_view> known) const;

  bool operator==(const Method& other) const;

 private:
  struct Parsed;
  std::shared_ptr<const Parsed> parsed_;
};

// True for methods that exchange the rows of a layer (A and D), from which every rank forms the
// gradient. Such rows cannot be added up. False for an unknown method.
DAD_EXPORT bool ExchangesRows(const Method& method);

}  // namespace dad
