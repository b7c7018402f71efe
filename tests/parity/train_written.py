"""What `parvl train` writes: transformers loads it with equal logits, `parvl generate` answers from it, training goes on from it,
and TensorBoard reads its losses."""
# slow
import json
import pathlib
import subprocess
import tempfile
import unittest

import torch
from tensorboard.backend.event_processing import event_accumulator

import train_reference as reference


class Written(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def recipe(self, family, dtype, steps):
        reference.write_directory(self.folder / "model", reference.make_model(family))
        lines = reference.write_samples(self.folder, 6, family.startswith("qwen2_"))
        (self.folder / "recipe.yaml").write_text(f"""
model: model
data: {{train: data.jsonl, micro_batch: 3, global_batch: 6}}
optim: {{lr: 0.005, clip_norm: 1}}
train: {{steps: {steps}, log_every: 1, out: out, device: cpu, dtype: {dtype}}}
""")
        return lines

    def generate(self, checkpoint, prompt, *images):
        command = [reference.PARVL, "generate", "--json", "--model", checkpoint, "--prompt", prompt, "--temperature", "0", "--max-tokens", "8"]
        for image in images:
            command += ["--image", image]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    @torch.no_grad()
    def test_loads_answers_and_trains_on(self):
        for family, dtype in (("qwen2_vl", "float32"), ("qwen2_vl", "bfloat16"), ("qwen2_5_vl", "float32"), ("llama", "float64")):
            with self.subTest(family=family, dtype=dtype):
                self.folder = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
                lines = self.recipe(family, dtype, 60)
                events = reference.parvl_train(self.folder / "recipe.yaml")
                losses = [e["loss"] for e in events if e["event"] == "step"]
                self.assertLess(losses[-1], 0.2 * losses[0])
                checkpoint = self.folder / "out" / "step-60"
                self.check_generation(family, dtype, checkpoint, lines[0])
                self.check_training_on(family, dtype, checkpoint, lines, losses)

    def check_generation(self, family, dtype, checkpoint, line):
        kind = type(reference.make_model(family))
        model, report = kind.from_pretrained(checkpoint, dtype="auto", output_loading_info=True)
        self.assertFalse(any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), report)
        self.assertEqual(model.dtype, getattr(torch, dtype))
        # The tokens of `parvl generate`, forced through transformers, have the log-probabilities that it gave.
        images = [self.folder / p["image"] for p in line["messages"][0]["content"] if p["type"] == "image"]
        question = "what is the color of 0?"
        answer = self.generate(checkpoint, question, *images)
        content = [{"type": "image", "image": p.name} for p in images] + [{"type": "text", "text": question}]
        prepare = reference.Reference(self.folder, bool(images))
        inputs, _ = prepare.prepare({"messages": [{"role": "user", "content": content}]}, model.dtype)
        opening = prepare.tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
        ids = inputs["input_ids"][0].tolist() + opening
        self.assertEqual(answer["prompt_tokens"], len(ids))
        inputs["input_ids"] = torch.tensor([ids + answer["token_ids"]])
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if images:
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == 373).long()
        model.set_attn_implementation("eager")
        logits = model(**inputs).logits[0, len(ids) - 1:-1].float()
        want = logits.log_softmax(-1)[range(len(answer["token_ids"])), answer["token_ids"]]
        got = torch.tensor([entry["logprob"] for entry in answer["logprobs"]])
        self.assertLess((want - got).abs().max().item(), 0.1 if dtype == "bfloat16" else 1e-4)
        self.assertGreater(len(answer["token_ids"]), 1)
        if family == "llama":  # learned by heart
            self.assertEqual(answer["text"].split()[0], "a")

    def check_training_on(self, family, dtype, checkpoint, lines, losses):
        """`model: CHECKPOINT` in a new folder starts at step 1 with the loss that transformers finds there."""
        events = reference.parvl_train(self.folder / "recipe.yaml", f"model={checkpoint}", "train.out=on", "train.steps=1", "optim.lr=0")
        first = events[0]["loss"]
        self.assertEqual(events[0]["step"], 1)
        torch_dtype = torch.float64 if dtype == "float64" else torch.float32
        model = reference.reference_model(family, checkpoint, torch_dtype)
        prepare = reference.Reference(self.folder, family.startswith("qwen2_"))
        want, _ = reference.batch_loss(model, [prepare.prepare(line, torch_dtype) for line in lines], torch_dtype)
        self.assertLess(abs(first - want.item()) / want.item(), {"float32": 1e-4, "bfloat16": 0.2, "float64": 1e-5}[dtype])
        self.assertLess(first, losses[0] / 2)

    def test_tensorboard(self):
        self.recipe("qwen2_vl", "float32", 7)
        events = reference.parvl_train(self.folder / "recipe.yaml", "train.log_every=3", "data.eval=data.jsonl")
        events += reference.parvl_train(self.folder / "recipe.yaml", "train.log_every=3", "train.steps=12")
        reader = event_accumulator.EventAccumulator(str(self.folder / "out"), size_guidance={event_accumulator.SCALARS: 0})
        reader.Reload()
        steps = [e for e in events if e["event"] == "step"]
        self.assertEqual([e["step"] for e in steps], [3, 6, 7, 9, 12])
        for tag in ("loss", "grad_norm", "lr", "tokens_per_second", "memory_bytes"):
            scalars = {e.step: e.value for e in reader.Scalars(f"train/{tag}")}
            self.assertEqual(sorted(scalars), [3, 6, 7, 9, 12])
            for event in steps:
                self.assertAlmostEqual(scalars[event["step"]] / event[tag], 1, places=6)
        evaluated = next(e for e in events if e["event"] == "eval")
        self.assertAlmostEqual(reader.Scalars("eval/loss")[0].value, evaluated["loss"], places=5)
        self.assertEqual(reader.Scalars("eval/accuracy")[0].step, 7)


if __name__ == "__main__":
    unittest.main()
