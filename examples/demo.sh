#!/usr/bin/env bash
# The demo, after the build: serves the example model, asks three questions about real test images over HTTP, then trains the
# same recipe from random weights for a minute so that the loss is seen to fall. DEMO_TRAIN=0 leaves the training out,
# DEMO_TRAIN_SECONDS says how long it takes. Writes nothing but into a temporary folder.
set -euo pipefail
cd "$(dirname "$0")/.."
parvl=${PARVL:-build/parvl}
model=examples/easy_vqa/model
data=.deps/data/easy_vqa/data/test
seconds=${DEMO_TRAIN_SECONDS:-60}

folder=$(mktemp -d)
server=
cleanup() {
  if [ -n "$server" ]; then kill -TERM "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; fi
  rm -rf "$folder"
}
trap cleanup EXIT

for needed in "$parvl" "$model/config.json" "$data/questions.json"; do
  if [ ! -e "$needed" ]; then echo "demo: $needed is missing; run 'make build' first" >&2; exit 1; fi
done

# The vision encoder and the LLM in processes of their own.
pools=(--config examples/pools.yaml --device-map gpu-24gb=cpu,gpu-40gb=cpu)
echo "demo: starting $parvl serve --model $model ${pools[*]}"
"$parvl" serve --model "$model" "${pools[@]}" --port 0 --served-model-name easy-vqa >"$folder/server.out" 2>"$folder/server.err" &
server=$!
python3 examples/demo_client.py wait --pid "$server" --output "$folder/server.out" --errors "$folder/server.err"
url=$(sed -n 's/^parvl ready \([^ ]*\).*/\1/p' "$folder/server.out")
python3 examples/demo_client.py ask --url "$url" --data "$data"

echo "demo: stopping the server"
kill -TERM "$server"
status=0
wait "$server" || status=$?
server=
if [ "$status" != 0 ]; then
  cat "$folder/server.err" >&2
  echo "demo: the server ended with status $status instead of 0" >&2
  exit 1
fi

if [ "${DEMO_TRAIN:-1}" = 0 ]; then
  echo "demo: done"
  exit 0
fi
echo "demo: training examples/easy_vqa/recipe.yaml from random weights for $seconds s (DEMO_TRAIN=0 leaves this out)"
# A signal after the time is up lets it save and leave with status 0. A minute on a few cores is too short for the recipe's
# batches of 128 and its warm-up.
train=(timeout --foreground --preserve-status -s TERM "$seconds" "$parvl" train --config examples/easy_vqa/recipe.yaml
  --set "train.out=$folder/out" --set train.dtype=float32 --set train.steps=300 --set train.log_every=1 --set train.checkpoint_every=0 --set optim.warmup_steps=10
  --set data.micro_batch=8 --set data.global_batch=8
  --set optim.schedule=constant --set data.eval=)
if [ -t 1 ]; then
  "${train[@]}"
else
  tools/heartbeat.sh "demo: training" "${train[@]}" | tee "$folder/train.log"
  python3 examples/demo_client.py losses --log "$folder/train.log"
fi
echo "demo: done"
