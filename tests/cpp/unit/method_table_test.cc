// A method that the core does not have, added from outside: everything that it takes is here.
#include "exchange/method_table.h"

#include <gtest/gtest.h>

#include <cmath>

#include "exchange/by_method.h"
#include "exchange/share/share_io.h"
#include "exchange/share/shares.h"
#include "tests/cpp/engine/engine_fixture.h"

namespace dad {
namespace {

using std::chrono::seconds;

// signSGD with majority vote: `signsgd;step=0.5`. A rank sends the sign of each element in one bit,
// and every rank applies
//
//   step · sign(Σ_w sign(g_w))
class SignSgdExchange final : public Exchange {
 public:
  SignSgdExchange(const TensorSpec& spec, double step)
      : spec_(spec), count_(NumElements(spec.shape)), step_(step) {}

  Status Begin(const StepInput& input, const Group& group) override {
    input_ = input;
    group_ = group;
    share_.assign(ShareBytes(), std::byte{0});
    if (input.mine == nullptr) return Status::Ok();
    DAD_RETURN_IF_ERROR(CheckContribution(spec_, *input.mine, true));
    std::vector<float> values(static_cast<size_t>(count_));
    ConvertTo(input.mine->input, values.data());
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i] < 0) share_[i / 8] |= std::byte{1} << (i % 8);
    }
    return Status::Ok();
  }

  int num_rounds() const override { return 1; }

  Status Send(int, int peer, GatherBuffer& out) override {
    if (Travels(group_.rank, peer)) out.Reference(share_.data(), share_.size());
    return Status::Ok();
  }

  int64_t ReceiveBytes(int, int peer) const override {
    return Travels(peer, group_.rank) ? static_cast<int64_t>(ShareBytes()) : 0;
  }

  Status Receive(int, std::span<const ByteSpan> shares) override {
    votes_.assign(static_cast<size_t>(count_), 0);
    for (int r = 0; r < group_.size; ++r) {
      if (group_.Joined(r) || input_.mine == nullptr) continue;
      const bool own = r == group_.rank;
      const ByteSpan share = own ? ByteSpan(share_) : shares[static_cast<size_t>(r)];
      if (!own) DAD_RETURN_IF_ERROR(CheckShareBytes(spec_, r, share, ReceiveBytes(0, r)));
      for (size_t i = 0; i < votes_.size(); ++i) {
        const bool negative = (share[i / 8] & (std::byte{1} << (i % 8))) != std::byte{0};
        votes_[i] += negative ? -1 : 1;
      }
    }
    return Status::Ok();
  }

  Status Finish() override {
    if (input_.mine == nullptr) return Status::Ok();
    std::vector<float> result(votes_.size());
    for (size_t i = 0; i < result.size(); ++i) {
      const int sign = votes_[i] == 0 ? 0 : votes_[i] < 0 ? -1 : 1;
      result[i] = static_cast<float>(sign * step_);
    }
    ConvertFrom(result.data(), input_.mine->output);
    return Status::Ok();
  }

 private:
  size_t ShareBytes() const { return static_cast<size_t>((count_ + 7) / 8); }
  bool Travels(int from, int to) const {
    return from != to && !group_.Joined(from) && !group_.Joined(to);
  }

  const TensorSpec spec_;
  const int64_t count_;
  const double step_;
  StepInput input_;
  Group group_;
  std::vector<std::byte> share_;
  std::vector<int> votes_;
};

Result<std::unique_ptr<Exchange>> MakeSignSgdExchange(const TensorSpec& spec, const ExchangeEnv&) {
  DAD_RETURN_IF_ERROR(CheckSummable(spec, "signs"));
  const Result<double> step = spec.method.Real("step", 1.0);
  DAD_RETURN_IF_ERROR(step.status());
  if (step.value() <= 0) return WrongMethod(spec, "step must be positive");
  return std::unique_ptr<Exchange>(std::make_unique<SignSgdExchange>(spec, step.value()));
}

class MethodTableTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    RegisterMethod(
        {.name = "signsgd", .make = MakeSignSgdExchange, .share_bytes = [](const TensorSpec& spec) {
           return (NumElements(spec.shape) + 7) / 8;
         }});
  }

  static Request SignSgd(Values& values, const std::string& options = "") {
    Request request = values.AllReduce("w");
    request.method = "signsgd" + options;
    return request;
  }
};

