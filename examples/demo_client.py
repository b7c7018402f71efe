#!/usr/bin/env python3
"""What examples/demo.sh needs in Python's standard library alone: waits for the server, asks it about pictures, reads losses."""
import argparse
import base64
import http.client
import json
import pathlib
import re
import sys
import time
import urllib.parse
import zlib


def alive(pid: int) -> bool:
    """Of the shell's child; one that has ended stays as a zombie until the shell asks for it."""
    try:
        return ") Z " not in pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def wait(pid: int, output: pathlib.Path, errors: pathlib.Path) -> None:
    """Until the ready line is there, showing what the server says meanwhile; a line at least every 4 s."""
    start = last = time.monotonic()
    with errors.open() as said:
        while True:
            for line in said:
                print(f"server: {line}", end="", flush=True)
                last = time.monotonic()
            if "parvl ready" in output.read_text():
                print(output.read_text(), end="", flush=True)
                return
            if not alive(pid):
                sys.exit("demo: the server ended before it was ready:\n" + errors.read_text())
            if time.monotonic() - last > 4:
                last = time.monotonic()
                print(f"waiting for the server ... {last - start:.0f} s", flush=True)
            time.sleep(0.05)  # a file that grows tells nobody; this ends when the server is ready or its process is gone


def pixels(file: bytes) -> list[list[tuple[int, int, int]]]:
    """Rows of an 8-bit RGB PNG without interlacing (what easy-vqa holds)."""
    width, height = (int.from_bytes(file[i:i + 4], "big") for i in (16, 20))
    if file[24:29] not in (b"\x08\x02\x00\x00\x00", b"\x08\x06\x00\x00\x00"):
        return []
    channels, at, packed = (3 if file[25] == 2 else 4), 8, b""
    while at < len(file):
        size, kind = int.from_bytes(file[at:at + 4], "big"), file[at + 4:at + 8]
        packed += file[at + 8:at + 8 + size] if kind == b"IDAT" else b""
        at += size + 12
    raw, stride, before, rows = zlib.decompress(packed), width * channels, bytearray(width * channels), []
    for y in range(height):
        method, row = raw[y * (stride + 1)], bytearray(raw[y * (stride + 1) + 1:(y + 1) * (stride + 1)])
        for x in range(stride):
            a = row[x - channels] if x >= channels else 0
            b, c = before[x], before[x - channels] if x >= channels else 0
            nearest = min((a, b, c), key=lambda v: abs(a + b - c - v))  # the first of equals, as the format asks
            row[x] = (row[x] + (0, a, b, (a + b) // 2, nearest)[method]) & 255
        rows.append([tuple(row[i:i + 3]) for i in range(0, stride, channels)])
        before = row
    return rows


def draw(file: bytes) -> None:
    """The picture in half-size characters, on a terminal."""
    rows = pixels(file)
    if not sys.stdout.isatty() or not rows:
        return
    for top, bottom in zip(rows[::4], rows[2::4]):
        print("  " + "".join("\x1b[38;2;%d;%d;%dm\x1b[48;2;%d;%d;%dm▀" % (t + b) for t, b in zip(top[::2], bottom[::2])) + "\x1b[0m")


def choose(data: pathlib.Path) -> list[tuple[str, str, int]]:
    """A question about a shape, one about a color and one of yes or no, each about another picture."""
    questions = json.loads((data / "questions.json").read_text())
    shapes, yes_no = {"circle", "rectangle", "triangle"}, {"yes", "no"}
    kinds = (lambda answer: answer in shapes, lambda answer: answer not in shapes | yes_no, lambda answer: answer in yes_no)
    return [next(q for q in questions if q[2] == image and kind(q[1])) for kind, image in zip(kinds, (101, 202, 303))]


def stream(url: str, body: dict):
    """(seconds since sending, parsed event) of a streamed chat completion."""
    place = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    start = time.monotonic()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        sys.exit(f"demo: the server answered {reply.status}: {reply.read().decode()}")
    for line in reply:
        if line.startswith(b"data: ") and line != b"data: [DONE]\n":
            yield time.monotonic() - start, json.loads(line[6:])
    connection.close()


def ask_one(url: str, image: bytes, question: str) -> tuple[str, int, dict[str, str], float, float]:
    """(answer, tokens, where each module ran, seconds to the first token, seconds a token after it)."""
    uri = "data:image/png;base64," + base64.b64encode(image).decode()
    content = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": question}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 16, "stream": True,
            "stream_options": {"include_usage": True}}
    answer, first, last, tokens, where = "", None, 0.0, 0, {}
    for seconds, event in stream(url, body):
        if event["choices"]:
            answer += event["choices"][0]["delta"].get("content") or ""
            first = seconds if first is None else first
            last = seconds
        else:
            tokens = event["usage"]["completion_tokens"]
            where.update(event["usage"].get("ran_on", {}))
    return answer, tokens, where, first or last, (last - (first or last)) / max(tokens - 1, 1)


def ask(url: str, data: pathlib.Path) -> None:
    right = 0
    chosen = choose(data)
    for question, wanted, number in chosen:
        file = data / "images" / f"{number}.png"
        image = file.read_bytes()
        answer, tokens, ran_on, ttft, tpot = ask_one(url, image, question)
        where = ", ".join(f"{module} on {place}" for module, place in ran_on.items())
        right += answer.strip() == wanted
        print(f"\nimage        {file}")
        draw(image)
        print(f"question     {question}\nanswer       {answer}\nright answer {wanted}\nran          {where}\n"
              f"TTFT         {ttft * 1000:.1f} ms\nTPOT         {tpot * 1000:.1f} ms over {tokens} tokens", flush=True)
    print(f"\n{right} of {len(chosen)} answers are right\n", flush=True)


def losses(log: pathlib.Path) -> None:
    values = [float(x) for x in re.findall(r"\bloss ([0-9.]+)", log.read_text())]
    if len(values) < 4:
        sys.exit("demo: the training wrote too few lines with a loss")
    share = max(len(values) // 5, 1)
    begin, end = sum(values[:share]) / share, sum(values[-share:]) / share
    print(f"demo: the loss went from {begin:.3f} to {end:.3f}", flush=True)
    if end >= begin:
        sys.exit("demo: the loss did not fall")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("wait")
    command.add_argument("--pid", type=int, required=True)
    command.add_argument("--output", type=pathlib.Path, required=True)
    command.add_argument("--errors", type=pathlib.Path, required=True)
    command = commands.add_parser("ask")
    command.add_argument("--url", required=True)
    command.add_argument("--data", type=pathlib.Path, required=True)
    command = commands.add_parser("losses")
    command.add_argument("--log", type=pathlib.Path, required=True)
    arguments = vars(parser.parse_args())
    {"wait": wait, "ask": ask, "losses": losses}[arguments.pop("command")](**arguments)


if __name__ == "__main__":
    main()
