// Settings from the environment.
#include "dad/options.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

namespace dad {
namespace {

Result<Options> Read(const std::map<std::string, std::string>& environment) {
  return Options::FromEnvironment([&](const char* name) -> const char* {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  });
}

TEST(OptionsTest, OurVariableComesBeforeHorovods) {
  const Result<Options> options =
      Read({{"DAD_TIMEOUT_SECONDS", "7"}, {"HOROVOD_GLOO_TIMEOUT_SECONDS", "8"}});
  ASSERT_TRUE(options.ok());
  EXPECT_EQ(options.value().timeout_seconds, 7);
}

TEST(OptionsTest, BadValueIsAnErrorThatNamesTheVariable) {
  const Result<Options> options = Read({{"HOROVOD_CACHE_CAPACITY", "(1,)"}});
  ASSERT_FALSE(options.ok());
  EXPECT_EQ(options.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(options.status().message().find("HOROVOD_CACHE_CAPACITY=\"(1,)\""), std::string::npos);
}

TEST(OptionsTest, WhatHorovodRunLeavesUnsetHasItsDefault) {
  const Result<Options> options =
      Read({{"HOROVOD_CYCLE_TIME", "(None,)"}, {"HOROVOD_CACHE_CAPACITY", "(None,)"}});
  ASSERT_TRUE(options.ok()) << options.status().ToString();
  EXPECT_EQ(options.value().cycle_time_ms, Options().cycle_time_ms);
  EXPECT_EQ(options.value().cache_capacity, Options().cache_capacity);
}

}  // namespace
}  // namespace dad
