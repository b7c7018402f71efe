"""Transfers over TCP between two network namespaces, across a line that loses and delays packets: veth with the kernel's netem where
it has that, and else (and always once) a line of our own between two TUN devices, whose losses come from a seed."""
import ctypes
import fcntl
import heapq
import os
import pathlib
import random
import re
import select
import struct
import subprocess
import threading
import time
import unittest

BUILD = pathlib.Path(os.environ.get("PARVL_BUILD", "build"))
PROBE = BUILD / "probes" / "transfer_probe"
CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN_NO_PI = 0x0001 | 0x1000
MTU = 9000
SIDES = ("10.77.0.1", "10.77.0.2")
LIBC = ctypes.CDLL(None, use_errno=True)


def check_call(result):
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Namespace:
    """A network of its own, entered by this thread for as long as the `with` lasts."""

    def __init__(self):
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            check_call(LIBC.unshare(CLONE_NEWNET))
            self.fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
            check_call(LIBC.setns(home, CLONE_NEWNET))
        finally:
            os.close(home)

    def __enter__(self):
        self.home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        check_call(LIBC.setns(self.fd, CLONE_NEWNET))

    def __exit__(self, *_):
        check_call(LIBC.setns(self.home, CLONE_NEWNET))
        os.close(self.home)

    def close(self):
        os.close(self.fd)


class Line(threading.Thread):
    """Carries packets between two descriptors, each after a delay, unless it is lost."""

    def __init__(self, ends, loss, delay_s, seed):
        super().__init__(daemon=True)
        self.ends, self.loss, self.delay_s, self.random = ends, loss, delay_s, random.Random(seed)
        self.carried = self.lost = 0
        self.stopping = False
        self.start()

    def run(self):
        other, queue, order = {self.ends[0]: self.ends[1], self.ends[1]: self.ends[0]}, [], 0
        while not self.stopping:
            wait_s = 0.05 if not queue else max(0.0, min(0.05, queue[0][0] - time.monotonic()))
            for end in select.select(self.ends, [], [], wait_s)[0]:
                packet = os.read(end, MTU + 100)
                if self.random.random() < self.loss:
                    self.lost += 1
                else:
                    order += 1
                    heapq.heappush(queue, (time.monotonic() + self.delay_s, order, other[end], packet))
            while queue and queue[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(queue)
                os.write(to, packet)
                self.carried += 1

    def stop(self):
        self.stopping = True
        self.join()


class Probe:
    def __init__(self, namespace, *words):
        with namespace:
            self.process = subprocess.Popen([PROBE, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def open_tun(namespace, address):
    with namespace:
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", b"line0", IFF_TUN_NO_PI))
        ip("address", "add", f"{address}/24", "dev", "line0")
        ip("link", "set", "line0", "mtu", str(MTU), "up")
    return end


class TransferNamespaces(unittest.TestCase):
    def setUp(self):
        try:
            self.sides = [Namespace() for _ in SIDES]
        except OSError as error:
            self.skipTest(f"this process may not make network namespaces: {error.strerror}")
        for side in self.sides:
            self.addCleanup(side.close)

    def tun_line(self, loss, delay_s):
        try:
            ends = [open_tun(side, address) for side, address in zip(self.sides, SIDES)]
        except OSError as error:
            self.skipTest(f"no TUN devices here: {error.strerror}")
        line = Line(ends, loss, delay_s, seed=5)
        self.addCleanup(lambda: (line.stop(), [os.close(end) for end in ends]))
        return line

    def probes(self, silence_s=5):
        source = Probe(self.sides[0], "source", f"{SIDES[0]}:0", str(silence_s))
        self.addCleanup(source.close)
        sink = Probe(self.sides[1], "sink", str(silence_s))
        self.addCleanup(sink.close)
        return source, sink

    def pull_some(self, items, size):
        source, sink = self.probes()
        for item in range(1, items + 1):
            handle = source.ask(f"publish {size}")
            # One machine, yet two networks: shared memory's socket is not reached from there.
            self.assertEqual(sink.ask(f"pull 60 {handle}"), "tcp")
            self.assertEqual(source.ask(f"drop {item}"), "1")
        self.wait_until_free(source)

    def wait_until_free(self, source):
        end = time.monotonic() + 20
        while source.ask("used") != "0":
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)

    def test_loss_and_delay(self):
        line = self.tun_line(loss=0.03, delay_s=0.005)
        self.pull_some(items=4, size=2_000_000)
        self.assertGreater(line.lost, 10)
        print(f"{line.carried} packets carried, {line.lost} lost")

    def test_kernel_loss_and_delay(self):
        there = Probe(self.sides[1], "sink", "5")  # a process by which ip finds the other network
        self.addCleanup(there.close)
        with self.sides[0]:
            done = subprocess.run(["ip", "link", "add", "line0", "type", "veth", "peer", "name", "line1", "netns", str(there.process.pid)],
                                  capture_output=True, text=True)
        if done.returncode != 0:
            self.skipTest(f"this kernel has no veth: {done.stderr.strip()}")
        for side, address, device in zip(self.sides, SIDES, ("line0", "line1")):
            with side:
                ip("address", "add", f"{address}/24", "dev", device)
                ip("link", "set", device, "up")
                done = subprocess.run(["tc", "qdisc", "add", "dev", device, "root", "netem", "delay", "5ms", "loss", "3%"],
                                      capture_output=True, text=True)
            if done.returncode != 0:
                self.skipTest(f"this kernel has no netem: {done.stderr.strip()}")
        self.pull_some(items=4, size=2_000_000)

    def test_a_line_that_is_cut(self):
        line = self.tun_line(loss=0, delay_s=0.005)
        source, sink = self.probes(silence_s=1)
        handle = source.ask("publish 20000000")
        threading.Timer(0.15, lambda: setattr(line, "loss", 1)).start()
        start = time.monotonic()
        self.assertRegex(sink.ask(f"pull 60 {handle}"), "UNAVAILABLE.*silent")
        self.assertLess(time.monotonic() - start, 10)
        # The sender gives up as well, so the memory of what it drops is free.
        self.assertEqual(source.ask("drop 1"), "1")
        self.wait_until_free(source)
        line.loss = 0
        handle = source.ask("publish 1000000")
        self.assertEqual(sink.ask(f"pull 60 {handle}"), "tcp")
        self.assertRegex(sink.ask(f"pull 60 {handle[:-8]}"), re.compile("INVALID"))


if __name__ == "__main__":
    unittest.main()
