// SIGINT and SIGTERM as a flag and a descriptor, so that a loop can save and leave.
#pragma once

namespace parvl {

// While one lives, the first SIGINT or SIGTERM only sets the flag; a second one ends the process at once (exit status
// 128 + signal), for a user who does not want to wait. One at a time in a process; made and destroyed on the main
// thread.
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();  // puts the former handlers back
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  bool requested() const;  // any thread
  int signal() const;      // which one came first; 0: none
  // Readable (poll, epoll) once a signal came; nobody reads it empty, so every waiter sees it.
  int descriptor() const;
};

// Until a StopSignal takes over, SIGINT and SIGTERM end the process with one sentence on standard error; those that
// were held back come through now. One that the process was started to ignore stays ignored. For main().
void say_when_interrupted();

// Writing to a closed pipe or socket becomes an error instead of ending the process.
void ignore_broken_pipes();

// Ends the process as SIGPIPE ends others, quietly, when `descriptor` is a pipe or socket whose reader has left; else
// returns.
void end_if_reader_left(int descriptor);

}  // namespace parvl
