// A rank that finds out in the middle of a step that it cannot take part: every rank gets an error
// that names it, no state changes, and the next step works. On the recording fake; no GPU has run
// any of it.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "exchange/device/refusal.h"
#include "method_job.h"

namespace dad {
namespace {

constexpr int64_t kOut = 9, kIn = 40;

class DeviceRefusalTest : public MethodTest {
 protected:
  // Steps of three ranks; `before` a step may spoil something, and gives the indices of its rows.
  // The text of every rank's error is [step][rank]; empty: none.
  using Before = std::function<std::vector<int64_t>(int rank, int step)>;
  std::vector<std::vector<std::string>> Run(const std::string& method, int steps,
                                            const Before& before) {
    std::vector<std::vector<std::string>> errors(static_cast<size_t>(steps),
                                                 std::vector<std::string>(3));
    weight_ = std::vector<std::vector<float>>(3);
    DeviceJob job(3, Wire::kStaged, {}, {}, Methods::kOnDevice);
    job.Run([&](int rank) {
      UserStream stream(rank);
      LayerJob<float> layer;
      layer.method = method + ";layer=" + std::to_string(kOut) + "x" + std::to_string(kIn);
      layer.out = kOut;
      layer.in = kIn;
      for (int step = 0; step < steps; ++step) {
        std::vector<int64_t> index = before(rank, step);
        const auto rows = static_cast<int64_t>(index.size());
        std::vector<float> x(static_cast<size_t>(rows * kIn), 1.0f);
        LayerStep<float> mine;
        const DeviceEvent ready = stream.Record();
        Request request = layer.RequestOf(mine, rank, ready.get());
        request.keep_alive = ready;
        IndexedSegment& segment = request.tensors[0].layers[0].indexed.emplace_back();
        segment.index = segment.x = request.tensors[0].layers[0].output;
        segment.index.data = index.data();
        segment.index.dtype = DType::kInt64;
        segment.index.shape = {rows};
        segment.x.data = x.data();
        segment.x.shape = {rows, kIn};
        auto ticket = job[rank].Submit(std::move(request));
        const Status used = stream.Use(*ticket);
        errors[static_cast<size_t>(step)][static_cast<size_t>(rank)] =
            used.ok() ? "" : used.message();
        if (used.ok()) weight_[static_cast<size_t>(rank)] = mine.output;
      }
    });
    return errors;
  }

  std::vector<std::vector<float>> weight_;  // of the last step that worked, by rank
};

const char* const kMethods[] = {"factor",
                                "low_rank;rank=2;wire=fp32;combine=owner;owner=1",
                                "low_rank;rank=2;wire=fp32;combine=gather",
                                "low_rank;rank=2;wire=fp32;combine=owner;owner=2",
                                "low_rank;rank=2;wire=fp32;feedback=none;combine=owner;owner=1",
                                "low_rank;rank=2;combine=power;owner=1"};

TEST_F(DeviceRefusalTest, AnIndexOutsideOfTheTensorIsAnErrorOnEveryRankThatNamesIt) {
  for (const char* method : kMethods) {
    SCOPED_TRACE(method);
    fake_gpu::Reset();
    const auto errors = Run(method, 4, [](int rank, int step) -> std::vector<int64_t> {
      if (rank == 2 && step == 1) return {0, kOut};
      if (rank == 0 && step == 2) return {-3};
      if (rank == 1 && step == 2) return {77};
      return {4};
    });
    for (size_t rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(errors[0][rank], "");
      EXPECT_EQ(errors[1][rank], "\"layer\": rank 2: an index of 9, expected 0 to 8");
      EXPECT_EQ(errors[2][rank], "\"layer\": rank 0: an index of -3, expected 0 to 8");
      EXPECT_EQ(errors[3][rank], "");
      for (int64_t i = 0; i < kOut * kIn; ++i) {
        ASSERT_NEAR(weight_[rank][static_cast<size_t>(i)], i / kIn == 4 ? 1.0f : 0.0f, 1e-5f) << i;
      }
    }
  }
}

TEST_F(DeviceRefusalTest, ALackOfDeviceMemoryIsAnErrorOnEveryRankAndTheNextStepWorks) {
  for (const char* method : kMethods) {
    for (const int lacks : {0, 2}) {
      SCOPED_TRACE(std::string(method) + ", rank " + std::to_string(lacks));
      fake_gpu::Reset();
      fake_gpu::SetLargestBlock(lacks, 100);
      const auto errors = Run(method, 2, [lacks](int rank, int step) -> std::vector<int64_t> {
        if (rank == lacks && step == 1) fake_gpu::SetLargestBlock(rank, 1 << 20);
        return {4, 5};
      });
      for (size_t rank = 0; rank < 3; ++rank) {
        // Factors are put together when everybody has sent: the others are through by then.
        const bool through = std::string(method) == "factor" && static_cast<int>(rank) != lacks;
        EXPECT_EQ(errors[0][rank], through ? ""
                                           : "\"layer\": rank " + std::to_string(lacks) +
                                                 ": cudaMallocAsync: out of memory");
        EXPECT_EQ(errors[1][rank], "");
        EXPECT_NEAR(weight_[rank][4 * kIn], 1.0f, 1e-5f);
      }
    }
  }
}

class DeviceTensorRefusalTest : public MethodTest {
 protected:
  static constexpr int64_t kOut = 60, kIn = 40;
  static constexpr int kSteps = 3;

