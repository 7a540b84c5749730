#include "exchange/device/low_rank_side.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "exchange/by_method.h"
#include "util/log.h"

namespace dad {
namespace {

// As on the host (low_rank_state.cc): passes to find directions from nothing.
constexpr int kColdIterations = 6;

}  // namespace

Status DeviceLowRankSide::Begin(Feedback feedback) {
  feedback_ = feedback;
  Result<DeviceBlock> block = bench_.Take(num_bytes());
  if (!block.ok()) return block.status();
  new_e_ = std::move(block).value();
  if (feedback == Feedback::kNone) return bench_.Clear(new_e_.get(), num_bytes());
  DAD_RETURN_IF_ERROR(e_ == nullptr ? bench_.Clear(new_e_.get(), num_bytes())
                                    : bench_.Copy(new_e_.get(), e_.get(), num_bytes()));
  return AddFactors(pending(), -1);
}

Status DeviceLowRankSide::AddDense(const float* weight, const float* bias, float scale) {
  for (const auto& [from, to, count] : {std::tuple(weight, Floats(new_e_), m_ * n()),
                                        std::tuple(bias, NewBias(), bias_ ? m_ : int64_t{0})}) {
    if (from == nullptr || count == 0) continue;
    DAD_RETURN_IF_ERROR(
        bench_.Run<cuda::AddKeptKernel<float>>({from, count, scale, to, to, nullptr}));
  }
  return Status::Ok();
}

Status DeviceLowRankSide::AddRows(const DeviceRows& term) {
  const int64_t rows = term.rows, out_count = term.out_count;
  if (rows == 0 || out_count == 0) return Status::Ok();
  const Result<DeviceProducts*> products = bench_.Products();
  if (!products.ok()) return products.status();
  const CudaDeviceGuard guard(bench_.cuda(), bench_.device());
  DAD_RETURN_IF_ERROR(products.value()->Multiply<float>(
      {term.d, rows, out_count}, true, {term.a, rows, n()}, false,
      {Floats(new_e_) + term.out_begin * n(), out_count, n()}, term.scale, 1));
  if (!bias_) return Status::Ok();
  DeviceArena work;
  auto* ones = work.Take<float>(bench_, rows);
  DAD_RETURN_IF_ERROR(work.status());
  const std::vector<float> host(static_cast<size_t>(rows), 1.0f);
  DAD_RETURN_IF_ERROR(Upload(bench_, std::as_bytes(std::span(host)), ones));
  return products.value()->Multiply<float>({term.d, rows, out_count}, true, {ones, rows, 1}, false,
                                           {NewBias() + term.out_begin, out_count, 1}, term.scale,
                                           1);
}

Status DeviceLowRankSide::AddIndexed(const float* x, const std::vector<uint32_t>& index,
                                     float scale) {
  const auto rows = static_cast<int64_t>(index.size());
  if (rows == 0) return Status::Ok();
  DeviceArena work;
  auto* where = work.Take<uint32_t>(bench_, rows);
  DAD_RETURN_IF_ERROR(work.status());
  DAD_RETURN_IF_ERROR(Upload(bench_, std::as_bytes(std::span(index)), where));
  return bench_.Run<cuda::AddRowsKernel<float>>({x, where, rows, n(), scale, Floats(new_e_)});
}

Status DeviceLowRankSide::AddFactors(const DeviceFactors& factors, float scale) {
  if (factors.k == 0) return Status::Ok();
  const Result<DeviceProducts*> products = bench_.Products();
  if (!products.ok()) return products.status();
  const CudaDeviceGuard guard(bench_.cuda(), bench_.device());
  const DeviceMatrix<const float> ut{factors.ut, factors.k, m_};
  DAD_RETURN_IF_ERROR(
      products.value()->Multiply<float>(ut, true, {factors.vt, factors.k, n(), columns_}, false,
                                        {Floats(new_e_), m_, n()}, scale, 1));
  if (!bias_) return Status::Ok();
  return products.value()->Multiply<float>(ut, true, {factors.vt + n(), factors.k, 1, columns_},
                                           false, {NewBias(), m_, 1}, scale, 1);
}

Status DeviceLowRankSide::AddSide(const DeviceLowRankSide& other, float scale) {
  DAD_RETURN_IF_ERROR(AddDense(Floats(other.e_), Floats(other.e_) + m_ * n(), scale));
  return AddFactors(other.pending(), -scale);
}

Result<DeviceBlock> DeviceLowRankSide::TakeFloats(int64_t count) {
  return bench_.Take(static_cast<size_t>(count) * sizeof(float));
}

// For the directions, and where the iteration starts, in memory of its own: the state stays as it
// is.
Status DeviceLowRankSide::TakeBlocks(const LowRankOptions& options) {
  const int64_t count = options.rank * columns_;
  Result<DeviceBlock> start = TakeFloats(count), ut = TakeFloats(options.rank * m_),
                      vt = TakeFloats(count);
  for (const Status& status : {start.status(), ut.status(), vt.status()}) {
    DAD_RETURN_IF_ERROR(status);
  }
  new_warm_ = std::move(start).value();
  new_rank_ = options.rank;
  sent_ut_ = std::move(ut).value();
  sent_vt_ = std::move(vt).value();
  if (warm_rank_ == options.rank) {
    return bench_.Copy(new_warm_.get(), warm_.get(), static_cast<size_t>(count) * sizeof(float));
  }
  std::vector<float> random(static_cast<size_t>(count));
  RandomStart<float>(seed_, ViewOf(random.data(), options.rank, columns_));
  return Upload(bench_, std::as_bytes(std::span(random)), new_warm_.get());
}

// What enters a residual never leaves it: looked at as a whole, and left as it is.
Status DeviceLowRankSide::LookAtE(int* not_finite) {
  float* e = Floats(new_e_);
  return bench_.Run<cuda::AddKeptKernel<float>>({e, m_ * columns_, 1.0f, nullptr, e, not_finite});
}

Status DeviceLowRankSide::Compress(const LowRankOptions& options, Wire wire) {
  const int passes = options.iterations + (warm_rank_ == options.rank ? 0 : kColdIterations);
  DAD_RETURN_IF_ERROR(TakeBlocks(options));
  DeviceArena work;
  auto* flags = work.Take<Flags>(bench_, 1);
  DAD_RETURN_IF_ERROR(work.status());
  DAD_RETURN_IF_ERROR(bench_.Clear(flags, sizeof *flags));
  DAD_RETURN_IF_ERROR(LookAtE(&flags->not_finite));
  DeviceSubspace subspace(bench_, NewE(), options);
  DAD_RETURN_IF_ERROR(subspace.Open());
  for (int pass = 0; pass < passes; ++pass) {
    DAD_RETURN_IF_ERROR(subspace.Pass(Floats(new_warm_)));
  }
  return Encode(subspace, flags, wire);
}

Status DeviceLowRankSide::CompressRows(std::span<const DeviceRows> rows,
                                       const LowRankOptions& options, Wire wire) {
  feedback_ = Feedback::kNone;
  DAD_RETURN_IF_ERROR(TakeBlocks(options));
  // At least as many as are sent: rows of zeros add no direction.
  int64_t count = 0;
  for (const DeviceRows& term : rows) count += term.rows;
  count = std::max<int64_t>(count, options.rank);
  DeviceArena work;
  auto* flags = work.Take<Flags>(bench_, 1);
  auto* d = work.Take<double>(bench_, count * m_);
  auto* a = work.Take<double>(bench_, count * columns_);
  DAD_RETURN_IF_ERROR(work.status());
  DAD_RETURN_IF_ERROR(bench_.Clear(flags, sizeof *flags));
  DAD_RETURN_IF_ERROR(bench_.Clear(d, static_cast<size_t>(count * m_) * sizeof *d));
  DAD_RETURN_IF_ERROR(bench_.Clear(a, static_cast<size_t>(count * columns_) * sizeof *a));
  double* d_to = d;
  double* a_to = a;
  for (const DeviceRows& term : rows) {
    DAD_RETURN_IF_ERROR(
        bench_.Run<cuda::WidenRowsKernel>({term.d, term.rows, term.out_count, term.scale,
                                           d_to + term.out_begin, m_, &flags->not_finite}));
    DAD_RETURN_IF_ERROR(bench_.Run<cuda::WidenRowsKernel>(
        {term.a, term.rows, term.a_cols, 1.0f, a_to, columns_, &flags->not_finite}));
    if (term.a_cols < columns_) {
      DAD_RETURN_IF_ERROR(bench_.Run<cuda::WidenRowsKernel>(
          {nullptr, term.rows, 1, 1.0f, a_to + n(), columns_, &flags->not_finite}));
    }
    d_to += term.rows * m_;
    a_to += term.rows * columns_;
  }
  DeviceSubspace subspace(bench_, {nullptr, nullptr, m_, columns_}, options, count);
  DAD_RETURN_IF_ERROR(subspace.Open());
  DAD_RETURN_IF_ERROR(subspace.OfRows(d, a, Floats(new_warm_)));
  return Encode(subspace, flags, wire);
}

// The directions, as they are sent, and on their way to the host.
Status DeviceLowRankSide::Encode(DeviceSubspace& subspace, Flags* flags, Wire wire) {
  const int64_t r = new_rank_;
  DAD_RETURN_IF_ERROR(subspace.Factors(Floats(sent_ut_), Floats(sent_vt_)));
  // Of rows that are finite the product may not be.
  float* vt = Floats(sent_vt_);
  DAD_RETURN_IF_ERROR(bench_.Run<cuda::AddKeptKernel<float>>(
      {vt, r * columns_, 1.0f, nullptr, vt, &flags->not_finite}));
  DAD_RETURN_IF_ERROR(bench_.Copy(&flags->kept, subspace.kept(), sizeof flags->kept));
  wire_ = wire;
  const size_t u_bytes = EncodedBytes(wire, r, m_, DType::kFloat32);
  const size_t v_bytes = EncodedBytes(wire, r, columns_, DType::kFloat32);
  const Result<std::byte*> pinned = pinned_.Take(bench_, sizeof *flags + u_bytes + v_bytes);
  if (!pinned.ok()) return pinned.status();
  std::byte* to = pinned.value();
  on_host_ = to;
  DAD_RETURN_IF_ERROR(bench_.Copy(to, flags, sizeof *flags));
  DAD_RETURN_IF_ERROR(EncodeRows(Floats(sent_ut_), r, m_, to + sizeof *flags));
  return EncodeRows(vt, r, columns_, to + sizeof *flags + u_bytes);
}

Status DeviceLowRankSide::Project(const LowRankOptions& options) {
  DAD_RETURN_IF_ERROR(TakeBlocks(options));
  DeviceArena work;
  auto* flags = work.Take<Flags>(bench_, 1);
  DAD_RETURN_IF_ERROR(work.status());
  DAD_RETURN_IF_ERROR(bench_.Clear(flags, sizeof *flags));
  DAD_RETURN_IF_ERROR(LookAtE(&flags->not_finite));
  DAD_RETURN_IF_ERROR(
      MultiplyRight(bench_, NewE(), new_rank_, Floats(new_warm_), Floats(sent_ut_)));
  return Fetch(flags, Floats(sent_ut_), new_rank_ * m_);
}

Status DeviceLowRankSide::ProjectBack(std::span<const float> u) {
  const int64_t count = new_rank_ * columns_;
  // All that the rest of the step needs.
  Result<DeviceBlock> own = TakeFloats(count);
  if (!own.ok()) return own.status();
  own_vt_ = std::move(own).value();
  const Result<std::byte*> pinned =
      pinned_.Take(bench_, 3 * static_cast<size_t>(count) * sizeof(float));
  if (!pinned.ok()) return pinned.status();
  to_device_ = reinterpret_cast<float*>(pinned.value());
  DAD_RETURN_IF_ERROR(Upload(bench_, std::as_bytes(u), sent_ut_.get()));
  DAD_RETURN_IF_ERROR(MultiplyLeft(bench_, NewE(), new_rank_, Floats(sent_ut_), Floats(sent_vt_)));
  DeviceArena work;
  auto* flags = work.Take<Flags>(bench_, 1);
  DAD_RETURN_IF_ERROR(work.status());
  DAD_RETURN_IF_ERROR(bench_.Clear(flags, sizeof *flags));
  return Fetch(flags, Floats(sent_vt_), count);
}

Status DeviceLowRankSide::TakeApplied(std::span<const float> vt, float share,
                                      std::span<const float> start) {
  float* at = to_device_;
  const auto put = [&](const DeviceBlock& to) -> Status {
    const float* from = std::exchange(at, at + vt.size());
    return bench_.Copy(to.get(), from, vt.size_bytes());
  };
  std::copy(start.begin(), start.end(), at);
  DAD_RETURN_IF_ERROR(put(new_warm_));
  std::copy(vt.begin(), vt.end(), at);
  DAD_RETURN_IF_ERROR(put(sent_vt_));
  std::transform(vt.begin(), vt.end(), at, [share](float value) { return value * share; });
  DAD_RETURN_IF_ERROR(put(own_vt_));
  sent_k_ = new_rank_;
  return Status::Ok();
}

Status DeviceLowRankSide::Fetch(const Flags* flags, const float* values, int64_t count) {
  const size_t num_bytes = static_cast<size_t>(count) * sizeof(float);
  const Result<std::byte*> pinned = pinned_.Take(bench_, sizeof *flags + num_bytes);
  if (!pinned.ok()) return pinned.status();
  on_host_ = pinned.value();
  projected_ = {reinterpret_cast<const float*>(on_host_ + sizeof *flags),
                static_cast<size_t>(count)};
  DAD_RETURN_IF_ERROR(bench_.Copy(pinned.value(), flags, sizeof *flags));
  return bench_.Copy(pinned.value() + sizeof *flags, values, num_bytes);
}

// x becomes what receivers will decode.
Status DeviceLowRankSide::EncodeRows(float* x, int64_t rows, int64_t cols, std::byte* to) {
  const size_t num_bytes = EncodedBytes(wire_, rows, cols, DType::kFloat32);
  if (wire_ == Wire::kFp32) return bench_.Copy(to, x, num_bytes);
  DeviceArena work;
  auto* out = work.Take<uint8_t>(bench_, static_cast<int64_t>(num_bytes));
  DAD_RETURN_IF_ERROR(work.status());
  if (wire_ == Wire::kInt4) {
    DAD_RETURN_IF_ERROR(bench_.Run<cuda::QuantiseInt4Kernel>({x, rows, cols, out, x}));
  } else if (wire_ == Wire::kInt8) {
    DAD_RETURN_IF_ERROR(bench_.Run<cuda::QuantiseInt8RowsKernel>({x, rows, cols, out, x}));
  } else {
    DAD_RETURN_IF_ERROR(bench_.Run<cuda::RoundBf16Kernel>(
        {x, rows * cols, reinterpret_cast<cuda::BFloat16*>(out), x}));
  }
  return bench_.Copy(to, out, num_bytes);
}

void DeviceLowRankSide::Read() {
  Flags flags;
  std::memcpy(&flags, on_host_, sizeof flags);
  finite_ = flags.not_finite == 0;
  sent_k_ = finite_ ? flags.kept : 0;
}

// Appends the first k of the rows that are there.
void DeviceLowRankSide::AppendSent(std::vector<std::byte>& bytes) const {
  const std::byte* from = on_host_ + sizeof(Flags);
  for (const int64_t cols : {m_, columns_}) {
    const size_t num_bytes = EncodedBytes(wire_, sent_k_, cols, DType::kFloat32);
    bytes.insert(bytes.end(), from, from + num_bytes);
    from += EncodedBytes(wire_, new_rank_, cols, DType::kFloat32);
  }
}

void DeviceLowRankSide::Commit() {
  // Nothing found is no start for the next time.
  warm_rank_ = sent_k_ > 0 ? new_rank_ : 0;
  warm_ = std::move(new_warm_);
  if (feedback_ == Feedback::kNone) return;
  e_ = std::move(new_e_);
  // They stay readable as what was sent: of two holders the last gives them back.
  pending_ut_ = sent_ut_;
  pending_vt_ = own_vt_ != nullptr ? own_vt_ : sent_vt_;
  pending_k_ = sent_k_;
  returnable_ = true;
}

void DeviceLowRankSide::End(const DeviceEvent& event) {
  for (DeviceBlock* block : {&new_e_, &new_warm_, &sent_ut_, &sent_vt_, &own_vt_}) {
    *block = nullptr;
  }
  sent_k_ = 0;
  finite_ = true;
  pinned_.ReleaseAfter(bench_, event);
}

void DeviceLowRankSide::Clear() {
  for (DeviceBlock* block : {&e_, &warm_, &pending_ut_, &pending_vt_}) *block = nullptr;
  warm_rank_ = 0;
  pending_k_ = 0;
  returnable_ = false;
}

void DeviceLowRankSide::Export(const std::string& prefix, std::vector<StateTensor>& out) const {
  const auto save = [&](const char* name, Shape shape, const DeviceBlock& values) {
    StateTensor tensor{prefix + name, DType::kFloat32, std::move(shape), {}};
    tensor.bytes.resize(static_cast<size_t>(NumElements(tensor.shape)) * sizeof(float));
    const Status status = FetchNow(bench_, values.get(), tensor.bytes);
    if (status.ok()) {
      out.push_back(std::move(tensor));
    } else {
      DAD_LOG(Error) << tensor.name << " is not saved: " << status.message();
    }
  };
  if (e_ != nullptr) save("residual", {m_ * columns_}, e_);
  if (warm_rank_ > 0) save("warm_start", {warm_rank_, columns_}, warm_);
  if (pending_k_ == 0) return;
  save("pending_d", {pending_k_, m_}, pending_ut_);
  save("pending_a", {pending_k_, columns_}, pending_vt_);
}

Status DeviceLowRankSide::Import(const std::string& prefix,
                                 const std::vector<StateTensor>& tensors) {
  int64_t factors[2] = {};  // directions of pending_d and pending_a
  for (const StateTensor& tensor : tensors) {
    if (!tensor.name.starts_with(prefix)) continue;
    const std::string name = tensor.name.substr(prefix.size());
    const int64_t k = tensor.shape.empty() ? 0 : tensor.shape[0];
    DeviceBlock* const to = name == "residual"     ? &e_
                            : name == "warm_start" ? &warm_
                            : name == "pending_d"  ? &pending_ut_
                            : name == "pending_a"  ? &pending_vt_
                                                   : nullptr;
    const int64_t expected = to == &e_ ? m_ * columns_ : k * (to == &pending_ut_ ? m_ : columns_);
    if (to == nullptr || tensor.dtype != DType::kFloat32 || NumElements(tensor.shape) != expected ||
        tensor.bytes.size() != static_cast<size_t>(expected) * sizeof(float)) {
      return Status::InvalidArgument("a saved " + tensor.name + " of shape " +
                                     ToString(tensor.shape) + " does not fit a layer of " +
                                     std::to_string(m_) + " x " + std::to_string(columns_));
    }
    if (to == &warm_) warm_rank_ = static_cast<int>(k);
    if (to == &pending_ut_) factors[0] = k;
    if (to == &pending_vt_) factors[1] = k;
    if (expected == 0) continue;
    Result<DeviceBlock> block = TakeFloats(expected);
    if (!block.ok()) return block.status();
    DAD_RETURN_IF_ERROR(Upload(bench_, tensor.bytes, block.value().get()));
    *to = std::move(block).value();
  }
  if (factors[0] != factors[1]) {
    return Status::InvalidArgument("a saved state has one factor without the other");
  }
  pending_k_ = factors[0];
  return Status::Ok();
}

Result<std::shared_ptr<DeviceLowRankState>> FindLowRankState(const TensorSpec& spec,
                                                             const LowRankSettings& settings,
                                                             const ExchangeEnv& env) {
  auto make = [&] { return std::make_shared<DeviceLowRankState>(settings, env.bench); };
  auto found = StateOf<DeviceLowRankState>(spec, env, make);
  if (!found.ok()) return found.status();
  const DeviceLowRankState& state = *found.value();
  if (state.m == settings.layer.out && state.columns == settings.columns()) return found;
  return Status::InvalidArgument("\"" + spec.name + "\": its shape has changed");
}

}  // namespace dad
