// The subcommands of `parvl`: one file each in this folder, one line each in apps/CMakeLists.txt.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <string>

#include "parvl/base/clock.h"
#include "parvl/base/status.h"

namespace parvl {

// What main() hands to a command. Outlives it.
struct Context {
  const Clock& clock;
  std::string version;
  std::string program_folder;              // of the running executable, absolute
  int64_t memory_limit_bytes = 0;          // to use no more memory of the device than this; 0: what the system says
  std::function<absl::Status()> selected;  // what to run after the command line was read; set by run_with
};

// A command NAME defines, in apps/NAME.cc,
//   void add_NAME_command(CLI::App& app, Context& context)
// which makes its subcommand and options and calls run_with. The status of `body` becomes the exit code (exit_code())
// and its message the last line on standard error; commands print neither themselves.
inline void run_with(CLI::App& subcommand, Context& context, std::function<absl::Status()> body) {
  subcommand.callback([&context, body = std::move(body)] { context.selected = body; });
}

// For options that name a file or folder: an empty one, of a variable that is not set say, would be taken for "/".
inline CLI::Option* named(CLI::Option* option) {
  return option->check([](const std::string& text) { return text.empty() ? "must not be empty" : ""; }, "");
}

#define PARVL_COMMAND(name) void add_##name##_command(CLI::App& app, Context& context);
#include "commands.inc"  // written by apps/CMakeLists.txt: PARVL_COMMAND(generate) ...
#undef PARVL_COMMAND

}  // namespace parvl