  // Steps of three ranks, of which `lacks` has no device memory in step `when`. The result and the
  // error of every rank and step; `elsewhere` has its tensors on a device that it does not compute
  // on.
  struct Outcome {
    std::vector<std::vector<float>> result[3];  // [rank][step]
    std::vector<std::string> errors[3];
  };
  static Outcome Run(const std::string& method, int lacks, int when, int elsewhere) {
    Outcome outcome;
    const bool layer = method.starts_with("sparse");
    DeviceJob job(3, Wire::kStaged, {}, {}, Methods::kOnDevice);
    job.Run([&](int rank) {
      const auto r = static_cast<size_t>(rank);
      UserStream stream(rank == elsewhere ? 7 : rank);
      for (int step = 0; step < kSteps; ++step) {
        const int number = step - (step > when ? 1 : 0);  // of those that count
        std::vector<float> gradient =
            Normal<float>(kOut * kIn, static_cast<uint32_t>(10 * rank + number));
        if (rank == lacks) fake_gpu::SetLargestBlock(rank, step == when ? 100 : 1 << 30);
        DeviceValues values(gradient, stream);
        LayerStep<float> mine;
        LayerJob<float> layers;
        layers.method = method + ";layer=60x40";
        layers.out = kOut;
        layers.in = kIn;
        mine.dense = std::move(gradient);
        const DeviceEvent ready = stream.Record();
        Request request = layer ? layers.RequestOf(mine, rank == elsewhere ? 7 : rank, ready.get())
                                : values.AllReduce("layer", ReduceOp::kAverage);
        if (layer) request.keep_alive = ready;
        if (!layer) request.method = method;
        auto ticket = job[rank].Submit(std::move(request));
        const Status used = stream.Use(*ticket);
        outcome.errors[r].push_back(used.ok() ? "" : used.message());
        outcome.result[r].push_back(layer ? mine.output : values.data);
      }
    });
    return outcome;
  }
};

TEST_F(DeviceTensorRefusalTest, ALackOfDeviceMemoryIsAnErrorOnEveryRankAndNoStateChanges) {
  for (const char* method : {"int8;bucket=64", "qsgd;bits=4", "sparse;rule=vgc;feedback=1",
                             "sparse;rule=strom;coding=word;tau=1", "sparse;rule=vgc_strom"}) {
    for (const int elsewhere : {-1, 1}) {
      SCOPED_TRACE(std::string(method) + ", on the host: rank " + std::to_string(elsewhere));
      const std::string why = std::string(method).starts_with("sparse")
                                  ? "cudaMallocAsync: out of memory"
                                  : "out of device memory";
      fake_gpu::Reset();
      const Outcome wanted = Run(method, -1, kSteps, elsewhere);  // none fails
      for (const int lacks : {0, 2}) {
        fake_gpu::Reset();
        const Outcome mine = Run(method, lacks, 0, elsewhere);
        for (size_t r = 0; r < 3; ++r) {
          EXPECT_EQ(mine.errors[r][0], "\"layer\": rank " + std::to_string(lacks) + ": " + why);
          EXPECT_EQ(mine.errors[r][1], "");
          EXPECT_EQ(mine.errors[r][2], "");
          EXPECT_EQ(wanted.errors[r][1], "");
          ExpectSameBits(mine.result[r][2], wanted.result[r][1], "the second that counts");
        }
      }
    }
  }
}

TEST_F(DeviceTensorRefusalTest, AJoinedOwnerWithoutMemoryIsNamed) {
  DeviceJob job(3, Wire::kStaged, {}, {}, Methods::kOnDevice);
  fake_gpu::SetLargestBlock(1, 100);
  job.Run([&](int rank) {
    UserStream stream(rank);
    for (int step = 0; step < 2 && rank != 1; ++step) {
      DeviceValues values(std::vector<float>(3000, 3.0f), stream);
      Request request = values.AllReduce("q", ReduceOp::kAverage);
      request.method = "int8";
      auto ticket = job[rank].Submit(std::move(request));
      const Status used = stream.Use(*ticket);
      EXPECT_EQ(used.message(), step == 0 ? "\"q\": rank 1: out of device memory" : "");
      if (step == 1) {
        EXPECT_NEAR(values.data[1500], 2.0f, 0.02f);
      }
      if (rank == 0 && step == 0) fake_gpu::SetLargestBlock(1, 1 << 30);
    }
    Request join;
    join.kind = OpKind::kJoin;
    join.name = "join";
    EXPECT_TRUE(job[rank].Submit(std::move(join))->Wait(nccl::kLong).ok());
  });
}

// Of seven ranks' factors together there is more than of a rank's own part.
TEST_F(DeviceRefusalTest, MemoryThatIsLackingAfterAllHaveSentIsThatRanksOwnError) {
  constexpr int kRanks = 7;
  LayerJob<float> layer;
  layer.out = 2000;
  layer.in = 4;
  layer.method = "low_rank;rank=2;combine=gather;layer=2000x4";
  fake_gpu::SetLargestBlock(3, 1 << 16);
  std::vector<std::string> errors(kRanks);
  std::vector<std::vector<float>> second(kRanks);
  DeviceJob job(kRanks, Wire::kStaged, {}, {}, Methods::kOnDevice);
  job.Run([&](int rank) {
    UserStream stream(rank);
    for (int step = 0; step < 2; ++step) {
      LayerStep<float> mine;
      mine.dense = Normal<float>(2000 * 4, static_cast<uint32_t>(rank));
      const DeviceEvent ready = stream.Record();
      Request request = layer.RequestOf(mine, rank, ready.get());
      request.keep_alive = ready;
      auto ticket = job[rank].Submit(std::move(request));
      const Status used = stream.Use(*ticket);
      if (step == 0) {
        errors[static_cast<size_t>(rank)] = used.ok() ? "" : used.message();
        if (rank == 3) fake_gpu::SetLargestBlock(3, 1 << 30);
      } else {
        ASSERT_TRUE(used.ok()) << used.ToString();
        second[static_cast<size_t>(rank)] = mine.output;
      }
    }
  });
  for (size_t rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(errors[rank], rank == 3 ? "\"layer\": rank 3: cudaMallocAsync: out of memory" : "");
    ExpectSameBits(second[rank], second[0], "replicas");
  }
}

TEST(RefusalTest, AShortOneNamesTheFirstRankInAShareOfAnyLength) {
  Refusal refusal;
  refusal.NoteShort(5);
  refusal.NoteShort(3);
  refusal.NoteShort(4);
  GatherBuffer out;
  refusal.WriteShort(9, out);
  std::vector<std::byte> bytes;
  for (const ByteSpan piece : out.Pieces()) bytes.insert(bytes.end(), piece.begin(), piece.end());
  ASSERT_EQ(bytes.size(), 9u);
  Refusal read;
  read.ReadShort(std::span(bytes).first(4), 6);
  read.ReadShort(bytes, 3);  // there is no such rank
  EXPECT_FALSE(read.there());
  read.ReadShort(bytes, 6);
  EXPECT_TRUE(read.there());
  TensorSpec spec;
  spec.name = "w";
  EXPECT_EQ(read.status(spec).message(), "\"w\": rank 3: out of device memory");
}

TEST(RefusalTest, OnlyWholeOnesAreRead) {
  Refusal refusal;
  refusal.Note(3, "no");
  ByteWriter out;
  refusal.Write(out);
  const std::vector<std::byte>& bytes = out.bytes();
  Refusal read;
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(read.Read(std::span(bytes).first(size))) << size;
  }
  EXPECT_FALSE(read.there());
  EXPECT_TRUE(read.Read(bytes));
  EXPECT_EQ(read.why(), "rank 3: no");
  std::vector<std::byte> longer = bytes;
  longer.push_back(std::byte{0});
  EXPECT_FALSE(read.Read(longer));
}

}  // namespace
}  // namespace dad
