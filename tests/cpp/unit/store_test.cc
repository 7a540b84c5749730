// Both stores, the HTTP one against a server that speaks what horovodrun's does.
#include "rendezvous/store.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "tests/cpp/transport/transport_fixture.h"
#include "tests/cpp/unit/key_value_server.h"

namespace dad {
namespace {

using std::chrono::milliseconds;

class StoreTest : public testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<Store> Open(const std::string& scope) {
    const std::string url = GetParam() == "http"
                                ? "http://127.0.0.1:" + std::to_string(server_.port())
                                : "file://" + directory_.path() + "/made/on/demand";
    auto store = OpenStore(url, scope);
    EXPECT_TRUE(store.ok()) << store.status().ToString();
    return std::move(store).value();
  }

  KeyValueServer server_;
  TempDirectory directory_;
};

INSTANTIATE_TEST_SUITE_P(Kinds, StoreTest, testing::Values("http", "file"),
                         [](const auto& info) { return info.param; });

TEST_P(StoreTest, GivesBackWhatWasSet) {
  auto store = Open("job");
  const std::string binary("\0\r\n\r\n\xff%/ \n", 10);
  for (const std::string& value : {std::string(), binary, std::string(300000, 'v')}) {
    ASSERT_TRUE(store->Set("key", value).ok());
    auto got = store->Get("key", milliseconds(5000));
    ASSERT_TRUE(got.ok()) << got.status().ToString();
    EXPECT_EQ(got.value(), value);
  }
}

TEST_P(StoreTest, StrangeKeysStayApart) {
  auto store = Open("sc/ope..");
  const std::vector<std::string> keys = {"a/b", "a%2Fb", "..", "a b", "ä", "a"};
  for (const std::string& key : keys) ASSERT_TRUE(store->Set(key, "of " + key).ok());
  for (const std::string& key : keys) {
    auto got = store->Get(key, milliseconds(5000));
    ASSERT_TRUE(got.ok()) << got.status().ToString();
    EXPECT_EQ(got.value(), "of " + key);
  }
}

TEST_P(StoreTest, WaitsForAKey) {
  auto store = Open("job");
  std::thread later([&] {
    std::this_thread::sleep_for(milliseconds(30));
    EXPECT_TRUE(Open("job")->Set("late", "here").ok());
  });
  auto got = store->Get("late", milliseconds(10000));
  later.join();
  ASSERT_TRUE(got.ok()) << got.status().ToString();
  EXPECT_EQ(got.value(), "here");
}

TEST_P(StoreTest, MissingKeyIsATimeoutThatNamesIt) {
  auto got = Open("job")->Get("nobody", milliseconds(30));
  ASSERT_FALSE(got.ok());
  EXPECT_EQ(got.status().code(), StatusCode::kTimeout);
  EXPECT_NE(got.status().message().find("nobody"), std::string::npos);
}

TEST_P(StoreTest, ScopesAndDeletionKeepGenerationsApart) {
  auto first = Open("generation 1");
  auto second = Open("generation 2");
  ASSERT_TRUE(first->Set("key", "1").ok());
  EXPECT_FALSE(second->Get("key", milliseconds(10)).ok());
  ASSERT_TRUE(first->Delete("key").ok());
  ASSERT_TRUE(first->Delete("key").ok()) << "deleting twice does no harm";
  EXPECT_FALSE(first->Get("key", milliseconds(10)).ok());
  ASSERT_TRUE(first->Set("key", "again").ok());
  EXPECT_TRUE(first->Get("key", milliseconds(5000)).ok());
}

TEST(HttpStoreTest, TriesAgainAfterAnError) {
  KeyValueServer server;
  auto store = OpenStore("http://127.0.0.1:" + std::to_string(server.port()), "job");
  ASSERT_TRUE(store.ok());
  server.FailNext(1);
  ASSERT_TRUE(store.value()->Set("key", "value").ok());
  auto got = store.value()->Get("key", milliseconds(5000));
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got.value(), "value");
}

// Its other half, a server that knows the key, is in Python; every job under dadrun tries the two.
TEST(HttpStoreTest, WithAKeyAnAnswerThatIsNotSignedIsAnError) {
  KeyValueServer server;
  auto store = OpenStore("http://127.0.0.1:" + std::to_string(server.port()), "job", "the key");
  ASSERT_TRUE(store.ok());
  const Status set = store.value()->Set("key", "value");
  EXPECT_EQ(set.code(), StatusCode::kInvalidArgument) << set.ToString();
  EXPECT_NE(set.message().find("not signed"), std::string::npos) << set.message();
  EXPECT_FALSE(store.value()->Get("key", milliseconds(1000)).ok());
}

TEST(HttpStoreTest, NobodyThereIsUnavailable) {
  int port;
  {
    KeyValueServer gone;
    port = gone.port();
  }
  auto store = OpenStore("http://127.0.0.1:" + std::to_string(port), "job");
  ASSERT_TRUE(store.ok());
  auto got = store.value()->Get("key", milliseconds(100));
  ASSERT_FALSE(got.ok());
  EXPECT_EQ(got.status().code(), StatusCode::kUnavailable) << got.status().ToString();
  EXPECT_NE(got.status().message().find(std::to_string(port)), std::string::npos);
}

TEST(OpenStoreTest, SaysWhatIsWrongWithAUrl) {
  for (const std::string url : {"", "ftp://x:1", "http://", "http://host", "http://host:port"}) {
    auto store = OpenStore(url, "job");
    ASSERT_FALSE(store.ok()) << url;
    EXPECT_EQ(store.status().code(), StatusCode::kInvalidArgument);
  }
}

TEST(FileStoreTest, LeavesNoFilesBehind) {
  TempDirectory directory;
  auto store = OpenStore("file://" + directory.path(), "job");
  ASSERT_TRUE(store.ok());
  ASSERT_TRUE(store.value()->Set("a", "1").ok());
  ASSERT_TRUE(store.value()->Set("b", "2").ok());
  ASSERT_TRUE(store.value()->Delete("a").ok());
  ASSERT_TRUE(store.value()->Delete("b").ok());
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

}  // namespace
}  // namespace dad
