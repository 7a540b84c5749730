#include "exchange/device/low_rank_side.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "util/log.h"

namespace dad {
namespace {

// As on the host (low_rank_state.cc): passes to find directions from nothing.
constexpr int kColdIterations = 6;
constexpr size_t kFlagBytes = 16;

StateTensor Copied(std::string name, Shape shape, const std::vector<float>& values) {
  StateTensor tensor{std::move(name), DType::kFloat32, std::move(shape), {}};
  const auto bytes = std::as_bytes(std::span(values));
  tensor.bytes.assign(bytes.begin(), bytes.end());
  return tensor;
}

}  // namespace

Status DeviceLowRankSide::Begin() {
  Result<DeviceBlock> block = bench_.Take(num_bytes());
  if (!block.ok()) return block.status();
  new_e_ = std::move(block).value();
  DAD_RETURN_IF_ERROR(e_ == nullptr ? bench_.Clear(new_e_.get(), num_bytes())
                                    : bench_.Copy(new_e_.get(), e_.get(), num_bytes()));
  return AddFactors(pending_, -1);
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

Status DeviceLowRankSide::AddRows(const float* d, const float* a, int64_t rows, int64_t out_begin,
                                  int64_t out_count, float scale) {
  if (rows == 0 || out_count == 0) return Status::Ok();
  const Result<DeviceProducts*> products = bench_.Products();
  if (!products.ok()) return products.status();
  const CudaDeviceGuard guard(bench_.cuda(), bench_.device());
  DAD_RETURN_IF_ERROR(products.value()->Multiply<float>(
      {d, rows, out_count}, true, {a, rows, n()}, false,
      {Floats(new_e_) + out_begin * n(), out_count, n()}, scale, 1));
  if (!bias_) return Status::Ok();
  DeviceArena work;
  const std::vector<float> host(static_cast<size_t>(rows), 1.0f);
  const Result<float*> ones = Bring(host.data(), rows, work);
  if (!ones.ok()) return ones.status();
  return products.value()->Multiply<float>({d, rows, out_count}, true, {ones.value(), rows, 1},
                                           false, {NewBias() + out_begin, out_count, 1}, scale, 1);
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

Status DeviceLowRankSide::AddFactors(const SentFactors<float>& factors, float scale) {
  if (factors.k == 0) return Status::Ok();
  DeviceArena work;
  const Result<float*> ut = Bring(factors.ut.data(), factors.k * m_, work);
  if (!ut.ok()) return ut.status();
  const Result<Split> vt = BringSplit(factors.vt.data(), factors.k, work);
  if (!vt.ok()) return vt.status();
  const Result<DeviceProducts*> products = bench_.Products();
  if (!products.ok()) return products.status();
  const CudaDeviceGuard guard(bench_.cuda(), bench_.device());
  DAD_RETURN_IF_ERROR(products.value()->Multiply<float>({ut.value(), factors.k, m_}, true,
                                                        {vt.value().weight, factors.k, n()}, false,
                                                        {Floats(new_e_), m_, n()}, scale, 1));
  if (!bias_) return Status::Ok();
  return products.value()->Multiply<float>({ut.value(), factors.k, m_}, true,
                                           {vt.value().bias, factors.k, 1}, false,
                                           {NewBias(), m_, 1}, scale, 1);
}

Status DeviceLowRankSide::AddSide(const DeviceLowRankSide& other, float scale) {
  DAD_RETURN_IF_ERROR(AddDense(Floats(other.e_), Floats(other.e_) + m_ * n(), scale));
  return AddFactors(other.pending_, -scale);
}

Status DeviceLowRankSide::StartIteration(const LowRankOptions& options) {
  const bool warm = warm_rank_ == options.rank;
  new_warm_ = warm_;
  if (!warm) {
    new_warm_.assign(static_cast<size_t>(options.rank * columns_), 0.0f);
    RandomStart<float>(seed_, ViewOf(new_warm_.data(), options.rank, columns_));
  }
  passes_ = options.iterations + (warm ? 0 : kColdIterations);
  return LaunchPass(options.rank);
}

Status DeviceLowRankSide::LaunchPass(int rank) {
  const int64_t r = rank;
  DeviceArena work;
  const Result<Split> v = BringSplit(new_warm_.data(), r, work);
  if (!v.ok()) return v.status();
  auto* not_finite = work.Take<int>(bench_, 1);
  auto* p = work.Take<float>(bench_, r * m_);
  auto* q = work.Take<float>(bench_, r * n());
  auto* q_bias = work.Take<float>(bench_, r);
  DAD_RETURN_IF_ERROR(work.status());
  const Result<DeviceProducts*> products = bench_.Products();
  if (!products.ok()) return products.status();
  float* e = Floats(new_e_);
  // What enters a residual never leaves it: looked at as a whole, and left as it is.
  DAD_RETURN_IF_ERROR(bench_.Clear(not_finite, sizeof *not_finite));
  DAD_RETURN_IF_ERROR(
      bench_.Run<cuda::AddKeptKernel<float>>({e, m_ * columns_, 1.0f, nullptr, e, not_finite}));
  {
    const CudaDeviceGuard guard(bench_.cuda(), bench_.device());
    DeviceProducts& multiply = *products.value();
    DAD_RETURN_IF_ERROR(multiply.Multiply<float>({v.value().weight, r, n()}, false, {e, m_, n()},
                                                 true, {p, r, m_}));
    if (bias_) {
      DAD_RETURN_IF_ERROR(multiply.Multiply<float>(
          {v.value().bias, r, 1}, false, {NewBias(), m_, 1}, true, {p, r, m_}, 1.0f, 1.0f));
    }
    DAD_RETURN_IF_ERROR(
        multiply.Multiply<float>({p, r, m_}, false, {e, m_, n()}, false, {q, r, n()}));
    if (bias_) {
      DAD_RETURN_IF_ERROR(
          multiply.Multiply<float>({p, r, m_}, false, {NewBias(), m_, 1}, false, {q_bias, r, 1}));
    }
  }
  const size_t p_bytes = static_cast<size_t>(r * m_) * sizeof(float);
  const size_t q_bytes = static_cast<size_t>(r * n()) * sizeof(float);
  const size_t bias_bytes = bias_ ? static_cast<size_t>(r) * sizeof(float) : 0;
  const Result<std::byte*> pinned =
      pinned_.Take(bench_, kFlagBytes + p_bytes + q_bytes + bias_bytes);
  if (!pinned.ok()) return pinned.status();
  std::byte* to = pinned.value();
  from_pass_ = to;
  DAD_RETURN_IF_ERROR(bench_.Copy(to, not_finite, sizeof *not_finite));
  DAD_RETURN_IF_ERROR(bench_.Copy(to + kFlagBytes, p, p_bytes));
  DAD_RETURN_IF_ERROR(bench_.Copy(to + kFlagBytes + p_bytes, q, q_bytes));
  return bench_.Copy(to + kFlagBytes + p_bytes + q_bytes, q_bias, bias_bytes);
}

Result<bool> DeviceLowRankSide::NextPass(CpuLevel level, const LowRankOptions& options) {
  const int64_t r = options.rank;
  int not_finite = 0;
  std::memcpy(&not_finite, from_pass_, sizeof not_finite);
  finite_ = not_finite == 0;
  if (!finite_) return true;
  const auto* p = reinterpret_cast<const float*>(from_pass_ + kFlagBytes);
  const float* q_weight = p + r * m_;
  const float* q_bias = q_weight + r * n();
  std::vector<float> q(static_cast<size_t>(r * columns_));
  for (int64_t k = 0; k < r; ++k) {
    std::copy_n(q_weight + k * n(), n(), q.data() + k * columns_);
    if (bias_) q[static_cast<size_t>((k + 1) * columns_ - 1)] = q_bias[k];
  }
  found_ =
      FinishSubspace<float>(level, ViewOf(p, r, m_), ViewOf<const float>(q.data(), r, columns_),
                            options, -1.0, ViewOf(new_warm_.data(), r, columns_));
  if (--passes_ == 0) return true;
  DAD_RETURN_IF_ERROR(LaunchPass(options.rank));
  return false;
}

const SentFactors<float>& DeviceLowRankSide::Round(Wire wire, std::vector<std::byte>& bytes) {
  sent_ = {found_.rank, std::move(found_.ut), std::move(found_.vt)};
  const size_t u_bytes = EncodedBytes(wire, sent_.k, m_, DType::kFloat32);
  bytes.resize(u_bytes + EncodedBytes(wire, sent_.k, columns_, DType::kFloat32));
  const MatrixView<float> ut = ViewOf(sent_.ut.data(), sent_.k, m_);
  const MatrixView<float> vt = ViewOf(sent_.vt.data(), sent_.k, columns_);
  EncodeFactors<float>(wire, ut, std::span(bytes).first(u_bytes), ut);
  EncodeFactors<float>(wire, vt, std::span(bytes).subspan(u_bytes), vt);
  return sent_;
}

void DeviceLowRankSide::Commit() {
  e_ = std::move(new_e_);
  // Nothing found is no start for the next time.
  warm_rank_ =
      sent_.k > 0 ? static_cast<int>(static_cast<int64_t>(new_warm_.size()) / columns_) : 0;
  warm_ = std::move(new_warm_);
  pending_ = sent_;
  returnable_ = true;
}

void DeviceLowRankSide::End(const DeviceEvent& event) {
  new_e_ = nullptr;
  found_ = {};
  sent_ = {};
  pinned_.ReleaseAfter(bench_, event);
}

void DeviceLowRankSide::Clear() {
  e_ = nullptr;
  warm_rank_ = 0;
  pending_ = {};
  returnable_ = false;
}

void DeviceLowRankSide::ReturnSent() {
  if (std::exchange(returnable_, false)) pending_ = {};
}

Result<float*> DeviceLowRankSide::Bring(const float* values, int64_t count, DeviceArena& work) {
  auto* to = work.Take<float>(bench_, count);
  DAD_RETURN_IF_ERROR(work.status());
  DAD_RETURN_IF_ERROR(
      Upload(bench_, std::as_bytes(std::span(values, static_cast<size_t>(count))), to));
  return to;
}

Result<DeviceLowRankSide::Split> DeviceLowRankSide::BringSplit(const float* rows, int64_t k,
                                                               DeviceArena& work) {
  std::vector<float> weight(static_cast<size_t>(k * n())), bias(static_cast<size_t>(bias_ ? k : 0));
  for (int64_t i = 0; i < k; ++i) {
    std::copy_n(rows + i * columns_, n(), weight.data() + i * n());
    if (bias_) bias[static_cast<size_t>(i)] = rows[(i + 1) * columns_ - 1];
  }
  Split split;
  Result<float*> brought = Bring(weight.data(), k * n(), work);
  if (!brought.ok()) return brought.status();
  split.weight = brought.value();
  if (!bias_) return split;
  brought = Bring(bias.data(), k, work);
  if (!brought.ok()) return brought.status();
  split.bias = brought.value();
  return split;
}

void DeviceLowRankSide::Export(const std::string& prefix, std::vector<StateTensor>& out) const {
  if (e_ != nullptr) {
    StateTensor tensor{prefix + "residual", DType::kFloat32, {m_ * columns_}, {}};
    tensor.bytes.resize(num_bytes());
    const Status status = FetchNow(bench_, e_.get(), tensor.bytes);
    if (!status.ok()) {
      DAD_LOG(Error) << "a residual is not saved: " << status.message();
      return;
    }
    out.push_back(std::move(tensor));
  }
  if (warm_rank_ > 0) out.push_back(Copied(prefix + "warm_start", {warm_rank_, columns_}, warm_));
  if (pending_.k == 0) return;
  out.push_back(Copied(prefix + "pending_d", {pending_.k, m_}, pending_.ut));
  out.push_back(Copied(prefix + "pending_a", {pending_.k, columns_}, pending_.vt));
}

Status DeviceLowRankSide::Import(const std::string& prefix,
                                 const std::vector<StateTensor>& tensors) {
  for (const StateTensor& tensor : tensors) {
    if (!tensor.name.starts_with(prefix)) continue;
    const std::string name = tensor.name.substr(prefix.size());
    const int64_t k = tensor.shape.empty() ? 0 : tensor.shape[0];
    const int64_t expected = name == "residual"    ? m_ * columns_
                             : name == "pending_d" ? k * m_
                                                   : k * columns_;
    const bool known = name == "residual" || name == "warm_start" || name.starts_with("pending");
    if (!known || tensor.dtype != DType::kFloat32 || NumElements(tensor.shape) != expected ||
        tensor.bytes.size() != static_cast<size_t>(expected) * sizeof(float)) {
      return Status::InvalidArgument("a saved " + tensor.name + " of shape " +
                                     ToString(tensor.shape) + " does not fit a layer of " +
                                     std::to_string(m_) + " x " + std::to_string(columns_));
    }
    if (name == "residual") {
      Result<DeviceBlock> block = bench_.Take(num_bytes());
      if (!block.ok()) return block.status();
      e_ = std::move(block).value();
      DAD_RETURN_IF_ERROR(Upload(bench_, tensor.bytes, e_.get()));
      continue;
    }
    std::vector<float> values(static_cast<size_t>(expected));
    if (expected > 0) std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
    if (name == "warm_start") {
      warm_ = std::move(values);
      warm_rank_ = static_cast<int>(k);
    } else {
      pending_.k = k;
      (name == "pending_d" ? pending_.ut : pending_.vt) = std::move(values);
    }
  }
  if (pending_.ut.size() != static_cast<size_t>(pending_.k * m_) ||
      pending_.vt.size() != static_cast<size_t>(pending_.k * columns_)) {
    return Status::InvalidArgument("a saved state has one factor without the other");
  }
  return Status::Ok();
}

}  // namespace dad
