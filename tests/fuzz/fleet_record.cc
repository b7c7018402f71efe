// A fleet's record, as a file may hold it: replayed to its end or to a difference, or refused with a good message;
// never a failed check. Seeds are records of fleets that chance drives.
#include "parvl/elastic/fleet_record.h"

#include "parvl/base/rng.h"
#include "tests/fuzz/replay_report.h"

namespace {

using Said = parvl::InstanceEvent::Kind;
using Tell = parvl::RequestEvent::Kind;

std::string random_record(uint64_t seed) {
  parvl::Rng rng(seed);
  parvl::FleetSettings settings;
  settings.pools = {{.name = "e", .instances = 1, .encodes = true, .generates = false},
                    {.name = "l", .instances = 2, .encodes = false, .generates = true}};
  if (seed % 2 == 1) {
    settings.pools[1] = {.name = "p", .encodes = false, .hands_over = true};
    settings.pools.push_back({.name = "d", .encodes = false, .generates = false, .takes_over = true});
  }
  std::string text;
  parvl::RecordedFleet fleet(settings, [&text](std::string_view line) { text += line; });
  double now = 0;
  fleet.start(now);
  for (int64_t turn = 1; turn <= 30; ++turn) {
    now += static_cast<double>(rng.below(8));
    const parvl::InstanceId id{static_cast<int64_t>(rng.below(3))};
    const int64_t epoch = fleet.fleet().instances()[static_cast<size_t>(id.value)].epoch;
    const auto say = [&](Said kind) {
      const parvl::InstanceEvent event = {.kind = kind, .at_s = now, .epoch = epoch, .number = 1, .reason = "why"};
      kind == Said::kLoaded ? fleet.loaded(id, event, {2, 100}) : fleet.instance(id, event);
    };
    switch (rng.below(7)) {
      case 0:
        for (const Said kind : {Said::kHello, Said::kLoaded, Said::kWarmed}) say(kind);
        break;
      case 1:
        say(static_cast<Said>(rng.below(12)));
        break;
      case 2: {
        parvl::FleetRequest request;
        request.shape.items = rng.below(3);
        request.needs = {10, 20};
        request.chain = {rng.below(3), 7};
        request.patches.assign(request.shape.items, 4);
        request.item_key.assign(request.shape.items, rng.below(3));
        fleet.arrive(parvl::RequestId{turn}, request, now);
        break;
      }
      case 3:
      case 4: {
        parvl::RequestEvent event;
        const Tell kinds[] = {Tell::kEncoded,   Tell::kEncodingFailed, Tell::kOutputLost,       Tell::kToken,
                              Tell::kFinished,  Tell::kLeft,           Tell::kGenerationFailed, Tell::kTimeUp,
                              Tell::kPrefilled, Tell::kKvLost};
        event.kind = kinds[rng.below(std::size(kinds))];
        event.instance = id;
        event.item = rng.below(2);
        event.attempt = static_cast<int>(1 + rng.below(2));
        event.index = static_cast<int64_t>(rng.below(2));
        if (rng.below(2) == 0) event.status = absl::UnavailableError("gone");
        fleet.request(parvl::RequestId{static_cast<int64_t>(1 + rng.below(static_cast<uint64_t>(turn)))}, event, now);
        break;
      }
      case 5:
        for (const parvl::StepLane lane : {parvl::StepLane::kBackbone, parvl::StepLane::kEncoder}) {
          if (rng.below(2) == 0) continue;
          fleet.step_began(id, epoch, {lane, static_cast<int64_t>(rng.below(64))}, now);
          fleet.step_ended(id, epoch, {lane, static_cast<int64_t>(rng.below(64)), 0.01}, now);
        }
        fleet.report_free(id, epoch, static_cast<int64_t>(rng.below(64)));
        break;
      default:
        fleet.tick(now);
    }
  }
  return text;
}

// Whether the settings ask for what is not worth the fuzzer's time.
bool too_large(std::string_view record) {
  const std::string_view first = record.substr(0, record.find('\n'));
  size_t digits = 0;
  for (const char c : first) {
    digits = c >= '0' && c <= '9' ? digits + 1 : 0;
    if (digits > 5) return true;
  }
  return false;
}

}  // namespace

std::vector<std::string> fuzz_seeds() { return record_seeds(random_record); }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view record(reinterpret_cast<const char*>(data), size);
  if (!too_large(record)) require_good_report(parvl::replay_fleet(record));
  return 0;
}
