#include "parvl/exec/encoder_links.h"

#include <string>

namespace parvl {
namespace {

constexpr double kDeadlineS = 600;

std::string key(int64_t from, int64_t to) { return absl::StrCat("encoder/", from, ">", to); }

}  // namespace

absl::StatusOr<std::shared_ptr<EncoderLinks>> EncoderLinks::connect(Communicator& ranks, int64_t ring_bytes) {
  std::vector<int64_t> others;
  for (int64_t rank = ranks.rank() == 0 ? 1 : 0; rank < (ranks.rank() == 0 ? ranks.world() : 1); ++rank) {
    others.push_back(rank);
  }
  const std::unique_ptr<Store> store = ranks.make_store();
  auto out = std::make_shared<EncoderLinks>();
  for (const int64_t other : others) {
    PARVL_ASSIGN_OR_RETURN(auto to, RingWriter::create(1, ring_bytes));
    PARVL_RETURN_IF_ERROR(store->set(key(ranks.rank(), other), to->path()));
    out->links_.push_back({std::move(to), nullptr});
  }
  for (size_t i = 0; i < others.size(); ++i) {
    PARVL_ASSIGN_OR_RETURN(const std::string path, store->get(key(others[i], ranks.rank()), kDeadlineS));
    PARVL_ASSIGN_OR_RETURN(out->links_[i].from, RingReader::open(path, 0));
  }
  return out;
}

void EncoderLinks::close() {
  for (const Link& link : links_) {
    link.to->close();
    link.from->close();
  }
}

}  // namespace parvl
