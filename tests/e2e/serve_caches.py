"""What may share a cache entry and what never may, by the server's own counts and by the probabilities of the answers."""
import random
import re
import unittest

from serve_common import Server, ask, data_uri, need_model, png, png_of

QUESTION = "what color is the shape?"


class Caches(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need_model()
        cls.server = Server("--dtype", "float32")
        cls.addClassCleanup(cls.server.stop)

    def count(self, name):
        return float(re.search(rf"^vllm:{name}_total{{.*}} (\S+)$", self.server.request("GET", "/metrics")[2], re.MULTILINE).group(1))

    def ask(self, image, **fields):
        """Hits of the encoder cache and of the prefix cache in tokens, prompt tokens, and log-probabilities of the first token."""
        before = [self.count(name) for name in ("mm_cache_hits", "prefix_cache_hits", "mm_cache_queries")]
        status, _, body = self.server.chat(messages=ask(QUESTION, image), max_tokens=1, temperature=0, logprobs=True, top_logprobs=20, **fields)
        self.assertEqual(status, 200, body)
        media, prefix, queries = (self.count(name) - was for name, was in zip(("mm_cache_hits", "prefix_cache_hits", "mm_cache_queries"), before))
        self.assertEqual(prefix, body["usage"]["prompt_tokens_details"]["cached_tokens"])
        top = body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return media, prefix, queries, body["usage"]["prompt_tokens"], [(t["token"], t["logprob"]) for t in top]

    def never_share(self, one, other, **fields):
        """`other` after `one` finds nothing; the same again does, whole or (under another salt) its encoder output alone."""
        salt = f"of {self.id()}"
        first = self.ask(one, cache_salt=salt)
        second = self.ask(other, cache_salt=salt, **fields)
        self.assertEqual(first[:3], (0, 0, 1))
        self.assertEqual(second[:3], (0, 0, 1))
        self.assertNotEqual(first[4], second[4])
        for i, (image, more, told) in enumerate(((one, {}, first), (other, fields, second))):
            again = self.ask(image, cache_salt=salt, **more)
            self.assertGreater(again[1], 0)
            elsewhere = self.ask(image, cache_salt=f"{salt}, elsewhere {i}", **more)
            self.assertEqual(elsewhere[:3], (1, 0, 1))
            for answer in (again, elsewhere):
                self.assertEqual([token for token, _ in answer[4][:3]], [token for token, _ in told[4][:3]])
                for (_, a), (_, b) in zip(answer[4][:3], told[4][:3]):
                    self.assertAlmostEqual(a, b, delta=1e-4)
        return first, second

    def test_equal_pixel_buffers_of_other_shapes(self):
        pixels = random.Random(3).randbytes(30 * 150 * 3)
        tall, wide = (data_uri(png_of(w, h, pixels)) for w, h in ((30, 150), (150, 30)))
        first, second = self.never_share(tall, wide)
        self.assertEqual(first[3], second[3])  # so that the prompts' tokens are the same as well

    def test_equal_text_and_size_with_another_image(self):
        self.never_share(data_uri(png(color=(250, 0, 0))), data_uri(png(color=(0, 0, 250))))

    def test_one_image_at_two_sizes(self):
        image = data_uri(png_of(112, 112, random.Random(4).randbytes(112 * 112 * 3)))
        self.never_share(image, image, mm_processor_kwargs={"max_pixels": 4096})


if __name__ == "__main__":
    unittest.main()
