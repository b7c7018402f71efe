// What happened of late: latencies of the last requests, and how busy instances and pools were. Pure; times never go
// back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <utility>
#include <vector>

namespace parvl {

// The last values, each with its time.
class RecentValues {
 public:
  static constexpr size_t kMost = 4096;
  void add(double at_s, double value);
  std::vector<double> since(double from_s) const;  // in ascending order

 private:
  std::deque<std::pair<double, double>> values_;
};

// The value that a share of `sorted`, which is not empty, lies at or below.
double quantile(const std::vector<double>& sorted, double share);

// The share of its time that an instance computes, and that the instances of a pool do together. An instance's time
// counts while it serves: one that starts or has failed could not have computed for anybody.
class BusyShare {
 public:
  struct Reading {
    int64_t instance = 0, epoch = 0;
    size_t pool = 0;
    bool serving = false;
    double busy_s = 0;  // since the start of this epoch
  };

  explicit BusyShare(double window_s) : window_s_(window_s) {}
  void take(double at_s, const std::vector<Reading>& readings);  // every so often, of every instance
  double of_instance(int64_t instance) const;                    // from 0 to 1, over the last window
  double of_pool(size_t pool) const;

 private:
  struct Time {
    double busy_s = 0, serving_s = 0;
  };
  struct Sums {
    double at_s = 0;
    std::map<int64_t, Time> instances;
    std::map<size_t, Time> pools;
  };
  struct Last {
    int64_t epoch = 0;
    double busy_s = 0;
  };
  template <typename Key>
  double share(std::map<Key, Time> Sums::*of, Key key) const;

  const double window_s_;
  std::map<int64_t, Last> last_;
  std::deque<Sums> sums_;  // since the first reading; the oldest is where the window begins
};

}  // namespace parvl
