// exchange/*: one rank's exchange, with shares of its peers from the input. The input has a
// choice of case, of our rank and of who has joined; then for each step, each round and each
// peer a chunk.
#include "exchange/exchange.h"

#include <cstring>
#include <deque>
#include <memory>
#include <random>

#include "dad/method.h"
#include "exchange/feedback/state_store.h"
#include "fuzz.h"

namespace dad::fuzz {
namespace {

constexpr int kSize = 3;
constexpr int kSteps = 2;

struct Case {
  const char* method;
  DType dtype = DType::kFloat32;
  Shape shape = {};  // of methods with layers: the elements of the layers
  OpKind kind = OpKind::kAllReduce;
  ReduceOp op = ReduceOp::kAverage;
  bool without_rows = false;  // we contribute nothing: all of the result comes from others
  bool pack = false;
  bool ring = false;
};

// Cases are numbered by the corpus: new ones go to the end.
const std::vector<Case>& Cases() {
  static const std::vector<Case> cases = {
      {"factor;layer=5x3:bias"},
      {"factor;layer=5x3:bias", DType::kFloat64},
      {"factor;layer=5x3", DType::kFloat16, {}, OpKind::kAllReduce, ReduceOp::kSum},
      {"factor;wire=bf16;layer=5x3:bias"},
      {.method = "factor;layer=5x3:bias", .without_rows = true},
      {"factor;layer=4x3:bias:relu;layer=2x4:bias"},
      {"factor;layer=4x3:bias:relu;layer=5x4:bias:pass:leaky_relu=0.1;layer=2x5:pass"},
      {"factor;layer=4x3:bias:gelu;layer=3x4:tanh;layer=2x3:bias"},
      {.method = "factor;layer=4x3:bias:relu;layer=2x4:bias", .without_rows = true},
      {.method = "factor;layer=4x3:silu;layer=3x4:relu;layer=2x3:pass", .without_rows = true},
      {"low_rank;rank=2;wire=int4;combine=owner;owner=0;layer=6x5:bias"},
      {"low_rank;rank=3;wire=int8;combine=owner;owner=1;feedback=none;layer=6x5", DType::kFloat64},
      {"low_rank;rank=2;wire=fp32;combine=owner;owner=0;feedback=rows;layer=6x5:bias"},
      {"low_rank;rank=2;wire=bf16;combine=gather;layer=6x5:bias", DType::kBFloat16},
      {"low_rank;rank=2;wire=fp32;combine=gather;feedback=none;layer=6x5", DType::kFloat64},
      {"low_rank;rank=2;wire=fp32;combine=power;owner=0;layer=6x5:bias"},
      {"low_rank;rank=2;wire=fp32;combine=power;owner=1;feedback=none;layer=6x5", DType::kFloat64},
      {"int8;bucket=16;feedback=1", DType::kFloat32, {100}},
      {"int8;bucket=7;feedback=0", DType::kFloat64, {50}},
      {"int8;bucket=512;feedback=1", DType::kFloat16, {3}},
      {"none", DType::kFloat32, {40}},
      {"none", DType::kInt64, {7}, OpKind::kAllReduce, ReduceOp::kSum},
      {"none", DType::kFloat32, {40}, OpKind::kAllReduce, ReduceOp::kAdasum},
      {"none", DType::kFloat16, {4, 3}, OpKind::kAllGather, ReduceOp::kSum},
      {"none", DType::kInt32, {4, 0}, OpKind::kAllGather, ReduceOp::kSum},
      {"none", DType::kFloat32, {6, 2}, OpKind::kAllToAll, ReduceOp::kSum},
      {"none", DType::kFloat32, {6, 2}, OpKind::kReduceScatter, ReduceOp::kSum},
      {"none", DType::kUint8, {9}, OpKind::kBroadcast, ReduceOp::kSum},
      {"none", DType::kUint8, {0}, OpKind::kBarrier, ReduceOp::kSum},
      {"qsgd;bits=1", DType::kFloat32, {700}},
      {"qsgd;bits=4;seed=3", DType::kFloat64, {50}},
      {"qsgd;bits=8", DType::kBFloat16, {3}},
      {"sparse;rule=vgc;coding=rice;layer=8x5:bias"},
      {"sparse;rule=vgc;coding=word;feedback=1;layer=8x5", DType::kFloat64},
      {"sparse;rule=vgc_strom;tau=0.5;coding=rice;layer=8x5:bias"},
      {"sparse;rule=strom;tau_absolute=0.25;coding=word;layer=8x5:bias"},
      {"sparse;rule=strom;tau=1;coding=rice;layer=8x5:bias", DType::kFloat16},
      {"sparse;rule=topk;ratio=0.2;coding=rice;layer=8x5:bias"},
      {"sparse;rule=topk;ratio=0.2;coding=word;layer=8x5", DType::kFloat64},
      {.method = "none", .dtype = DType::kFloat64, .shape = {40}, .ring = true},
      {.method = "none", .shape = {800}, .pack = true},
      {.method = "none", .shape = {800}, .pack = true, .ring = true},
      {.method = "none", .dtype = DType::kBFloat16, .shape = {800}, .pack = true},
      {"chunk_topk;chunk=16;k=3;combine=gather", DType::kFloat32, {100}},
      {"chunk_topk;chunk=16;k=3;combine=owner", DType::kFloat32, {100}},
      {"chunk_topk;chunk=7;k=7;bits=3;decay=0.5;combine=owner", DType::kFloat64, {50}},
      {"chunk_topk;bits=1;combine=owner", DType::kBFloat16, {3}},
      {"chunk_topk_rows;chunk=12;k=3;combine=owner;layer=8x5"},
      {"chunk_topk_rows;chunk=16;k=2;combine=gather;layer=8x5", DType::kFloat64},
  };
  return cases;
}

bool HasLayers(const Case& c) { return std::strstr(c.method, "layer=") != nullptr; }

TensorSpec SpecOf(const Case& c) {
  TensorSpec spec;
  spec.name = "w";
  spec.kind = c.kind;
  spec.op = c.op;
  spec.dtype = c.dtype;
  spec.shape = c.shape;
  spec.method = c.method;
  spec.root = c.kind == OpKind::kBroadcast ? 1 : -1;
  if (HasLayers(c)) {
    int64_t count = 0;
    for (const LayerShape& layer : spec.method.layers()) {
      if (!layer.pass) count += layer.num_elements();
    }
    spec.shape = {count};
  }
  return spec;
}

// One rank: what it contributes, and its exchange.
class Rank {
 public:
  Rank(const Case& c, int rank, const std::vector<bool>& joined)
      : random_(static_cast<uint32_t>(rank)), group_{rank, kSize, joined} {
    const TensorSpec spec = SpecOf(c);
    if (HasLayers(c)) {
      mine_.input = TensorView{.dtype = c.dtype, .shape = spec.shape};
      AddLayers(c, spec.method.layers());
    } else {
      mine_.input = New(c.dtype, c.shape, -2);
      if (c.kind == OpKind::kAllReduce || c.kind == OpKind::kBroadcast) {
        mine_.output = New(c.dtype, c.shape, 0);
      }
    }
    ExchangeEnv env;
    env.states = &states_;
    env.direct_bytes = c.dtype == DType::kInt64 ? 1 << 20 : 0;
    env.ring_bytes = c.ring ? 1 : 0;
    env.pack = c.pack;
    auto made = MakeExchange(spec, {0, NumElements(spec.shape)}, 1, env);
    Require(made.status(), "no such exchange");
    exchange_ = std::move(made).value();
  }

