#!/usr/bin/env python3
"""NVIDIA's load client aiperf, unchanged, against `parvl serve` with the example model: text, one image, four images, streaming.

Installs aiperf into --env the first time (1.2 GB). Ends with status 1 when a request failed or a stream was cut short.

usage: aiperf.py [--build BUILD] [--env FOLDER] [--requests N] [--concurrency N] [--tokens N]
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
VERSION = "0.13.0"
MODEL = ROOT / "examples" / "easy_vqa" / "model"
IMAGES = ROOT / ".deps" / "data" / "easy_vqa" / "data" / "test" / "images"
KINDS = {"text": 0, "one image": 1, "four images": 4}


def install(folder):
    if not (folder / f".ready-{VERSION}").exists():
        print(f"installing aiperf {VERSION} into {folder} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "-q", "--disable-pip-version-check", f"aiperf=={VERSION}"], check=True)
        (folder / f".ready-{VERSION}").touch()
    return folder / "bin" / "aiperf"


def write_requests(path, count, images):
    """One line a request; no picture comes twice in a run."""
    pictures = sorted(IMAGES.glob("*.png"))[:count * max(images, 1)]
    with open(path, "w") as file:
        for i in range(count):
            line = {"text": f"Number {i}: what color is the shape?"}
            mine = [str(p) for p in pictures[i * images:(i + 1) * images]]
            if images == 1:
                line["image"] = mine[0]
            elif images > 1:
                line["images"] = mine
            file.write(json.dumps(line) + "\n")


def run(aiperf, url, folder, images, args):
    requests = folder / f"{images}.jsonl"
    write_requests(requests, args.requests, images)
    command = [aiperf, "profile", "--model", "example", "--url", url, "--endpoint-type", "chat", "--streaming", "--tokenizer", MODEL,
               "--input-file", requests, "--custom-dataset-type", "single_turn", "--request-count", args.requests,
               "--concurrency", args.concurrency, "--artifact-dir", folder / f"out-{images}", "--ui", "none",
               "--extra-inputs", f"min_tokens:{args.tokens}", "--extra-inputs", f"max_completion_tokens:{args.tokens}"]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"aiperf failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return json.loads((folder / f"out-{images}" / "profile_export_aiperf.json").read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build", type=pathlib.Path)
    parser.add_argument("--env", default=ROOT / ".deps" / "aiperf", type=pathlib.Path)
    parser.add_argument("--requests", default=40, type=int)
    parser.add_argument("--concurrency", default=4, type=int)
    parser.add_argument("--tokens", default=16, type=int)
    args = parser.parse_args()
    aiperf = install(args.env)
    server = subprocess.Popen([args.build / "parvl", "serve", "--model", MODEL, "--port", "0", "--served-model-name", "example"],
                              stdout=subprocess.PIPE, text=True)
    bad = 0
    try:
        url = server.stdout.readline().split()[2]
        print(f"{'':12} {'done':>5} {'failed':>6} {'tokens':>6} {'TTFT ms p50':>12} {'p99':>8} {'ITL ms p50':>11} {'p99':>8}")
        with tempfile.TemporaryDirectory() as folder:
            for name, images in KINDS.items():
                report = run(aiperf, url, pathlib.Path(folder), images, args)
                completed = int(report["request_count"]["avg"])
                failed = sum(error["count"] for error in report["error_summary"])
                tokens = int(report["total_usage_completion_tokens"]["avg"])
                bad += failed + (completed != args.requests) + (tokens != args.requests * args.tokens)
                for error in report["error_summary"]:
                    print(f"  {error['count']} failed: {error['error_details']}")
                ttft, itl = report["time_to_first_token"], report["inter_token_latency"]
                print(f"{name:12} {completed:5} {failed:6} {tokens:6} {ttft['p50']:12.1f} {ttft['p99']:8.1f} {itl['p50']:11.2f} {itl['p99']:8.2f}",
                      flush=True)
    finally:
        server.terminate()
        server.wait()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
