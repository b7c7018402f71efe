"""A server under many clients at once: some leave in the middle, every other request ends once, and nothing is left behind."""
# slow
import json
import os
import pathlib
import random
import re
import socket
import threading
import time
import unittest

from serve_common import Server, ask, data_uri, need_model, png

# make soak asks for 10,000.
IMAGE_REQUESTS = int(os.environ.get("PARVL_IMAGE_REQUESTS", "500"))
CLIENTS = 8
AT_ONCE = 300


def figure(server, name):
    """The sum of a metric over its labels."""
    text = server.request("GET", "/metrics")[2]
    values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    assert values, f"/metrics has no {name}"
    return sum(map(float, values))


def resident_kib(server):
    return int(re.search(r"VmRSS:\s+(\d+)", pathlib.Path(f"/proc/{server.process.pid}/status").read_text()).group(1))


def descriptors(server):
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def in_threads(count, work):
    """work(i) for i in range(count) on CLIENTS threads; the first exception is raised again."""
    numbers, lock, failures = iter(range(count)), threading.Lock(), []

    def loop():
        while not failures:
            with lock:
                i = next(numbers, None)
            if i is None:
                return
            try:
                work(i)
            except Exception as failure:  # pylint: disable=broad-except
                failures.append(failure)

    threads = [threading.Thread(target=loop) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def picture(i):
    return data_uri(png(16 + i % 48, 16 + i // 48 % 48, (i % 256, i // 256 % 256, 77)))


class Load(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need_model()

    def test_image_requests_leave_memory_and_descriptors_as_they_were(self):
        with Server("--encoder-cache-bytes", "2000000", "--kv-cache-memory-bytes", "50000000") as server:
            def one(i):
                status, _, body = server.chat(messages=ask("what color is the shape?", picture(i)), max_tokens=3)
                self.assertEqual(status, 200, body)

            in_threads(1500, one)  # caches are full, allocators have settled
            memory, files = resident_kib(server), descriptors(server)
            in_threads(IMAGE_REQUESTS, lambda i: one(1500 + i))
            growth = resident_kib(server) - memory
            print(f"{IMAGE_REQUESTS} image requests: {growth / 1024:.1f} MiB more, {descriptors(server) - files} descriptors more")
            self.assertLess(growth, 32 * 1024)
            self.assertLessEqual(descriptors(server), files + CLIENTS)

    def test_300_at_once_of_whom_some_leave(self):
        """Every request is sent before any answer is read."""
        chance = random.Random(5)
        clients = [Client(i, chance) for i in range(AT_ONCE)]
        sent = threading.Barrier(AT_ONCE)
        with Server("--max-queue", str(AT_ONCE)) as server:
            threads = [threading.Thread(target=client.run, args=(server, sent)) for client in clients]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            begin = time.monotonic()
            while figure(server, "vllm:num_requests_running") + figure(server, "vllm:num_requests_waiting") > 0:
                self.assertLess(time.monotonic() - begin, 1, "requests of clients that left still run")
            seconds = time.monotonic() - begin
            self.assertLess(seconds, 1)
            self.assertEqual(figure(server, "vllm:kv_cache_usage_perc"), 0)
            self.assertEqual([client.failure for client in clients if client.failure], [])
            ends = {end: sum(client.end == end for client in clients) for end in ("whole", "left")}
            print(f"{ends}; nothing runs {seconds:.2f} s after the last of {AT_ONCE} ended")
            self.assertEqual(sum(ends.values()), AT_ONCE)
            self.assertGreater(min(ends.values()), 30)
            # By the server's own count every choice that was begun ended once: those that ran on, and no more than all.
            whole = ends["whole"]
            self.assertTrue(whole <= figure(server, "vllm:request_success_total") <= AT_ONCE)
            self.assertEqual(server.chat(messages=ask("still there?"), max_tokens=2)[0], 200)


class Client:
    """One of many at once: asks for text or images, streamed or not, and reads all of it or leaves on the way."""

    def __init__(self, i, chance):
        self.stream, self.leaves_at = chance.random() < 0.5, None
        if chance.random() < 0.4:  # at once; after some bytes of a stream; while the whole answer is being made
            self.leaves_at = 0 if chance.random() < 0.3 or not self.stream else chance.randrange(1, 1500)
        # Who leaves had asked for so much that it would run on for long if nobody noticed.
        self.tokens = 100_000 if self.leaves_at is not None else chance.randrange(1, 60)
        images = [picture(chance.randrange(5)) for _ in range(chance.randrange(3))]
        self.body = {"messages": ask(f"question {i}", *images), "max_tokens": self.tokens, "ignore_eos": True, "stream": self.stream}
        self.end = self.failure = None

    def run(self, server, sent):
        connection = server.connect(timeout=300)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(self.body))
            sent.wait(120)
            self.end = "whole" if self.leaves_at is None else "left"
            if self.leaves_at == 0:
                connection.sock.shutdown(socket.SHUT_RDWR)
                return
            reply = connection.getresponse()
            assert reply.status == 200, (reply.status, reply.read())
            if self.leaves_at is not None:
                reply.read(self.leaves_at)
                connection.sock.shutdown(socket.SHUT_RDWR)
                return
            self.check_whole(reply.read().decode())
        except Exception as failure:  # pylint: disable=broad-except
            self.failure = repr(failure)
            sent.abort()
        finally:
            connection.close()

    def check_whole(self, text):
        if self.stream:
            assert text.count("data: [DONE]") == 1, text[-500:]
            assert len(re.findall(r'"finish_reason":"length"', text)) == 1, text[-500:]
        else:
            assert json.loads(text)["usage"]["completion_tokens"] == self.tokens, text[-500:]


if __name__ == "__main__":
    unittest.main()