  Exchange& exchange() { return *exchange_; }

  // Not ok if such a step cannot be: the root of a broadcast has joined.
  Status Begin(int step) {
    StepInput input;
    input.mine = group_.Joined(group_.rank) ? nullptr : &mine_;
    input.allocate = [this](const Shape& shape) -> Result<TensorView> {
      return New(mine_.input.dtype, shape, 0);
    };
    input.received_splits = &splits_;
    input.report = &report_;
    input.submit_id = static_cast<uint64_t>(step + 1);
    return exchange_->Begin(input, group_);
  }

  // What it sends to all in a round, as bytes.
  std::vector<Bytes> Send(int round) {
    std::vector<Bytes> sent(kSize);
    for (int peer = 0; peer < kSize; ++peer) {
      if (peer == group_.rank) continue;
      GatherBuffer out;
      Require(exchange_->Send(round, peer, out), "Send failed");
      for (const ByteSpan piece : out.Pieces()) {
        Bytes& bytes = sent[static_cast<size_t>(peer)];
        bytes.insert(bytes.end(), piece.begin(), piece.end());
      }
    }
    return sent;
  }

  // As the executor does it: into the exchange's own memory where it offers some.
  Status Receive(int round, const std::vector<Bytes>& shares) {
    std::vector<ByteSpan> views(shares.begin(), shares.end());
    views[static_cast<size_t>(group_.rank)] = {};
    for (int peer = 0; peer < kSize && round > 0; ++peer) {
      if (peer == group_.rank) continue;
      const std::span<std::byte> there = exchange_->Destination(round, peer);
      ByteSpan& view = views[static_cast<size_t>(peer)];
      if (there.empty() || there.size() != view.size()) continue;
      std::memcpy(there.data(), view.data(), view.size());
      view = there;
    }
    return exchange_->Receive(round, views);
  }

