#include "parvl/comm/comm_site.h"

#include <algorithm>
#include <cstring>

namespace parvl {
namespace {

struct Place {
  char text[190];
  size_t length = 0;
  bool waits_long = false;

  void append(std::string_view more) {
    const size_t count = std::min(more.size(), sizeof text - length);
    std::memcpy(text + length, more.data(), count);
    length += count;
  }
};
thread_local Place here;

}  // namespace

CommSite::CommSite(std::string_view label, Wait wait) : length_before_(here.length), long_before_(here.waits_long) {
  if (here.length > 0) here.append("/");
  here.append(label);
  here.waits_long = here.waits_long || wait == Wait::kLong;
}

CommSite::~CommSite() {
  here.length = length_before_;
  here.waits_long = long_before_;
}

std::string_view CommSite::current() { return {here.text, here.length}; }
bool CommSite::waits_long() { return here.waits_long; }

}  // namespace parvl
