"""Builds realistic tokenizers and chat templates: the pipelines of Qwen2-VL and Llama 3, trained on text that is at hand."""
import json
import pathlib
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

DATA = pathlib.Path(__file__).resolve().parents[1] / "data" / "media"

QWEN_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
                r"|\s+(?!\S)|\s+")
LLAMA_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                 r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
                "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>",
                "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
QWEN_PLAIN = ["<tool_call>", "</tool_call>"]
LLAMA_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
                 *(f"<|reserved_special_token_{i}|>" for i in range(40))]

OTHER_SCRIPTS = ["Το ταχύ καφέ αλεπού πηδάει πάνω από το τεμπέλικο σκυλί.", "Съешь ещё этих мягких французских булок.",
                 "敏捷的棕色狐狸跳过懒狗。图像里有什么?", "いろはにほへと ちりぬるを。がぎぐげご", "빠른 갈색 여우가 게으른 개를 뛰어넘는다",
                 "नमस्ते दुनिया, यह एक परीक्षण है।", "שלום עולם", "مرحبا بالعالم", "Đây là một câu tiếng Việt.", "🙂🎉👩‍👩‍👧‍👦🇩🇪",
                 "naïve café façade Ångström", "ﬁ ligature ½ ² ①"]


def corpus():
    """Text that every Python has: its own sources, and lines in other scripts."""
    import argparse
    import difflib
    import textwrap
    lines = []
    for module in (argparse, difflib, textwrap):
        lines += pathlib.Path(module.__file__).read_text(encoding="utf-8").splitlines(keepends=True)
    return lines + OTHER_SCRIPTS * 30


def train(tokenizer, size):
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)


def split_then_bytes(pattern):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated", invert=False),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def qwen(size=2000):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split_then_bytes(QWEN_PATTERN)
    train(tokenizer, size)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in QWEN_SPECIAL])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in QWEN_PLAIN])
    return tokenizer


def llama(size=1200):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split_then_bytes(LLAMA_PATTERN)
    train(tokenizer, size)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in LLAMA_SPECIAL])
    start = ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A <|begin_of_text|> $B",
                                      special_tokens=[start])])
    # Words that no merge can make, which ignore_merges finds all the same.
    as_json = json.loads(tokenizer.to_str())
    as_json["model"]["ignore_merges"] = True
    kept = as_json["model"]["merges"]
    as_json["model"]["merges"] = kept[:300] + kept[340:]
    produced = {left + right for left, right in as_json["model"]["merges"]}
    reachable = produced | {t for t in as_json["model"]["vocab"] if len(t) == 1}
    as_json["model"]["merges"] = [m for m in as_json["model"]["merges"] if m[0] in reachable and m[1] in reachable]
    return Tokenizer.from_str(json.dumps(as_json))


def gpt2(size=700):
    """GPT-2's own ByteLevel cutting, with a space put before, and every kind of added token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC()])
    train(tokenizer, size)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="$A $B", special_tokens=[("<s>", size), ("</s>", size + 1)])
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=True),
                                  AddedToken("<mask>", lstrip=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<r>", rstrip=True), AddedToken("<both>", lstrip=True, rstrip=True, normalized=False),
                          AddedToken("word", single_word=True, normalized=False), AddedToken("words", normalized=True),
                          AddedToken("é!", normalized=True), AddedToken("<s><s>", normalized=False)])
    return tokenizer


def cutting(steps, size=500):
    """Other Split steps."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    train(tokenizer, size)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def all_cutting():
    Split, Digits = pre_tokenizers.Split, pre_tokenizers.Digits
    space, digits = Regex(r"\s+"), Regex(r"\d+|\W")
    steps = {
        "removed": [Split(space, "removed")], "isolated": [Split(digits, "isolated")],
        "previous": [Split(space, "merged_with_previous")], "next": [Split(Regex(r"\p{Lu}|\w\s"), "merged_with_next")],
        "contiguous": [Split(Regex(r"[\p{Han}\p{Ll}]"), "contiguous")], "inverted": [Split(space, "isolated", invert=True)],
        "string": [Split("the", "isolated"), Split("\n", "merged_with_previous")],
        "digits": [Digits(individual_digits=False)], "each digit": [Digits(individual_digits=True), Split(space, "isolated")],
    }
    return {name: cutting(step) for name, step in steps.items()}


WORDS = ["the", "image", " shows", "It's", "WE'LL", "you'Re", "don't", "I'm", "he'd", "'ſ", "'S", "x86", "12345678", "3.14", "½²①",
         "naïve", "nai\u0308ve", "e\u0301", "é", "é!", "e\u0301!", "A\u030a", "\u212b", "Å", "가", "\u1100\u1161\u11a8",
         "\u1112\u1161\u11ab글", "が", "か\u3099", "क्षि", "q\u0323\u0307", "q\u0307\u0323", "\u0344", "敏捷", "的棕色狐狸", "🙂", "👩‍👩‍👧‍👦", "🇩🇪", "👍🏽",
         "\u200d", "\u200b", "\ufeff", "\u00a0", "\u2003", "\u3000", "\u180e", "\u0085", "\u2028", "\x00", "\x1b", "\t", "\r\n", "\n\n",
         "\n", "   ", " ", "  \n ", "\r", "\x0b\x0c", "<s>", "</s>", "<mask>", " <mask>", "<r> ", "<both>", "word", "words",
         "sword", "wordé", "_word", "<s><s>", "<|im_start|>", "<|im_end|>", "<|im_", "start|>", "<|image_pad|>", "<tool_call>",
         "</tool_call>", "<|begin_of_text|>", "<|eot_id|>", "<|reserved_special_token_1|>", "<|reserved_special_token_11|>", "<|",
         "|>", "<", "...", "!!!", "({[", "=>", "==", "://", "def f(x):", "    return", "Ġ", "Ċ", "ĠĠ", "\U0001F9FF", "ǅ", "ß",
         "ﬁ", "K", "\u0345", "\u05d0\u05b7", "\u0e01\u0e33", "ไทย", "שלום", "مرحبا", "Đây"]

# Characters that the oldest Unicode tables in use know.
ASSIGNED = [chr(c) for c in range(0x20000) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")
            and unicodedata.ucd_3_2_0.category(chr(c)) != "Cn"]


def random_text(rng):
    kind = rng.randrange(5)
    if kind == 0:
        return "".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 12)))
    if kind == 1:
        return "".join(rng.choice(ASSIGNED) for _ in range(rng.randrange(1, 40)))
    if kind == 2:
        return "".join(rng.choice(" \n\r\t\u00a0a1.'") for _ in range(rng.randrange(1, 30)))
    if kind == 3:
        return " ".join(rng.choice(OTHER_SCRIPTS) for _ in range(rng.randrange(1, 3)))
    base = "".join(rng.choice("aeiouAEIOUnNcC") + "".join(chr(rng.randrange(0x300, 0x370)) for _ in range(rng.randrange(4)))
                   for _ in range(rng.randrange(1, 10)))
    return base + rng.choice(WORDS)
