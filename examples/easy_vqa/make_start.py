#!/usr/bin/env python3
"""Makes examples/easy_vqa/start: configuration, tokenizer, chat template and preprocessor of the example, without weights.

Needs the packages `tokenizers` and `easy-vqa`. The tokenizer is a byte-level BPE trained on the training questions and answers.
usage: make_start.py EASY_VQA_DATA_DIR OUT_DIR
"""
import json
import pathlib
import sys

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
# One token of text a word; the pattern is Qwen2's.
PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or part['type'] == 'image_url' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


def make_tokenizer(data):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    texts = [text for question, answer, _ in json.loads((data / "train" / "questions.json").read_text()) for text in (question, answer)]
    texts += ["system", "user", "assistant", "\n"] * 100
    trainer = trainers.BpeTrainer(vocab_size=384 - len(SPECIAL), special_tokens=[], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def main():
    data, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(data)
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    tokenizer.save(str(out / "tokenizer.json"))

    def write(name, value):
        (out / name).write_text(json.dumps(value, indent=2) + "\n")

    write("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
                                    "model_max_length": 1024, "clean_up_tokenization_spaces": False, "add_prefix_space": False})
    (out / "chat_template.jinja").write_text(TEMPLATE)
    write("preprocessor_config.json", {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor", "patch_size": 4,
        "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 1024, "max_pixels": 65536, "do_resize": True, "do_rescale": True,
        "do_normalize": True, "do_convert_rgb": True, "resample": 3, "rescale_factor": 1 / 255,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]})
    write("generation_config.json", {"do_sample": False, "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]})
    hidden = 192
    write("config.json", {
        "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "torch_dtype": "bfloat16",
        "hidden_size": hidden, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
        "vocab_size": 384, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [6, 9, 9]}, "hidden_act": "silu", "tie_word_embeddings": True,
        "attention_dropout": 0.0, "use_sliding_window": False, "initializer_range": 0.02,
        "bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"],
        "image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"], "vision_end_token_id": ids["<|vision_end|>"],
        "vision_config": {"depth": 4, "embed_dim": hidden, "hidden_size": hidden, "num_heads": 4, "mlp_ratio": 4, "patch_size": 4,
                          "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "hidden_act": "quick_gelu",
                          "model_type": "qwen2_vl"}})


main()
