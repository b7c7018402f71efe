"""Starting: what does not fit is said before any weight is read, and the phases are told with their times."""
# slow
import fcntl
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import tempfile
import time
import unittest

from serve_common import MODEL, PARVL, Server, ask, need_model


def run(*arguments, limit=None, seconds=120):
    env = dict(os.environ)
    if limit is not None:
        env["PARVL_MEMORY_LIMIT"] = str(limit)
    return subprocess.run([PARVL, *arguments], capture_output=True, text=True, timeout=seconds, env=env)


def last_line(done):
    return done.stderr.strip().splitlines()[-1]


class WhatFits(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need_model()

    def serve(self, *flags, limit):
        return run("serve", "--model", MODEL, "--port", "0", *flags, limit=limit)

    def test_serve_names_what_does_not_fit_and_the_flag(self):
        flags = []
        for _ in range(4):
            done = self.serve(*flags, limit=60 << 20)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertNotIn("parvl ready", done.stdout)
            line = last_line(done)
            self.assertRegex(line, r"weights [\d.]+ MiB \+ KV memory [\d.]+ MiB \+ a step [\d.]+ MiB \+ encoding an image [\d.]+ MiB "
                                   r"\+ encoded images [\d.]+ MiB = [\d.]+ MiB, and 60.0 MiB of the CPU's memory may be used; start with --")
            advice = re.findall(r"(--[a-z-]+) (\d+)", line.split("start with ")[1])
            flags = [word for pair in advice for word in pair]
            os.environ["PARVL_MEMORY_LIMIT"] = str(60 << 20)
            try:
                with Server(*flags) as server:  # what it advised
                    self.assertEqual(server.chat(messages=ask("what color?"), max_tokens=3)[0], 200)
                return
            except AssertionError as error:
                self.assertIn("does not fit", str(error))  # it has more advice
            finally:
                del os.environ["PARVL_MEMORY_LIMIT"]
        self.fail("no advice was enough")

    def test_nothing_helps_when_the_weights_do_not_fit(self):
        for command in (("serve", "--port", "0"), ("generate", "--prompt", "x")):
            done = run(*command, "--model", MODEL, limit=1 << 20)
            self.assertEqual(done.returncode, 2)
            self.assertIn("take a smaller model, or a machine with more memory", last_line(done))

    def test_generate_names_the_flag(self):
        whole = run("generate", "--model", MODEL, "--prompt", "x", "--dtype", "float32", "--max-tokens", "2", limit=14 << 20)
        self.assertEqual(whole.returncode, 2, whole.stderr)
        self.assertTrue(last_line(whole).endswith("ask with --dtype bfloat16"), whole.stderr)
        done = run("generate", "--model", MODEL, "--prompt", "x", "--dtype", "bfloat16", "--max-tokens", "2", limit=14 << 20)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_utilisation_and_limits_are_checked(self):
        for value in ("1.5", "-1", "0"):
            done = self.serve("--gpu-memory-utilization", value, limit=None)
            self.assertEqual(done.returncode, 2)
            self.assertIn("--gpu-memory-utilization must be above 0 and at most 1", last_line(done))
        none = self.serve("--encoder-cache-bytes", "1", limit=None)
        self.assertEqual(none.returncode, 2)
        least = re.search(r"--encoder-cache-bytes 1 holds no image: the smallest takes (\d+) bytes", last_line(none))
        self.assertIsNotNone(least, none.stderr)
        with Server("--encoder-cache-bytes", least[1]):
            pass
        tiny = self.serve("--gpu-memory-utilization", "0.0001", limit=None)
        self.assertEqual(tiny.returncode, 2)
        self.assertIn("does not fit", last_line(tiny))
        self.assertIn("PARVL_MEMORY_LIMIT", last_line(run("--version", limit="much")))

    def test_a_huge_model_is_refused_at_once(self):
        """72 billion parameters in a file without content: nothing of it is read."""
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(MODEL / name, folder)
            hidden, layers, middle, vocab = 8192, 80, 29568, 152064
            config = {"model_type": "qwen2", "hidden_size": hidden, "intermediate_size": middle, "num_hidden_layers": layers,
                      "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": vocab, "max_position_embeddings": 32768,
                      "rms_norm_eps": 1e-6, "eos_token_id": 1, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
            (folder / "config.json").write_text(json.dumps(config))
            shapes = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden], "lm_head.weight": [vocab, hidden]}
            for i in range(layers):
                layer = f"model.layers.{i}."
                shapes |= {layer + "input_layernorm.weight": [hidden], layer + "post_attention_layernorm.weight": [hidden],
                           layer + "self_attn.q_proj.weight": [hidden, hidden], layer + "self_attn.q_proj.bias": [hidden],
                           layer + "self_attn.k_proj.weight": [1024, hidden], layer + "self_attn.k_proj.bias": [1024],
                           layer + "self_attn.v_proj.weight": [1024, hidden], layer + "self_attn.v_proj.bias": [1024],
                           layer + "self_attn.o_proj.weight": [hidden, hidden], layer + "mlp.gate_proj.weight": [middle, hidden],
                           layer + "mlp.up_proj.weight": [middle, hidden], layer + "mlp.down_proj.weight": [hidden, middle]}
            header, offset = {}, 0
            for name, shape in shapes.items():
                size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
                header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
                offset += size
            text = json.dumps(header).encode()
            with open(folder / "model.safetensors", "wb") as file:
                file.write(struct.pack("<Q", len(text)) + text)
                file.truncate(8 + len(text) + offset)
            for command in (("serve", "--port", "0"), ("generate", "--raw", "--prompt", "x")):
                begin = time.monotonic()
                done = run(*command, "--model", folder, limit=64 << 30)
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertRegex(last_line(done), r"weights 135\.\d GiB .* and \d+\.\d GiB of the CPU's memory may be used; take a smaller model")
                self.assertLess(time.monotonic() - begin, 30)


class Phases(unittest.TestCase):
    def test_phases_and_the_one_line(self):
        need_model()
        with Server() as server:
            pass
        errors = "".join(server.errors)  # whole only now: they are read beside the line that says ready
        self.assertRegex(errors, r"ready after [\d.]+ s: files [\d.]+ s, weights [\d.]+ s(?: at [\d.]+ GB/s)?, KV memory [\d.]+ s, warm-up [\d.]+ s, listening [\d.]+ s")
        self.assertRegex(errors, r"KV memory: \d+ tokens in \d+ blocks")

    def test_an_answer_that_nobody_reads_is_no_start(self):
        """The first token waits in front of a full pipe, for longer than a start is silent."""
        need_model()
        reading, writing = os.pipe()
        size = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        os.write(writing, b"x" * size)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as schema:
            schema.write('{"enum": ["red", "green"]}')
            schema.flush()
            command = [PARVL, "generate", "--model", MODEL, "--prompt", "x", "--json-schema", schema.name]
            with subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE, text=True) as process:
                os.close(writing)
                with self.assertRaises(subprocess.TimeoutExpired):
                    process.wait(7)
                with os.fdopen(reading) as pipe:
                    self.assertIn(pipe.read()[size:].strip(), ('"red"', '"green"'))
                errors = process.stderr.read()
                self.assertEqual(process.wait(30), 0, errors)
        self.assertNotIn("starting:", errors)


if __name__ == "__main__":
    unittest.main()
