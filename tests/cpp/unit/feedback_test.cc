#include "exchange/feedback/feedback.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace dad {
namespace {

// One step of a compressor that rounds to whole numbers.
std::vector<double> Round(Feedback<double>& feedback, const std::vector<double>& gradient,
                          double scale = 1.0) {
  const std::span<double> x = feedback.Values();
  std::copy(gradient.begin(), gradient.end(), x.begin());
  feedback.Add(scale);
  std::vector<double> sent(x.size());
  for (size_t i = 0; i < sent.size(); ++i) sent[i] = std::round(x[i]);
  feedback.Leave(sent);
  return sent;
}

std::vector<double> Residual(const Feedback<double>& feedback) {
  std::vector<StateTensor> saved;
  feedback.Save("residual", saved);
  std::vector<double> values(saved.at(0).bytes.size() / sizeof(double));
  std::memcpy(values.data(), saved[0].bytes.data(), saved[0].bytes.size());
  return values;
}

TEST(FeedbackTest, SentPlusKeptEqualsTheSumOfGradients) {
  std::mt19937 random(3);
  std::uniform_real_distribution<double> uniform(-1, 1);
  Feedback<double> feedback;
  std::vector<double> total(5), sent(5);
  for (int step = 0; step < 50; ++step) {
    ASSERT_TRUE(feedback.Fit(5, true).ok());
    std::vector<double> gradient(5);
    for (double& g : gradient) g = uniform(random);
    const std::vector<double> now = Round(feedback, gradient, 0.5);
    feedback.Commit();
    for (size_t i = 0; i < 5; ++i) {
      total[i] += 0.5 * gradient[i];
      sent[i] += now[i];
    }
  }
  const std::vector<double> kept = Residual(feedback);
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_NEAR(sent[i] + kept[i], total[i], 1e-12);
    EXPECT_LE(std::abs(kept[i]), 0.5);
  }
}

TEST(FeedbackTest, AStepThatDoesNotCountLeavesTheResidual) {
  Feedback<double> feedback;
  ASSERT_TRUE(feedback.Fit(2, true).ok());
  Round(feedback, {0.25, 1.4});
  feedback.Commit();
  const std::vector<double> before = Residual(feedback);
  EXPECT_EQ(before[0], 0.25);
  Round(feedback, {3.3, 4.4});  // some rank was not finite: no Commit
  EXPECT_EQ(Residual(feedback), before);
  // A step that begins and leaves nothing does not commit what the one before it had left.
  (void)feedback.Values();
  feedback.Commit();
  EXPECT_EQ(Residual(feedback), before);
}

TEST(FeedbackTest, WhatWasNotUsedWaitsAgain) {
  Feedback<double> feedback;
  ASSERT_TRUE(feedback.Fit(1, true).ok());
  const std::vector<double> sent = Round(feedback, {2.25});
  feedback.Commit();
  feedback.Return(sent);
  EXPECT_EQ(Residual(feedback), std::vector<double>{2.25});
}

TEST(FeedbackTest, OffItAddsAndKeepsNothing) {
  Feedback<double> feedback;
  ASSERT_TRUE(feedback.Fit(1, false).ok());
  for (int step = 0; step < 3; ++step) {
    EXPECT_EQ(Round(feedback, {0.4}), std::vector<double>{0});
    feedback.Commit();
  }
  EXPECT_EQ(Residual(feedback), std::vector<double>{0});
}

TEST(FeedbackTest, ASavedResidualOfAnotherSizeOrTypeIsRefused) {
  Feedback<double> feedback;
  ASSERT_TRUE(feedback.Fit(3, true).ok());
  std::vector<StateTensor> saved;
  feedback.Save("residual", saved);
  Feedback<double> other;
  ASSERT_TRUE(other.Load(saved[0]).ok());
  EXPECT_NE(other.Fit(4, true).message().find("3 elements does not fit 4"), std::string::npos);
  EXPECT_FALSE(Feedback<float>().Load(saved[0]).ok());
}

}  // namespace
}  // namespace dad
