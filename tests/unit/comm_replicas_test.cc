// Whether ranks hold the same bits, and what is said when they do not.
#include <gmock/gmock.h>

#include <cmath>

#include "parvl/base/hash.h"
#include "parvl/comm/replicas.h"
#include "tests/unit/comm_fixture.h"

namespace parvl {
namespace {

using testing::HasSubstr;

// What the reference implementation gives.
TEST(Hash64, IsXxh64) {
  EXPECT_EQ(hash64(""), 0xef46db3751d8e999);
  EXPECT_EQ(hash64("a"), 0xd24ec4f1a98c6e5b);
  EXPECT_EQ(hash64("abc"), 0x44bc2cf5ad770999);
  EXPECT_EQ(hash64("Nobody inspects the spammish repetition"), 0xfbcea83c8a378bf1);
  EXPECT_EQ(hash64("xxhash", 20141025), 13067679811253438005u);
}

TEST(Hash64, EveryBitOfEveryLengthCounts) {
  for (size_t length = 1; length <= 80; ++length) {
    std::string text(length, 'x');
    const uint64_t whole = hash64(text);
    for (size_t i = 0; i < 8 * length; ++i) {
      text[i / 8] = static_cast<char>(text[i / 8] ^ (1 << (i % 8)));
      EXPECT_NE(hash64(text), whole) << length << " " << i;
      text[i / 8] = static_cast<char>(text[i / 8] ^ (1 << (i % 8)));
    }
  }
}

struct Tensors {
  std::vector<float> a = {1, 2, 3}, b = {4, 5}, c = {6};
  std::vector<NamedBuffer> buffers() const {
    const auto buffer = [](const std::vector<float>& v) {
      return ConstBuffer(v.data(), static_cast<int64_t>(v.size()), DType::kFloat32);
    };
    return {{"projector.a", buffer(a)}, {"llm_backbone.b", buffer(b)}, {"llm_backbone.c", buffer(c)}};
  }
};

TEST(Replicas, EqualOnesAreEqual) {
  run_ranks(3, {}, [](ProcessGroup& group) {
    const Tensors mine;
    EXPECT_TRUE(expect_equal_replicas(mine.buffers(), group).ok());
    EXPECT_TRUE(expect_equal_replicas({}, group).ok());
  });
}

TEST(Replicas, TheFirstThatDiffersIsNamedOnAllRanks) {
  run_ranks(4, {}, [](ProcessGroup& group) {
    Tensors mine;
    if (group.rank() == 2) {
      mine.b[1] = std::nextafter(mine.b[1], 9.0f);  // one bit
      mine.c[0] = -6;
    }
    EXPECT_EQ(expect_equal_replicas(mine.buffers(), group).message(),
              "replicas differ in group g: 'llm_backbone.b' is another on rank 2; 2 of 3 tensors differ");
    mine = Tensors();
    if (group.rank() == 3) mine.a[0] = 0.0f;
    if (group.rank() == 0) mine.a[0] = -0.0f;
    EXPECT_THAT(expect_equal_replicas(mine.buffers(), group).message(),
                HasSubstr("'projector.a' is another on ranks 0, 3"));
  });
}

// A NaN is not equal to itself, but its bits are.
TEST(Replicas, BitsAreComparedNotNumbers) {
  run_ranks(2, {}, [](ProcessGroup& group) {
    Tensors mine;
    mine.a[1] = std::nanf("");
    EXPECT_TRUE(expect_equal_replicas(mine.buffers(), group).ok());
  });
}

TEST(Replicas, NamesAndNumbersOfTensorsCount) {
  run_ranks(2, {}, [](ProcessGroup& group) {
    const Tensors mine;
    std::vector<NamedBuffer> buffers = mine.buffers();
    if (group.rank() == 1) std::swap(buffers[1].name, buffers[2].name);
    EXPECT_THAT(expect_equal_replicas(buffers, group).message(), HasSubstr("2 of 3 tensors differ"));
    buffers = mine.buffers();
    if (group.rank() == 1) buffers.pop_back();
    EXPECT_THAT(expect_equal_replicas(buffers, group).message(), HasSubstr("rank 1 holds 2 tensors, others do not"));
    // The same bytes as other values.
    const std::vector<double> wide = {1};
    const std::vector<NamedBuffer> one = {{"x", group.rank() == 0 ? ConstBuffer(wide.data(), 1, DType::kFloat64)
                                                                  : ConstBuffer(wide.data(), 2, DType::kFloat32)}};
    EXPECT_THAT(expect_equal_replicas(one, group).message(), HasSubstr("'x' is another on rank 1"));
  });
}

}  // namespace
}  // namespace parvl
