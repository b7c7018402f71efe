// Writes an event file for tests/parity/tensorboard_events.py: events_probe FOLDER COUNT [wait]
#include <cstdlib>
#include <iostream>
#include <string>

#include "parvl/train/tensorboard.h"

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  auto writer = parvl::EventWriter::create(argv[1], 1'700'000'000);
  if (!writer.ok()) {
    std::cerr << writer.status().message() << "\n";
    return 1;
  }
  const std::string loss = "train/loss with a long name " + std::string(200, 'x');
  for (int64_t i = 0; i < std::atoll(argv[2]); ++i) {
    const absl::Status status =
        (*writer)->scalars(i << 20, 1'700'000'000.25 + static_cast<double>(i),
                           {{loss, 1.0 / static_cast<double>(i + 1)}, {"lr", static_cast<double>(i) * 1e-5}});
    if (!status.ok()) return 1;
  }
  if (argc > 3) {
    std::cout << "written" << std::endl;
    std::string line;
    std::getline(std::cin, line);
  }
  return 0;
}
