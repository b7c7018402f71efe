// Named tensors in order: what passes between the pieces of a model ("hidden"; later DeepStack or cross-attention
// features).
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <utility>
#include <vector>

#include "parvl/base/check.h"

namespace parvl {

class Bundle {
 public:
  Bundle() = default;
  Bundle(std::initializer_list<std::pair<std::string, at::Tensor>> entries) : entries_(entries) {}

  void set(const std::string& name, at::Tensor tensor) {
    for (auto& [key, value] : entries_) {
      if (key == name) {
        value = std::move(tensor);
        return;
      }
    }
    entries_.emplace_back(name, std::move(tensor));
  }
  // An undefined tensor when there is none of that name.
  at::Tensor find(const std::string& name) const {
    for (const auto& [key, value] : entries_) {
      if (key == name) return value;
    }
    return {};
  }
  at::Tensor at(const std::string& name) const {
    at::Tensor tensor = find(name);
    PARVL_CHECK(tensor.defined(), ("a piece was not given the tensor it reads: " + name).c_str());
    return tensor;
  }
  const std::vector<std::pair<std::string, at::Tensor>>& entries() const { return entries_; }
  bool empty() const { return entries_.empty(); }

 private:
  std::vector<std::pair<std::string, at::Tensor>> entries_;
};

}  // namespace parvl
