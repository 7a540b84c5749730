#include "exchange/method/low_rank/low_rank_share.h"

#include <string>

#include "exchange/by_method.h"
#include "util/byte_io.h"
#include "util/hash.h"

namespace dad {

Result<LowRankSettings> ParseLowRankSettings(const TensorSpec& spec) {
  const Method& method = spec.method;
  auto wrong = [&](const std::string& what) { return WrongMethod(spec, what); };
  LowRankSettings settings;
  if (method.layers().size() != 1) return wrong("expected one layer");
  DAD_RETURN_IF_ERROR(CheckSummable(spec, "low rank"));
  settings.layer = method.layers()[0];
  const auto rank = method.Integer("rank", 4);
  const auto tol = method.Real("tol", 0.0);
  const auto energy = method.Real("energy", 0.0);
  const auto iterations = method.Integer("iterations", 1);
  const auto owner = method.Integer("owner", 0);
  for (const Status& status :
       {rank.status(), tol.status(), energy.status(), iterations.status(), owner.status()}) {
    DAD_RETURN_IF_ERROR(status);
  }
  if (rank.value() < 1 || rank.value() > 255) return wrong("rank must be in 1..255");
  if (iterations.value() < 1 || iterations.value() > 100)
    return wrong("iterations must be in 1..100");
  settings.options.rank = static_cast<int>(rank.value());
  settings.options.tol = tol.value();
  settings.options.energy = energy.value();
  settings.options.iterations = static_cast<int>(iterations.value());
  settings.owner = static_cast<int>(owner.value());
  const auto wire = ParseWire(method.Text("wire", "int4"));
  if (!wire.ok()) return wire.status();
  settings.wire = wire.value();
  const std::string combine = method.Text("combine", "owner");
  if (combine == "gather") {
    settings.combine = LowRankCombine::kGather;
  } else if (combine == "power") {
    settings.combine = LowRankCombine::kPower;
  } else if (combine != "owner") {
    return wrong("combine must be owner, gather or power");
  }
  const std::string feedback = method.Text("feedback", "dense");
  if (feedback == "none") {
    settings.feedback = Feedback::kNone;
  } else if (feedback == "rows") {
    settings.feedback = Feedback::kRows;
  } else if (feedback != "dense") {
    return wrong("feedback must be dense, rows or none");
  }
  if (settings.combine == LowRankCombine::kPower && settings.feedback == Feedback::kRows) {
    return wrong("power keeps a dense residual");
  }
  return settings;
}

// By shape, not by name: frameworks call the same layer by different names.
uint64_t LowRankSeed(const LowRankSettings& settings, uint64_t side) {
  const auto m = static_cast<uint64_t>(settings.layer.out);
  const auto n = static_cast<uint64_t>(settings.columns());
  return HashCombine(HashCombine(HashCombine(kHashSeed, m), n), side);
}

Status MalformedLowRank(const TensorSpec& spec, int rank) {
  return Status::InvalidArgument("\"" + spec.name + "\": rank " + std::to_string(rank) +
                                 " sent malformed factors");
}

template <typename T>
Status ReadLowRankShare(const TensorSpec& spec, const LowRankSettings& settings, int rank,
                        ByteSpan share, uint8_t& flags, SentFactors<T>& factors) {
  const int64_t m = settings.layer.out, columns = settings.columns();
  ByteReader in(share);
  flags = in.Value<uint8_t>();
  if ((flags & kLowRankNotFinite) != 0) {
    return in.AtEnd() ? Status::Ok() : MalformedLowRank(spec, rank);
  }
  const int64_t k = in.Value<uint8_t>();
  if (!in.ok() || k > settings.options.rank) return MalformedLowRank(spec, rank);
  const ByteSpan u = in.Take(EncodedBytes(settings.wire, k, m, DTypeOf<T>()));
  const ByteSpan v = in.Take(EncodedBytes(settings.wire, k, columns, DTypeOf<T>()));
  if (!in.AtEnd()) return MalformedLowRank(spec, rank);
  factors.k = k;
  factors.ut.resize(static_cast<size_t>(k * m));
  factors.vt.resize(static_cast<size_t>(k * columns));
  DAD_RETURN_IF_ERROR(DecodeFactors<T>(settings.wire, u, ViewOf(factors.ut.data(), k, m)));
  return DecodeFactors<T>(settings.wire, v, ViewOf(factors.vt.data(), k, columns));
}

template Status ReadLowRankShare<float>(const TensorSpec&, const LowRankSettings&, int, ByteSpan,
                                        uint8_t&, SentFactors<float>&);
template Status ReadLowRankShare<double>(const TensorSpec&, const LowRankSettings&, int, ByteSpan,
                                         uint8_t&, SentFactors<double>&);

}  // namespace dad
