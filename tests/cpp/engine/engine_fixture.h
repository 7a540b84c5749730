// A job of several engines in one process, over the local transport.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "dad/engine.h"
#include "transport/local/local_network.h"
#include "transport/transport.h"

namespace dad {

class Job {
 public:
  using Wrap = std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport>)>;

  // `wrap`: what the engines get of their transports; null: these.
  explicit Job(int size, Options options = {}, std::vector<std::vector<int>> sets = {},
               const Wrap& wrap = nullptr)
      : network_(size), engines_(static_cast<size_t>(size)) {
    Run([&](int rank) {
      World world;
      world.rank = rank;
      world.size = size;
      std::unique_ptr<Transport> transport = network_.Connect(rank);
      if (wrap) transport = wrap(std::move(transport));
      auto engine = Engine::CreateOn(std::move(transport), world, options, sets);
      ASSERT_TRUE(engine.ok()) << engine.status().ToString();
      engines_[static_cast<size_t>(rank)] = std::move(engine).value();
    });
  }
  ~Job() {
    Run([this](int rank) { engines_[static_cast<size_t>(rank)].reset(); });
  }

  int size() const { return static_cast<int>(engines_.size()); }
  Engine& operator[](int rank) { return *engines_[static_cast<size_t>(rank)]; }
  void Leave(int rank) { engines_[static_cast<size_t>(rank)].reset(); }
  LocalNetwork& network() { return network_; }

  // One thread per rank.
  void Run(const std::function<void(int rank)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) threads.emplace_back(body, rank);
    for (std::thread& thread : threads) thread.join();
  }

 private:
  LocalNetwork network_;
  std::vector<std::unique_ptr<Engine>> engines_;
};

// A float tensor with a request around it.
struct Values {
  explicit Values(std::vector<float> v) : data(std::move(v)) {}

  Contribution View() {
    Contribution tensor;
    tensor.input.data = data.data();
    tensor.input.shape = {static_cast<int64_t>(data.size())};
    tensor.output = tensor.input;
    return tensor;
  }
  Request AllReduce(const std::string& name, ReduceOp op = ReduceOp::kSum) {
    Request request;
    request.name = name;
    request.op = op;
    request.tensors.push_back(View());
    return request;
  }
  Request AllGather(const std::string& name) {
    Request request;
    request.name = name;
    request.kind = OpKind::kAllGather;
    request.tensors.push_back(View());
    request.tensors[0].output = {};
    request.allocate = [this](int, DType dtype, const Shape& shape) -> Result<TensorView> {
      gathered.resize(static_cast<size_t>(NumElements(shape)));
      TensorView view;
      view.data = gathered.data();
      view.dtype = dtype;
      view.shape = shape;
      return view;
    };
    return request;
  }
  Request Broadcast(const std::string& name, int root) {
    Request request = AllReduce(name);
    request.kind = OpKind::kBroadcast;
    request.root_rank = root;
    return request;
  }

  std::vector<float> data;
  std::vector<float> gathered;
};

inline Request Bare(OpKind kind, const std::string& name, std::vector<int> ranks = {}) {
  Request request;
  request.kind = kind;
  request.name = name;
  request.ranks = std::move(ranks);
  return request;
}

}  // namespace dad
