// dad/method.h: a text, and the exchange that it asks for.
#include "dad/method.h"

#include "exchange/exchange.h"
#include "exchange/feedback/state_store.h"
#include "fuzz.h"

namespace dad::fuzz {
namespace {

constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kInt32};
constexpr ReduceOp kOps[] = {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kAdasum};

void Run(ByteSpan input) {
  Input choices(input);
  TensorSpec spec;
  spec.name = "w";
  spec.dtype = choices.OneOf(kTypes);
  spec.op = choices.OneOf(kOps);
  spec.shape = {static_cast<int64_t>(choices.Short())};
  const ByteSpan rest = choices.Rest();
  spec.method = std::string(reinterpret_cast<const char*>(rest.data()), rest.size());

  for (const char* key : {"rank", "owner", "rows", "tol", ""}) {
    (void)spec.method.Integer(key, 0);
    (void)spec.method.Real(key, 0);
  }
  for (const LayerShape& layer : spec.method.layers()) {
    Require(layer.num_elements() >= 0, "a layer with a negative number of elements");
  }
  (void)IsElementwise(spec);
  (void)ExpectedBytes(spec);
  (void)FusedBytes(spec);
  StateStore states;
  ExchangeEnv env;
  env.states = &states;
  (void)MakeExchange(spec, {0, NumElements(spec.shape)}, 1, env);
}

std::vector<Bytes> Seeds() {
  std::vector<Bytes> seeds;
  for (const char* text : {
           "none",
           "factor;wire=fp32;rows=32;layer=1024x784:bias:relu;layer=10x1024:bias",
           "factor;wire=bf16;rows=8;layer=12x5:pass:leaky_relu=0.01;layer=3x12:bias:pass",
           "factor;layer=12x5:gelu;layer=4x12:gelu_tanh;layer=2x4:silu",
           "low_rank;rank=4;tol=0.0;energy=0.9;iterations=1;combine=owner;owner=2;wire=int4;"
           "feedback=dense;layer=1024x784:bias",
           "low_rank;rank=2;combine=power;wire=fp32;feedback=rows;layer=8x8",
           "low_rank;rank=2;combine=gather;wire=int8;feedback=none;layer=8x8",
           "int8;bucket=512;feedback=1",
           "sparse;rule=vgc;alpha=1.0;zeta=0.999;variance=row;coding=rice;feedback=0;layer=8x4:"
           "bias",
           "sparse;rule=vgc_strom;tau=4.0;alpha=2;coding=word;variance=sample;layer=8x4",
           "sparse;rule=strom;tau_absolute=0.5;coding=word;layer=8x4",
           "sparse;rule=topk;ratio=0.01;coding=rice;layer=8x4:bias",
           "qsgd;bits=4;seed=7",
           "chunk_topk;chunk=4096;k=64;bits=2;decay=0.95;combine=owner",
           "chunk_topk_rows;chunk=16;k=2;bits=1;combine=gather;layer=8x4",
       }) {
    seeds.push_back(Seed().Byte(0).Byte(0).Short(100).Text(text).bytes());
  }
  return seeds;
}

const Register registered({"method", Run, Seeds});

}  // namespace
}  // namespace dad::fuzz
