"""Twenty steps of `parvl train` against a loop of transformers and torch.optim on the same samples in the same order."""
# slow
import contextlib
import math
import pathlib
import tempfile
import unittest

import torch

import tiny_models
import train_reference as common

STEPS, SAMPLES, BATCH, SEED = 20, 14, 6, 9


class Losses(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def schedule(self, kind, step, warmup):
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / (STEPS - 1 - warmup)
        return {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}[kind]

    def reference(self, family, dtype, optimizer, lines, order, kind, warmup, clip):
        images = family.startswith("qwen2_")
        prepare = common.Reference(self.folder, images)
        model = common.reference_model(family, self.folder / "model", dtype)
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        optimizer = optimizer(matrices, others)
        rates = [group["lr"] for group in optimizer.param_groups]
        losses, norms, tokens = [], [], []
        with tiny_models.promote_only() if dtype == torch.float64 else contextlib.nullcontext():
            for step in range(STEPS):
                batch = [prepare.prepare(lines[i], dtype) for i in order[step * BATCH:(step + 1) * BATCH]]
                optimizer.zero_grad()
                loss, count = common.batch_loss(model, batch, dtype)
                loss.backward()
                for p in model.parameters():  # a parameter that no sample reached counts as zero, and decays
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf).item())
                for group, rate in zip(optimizer.param_groups, rates):
                    group["lr"] = rate * self.schedule(kind, step, warmup)
                optimizer.step()
                losses.append(loss.item())
                tokens.append(count)
        return model, losses, norms, tokens

    def compare(self, family, dtype, optimizer, tolerance, *settings, kind="constant", warmup=0, clip=0.0):
        images = family.startswith("qwen2_")
        common.write_directory(self.folder / "model", common.make_model(family))
        lines = common.write_samples(self.folder, SAMPLES, images)
        (self.folder / "recipe.yaml").write_text(f"""
model: model
data: {{train: data.jsonl, micro_batch: 2, global_batch: {BATCH}, shuffle_seed: {SEED}}}
optim: {{schedule: {kind}, warmup_steps: {warmup}, clip_norm: {clip}}}
train: {{steps: {STEPS}, log_every: 1, out: out, device: cpu, dtype: {dtype}}}
""")
        events = common.parvl_train(self.folder / "recipe.yaml", *settings)
        steps = [e for e in events if e["event"] == "step"]
        order = common.sample_order(SAMPLES, SEED, STEPS * BATCH)
        torch_dtype = getattr(torch, dtype)
        model, losses, norms, tokens = self.reference(family, torch_dtype, optimizer, lines, order, kind, warmup, clip)
        self.assertEqual([e["loss_tokens"] for e in steps], tokens)
        self.assertLess(losses[-1], 0.8 * losses[0], "the run learns too little to tell anything")
        for step, (event, loss, norm) in enumerate(zip(steps, losses, norms)):
            self.assertLess(abs(event["loss"] - loss) / loss, tolerance, f"loss of step {step + 1}")
            self.assertLess(abs(event["grad_norm"] - norm) / norm, 100 * tolerance, f"grad norm of step {step + 1}")
        return model

    def test_adamw(self):
        def optimizer(matrices, others):
            groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
            return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)

        settings = ("optim.lr=3e-3", "optim.weight_decay=0.1")
        model = self.compare("qwen2_vl", "float64", optimizer, 1e-9, *settings, kind="cosine", warmup=3, clip=1.0)
        # The written weights are the reference's.
        trained = common.reference_model("qwen2_vl", self.folder / "out" / f"step-{STEPS}", torch.float64)
        for (name, want), (_, got) in zip(model.named_parameters(), trained.named_parameters()):
            self.assertLess((want - got).abs().max().item(), 1e-9, name)
        for family in ("qwen2_5_vl", "llama", "qwen2"):
            with self.subTest(family):
                self.folder = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
                self.compare(family, "float64", optimizer, 1e-9, *settings, kind="linear")

    def test_sgd(self):
        for momentum, lr in ((0.0, 0.1), (0.9, 0.01)):
            with self.subTest(momentum=momentum):
                def optimizer(matrices, others):
                    groups = [{"params": matrices, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}]
                    return torch.optim.SGD(groups, lr=lr, momentum=momentum)

                self.folder = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
                self.compare("qwen2_vl", "float64", optimizer, 1e-9, "optim.name=sgd", f"optim.lr={lr}", "optim.weight_decay=0.02",
                             f"optim.momentum={momentum}", clip=1.0)

    def test_float32(self):
        def adamw(matrices, others):
            return torch.optim.AdamW(matrices + others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0)

        def sgd(matrices, others):
            return torch.optim.SGD(matrices + others, lr=0.02, momentum=0.9)

        self.compare("qwen2_vl", "float32", adamw, 1e-4, clip=1.0)
        self.folder = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
        self.compare("qwen2_5_vl", "float32", sgd, 1e-4, "optim.name=sgd", "optim.lr=0.02", "optim.momentum=0.9", clip=1.0)


if __name__ == "__main__":
    unittest.main()
