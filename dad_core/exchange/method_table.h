// The methods, one row each. Code outside of a method's own files asks its row and never compares
// names: a new method is a row in method_table.cc beside its exchange.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "dad/method.h"
#include "dad/status.h"
#include "exchange/exchange.h"

namespace dad {

// Which squares a method needs beside the gradient, for the variance of its elements.
enum class Squares {
  kNone,
  kOfRows,     // every row is a sample
  kOfSamples,  // adjacent rows form one (contribution.h)
};

// How a method is computed where its tensors are on a CUDA device (exchange/device). `make` is null
// for a method that computes on the host only.
struct DeviceMethod {
  Result<std::unique_ptr<Exchange>> (*make)(const TensorSpec& spec,
                                            const ExchangeEnv& env) = nullptr;
  // Whether it can do this spec, the same on every rank. Null: any.
  bool (*can_make)(const TensorSpec& spec, const ExchangeEnv& env) = nullptr;
  // True where every rank repeats a computation whose bits depend on where it runs: then all ranks
  // compute on their devices, or none. Otherwise a rank may join in from the host.
  bool on_all_ranks = false;
  // Whether this rank's tensors can be read where they are; if not, they are copied to the host.
  // Null: `input` and `output` are all there is to read.
  bool (*takes)(const TensorSpec& spec, const Contribution& mine, const ExchangeEnv& env) = nullptr;
};

struct MethodRow {
  std::string_view name;  // the first word of the text

  // The exchange on the host. Also says what is wrong with the options: requests are validated by
  // making one with an empty ExchangeEnv.
  Result<std::unique_ptr<Exchange>> (*make)(const TensorSpec& spec,
                                            const ExchangeEnv& env) = nullptr;
  // About how many bytes one share has, the same on every rank; the fuser goes by it. The options
  // may be wrong here. Null: as many as the tensor.
  int64_t (*share_bytes)(const TensorSpec& spec) = nullptr;
  // A batch holds gradients of at most this many times the fusion size, whatever their shares have:
  // shares of a whole model may fit into one batch, which would then start when backward has ended.
  int64_t dense_per_batch = 4;

  DeviceMethod device = {};

  // Exchanges rows instead of gradients (ExchangesRows). Then it runs between all ranks, also where
  // there is a hierarchy of hosts.
  bool exchanges_rows = false;
  // What has to be summed up inside a host beside the gradient. Null: nothing.
  Result<Squares> (*squares)(const Method& method) = nullptr;
};

// Null if no method has this name.
const MethodRow* FindMethod(const Method& method);

// InvalidArgument, saying what is wrong and which methods there are, if there is no row or the text
// is malformed.
Result<const MethodRow*> RowOf(const Method& method);

// Adds a method that is not part of the core; it replaces one of the same name. Before the first
// engine starts, and on every rank.
void RegisterMethod(const MethodRow& row);

}  // namespace dad
