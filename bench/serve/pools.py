#!/usr/bin/env python3
"""Pools against colocated instances at equal hardware: N instances of the CPU, each bound to a core of its own. The same requests to
`parvl serve` with every module in N instances, and with E instances that encode and N - E that generate, of --one and --four that E
which completes most. Prints one JSON object:

goodput       requests/s that meet the SLO, at the best of the offered rates; the SLO is 5 times the TTFT and --tpot-times the TPOT of
              colocated instances that have one request at a time. Rates are shares of what colocated instances complete when they
              are never without work.
isolation     p99 of TTFT and ITL of text requests while requests with images come at --heavy times what colocated instances complete.

Both are told the TPOT of the SLO (slo.tpot_ms), which bounds their steps.

usage: pools.py --model DIR [--build BUILD] [--processes N] [--one E,E] [--four E,E] [--seconds S] [--seed N]

The instances have the first N cores; the server itself and the load have the others, where there are more.
"""
import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading

ROOT = pathlib.Path(__file__).resolve().parents[2]
POOLS = """
cluster:
  gpu_pools:
    encoder-pool: {{device: cpu-class, max_instances: 64}}
    llm-pool:     {{device: cpu-class, max_instances: 64}}
model:
  modules:
    vision_encoder: {{pool: encoder-pool, parallel: data, replicas: {encoders}}}
    llm_backbone:   {{pool: llm-pool, replicas: {others}}}
queues: {{text: {{limit: 100000}}, image: {{limit: 100000}}}}
slo: {{tpot_ms: {tpot_ms}}}
"""
COLOCATED = """
cluster:
  gpu_pools:
    llm-pool: {{device: cpu-class, max_instances: 64}}
model:
  modules:
    vision_encoder: {{pool: llm-pool}}
    llm_backbone:   {{pool: llm-pool, replicas: {processes}}}
queues: {{text: {{limit: 100000}}, image: {{limit: 100000}}}}
slo: {{tpot_ms: {tpot_ms}}}
"""
RATES = (0.7, 0.85, 1.0)
TTFT_TIMES = 5


