// The programs `parvl` and `parvl-engine`: reads the command line, runs one command, and turns its status into the exit
// code and the last line on standard error.
#include <absl/strings/numbers.h>
#include <absl/strings/str_join.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "apps/commands.h"
#include "parvl/base/env.h"
#include "parvl/base/memory.h"
#include "parvl/base/signal.h"
#include "parvl/base/text.h"

namespace parvl {
namespace {

void add_commands(CLI::App& app, Context& context) {
#define PARVL_COMMAND(name) add_##name##_command(app, context);
#include "commands.inc"
#undef PARVL_COMMAND
}

// The subcommand that the user got as far as, `parvl model inspect` say.
const CLI::App& innermost(const CLI::App& app) {
  const CLI::App* current = &app;
  while (!current->get_subcommands().empty()) current = current->get_subcommands().front();
  return *current;
}

std::string full_name(const CLI::App& app) {
  return app.get_parent() == nullptr ? app.get_name() : full_name(*app.get_parent()) + " " + app.get_name();
}

// What the user may have meant by an argument nobody knows.
std::string suggestion(const CLI::App& app, const std::string& word) {
  std::vector<std::string> known;
  if (word.rfind("-", 0) == 0) {
    for (const CLI::Option* option : app.get_options()) {
      for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
    }
  } else {
    for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; }))
      known.push_back(sub->get_name());
  }
  return likely_meant(word.substr(0, word.find('=')), known);
}

// One sentence with the fix for a command line that does not parse.
std::string explain(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App& at = innermost(app);
  std::string message = one_line(error.what());
  const std::vector<std::string> extra = app.remaining(true);
  if (!extra.empty()) {  // a misspelt option is the cause of the missing one
    const bool wants_command = at.get_require_subcommand_max() > 0 && extra.front().rfind("-", 0) != 0;
    message = (wants_command ? "unknown command " : "unexpected argument ") + excerpt(extra.front());
    const std::string meant = suggestion(at, extra.front());
    if (!meant.empty()) message += "; did you mean " + meant + "?";
  }
  return message + " (see `" + full_name(at) + " --help`)";
}

int report(int code, const std::string& sentence) {
  std::cout.flush();
  std::fprintf(stderr, PARVL_PROGRAM ": %s\n", one_line(sentence).c_str());
  return code;
}

int run(int argc, char** argv) {
  const RealClock clock;
  Context context{clock, PARVL_VERSION, std::filesystem::read_symlink("/proc/self/exe").parent_path().string(), {}};
  if (const std::string limit = get_env("PARVL_MEMORY_LIMIT"); !limit.empty()) {
    if (!absl::SimpleAtoi(limit, &context.memory_limit_bytes) || context.memory_limit_bytes < 1) {
      return report(2, "PARVL_MEMORY_LIMIT must be a number of bytes, found " + excerpt(limit));
    }
  }
  CLI::App app(PARVL_ABOUT, PARVL_PROGRAM);
  app.set_version_flag("--version", PARVL_PROGRAM " " + context.version);
  app.require_subcommand(0, 1);
  add_commands(app, context);
  absl::Status status;
  try {
    app.parse(argc, argv);
    if (context.selected == nullptr) return report(2, "no command given (see `" PARVL_PROGRAM " --help`)");
    status = context.selected();
  } catch (const CLI::Success& done) {  // --help and --version
    app.exit(done, std::cout, std::cerr);
  } catch (const CLI::ParseError& error) {
    return report(2, explain(app, error));
  }
  if (!status.ok()) return report(exit_code(status), std::string(status.message()));
  std::cout.flush();
  if (std::cout && std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return 0;
  end_if_reader_left(STDOUT_FILENO);  // `parvl ... | head`
  return report(1, "cannot write to standard output");
}

// An exception that left a thread: still one sentence, not a core dump.
[[noreturn]] void on_terminate() {
  try {
    if (std::exception_ptr current = std::current_exception()) std::rethrow_exception(current);
    report(1, "internal error: terminated without a cause");
  } catch (const std::exception& e) {
    report(1, std::string("internal error: ") + e.what());
  } catch (...) {
    report(1, "internal error: an unknown exception");
  }
  std::_Exit(1);
}

}  // namespace
}  // namespace parvl

int main(int argc, char** argv) {
  std::set_terminate(parvl::on_terminate);
  parvl::say_when_interrupted();
  parvl::ignore_broken_pipes();
  parvl::tune_memory();
  try {
    return parvl::run(argc, argv);
  } catch (const std::bad_alloc&) {
    return parvl::report(1, "out of memory");
  } catch (const std::exception& e) {
    const std::string text = e.what();  // libtorch adds a backtrace below the cause
    return parvl::report(1, "internal error: " + text.substr(0, text.find('\n')));
  } catch (...) {
    return parvl::report(1, "internal error: an unknown exception");
  }
}
