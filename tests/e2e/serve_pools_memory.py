"""What lies in whose memory: weights only where their module is, pixels never in the gateway's."""
# slow
import json
import mmap
import os
import struct
import unittest

from pools_common import LONG, POOLS, SMALL, Answer, Pools, Waiting
from serve_common import MODEL, ask, data_uri, need_model, png

ONE_EACH = POOLS.replace("replicas: 2", "replicas: 1").replace("replicas: 3", "replicas: 1")
MARK_VALUES = 16


def weights_of(prefix):
    """By the names of some matrices of the checkpoint that begin so: 64 bytes of a row in the middle as float32, and the 32 bytes of the file."""
    with open(MODEL / "model.safetensors", "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        length = struct.unpack("<Q", data[:8])[0]
        marks = {}
        for name, tensor in json.loads(data[8:8 + length]).items():
            if not name.startswith(prefix) or len(tensor["shape"]) != 2:
                continue
            assert tensor["dtype"] == "BF16", tensor
            rows, columns = tensor["shape"]
            at = 8 + length + tensor["data_offsets"][0] + 2 * columns * (rows // 2)
            raw = data[at:at + 2 * MARK_VALUES]
            marks[name] = (b"".join(b"\0\0" + raw[i:i + 2] for i in range(0, len(raw), 2)), raw)
        return dict(list(marks.items())[::len(marks) // 5])


def memory_of(pid):
    """What the process can read, piece by piece, but for what the kernel lends it."""
    with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
        ranges = [line.split() for line in maps]
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    try:
        for entry in ranges:
            begin, end = (int(side, 16) for side in entry[0].split("-"))
            if "r" not in entry[1] or (len(entry) > 5 and entry[5].startswith("[v")):
                continue
            tail = b""
            for at in range(begin, end, 16 << 20):
                try:
                    piece = tail + os.pread(memory, min(16 << 20, end - at), at)
                except OSError:
                    break  # it is gone by now, or belongs to a device
                yield piece
                tail = piece[-4 * MARK_VALUES:]
    finally:
        os.close(memory)


def found_in(pid, marks):
    """The names whose marks are in the process's memory, as float32 or as the file has them."""
    found = set()
    for piece in memory_of(pid):
        found |= {name for name, forms in marks.items() if any(form in piece for form in forms)}
    return found


class Memory(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need_model()
        cls.server = Pools(ONE_EACH, *SMALL)
        cls.addClassCleanup(cls.server.stop)

    def pid_in(self, pool):
        return next(pid for of, pid in self.server.instances().values() if of == pool)

    def test_weights_are_only_where_their_module_is(self):
        self.assertTrue(Answer(self.server, ask("what is it?", data_uri(png())), **LONG).read_all().done)
        encoder, llm = weights_of("visual.blocks."), weights_of("model.layers.")
        self.assertTrue(len(encoder) > 4 and len(llm) > 4)
        try:
            self.assertEqual(found_in(self.pid_in("encoder-pool"), {**encoder, **llm}), set(encoder))
            self.assertEqual(found_in(self.pid_in("llm-pool"), {**encoder, **llm}), set(llm))
            self.assertEqual(found_in(self.server.process.pid, {**encoder, **llm}), set())
        except PermissionError:
            self.skipTest("the memory of another process cannot be read here (ptrace is not allowed)")

    def shared_memory(self):
        """Bytes of the gateway's mappings of memory without a name, and those of them that it has ever touched."""
        size = resident = 0
        with open(f"/proc/{self.server.process.pid}/smaps", encoding="utf-8") as file:
            inside = False
            for line in file:
                words = line.split()
                if "-" in words[0] and len(words[1]) == 4:
                    inside = "/memfd:" in line
                elif inside and words[0] == "Size:":
                    size += 1024 * int(words[1])
                elif inside and words[0] == "Rss:":
                    resident += 1024 * int(words[1])
        return size, resident

    def test_pixels_do_not_pass_through_the_gateway(self):
        picture_bytes = 240 * 240 * 3 * 2 * 4  # each pixel three times two float32, since a patch is a pair of equal frames
        answers = [Waiting(self.server, ask(f"what is in number {i}?", data_uri(png(240, 240, (i, 7, 7)))), **{**LONG, "max_tokens": 100})
                   for i in range(6)]
        for answer in answers:
            self.assertTrue(answer.result().done)
        size, resident = self.shared_memory()
        self.assertGreaterEqual(size, 2 * picture_bytes, "they lay there, as many as were prepared at once")
        self.assertEqual(resident, 0, "the gateway has looked at them")


if __name__ == "__main__":
    unittest.main()