class Server:
    def __init__(self, args, allocation):
        self.folder = tempfile.TemporaryDirectory()
        path = pathlib.Path(self.folder.name) / "allocation.yaml"
        path.write_text(allocation)
        self.process = subprocess.Popen([args.build / "parvl", "serve", "--model", args.model, "--config", path, "--device-map", "cpu-class=cpu", "--port", "0",
                                         "--kv-cache-memory-bytes", "500000000", "--max-num-batched-tokens", str(args.step_tokens)],
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                        preexec_fn=lambda: os.sched_setaffinity(0, args.cores[args.processes:] or args.cores))
        self.errors = []
        threading.Thread(target=lambda: self.errors.extend(self.process.stderr), daemon=True).start()
        line = self.process.stdout.readline()
        if not (ready := re.match(r"parvl ready (http://\S+)", line)):
            sys.exit(f"parvl serve did not start: {''.join(self.errors[-5:])}")
        self.url = ready.group(1)
        for number, pid in self.instances():
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), {args.cores[number % args.processes]})

    def instances(self):
        children = pathlib.Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = [int(pid) for path in children for pid in path.read_text().split()]
        commands = [(pid, pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")) for pid in pids]
        found = sorted(pid for pid, command in commands if b"worker" in command)
        if not found:
            sys.exit("parvl serve has no instances")
        return enumerate(found)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
        self.folder.cleanup()


class Bench:
    def __init__(self, args):
        self.parvl = args.build / "parvl"
        self.args, self.seed = args, args.seed

    def load(self, url, kind, *flags):
        self.seed += 1  # another seed, so that no cache knows the images
        done = subprocess.run([self.parvl, "bench", "--target", url, "--synthetic", kind, "--seed", str(self.seed), "--json", *map(str, flags)],
                              capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"parvl bench failed: {done.stderr.strip().splitlines()[-1]}")
        return json.loads(done.stdout)

    def rate_of(self, url, kind):
        """Requests/s when it is never without work."""
        return self.load(url, kind, "--concurrency", 4 * self.args.processes, "--requests", 8 * self.args.processes)["requests_per_s"]

    def slo_of(self, kind):
        with Server(self.args, self.colocated(0)) as server:
            alone = self.load(server.url, kind, "--concurrency", 1, "--requests", 6)
        return TTFT_TIMES * alone["ttft_ms"]["p50"], self.args.tpot_times * alone["tpot_ms"]["p50"]

    def colocated(self, tpot_ms):
        return COLOCATED.format(processes=self.args.processes, tpot_ms=tpot_ms)

    def pools(self, encoders, tpot_ms):
        return POOLS.format(encoders=encoders, others=self.args.processes - encoders, tpot_ms=tpot_ms)

    def goodputs(self, url, kind, slo, full):
        out = []
        for share in RATES:
            rate = share * full
            report = self.load(url, kind, "--rate", rate, "--requests", max(20, round(rate * self.args.seconds)),
                               "--slo-ttft-ms", slo[0], "--slo-tpot-ms", slo[1])
            out.append({"rate": round(rate, 3), "goodput": report["goodput_requests_per_s"], "violations": report["violation_rate"],
                        "ttft_p99_ms": report["ttft_ms"]["p99"], "tpot_p99_ms": report["tpot_ms"]["p99"], "failed": report["requests"]["failed"]})
        return out

    def mix(self, kind, encoders):
        slo = self.slo_of(kind)
        with Server(self.args, self.colocated(slo[1])) as server:
            full = self.rate_of(server.url, kind)
            colocated = self.goodputs(server.url, kind, slo, full)
        tried = {}
        for some in encoders:
            with Server(self.args, self.pools(some, slo[1])) as server:
                tried[some] = self.rate_of(server.url, kind)
        chosen = max(tried, key=tried.get)
        with Server(self.args, self.pools(chosen, slo[1])) as server:
            pools = self.goodputs(server.url, kind, slo, full)
        best = [max(one["goodput"] for one in rows) for rows in (pools, colocated)]
        return {"requests": kind, "processes": self.args.processes, "encoders": chosen, "slo_ttft_ms": slo[0], "slo_tpot_ms": slo[1],
                "completed_per_s": {"pools": tried, "colocated": full}, "goodput": {"pools": best[0], "colocated": best[1]},
                "ratio": best[0] / best[1] if best[1] else None, "pools": pools, "colocated": colocated}

    def text_beside(self, url, kind, rate, text, text_rate):
        images = threading.Thread(target=self.load, args=(url, kind, "--rate", rate, "--requests", round(rate * self.args.seconds)))
        images.start()
        report = self.load(url, text, "--rate", text_rate, "--requests", round(text_rate * self.args.seconds))
        images.join()
        return {"ttft_p99_ms": report["ttft_ms"]["p99"], "itl_p99_ms": report["itl_ms"]["p99"], "ttft_p50_ms": report["ttft_ms"]["p50"],
                "itl_p50_ms": report["itl_ms"]["p50"], "requests": report["requests"]}

    def isolation(self, kind, text, encoders):
        slo = self.slo_of(text)
        with Server(self.args, self.colocated(slo[1])) as server:
            rate = self.args.heavy * self.rate_of(server.url, kind)
            text_rate = self.args.text * self.rate_of(server.url, text)
            colocated = self.text_beside(server.url, kind, rate, text, text_rate)
        with Server(self.args, self.pools(encoders, slo[1])) as server:
            pools = self.text_beside(server.url, kind, rate, text, text_rate)
        return {"images": kind, "images_per_s": rate, "text": text, "text_per_s": text_rate, "encoders": encoders, "slo_tpot_ms": slo[1],
                "pools": pools, "colocated": colocated,
                "lower_by": {name: 1 - pools[name] / colocated[name] for name in ("ttft_p99_ms", "itl_p99_ms")}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--processes", type=int, default=12)
    numbers = lambda text: [int(number) for number in text.split(",")]
    parser.add_argument("--one", type=numbers, default=[2, 3], help="encoders to try for requests with one image")
    parser.add_argument("--four", type=numbers, default=[3, 4], help="and with four; the first for isolation")
    parser.add_argument("--seconds", type=float, default=20, help="of each offered rate")
    parser.add_argument("--heavy", type=float, default=0.7)
    parser.add_argument("--text", type=float, default=0.15, help="text requests, as a share of what colocated instances complete of nothing else")
    parser.add_argument("--tpot-times", type=float, default=2, help="SLO: times the TPOT of one request alone")
    parser.add_argument("--step-tokens", type=int, default=256, help="--max-num-batched-tokens of both")
    parser.add_argument("--image", default="448x448")
    parser.add_argument("--parts", default="one,four,isolation")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, args.cores[args.processes:] or args.cores)
    bench, out = Bench(args), {}
    image = args.image
    if "one" in args.parts:
        out["one_image"] = bench.mix(f"images=1x{image},text=32,output=32", args.one)
        print(json.dumps(out["one_image"]), file=sys.stderr, flush=True)
    if "four" in args.parts:
        out["four_images"] = bench.mix(f"images=4x{image},text=32,output=32", args.four)
        print(json.dumps(out["four_images"]), file=sys.stderr, flush=True)
    if "isolation" in args.parts:
        out["isolation"] = bench.isolation(f"images=4x{image},text=32,output=8", "text=64,output=32", args.four[0])
    print(json.dumps(out))


if __name__ == "__main__":
    main()
