"""A server under many clients at once: some leave in the middle, every other request ends once, and nothing is left behind."""
# slow
import http.client
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

    def test_clients_that_leave(self):
        with Server("--max-queue", "400", "--max-num-seqs", "16") as server:
            chance, lock = random.Random(5), threading.Lock()
            ends = {"whole": 0, "left": 0}

            def one(i):
                with lock:
                    images, stream, leaves = chance.randrange(3), chance.random() < 0.5, chance.random() < 0.4
                    tokens, after = chance.randrange(1, 60), chance.randrange(0, 2000)
                body = {"messages": ask(f"question {i}", *[picture(chance.randrange(5)) for _ in range(images)]),
                        "max_tokens": tokens, "ignore_eos": True, "stream": stream}
                connection = server.connect()
                connection.request("POST", "/v1/chat/completions", json.dumps(body))
                if leaves and after < 500:  # without waiting for anything
                    connection.sock.shutdown(socket.SHUT_RDWR)
                    connection.close()
                    return self.count(ends, lock, "left")
                reply = connection.getresponse()
                self.assertEqual(reply.status, 200)
                if leaves and stream:
                    reply.read(after)
                    connection.sock.shutdown(socket.SHUT_RDWR)
                    connection.close()
                    return self.count(ends, lock, "left")
                text = reply.read().decode()
                connection.close()
                if stream:
                    self.assertEqual(text.count("data: [DONE]"), 1)
                    self.assertEqual(len(re.findall(r'"finish_reason":"length"', text)), 1, text[-500:])
                else:
                    self.assertEqual(json.loads(text)["usage"]["completion_tokens"], tokens)
                self.count(ends, lock, "whole")

            in_threads(300, one)
            self.assertEqual(sum(ends.values()), 300)
            self.assertGreater(min(ends.values()), 30)
            # Those who left are noticed within moments; the limit only keeps the test from hanging.
            begin = time.monotonic()
            while figure(server, "vllm:num_requests_running") + figure(server, "vllm:num_requests_waiting") > 0:
                self.assertLess(time.monotonic() - begin, 30, "requests of clients that left still run")
            print(f"{ends}; nothing runs {time.monotonic() - begin:.2f} s after the last answer")
            self.assertEqual(figure(server, "vllm:kv_cache_usage_perc"), 0)
            self.assertEqual(server.chat(messages=ask("still there?"), max_tokens=2)[0], 200)

    @staticmethod
    def count(ends, lock, how):
        with lock:
            ends[how] += 1


if __name__ == "__main__":
    unittest.main()