TEST_F(MethodTableTest, AMethodFromOutsideRunsThroughTheEngine) {
  constexpr size_t kCount = 1000;
  for (const int size : {1, 2, 3, 4}) {
    SCOPED_TRACE(size);
    Job job(size);
    job.Run([&](int rank) {
      for (int step = 0; step < 5; ++step) {
        // Element i is negative on the ranks below i % (size + 1).
        Values values(std::vector<float>(kCount, 3.0f));
        for (size_t i = 0; i < kCount; ++i) {
          if (rank < static_cast<int>(i) % (size + 1)) values.data[i] = -0.1f;
        }
        const Status status = job[rank].Submit(SignSgd(values, ";step=0.5"))->Wait(seconds(20));
        ASSERT_TRUE(status.ok()) << status.ToString();
        for (size_t i = 0; i < kCount; ++i) {
          const int votes = size - 2 * (static_cast<int>(i) % (size + 1));
          ASSERT_EQ(values.data[i], votes == 0 ? 0.0f : votes < 0 ? -0.5f : 0.5f) << i;
        }
      }
      if (size == 1) return;
      const Stats stats = job[rank].GetStats();
      ASSERT_EQ(stats.tensors.size(), 1u);
      // A bit per element, to each peer in each step.
      EXPECT_EQ(stats.tensors[0].wire_bytes_sent,
                5 * (size - 1) * static_cast<int64_t>(kCount / 8));
    });
  }
}

TEST_F(MethodTableTest, WrongOptionsAndUnknownMethodsAreRefusedAtSubmit) {
  Job job(2);
  job.Run([&](int rank) {
    const auto refused = [&](const Request& request) {
      const Status status = job[rank].Submit(request)->Wait(seconds(20));
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      return status.message();
    };
    Values values(std::vector<float>(8, 1.0f));
    EXPECT_NE(refused(SignSgd(values, ";step=0")).find("step must be positive"), std::string::npos);
    Request unknown = values.AllReduce("w");
    unknown.method = "signsdg;step=1";
    const std::string message = refused(unknown);
    EXPECT_NE(message.find("unknown method \"signsdg;step=1\"; there are"), std::string::npos);
    for (const char* name :
         {"factor", "low_rank", "int8", "sparse", "qsgd", "chunk_topk", "signsgd"}) {
      EXPECT_NE(message.find(name), std::string::npos) << message;
    }
  });
}

TEST_F(MethodTableTest, TheFuserGoesByTheRow) {
  TensorSpec spec;
  spec.shape = {1 << 20};
  EXPECT_EQ(FusedBytes(spec), 4 << 20);
  spec.method = "signsgd";
  EXPECT_EQ(ExpectedBytes(spec), (1 << 20) / 8);
  EXPECT_EQ(FusedBytes(spec), 1 << 20);  // four times the fusion size in gradients
  spec.method = "sparse;rule=vgc;layer=1024x1024";
  EXPECT_EQ(FusedBytes(spec), 4 << 20);
}

TEST(MethodTest, EqualTextsAreEqualMethods) {
  const Method method = std::string("low_rank;rank=4;layer=10x784:bias");
  EXPECT_EQ(method, Method("low_rank;rank=4;layer=10x784:bias"));
  EXPECT_NE(method, Method("low_rank;rank=5;layer=10x784:bias"));
  EXPECT_EQ(method.name(), "low_rank");
  EXPECT_EQ(method.Integer("rank", 0).value(), 4);
  ASSERT_EQ(method.layers().size(), 1u);
  EXPECT_EQ(method.layers()[0].num_elements(), 7850);
  EXPECT_TRUE(Method().none());
}

TEST(MethodTest, AMalformedTextSaysWhy) {
  const Method method = "int8;layer=3by4";
  EXPECT_EQ(method.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(method.status().message().find("OUTxIN"), std::string::npos);
  EXPECT_EQ(method.text(), "int8;layer=3by4");
}

}  // namespace
}  // namespace dad
