// A request in the timeline of `parvl serve --trace`. Only serve_request.cc includes it.
#pragma once

#include "parvl/serve/gateway.h"

namespace parvl {

// The row of one request in the timeline, from its arrival to its end.
class RequestRow {
 public:
  RequestRow(const Gateway& gateway, const HttpConnection& connection)
      : timeline_(gateway.options().timeline.get()), clock_(gateway.clock()), connection_(connection) {
    if (timeline_ == nullptr) return;
    track_ = timeline_->new_track();
    timeline_->begin(track_, connection.request_id(), connection.received_s(), connection.log_fields());
  }
  ~RequestRow() {
    if (timeline_ == nullptr) return;
    timeline_->end(track_, connection_.request_id(), clock_.now_seconds(),
                   {{"status", int64_t{connection_.replied_status()}}});
  }
  RequestRow(const RequestRow&) = delete;
  RequestRow& operator=(const RequestRow&) = delete;

  Timeline* timeline() const { return timeline_; }
  TrackId track() const { return track_; }
  // A row of its own for each generation but the first: they run side by side.
  TrackId of_choice(size_t choice) const {
    if (timeline_ == nullptr || choice == 0) return track_;
    const TrackId track = timeline_->new_track();
    timeline_->mark(track, absl::StrCat(connection_.request_id(), " choice ", choice), clock_.now_seconds());
    return track;
  }

 private:
  Timeline* timeline_;
  const Clock& clock_;
  const HttpConnection& connection_;
  TrackId track_;
};

}  // namespace parvl
