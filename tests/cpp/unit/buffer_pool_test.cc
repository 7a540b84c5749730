#include "util/buffer_pool.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "util/aligned_buffer.h"

namespace dad {
namespace {

constexpr size_t kLarge = size_t{1} << 20;

TEST(BufferPoolTest, ABlockIsUsedAgainForTheNextOfItsSize) {
  BufferPool pool(4 * kLarge);
  std::byte* const block = pool.Take(kLarge);
  EXPECT_EQ(pool.kept_bytes(), 0u);
  pool.Give(block, kLarge);
  EXPECT_EQ(pool.kept_bytes(), kLarge);
  EXPECT_EQ(pool.Take(kLarge), block);
  EXPECT_EQ(pool.kept_bytes(), 0u);
  pool.Give(block, kLarge);
}

TEST(BufferPoolTest, MessagesOfNearlyOneSizeShareABlock) {
  BufferPool pool(4 * kLarge);
  std::byte* const block = pool.Take(kLarge + 1000);
  pool.Give(block, kLarge + 1000);
  std::byte* const again = pool.Take(kLarge + 30000);
  EXPECT_EQ(again, block);
  std::memset(again, 1, kLarge + 30000);  // a sanitizer sees it if that is too much
  std::byte* const twice = pool.Take(2 * kLarge);
  EXPECT_NE(twice, block);
  pool.Give(again, kLarge + 30000);
  pool.Give(twice, 2 * kLarge);
}

TEST(BufferPoolTest, NoMoreIsKeptThanItsCapacity) {
  BufferPool pool(2 * kLarge);
  std::vector<std::byte*> blocks;
  for (int i = 0; i < 5; ++i) blocks.push_back(pool.Take(kLarge));
  for (std::byte* block : blocks) pool.Give(block, kLarge);
  EXPECT_EQ(pool.kept_bytes(), 2 * kLarge);
  pool.Trim();
  EXPECT_EQ(pool.kept_bytes(), 0u);
}

TEST(BufferPoolTest, SmallBlocksAreLeftToTheAllocator) {
  BufferPool pool(kLarge);
  EXPECT_EQ(pool.Take(0), nullptr);
  pool.Give(nullptr, 0);
  std::byte* const small = pool.Take(100);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(small) % BufferPool::kAlignment, 0u);
  pool.Give(small, 100);
  EXPECT_EQ(pool.kept_bytes(), 0u);
}

TEST(BufferPoolTest, ThreadsGiveWhatOthersTook) {
  BufferPool pool(8 * kLarge);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pool] {
      for (int i = 0; i < 200; ++i) {
        const size_t size = BufferPool::kLeastBytes * static_cast<size_t>(1 + i % 3);
        std::byte* const block = pool.Take(size);
        std::memset(block, i, size);
        std::thread([&pool, block, size] { pool.Give(block, size); }).join();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(pool.kept_bytes(), 0u);
}

TEST(AlignedBufferTest, ABufferThatIsMovedFromHasNothing) {
  AlignedBuffer first(kLarge);
  std::byte* const data = first.data();
  AlignedBuffer second = std::move(first);
  EXPECT_EQ(first.data(), nullptr);
  EXPECT_EQ(first.size(), 0u);
  EXPECT_EQ(second.data(), data);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % AlignedBuffer::kAlignment, 0u);
}

}  // namespace
}  // namespace dad
