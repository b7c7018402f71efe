"""What the tests of `parvl bench` share: running it, and a server that does what a test says."""
import http.server
import json
import re
import socket
import subprocess
import threading

from serve_common import PARVL

LIMIT_S = 120  # of anything that is waited for; reached only when a test fails


def command(url, *flags):
    return [PARVL, "bench", "--target", url, *map(str, flags)]


def bench(url, *flags, code=0):
    """The JSON report, and the last line on standard error."""
    done = subprocess.run(command(url, "--json", *flags), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == code, done
    return json.loads(done.stdout), (done.stderr.splitlines() or [""])[-1]


def wait_progress(run, condition):
    """Reads the lines that say how far a running client is until one of them meets the condition."""
    for line in run.stderr:
        counts = {name: int(count) for count, name in re.findall(r"(\d+) (completed|failed)", line)}
        if counts and condition(counts):
            return
    raise AssertionError("the client ended too early")


def text_chunk(text):
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


class Fake(http.server.ThreadingHTTPServer):
    """A server whose chats a test answers: `answer(handler, number, request)`, numbered from 0 as they come."""
    daemon_threads = True
    request_queue_size = 512

    def __init__(self, answer, has_tokenize=True):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.has_tokenize = answer, has_tokenize
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.lock = threading.Lock()
        self.requests = []
        self.connections = 0
        self.under_way = self.most_under_way = 0
        self.arrived = threading.Condition(self.lock)
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.shutdown()
        self.server_close()

    def begin(self, request):
        with self.lock:
            self.requests.append(request)
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            self.arrived.notify_all()
            return len(self.requests) - 1

    def end(self):
        with self.lock:
            self.under_way -= 1

    def wait_requests(self, count):
        with self.lock:
            if not self.arrived.wait_for(lambda: len(self.requests) >= count, LIMIT_S):
                raise AssertionError(f"only {len(self.requests)} of {count} requests came")


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self):
        super().setup()
        with self.server.lock:
            self.server.connections += 1

    def do_GET(self):
        self.reply(200, {"data": [{"id": "fake"}]})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize" and not self.server.has_tokenize:
            return self.reply(404, {"error": {"message": "no such route"}})
        if self.path == "/tokenize":  # three tokens a word and two more
            return self.reply(200, {"count": 3 * len(request["prompt"].split()) + 2})
        self.server.answer(self, self.server.begin(request), request)

    def reply(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def begin_stream(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def send_event(self, data):
        text = f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))
        self.wfile.flush()

    def end_stream(self, prompt_tokens, output_tokens):
        self.server.end()  # before the client can know and send another
        self.send_event({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}})
        self.send_event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()

    def whole_answer(self, request, prompt_tokens=5):
        self.begin_stream()
        for _ in range(request["max_tokens"]):
            self.send_event(text_chunk("x"))
        self.end_stream(prompt_tokens, request["max_tokens"])

    def cut(self):
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *args):
        pass


def answer_all(handler, number, request):
    handler.whole_answer(request)