 private:
  // Values from `low` to -low in eighths; 0: zeros.
  TensorView New(DType dtype, Shape shape, int low) {
    TensorView view{.dtype = dtype, .shape = std::move(shape)};
    Bytes& bytes = memory_.emplace_back(view.num_bytes());
    view.data = bytes.data();
    for (int64_t i = 0; low != 0 && i < view.num_elements(); ++i) {
      const int eighths = static_cast<int>(random_() % static_cast<uint32_t>(-16 * low)) + 8 * low;
      SetElement(view, i, eighths);
    }
    return view;
  }

  static void SetElement(const TensorView& view, int64_t i, int eighths) {
    const auto float_value = static_cast<float>(eighths) / 8;
    const auto double_value = static_cast<double>(float_value);
    const auto integer = static_cast<int64_t>(eighths);
    // Of halves any pattern that is no NaN will do.
    const auto half = static_cast<uint16_t>(0x3800 + eighths * 64);
    const void* from = view.dtype == DType::kFloat32   ? static_cast<const void*>(&float_value)
                       : view.dtype == DType::kFloat64 ? static_cast<const void*>(&double_value)
                       : IsFloating(view.dtype)        ? static_cast<const void*>(&half)
                                                       : static_cast<const void*>(&integer);
    const size_t width = SizeOf(view.dtype);
    std::memcpy(view.bytes() + static_cast<size_t>(i) * width, from, width);
  }

  void AddLayers(const Case& c, const std::vector<LayerShape>& layers) {
    const bool chain = layers.size() > 1;
    const int64_t rows = group_.rank == 2 ? 1 : 3;
    for (size_t l = 0; l < layers.size(); ++l) {
      const LayerShape& shape = layers[l];
      LayerInput layer;
      if (!c.without_rows) {
        RowsSegment segment;
        segment.a = New(c.dtype, {rows, shape.in}, -1);
        if (!chain || l + 1 == layers.size()) segment.d = New(c.dtype, {rows, shape.out}, -1);
        layer.rows.push_back(segment);
      }
      if (!chain && !c.without_rows && group_.rank != 1) AddOtherParts(c, shape, layer);
      if (!shape.pass) {
        layer.output = New(c.dtype, {shape.out, shape.in}, 0);
        if (shape.bias) layer.output_bias = New(c.dtype, {shape.out}, 0);
      }
      if (chain) {
        layer.weight = New(c.dtype, {shape.out, shape.in}, -1);
        if (shape.bias) layer.bias = New(c.dtype, {shape.out}, -1);
      }
      mine_.layers.push_back(layer);
    }
  }

