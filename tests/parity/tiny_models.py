"""Small random checkpoints of every supported family, and the double-precision reference of transformers."""
import contextlib
import json
import os
import pathlib
import shutil

import torch
import transformers

torch.set_num_threads(1)
VOCAB = 300
IMAGE_TOKEN, VISION_START, VISION_END = 290, 291, 292
START = pathlib.Path(__file__).resolve().parents[2] / "examples" / "easy_vqa" / "start"  # a tokenizer, a template, ...


def _text(**extra):
    base = dict(vocab_size=VOCAB, hidden_size=48, intermediate_size=92, num_hidden_layers=3, num_attention_heads=6,
                num_key_value_heads=2, max_position_embeddings=512, rms_norm_eps=1e-5, initializer_range=0.15)
    base.update(extra)
    return base


def _vl_text(**extra):
    return _text(rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
                 bos_token_id=None, eos_token_id=None, **extra)


def _vl_tokens():
    return dict(image_token_id=IMAGE_TOKEN, video_token_id=293, vision_start_token_id=VISION_START, vision_end_token_id=VISION_END)


def make_directory(name, path, dtype=torch.float32):
    """A whole directory: the family's model with the vocabulary, template and image processor of examples/easy_vqa/start."""
    start = json.loads((START / "config.json").read_text())
    tokens = {key: start[key] for key in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")}
    model = make(name, vocab=start["vocab_size"], tokens=tokens).to(dtype)
    model.save_pretrained(path)
    path = pathlib.Path(path)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(START / file, path / file)
    if name in VISION_FAMILIES:
        processor = json.loads((START / "preprocessor_config.json").read_text())
        processor.update(patch_size=6, min_pixels=24 * 24, max_pixels=60 * 60)
        (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


def make_speaker(name, path, follows):
    """A directory whose model's next token depends on the last one alone: follows {id: next id}."""
    model = make_directory(name, path)
    embed, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert embed is not head, "needs a model that is not tied"
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "layers." in key and "norm" not in key:
                value.zero_()
            elif key.endswith(".norm.weight"):
                value.fill_(1)
        head.zero_()
        for now, then in follows.items():
            head[then] += embed[now] * 40
    model.save_pretrained(path)
    shutil.copy(START / "generation_config.json", pathlib.Path(path) / "generation_config.json")


def byte_symbol(value):
    """The character that stands for a byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    return chr(value) if value in printable else chr(256 + [b for b in range(256) if b not in printable].index(value))


def token_ids():
    """{token text: id} of the directories' tokenizer, special tokens too."""
    tokenizer = json.loads((START / "tokenizer.json").read_text())
    return {**tokenizer["model"]["vocab"], **{t["content"]: t["id"] for t in tokenizer["added_tokens"]}}


def make(name, vocab=VOCAB, tokens=None):
    """The family's model in float32, with weights large enough that logits spread and the image matters."""
    torch.manual_seed(sum(map(ord, name)))
    if name == "llama":
        config = transformers.LlamaConfig(**_text(vocab_size=vocab), tie_word_embeddings=False)
        model = transformers.LlamaForCausalLM(config)
    elif name == "llama31":
        rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64}
        config = transformers.LlamaConfig(**_text(vocab_size=vocab, rope_parameters=rope, head_dim=10), tie_word_embeddings=True)
        model = transformers.LlamaForCausalLM(config)
    elif name == "qwen2":
        config = transformers.Qwen2Config(**_text(vocab_size=vocab), tie_word_embeddings=True)
        model = transformers.Qwen2ForCausalLM(config)
    elif name == "qwen2_vl":
        vision = dict(depth=3, embed_dim=32, hidden_size=48, num_heads=4, mlp_ratio=3, patch_size=6, spatial_merge_size=2,
                      initializer_range=0.15)
        config = transformers.Qwen2VLConfig(text_config=_vl_text(vocab_size=vocab), vision_config=vision, tie_word_embeddings=True,
                                            **(tokens or _vl_tokens()))
        model = transformers.Qwen2VLForConditionalGeneration(config)
    elif name == "qwen2_5_vl":
        vision = dict(depth=4, hidden_size=32, out_hidden_size=48, num_heads=4, intermediate_size=52, patch_size=6,
                      spatial_merge_size=2, window_size=24, fullatt_block_indexes=[1, 3], initializer_range=0.15)
        config = transformers.Qwen2_5_VLConfig(text_config=_vl_text(vocab_size=vocab), vision_config=vision, tie_word_embeddings=False,
                                              **(tokens or _vl_tokens()))
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    else:
        raise ValueError(name)
    with torch.no_grad():
        for key, value in model.named_parameters():
            # Biases and norms start at 0 and 1; move them, or a swapped pair would not show.
            if value.ndim == 1:
                value.add_(torch.randn_like(value) * 0.1)
            if "patch_embed" in key:
                value.mul_(4)
    return model.eval()


FAMILIES = ["llama", "llama31", "qwen2", "qwen2_vl", "qwen2_5_vl"]
VISION_FAMILIES = {"qwen2_vl", "qwen2_5_vl"}


class Sequence:
    """One prompt: ids with the images' tokens in place, and the images' patches."""

    def __init__(self, parts, seed, merge=2, patch_values=3 * 2 * 6 * 6):
        generator = torch.Generator().manual_seed(seed)
        self.ids, self.images = [], []
        for part in parts:
            if isinstance(part, int):
                self.ids += torch.randint(0, 280, (part,), generator=generator).tolist()
            else:
                t, h, w = part
                self.ids.append(VISION_START)
                self.images.append((len(self.ids), part, torch.randn(t * h * w, patch_values, generator=generator)))
                self.ids += [IMAGE_TOKEN] * (t * h * w // merge**2) + [VISION_END]
        self.targets = [0] + torch.randint(0, 2, (len(self.ids) - 1,), generator=generator).tolist()

    def model_inputs(self, dtype):
        ids = torch.tensor([self.ids])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.images:
            inputs["pixel_values"] = torch.cat([pixels for _, _, pixels in self.images]).to(dtype)
            inputs["image_grid_thw"] = torch.tensor([grid for _, grid, _ in self.images])
            inputs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).long()
        return inputs

    def as_json(self, folder, name):
        images = []
        for i, (begin, grid, pixels) in enumerate(self.images):
            path = os.path.join(folder, f"{name}_{i}.f32")
            pixels.numpy().tofile(path)
            images.append({"begin": begin, "grid": list(grid), "pixels": path})
        return {"ids": self.ids, "images": images, "targets": self.targets}


def sequences(family):
    """Odd sizes, two images, an image in the middle, text only."""
    if family not in VISION_FAMILIES:
        return [Sequence([7], 1), Sequence([31], 2), Sequence([1], 3), Sequence([90], 4)]
    return [Sequence([5, (1, 4, 6), 9], 1), Sequence([(1, 10, 6), 3, (1, 2, 2), 12], 2), Sequence([17], 3),
            Sequence([3, (1, 6, 14), 1, (1, 6, 14), 2], 4)]


@contextlib.contextmanager
def promote_only():
    """In double precision, transformers' hard-coded casts to float32 become casts that only widen."""
    original_to, original_float = torch.Tensor.to, torch.Tensor.float
    original_softmax = torch.nn.functional.softmax

    def widen(x, dtype):
        return torch.float64 if x.dtype == torch.float64 and dtype == torch.float32 else dtype

    def to(self, *args, **kwargs):
        args = tuple(widen(self, a) if isinstance(a, torch.dtype) else a for a in args)
        if "dtype" in kwargs:
            kwargs["dtype"] = widen(self, kwargs["dtype"])
        return original_to(self, *args, **kwargs)

    def softmax(x, dim=None, _stacklevel=3, dtype=None):
        return original_softmax(x, dim=dim, dtype=widen(x, dtype))

    torch.Tensor.to = to
    torch.Tensor.float = lambda self, *a, **k: self if self.dtype == torch.float64 else original_float(self, *a, **k)
    torch.nn.functional.softmax = softmax
    try:
        yield
    finally:
        torch.Tensor.to, torch.Tensor.float, torch.nn.functional.softmax = original_to, original_float, original_softmax


def as_double(model):
    """The model in float64 with rotary frequencies computed in float64, eager attention."""
    model = model.double()
    model.set_attn_implementation("eager")
    for module in model.modules():
        if not hasattr(module, "inv_freq"):
            continue
        config = module.config
        heads = getattr(config, "num_heads", None) or config.num_attention_heads
        vision = "vision" in type(config).__name__.lower()
        width = getattr(config, "embed_dim", None) if vision and hasattr(config, "embed_dim") else config.hidden_size
        dim = (getattr(config, "head_dim", None) or width // heads) // (2 if vision else 1)
        theta = config.rope_parameters["rope_theta"]
        exact = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        assert module.inv_freq.shape == exact.shape
        if config.rope_parameters["rope_type"] == "llama3":
            exact = _llama3(exact, config.rope_parameters)
        assert torch.allclose(exact.float(), module.inv_freq.float(), rtol=1e-5)
        module.inv_freq = exact
        module.forward = _double_rotary(module, vision)
    return model


def _llama3(inv_freq, p):
    old = p["original_max_position_embeddings"]
    out = []
    for f in inv_freq.tolist():
        wavelength = 2 * torch.pi / f
        if wavelength > old / p["low_freq_factor"]:
            out.append(f / p["factor"])
        elif wavelength < old / p["high_freq_factor"]:
            out.append(f)
        else:
            smooth = (old / wavelength - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])
            out.append((1 - smooth) * f / p["factor"] + smooth * f)
    return torch.tensor(out, dtype=torch.float64)


def _double_rotary(module, vision):
    def forward(x, position_ids):
        if not vision and hasattr(module, "mrope_section"):
            position_ids = position_ids.expand(3, -1, -1)
        freqs = position_ids[..., None].double() * module.inv_freq
        cos, sin = freqs.cos(), freqs.sin()
        if hasattr(module, "recomposition_frequencies"):
            return module.recomposition_frequencies(cos), module.recomposition_frequencies(sin)
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)

    return forward
