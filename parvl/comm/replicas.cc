#include "parvl/comm/replicas.h"

#include <absl/strings/str_join.h>

#include <algorithm>
#include <vector>

#include "parvl/base/hash.h"
#include "parvl/comm/comm_site.h"

namespace parvl {
namespace {

// Everybody's words, by rank. They travel as float64, which no backend looks into when it gathers.
absl::StatusOr<std::vector<uint64_t>> gather(const std::vector<uint64_t>& mine, ProcessGroup& group) {
  std::vector<uint64_t> all(mine.size() * static_cast<size_t>(group.size()));
  const ConstBuffer in(mine.data(), static_cast<int64_t>(mine.size()), DType::kFloat64);
  const Buffer out{all.data(), static_cast<int64_t>(all.size()), DType::kFloat64};
  PARVL_RETURN_IF_ERROR(group.all_gather(in, out)->wait());
  return all;
}

// The ranks whose word is not the one that most have; of equally frequent ones the lowest rank's counts.
std::vector<size_t> unlike_most(const std::vector<uint64_t>& words) {
  uint64_t usual = words[0];
  int64_t most = 0;
  for (const uint64_t word : words) {
    const int64_t times = std::count(words.begin(), words.end(), word);
    if (times > most) usual = word;
    most = std::max(most, times);
  }
  std::vector<size_t> out;
  for (size_t r = 0; r < words.size(); ++r) {
    if (words[r] != usual) out.push_back(r);
  }
  return out;
}

std::string ranks_text(const std::vector<size_t>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

}  // namespace

uint64_t checksum(const ConstBuffer& values) {
  return hash64_bytes(values.data, static_cast<size_t>(values.count * dtype_bytes(values.dtype)),
                      static_cast<uint64_t>(values.dtype));
}

absl::Status expect_equal_replicas(absl::Span<const NamedBuffer> buffers, ProcessGroup& group) {
  const CommSite site("replicas");
  std::vector<uint64_t> words;  // a buffer each: its name and its values
  for (const NamedBuffer& buffer : buffers) words.push_back(mix64(hash64(buffer.name), checksum(buffer.values)));
  const uint64_t together = hash64_bytes(words.data(), words.size() * sizeof(uint64_t));
  PARVL_ASSIGN_OR_RETURN(const std::vector<uint64_t> all, gather({words.size(), together}, group));
  std::vector<uint64_t> counts, sums;
  for (size_t r = 0; 2 * r < all.size(); ++r) {
    counts.push_back(all[2 * r]);
    sums.push_back(all[2 * r + 1]);
  }
  if (const auto unlike = unlike_most(counts); !unlike.empty()) {
    return failed("replicas differ in group ", group.name(), ": ", ranks_text(unlike), " holds ", counts[unlike[0]],
                  " tensors, others do not");
  }
  if (unlike_most(sums).empty()) return absl::OkStatus();
  PARVL_ASSIGN_OR_RETURN(const std::vector<uint64_t> each, gather(words, group));
  std::string first;
  size_t differ = 0;
  for (size_t i = 0; i < words.size(); ++i) {
    std::vector<uint64_t> column;
    for (size_t r = 0; r < sums.size(); ++r) column.push_back(each[r * words.size() + i]);
    const auto unlike = unlike_most(column);
    if (unlike.empty()) continue;
    if (differ++ == 0) first = absl::StrCat("'", buffers[i].name, "' is another on ", ranks_text(unlike));
  }
  return failed("replicas differ in group ", group.name(), ": ", first, "; ", differ, " of ", words.size(),
                differ == 1 ? " tensors differs" : " tensors differ");
}

}  // namespace parvl