  // An embedding's rows, a part of W, and a gradient that came formed.
  void AddOtherParts(const Case& c, const LayerShape& shape, LayerInput& layer) {
    RowsSegment part;
    part.a = New(c.dtype, {2, shape.in}, -1);
    part.d = New(c.dtype, {2, 2}, -1);
    part.out_begin = 1;
    layer.rows.push_back(part);
    IndexedSegment indexed;
    indexed.index = New(DType::kInt64, {2}, 0);
    SetElement(indexed.index, 1, 2);
    indexed.x = New(c.dtype, {2, shape.in}, -1);
    layer.indexed.push_back(indexed);
    layer.dense = New(c.dtype, {shape.out, shape.in}, -1);
    if (shape.bias) layer.dense_bias = New(c.dtype, {shape.out}, -1);
  }

  std::mt19937 random_;
  Group group_;
  Contribution mine_;
  std::deque<Bytes> memory_;
  std::vector<int64_t> splits_;
  StepReport report_;
  StateStore states_;
  std::unique_ptr<Exchange> exchange_;
};

// 0, 1: nobody has joined; 2: the rank after ours; 3: ours.
std::vector<bool> Joined(size_t choice, int rank) {
  std::vector<bool> joined(choice < 2 ? 0 : kSize);
  if (choice == 2) joined[static_cast<size_t>((rank + 1) % kSize)] = true;
  if (choice == 3) joined[static_cast<size_t>(rank)] = true;
  return joined;
}

void Run(ByteSpan input) {
  Input choices(input);
  const Case& c = Cases()[choices.Below(Cases().size())];
  const auto me = static_cast<int>(choices.Below(kSize));
  Rank rank(c, me, Joined(choices.Below(4), me));
  for (int step = 0; step < kSteps && !choices.empty(); ++step) {
    if (const Status status = rank.Begin(step); !status.ok()) {
      Require(status.code() == StatusCode::kFailedPrecondition, "our contribution is refused");
      return;
    }
    for (int round = 0; round < rank.exchange().num_rounds(); ++round) {
      (void)rank.Send(round);
      std::vector<Bytes> shares(kSize);
      for (int peer = 0; peer < kSize; ++peer) {
        if (peer != me) shares[static_cast<size_t>(peer)] = choices.Chunk();
      }
      const Status status = rank.Receive(round, shares);
      if (status.ok()) continue;
      Require(status.code() == StatusCode::kInvalidArgument, "an error of another kind");
      return;  // the engine ends here
    }
    Require(rank.exchange().Finish(), "Finish failed");
  }
}

// What `me` gets when all ranks are real.
Bytes Record(size_t which, int me, size_t joined_choice) {
  const Case& c = Cases()[which];
  Seed seed;
  seed.Byte(which).Byte(static_cast<size_t>(me)).Byte(joined_choice);
  std::deque<Rank> ranks;
  for (int r = 0; r < kSize; ++r) ranks.emplace_back(c, r, Joined(joined_choice, me));
  for (int step = 0; step < kSteps; ++step) {
    for (Rank& rank : ranks) Require(rank.Begin(step), "a contribution is refused");
    for (int round = 0; round < ranks[0].exchange().num_rounds(); ++round) {
      std::vector<std::vector<Bytes>> mail(kSize, std::vector<Bytes>(kSize));
      for (size_t from = 0; from < kSize; ++from) {
        const std::vector<Bytes> sent = ranks[from].Send(round);
        for (size_t to = 0; to < kSize; ++to) mail[to][from] = sent[to];
      }
      for (size_t to = 0; to < kSize; ++to) {
        Require(ranks[to].Receive(round, mail[to]), "a real share is refused");
      }
      for (size_t from = 0; from < kSize; ++from) {
        if (static_cast<int>(from) != me) seed.Chunk(mail[static_cast<size_t>(me)][from]);
      }
    }
    for (Rank& rank : ranks) Require(rank.exchange().Finish(), "Finish failed");
  }
  return seed.bytes();
}

std::vector<Bytes> Seeds() {
  std::vector<Bytes> seeds;
  for (size_t which = 0; which < Cases().size(); ++which) {
    seeds.push_back(Record(which, 0, 0));
    seeds.push_back(Record(which, 1, which % 2 == 0 ? 0 : 2));
  }
  return seeds;
}

const Register registered({"exchange", Run, Seeds});

}  // namespace
}  // namespace dad::fuzz
