#!/usr/bin/env python3
"""What open streams cost a server: starts `parvl serve`, opens streams until all have had a piece of text and none has ended, and
compares the server's memory (with its media workers) to that of the idle process. Prints one JSON object; ends with status 1 when
that is over --limit-mb.

usage: open_streams.py [--build BUILD] [--model DIR] [--streams N] [--running N] [--tokens N] [--limit-mb MB]
"""
import argparse
import asyncio
import json
import pathlib
import re
import resource
import subprocess
import sys
import time
import urllib.request

KV_BYTES = 4_000_000_000  # taken from the system only where tokens were written
ROOT = pathlib.Path(__file__).resolve().parents[2]


def resident(pid):
    """Bytes of the process and of those it started."""
    total, todo = 0, [pid]
    while todo:
        one = todo.pop()
        status = pathlib.Path(f"/proc/{one}/status").read_text()
        total += 1024 * int(re.search(r"VmRSS:\s+(\d+)", status).group(1))
        for children in pathlib.Path(f"/proc/{one}/task").glob("*/children"):
            todo += map(int, children.read_text().split())
    return total


def kv_usage(url):
    """Share of the KV memory that sequences hold."""
    text = urllib.request.urlopen(url + "/metrics").read().decode()
    return float(re.search(r"^parvl_kv_cache_usage_perc{.*} (\S+)$", text, re.MULTILINE).group(1))


class Stream:
    """One answer that is still being told: `text` when a piece of it has come, `ended` when the server closed it."""

    def __init__(self, number, tokens):
        body = json.dumps({"messages": [{"role": "user", "content": f"Stream {number}"}], "stream": True,
                           "ignore_eos": True, "max_tokens": tokens}).encode()
        self.request = (b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" +
                        f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.text, self.ended, self.wrong = asyncio.Event(), False, ""

    async def run(self, host, port):
        writer = None
        try:
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(self.request)
            status = await reader.readline()
            if b" 200 " not in status:
                self.wrong = (status + await reader.read(1000)).decode()
            while not self.wrong and (line := await reader.readline()):
                if line.startswith(b"data: [DONE]"):
                    self.ended = True
                if re.search(rb'"content":"[^"]', line):
                    self.text.set()
            if not self.ended:
                self.wrong = self.wrong or "the connection ended"
        except OSError as error:
            self.wrong = str(error)
        finally:
            self.text.set()
            if writer:
                writer.close()


async def measure(pid, url, args):
    """Memory idle and with every stream open and telling (of it: what the tokens' keys and values take, which is the model's)."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    idle, start = resident(pid), time.monotonic()
    streams = [Stream(i, args.tokens) for i in range(args.streams)]
    tasks = [asyncio.create_task(stream.run(host, int(port))) for stream in streams]
    await asyncio.gather(*(stream.text.wait() for stream in streams))
    report = {"streams": args.streams, "running_at_once": args.running, "seconds_until_all_had_text": time.monotonic() - start,
              "idle_mb": idle / 1e6, "above_idle_mb": (resident(pid) - idle) / 1e6, "of_it_kv_mb": kv_usage(url) * KV_BYTES / 1e6}
    wrong = [stream.wrong for stream in streams if stream.wrong]
    ended = sum(stream.ended for stream in streams)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if wrong or ended:
        sys.exit(f"open_streams: {len(wrong)} streams failed and {ended} ended before all were open: {wrong[:1]}")
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build", type=pathlib.Path)
    parser.add_argument("--model", default=ROOT / "examples" / "easy_vqa" / "model", type=pathlib.Path)
    parser.add_argument("--streams", default=1000, type=int)
    parser.add_argument("--running", type=int, help="of them computed at once (default: all)")
    parser.add_argument("--tokens", default=1000, type=int, help="that each asks for; enough that none ends before the last begins")
    parser.add_argument("--limit-mb", default=200, type=float)
    args = parser.parse_args()
    args.running = args.running or args.streams
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    flags = {"model": args.model, "port": 0, "max-num-seqs": args.running, "max-queue": args.streams,
             "max-connections": args.streams + 24, "kv-cache-memory-bytes": KV_BYTES}
    server = subprocess.Popen([args.build / "parvl", "serve", *(str(part) for flag, value in flags.items() for part in (f"--{flag}", value))],
                              stdout=subprocess.PIPE, text=True)
    try:
        report = asyncio.run(measure(server.pid, server.stdout.readline().split()[2], args))
    finally:
        server.terminate()
        server.wait()
    print(json.dumps({key: round(value, 1) for key, value in report.items()}))
    return 1 if report["above_idle_mb"] > args.limit_mb else 0


if __name__ == "__main__":
    sys.exit(main())
