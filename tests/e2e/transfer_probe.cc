// One end of a transfer as a program of its own, ordered about in lines, for tests/e2e/transfer_namespaces.py.
//   transfer_probe source ADDRESS SILENCE_S    publish BYTES → handle; drop ITEM → 1 or 0; used → bytes of memory in
//   use transfer_probe sink SILENCE_S              pull TIMEOUT_S HANDLE → lane, or the status
#include <cstring>
#include <iostream>
#include <sstream>

#include "tests/unit/transfer_fixture.h"

namespace parvl {
namespace {

void run_source(const std::string& address, double silence_s) {
  TransferSourceOptions options = source_options();
  options.tcp_listen = address;
  options.silence_s = silence_s;
  const auto source = start_source(options);
  for (std::string order; std::cin >> order;) {
    int64_t number = 0;
    if (order == "publish") {
      std::cin >> number;
      std::cout << publish(*source, one_tensor(number), 7, {.seconds = 600}).to_text() << std::endl;
    } else if (order == "drop") {
      std::cin >> number;
      std::cout << source->drop(TransferId{number}) << std::endl;
    } else if (order == "used") {
      std::cout << source->counters().used_bytes << std::endl;
    }
  }
}

std::string pull(TransferSink& sink, double timeout_s, const std::string& text) {
  const auto handle = TransferHandle::from_text(text);
  if (!handle.ok()) return handle.status().ToString();
  const auto view = sink.pull(*handle, timeout_s);
  if (!view.ok()) return view.status().ToString();
  return has_bytes_of(*view, 7) ? to_string(view->lane()) : "other bytes";
}

void run_sink(double silence_s) {
  TransferSinkOptions options = sink_options();
  options.silence_s = silence_s;
  const auto sink = start_sink(options);
  for (std::string order; std::cin >> order;) {
    double timeout_s = 0;
    std::string handle;
    std::cin >> timeout_s >> handle;
    std::cout << pull(*sink, timeout_s, handle) << std::endl;
  }
}

}  // namespace
}  // namespace parvl

int main(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], "source") == 0) {
    parvl::run_source(argv[2], std::stod(argv[3]));
  } else if (argc == 3 && std::strcmp(argv[1], "sink") == 0) {
    parvl::run_sink(std::stod(argv[2]));
  } else {
    return 2;
  }
}
