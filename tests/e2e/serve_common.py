"""What the tests of a running server share: starting and stopping it, images, raw HTTP."""
import base64
import http.client
import json
import os
import pathlib
import select
import signal
import struct
import subprocess
import threading
import time
import zlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
PARVL = pathlib.Path(os.environ.get("PARVL", ROOT / "build" / "parvl"))
MODEL = pathlib.Path(os.environ.get("PARVL_E2E_MODEL", ROOT / "examples" / "easy_vqa" / "model"))


def need_model():
    if not (MODEL / "config.json").exists():
        raise AssertionError(f"{MODEL} is missing; it is committed, so get it again, or set PARVL_E2E_MODEL to a model directory")


def png_of(width, height, rgb):
    """Bytes of a PNG file that shows `rgb`: width x height x 3 bytes, row after row."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    rows = b"".join(b"\0" + rgb[at:at + 3 * width] for at in range(0, 3 * width * height, 3 * width))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) +
            chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def png(width=64, height=64, color=(200, 30, 30)):
    """A picture of one colour, as bytes of a PNG file."""
    return png_of(width, height, bytes(color) * (width * height))


def data_uri(image, mime="image/png"):
    return f"data:{mime};base64," + base64.b64encode(image).decode()


def ask(question, *urls):
    """The messages of one user turn: images first, then the question."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": parts + [{"type": "text", "text": question}]}]


class Server:
    """A `parvl serve` process; a context manager. `url` and `port` once it is ready."""

    def __init__(self, *flags, model=MODEL):
        self.process = subprocess.Popen([PARVL, "serve", "--model", model, "--port", "0", "--served-model-name", "tiny", *flags],
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.errors = []
        self.reader = threading.Thread(target=self._read_errors, daemon=True)
        self.reader.start()
        self.url = self._wait_ready()
        self.port = int(self.url.rsplit(":", 1)[1])

    def _read_errors(self):
        for line in self.process.stderr:
            self.errors.append(line)

    def _wait_ready(self, seconds=120):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if select.select([self.process.stdout], [], [], 0.5)[0]:
                line = self.process.stdout.readline()
                if line.startswith("parvl ready "):
                    self.ready_line = line
                    return line.split()[2]
                if not line:
                    break
        self.process.kill()
        self.process.wait()
        self.reader.join()
        raise AssertionError("the server did not get ready: " + "".join(self.errors))

    def stop(self, seconds=60):
        """SIGTERM; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(seconds)
        self.reader.join()
        self.process.stdout.close()
        self.process.stderr.close()
        return status

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stop()

    def connect(self, timeout=60):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def request(self, method, path, body=None, headers=None):
        """(status, headers, JSON or text) of one request on its own connection."""
        connection = self.connect()
        try:
            data = json.dumps(body) if isinstance(body, (dict, list)) else body
            connection.request(method, path, data, headers or {})
            reply = connection.getresponse()
            text = reply.read().decode()
            return reply.status, dict(reply.getheaders()), json.loads(text) if text.startswith("{") else text
        finally:
            connection.close()

    def chat(self, **fields):
        return self.request("POST", "/v1/chat/completions", fields)

    def events(self, **fields):
        """The data of each event of a streamed chat completion, as read from the wire."""
        connection = self.connect()
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps({"stream": True, **fields}))
            reply = connection.getresponse()
            assert reply.status == 200, (reply.status, reply.read())
            return [line[6:] for line in reply.read().decode().split("\n") if line.startswith("data: ")]
        finally:
            connection.close()
