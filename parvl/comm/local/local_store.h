// A store among threads of one process.
#pragma once

#include <memory>

#include "parvl/comm/run_store.h"

namespace parvl {

// What all ends of one store share.
struct LocalStoreState;
std::shared_ptr<LocalStoreState> make_local_store_state();
std::unique_ptr<Store> make_local_store(std::shared_ptr<LocalStoreState> state);

}  // namespace parvl
