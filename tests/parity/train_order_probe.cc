// What tests/parity/train_*.py ask: the data set's indices in the order in which a run reads them.
//
//   train_order_probe DATASET_SIZE SHUFFLE_SEED COUNT
#include <cstdio>
#include <cstdlib>

#include "parvl/train/data.h"

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: train_order_probe DATASET_SIZE SHUFFLE_SEED COUNT\n");
    return 2;
  }
  parvl::SampleOrder order(std::atoll(argv[1]), std::strtoull(argv[2], nullptr, 10));
  for (int64_t i = 0; i < std::atoll(argv[3]); ++i) std::printf("%lld\n", static_cast<long long>(order.at(i)));
  return 0;
}
