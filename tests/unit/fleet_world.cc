#include "tests/unit/fleet_world.h"

namespace parvl {

void World::add(InstanceId id, bool can) {
  const std::vector<Order>& orders = processes[id.value].orders;
  const auto last = std::find_if(orders.rbegin(), orders.rend(), [](Order order) {
    return order == Order::kAdd || order == Order::kStart;  // of this process
  });
  if (last != orders.rend() && *last == Order::kAdd) say(id, can ? Said::kAdded : Said::kAddRefused);
}

void World::work(InstanceId id) {
  Process& process = processes[id.value];
  if (!process.encodings.empty()) {
    const auto [request, item, attempt] = *process.encodings.begin();
    process.encodings.erase(process.encodings.begin());
    process.held.emplace(request, item, attempt);
    take(fleet.request(RequestId{request}, {.kind = Tell::kEncoded, .instance = id, .item = item, .attempt = attempt},
                       now));
    return;
  }
  if (process.generations.empty()) return;
  auto& [key, next] = *process.generations.begin();
  const auto [request, attempt] = key;
  const int64_t index = next++;
  if (next == lengths[request]) process.generations.erase(key);
  const bool last = index + 1 == lengths[request];
  const bool hands_over = settings.pools[fleet.fleet().instance(id).pool].hands_over;
  if (hands_over && !last) {
    process.generations.erase(key);
    process.kv.emplace(request, attempt);
  }
  take(fleet.request(RequestId{request}, {.kind = Tell::kToken, .instance = id, .attempt = attempt, .index = index},
                     now));
  if (last) {
    take(fleet.request(RequestId{request}, {.kind = Tell::kFinished, .instance = id, .attempt = attempt}, now));
  } else if (hands_over) {
    take(fleet.request(RequestId{request}, {.kind = Tell::kPrefilled, .instance = id, .attempt = attempt}, now));
  }
}

void World::obey(const RequestOrder& order) {
  const int64_t id = order.request.value;
  const RequestAction& action = order.action;
  Process& process = processes[action.instance.value];
  // Of requests under way a draining one may get more.
  const auto open = [&] {
    const InstanceView one = fleet.fleet().instance(action.instance);
    return one.open || (one.state == State::kDraining && process.orders.back() != Order::kRelease);
  };
  switch (action.kind) {
    case Do::kEncode:
      EXPECT_TRUE(open()) << "work for one that takes none";
      EXPECT_TRUE(process.added ||
                  fleet.fleet().instances()[static_cast<size_t>(action.instance.value)].added != AddedEncoder::kEncodes)
          << "an image for one that has given the encoder back";
      process.encodings.emplace(id, action.item, action.attempt);
      break;
    case Do::kDecode:
      EXPECT_TRUE(std::any_of(processes.begin(), processes.end(), [id](const auto& one) {
        const auto of = one.second.kv.lower_bound({id, 0});
        return of != one.second.kv.end() && of->first == id;
      })) << "nothing to go on from";
      [[fallthrough]];
    case Do::kGenerate:
      EXPECT_TRUE(open()) << "work for one that takes none";
      if (lengths[id] == clients[id].delivered) break;
      process.generations[{id, action.attempt}] = clients[id].delivered;
      break;
    case Do::kDeliver:
      ++clients[id].delivered;
      break;
    case Do::kLetGo:
      process.held.erase({id, action.item, action.attempt});
      break;
    case Do::kLetGoKv:
      EXPECT_EQ(process.kv.erase({id, action.attempt}), 1u) << "once";
      break;
    case Do::kCancelEncoding:
      process.encodings.erase({id, action.item, action.attempt});
      break;
    case Do::kCancelGeneration:
      process.generations.erase({id, action.attempt});
      break;
    case Do::kEnd:
      ++clients[id].ends;
      clients[id].status = action.status;
      break;
    case Do::kPlaceEncoding:
    case Do::kPlaceGeneration:
    case Do::kPlaceDecoding:
      ADD_FAILURE() << "a place that nobody has chosen";
  }
}

void World::arrive(int64_t id, size_t items, int64_t tokens) {
  FleetRequest request;
  request.shape.items = items;
  request.needs = {10, 20};
  request.chain = {1, 2, static_cast<uint64_t>(100 + id)};
  for (size_t i = 0; i < items; ++i) {
    request.patches.push_back(16);
    request.item_key.push_back(i);
  }
  clients[id] = {};
  lengths[id] = tokens;
  take(fleet.arrive(RequestId{id}, request, now));
}

}  // namespace parvl
