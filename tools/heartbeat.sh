#!/usr/bin/env bash
# heartbeat.sh WHAT COMMAND...: runs the command, passes its lines on, and says that it is still at WHAT when none came for
# almost 5 s. Ends with the command's status.
set -uo pipefail
what=$1
shift
pass_on() {
  local line status start=$SECONDS
  while true; do
    status=0
    IFS= read -r -t 4.7 line || status=$?
    if [ "$status" = 0 ] || [ -n "$line" ]; then
      printf '%s\n' "$line"
    elif [ "$status" -gt 128 ]; then
      echo "$what ... $((SECONDS - start)) s"
    else
      break
    fi
  done
}
"$@" 2>&1 | pass_on
exit "${PIPESTATUS[0]}"
