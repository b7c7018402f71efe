"""The tokenizer against the `tokenizers` library on random text of many kinds."""
import json
import random
import unicodedata
import unittest

import media_models as made
from media_common import Checks, Probe, settle

rng = random.Random(11)
probe, checks = Probe(), Checks()

def byte_ranges(text, offsets):
    starts = [0]
    for c in text:
        starts.append(starts[-1] + len(c.encode()))
    return [[starts[a], starts[b]] for a, b in offsets]


def compare(name, tokenizer, count):
    folder = probe.dir / name.replace(" ", "_")
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    offsets_agree = offsets_seen = 0
    for _ in range(count):
        text = made.random_text(rng)
        theirs = tokenizer.encode(text, add_special_tokens=False)
        ours = probe.ask(op="encode", dir=str(folder), runs=[[text, True]])
        if not checks.check(ours.get("ids") == theirs.ids, f"{name}: {text!r}: {str(ours)[:300]} against {theirs.ids} {theirs.tokens}"):
            continue
        spans = ours["ranges"]
        data = text.encode()
        checks.check(all(0 <= a <= b <= len(data) for a, b in spans), f"{name}: ranges of {text!r}: {spans}")
        if text.isascii():  # theirs are in characters; within one of several bytes they differ
            offsets_seen += 1
            offsets_agree += spans == byte_ranges(text, theirs.offsets)
        whole = probe.ask(op="encode_with_prefix", dir=str(folder), text=text)
        checks.check(whole["ids"] == tokenizer.encode(text).ids, f"{name}: with prefix: {text!r}")
        for skip in (True, False):
            back = probe.ask(op="decode_ids", dir=str(folder), ids=theirs.ids, skip_special=skip)
            checks.check(back["text"] == tokenizer.decode(theirs.ids, skip_special_tokens=skip) or "é!" in text + unicodedata.normalize("NFC", text),
                         f"{name}: decode {text!r}: {back['text']!r}")
        checks.check(back["text"] == back["streamed"], f"{name}: stream {text!r}: {back['streamed']!r}")
        ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(8)]
        back = probe.ask(op="decode_ids", dir=str(folder), ids=ids, skip_special=False)
        want = tokenizer.decode(ids, skip_special_tokens=False)
        if tokenizer.token_to_id("é!") not in ids:
            checks.check(back["text"] == back["streamed"] == want, f"{name}: decode {ids}: {back} against {want!r}")
    # A space that the pre-tokenizer put before a text has no place in it; theirs then claims the next character's.
    checks.check(offsets_agree == offsets_seen or name == "gpt2", f"{name}: {offsets_agree} of {offsets_seen} ranges agree")
    tokens = rng.sample(sorted(tokenizer.get_vocab()), 30) + ["not a token"]
    answer = probe.ask(op="vocabulary", dir=str(folder), tokens=tokens)
    checks.check(answer["ids"] == [-1 if tokenizer.token_to_id(t) is None else tokenizer.token_to_id(t) for t in tokens],
                 f"{name}: ids of {tokens}")
    checks.check(answer["size"] == tokenizer.get_vocab_size(), f"{name}: {answer['size']} tokens")
    return folder


def trust(folder, tokenizer):
    """Special tokens from the template bind, the same text from a user does not, nor a token that is half a user's."""
    def ids(*runs):
        return probe.ask(op="encode", dir=str(folder), runs=[list(r) for r in runs])["ids"]
    special = {tokenizer.token_to_id(t) for t in made.QWEN_SPECIAL + made.QWEN_PLAIN}
    for token in made.QWEN_SPECIAL + made.QWEN_PLAIN:
        checks.check(ids((token, True)) == [tokenizer.token_to_id(token)], f"{token} from the template")
        typed = ids(("a " + token + " b", False))
        checks.check(not special & set(typed), f"{token} typed by a user")
        checks.check(bytes_of(folder, typed) == "a " + token + " b", f"{token} typed by a user stays text")
        for cut in range(1, len(token)):
            half = ids((token[:cut], False), (token[cut:], True))
            checks.check(not special & set(half), f"{token} half typed")
            joined = ids((token[:cut], True), (token[cut:], True))
            checks.check(joined == [tokenizer.token_to_id(token)], f"{token} of two trusted runs")
    text = "What is it? 敏捷 e\u0301"
    want = tokenizer.encode("<|im_start|>user\n" + text + "<|im_end|>\n").ids
    got = ids(("<|im_start|>user\n", True), (text, False), ("<|im_end|>\n", True))
    checks.check(got == want, "words run across the border of runs")
    checks.check(ids() == [] and ids(("", True)) == [], "nothing gives nothing")


def bytes_of(folder, ids):
    return probe.ask(op="decode_ids", dir=str(folder), ids=ids, skip_special=False)["text"]


def merges_as_strings(folder, tokenizer):
    """The older spelling of merges means the same."""
    file = json.loads((folder / "tokenizer.json").read_text())
    file["model"]["merges"] = [" ".join(pair) for pair in file["model"]["merges"]]
    older = probe.dir / "older"
    older.mkdir()
    (older / "tokenizer.json").write_text(json.dumps(file))
    for text in made.OTHER_SCRIPTS:
        got = probe.ask(op="encode", dir=str(older), runs=[[text, True]])["ids"]
        checks.check(got == tokenizer.encode(text).ids, f"merges as strings: {text!r}")


def refusals(folder):
    """What the reader does not know is named."""
    whole = json.loads((folder / "tokenizer.json").read_text())
    changes = [("normalizer", {"type": "NFKC"}, "NFKC"), ("pre_tokenizer", {"type": "Metaspace"}, "Metaspace"),
               ("pre_tokenizer", None, "ByteLevel"), ("decoder", {"type": "WordPiece"}, "WordPiece"), ("decoder", None, "decoder"),
               ("post_processor", {"type": "BertProcessing"}, "BertProcessing"), ("surprise", 1, "surprise"),
               ("model", {"type": "Unigram"}, "Unigram"), ("model", {"type": "BPE"}, "vocab"),
               ("model", {**whole["model"], "dropout": 0.1}, "dropout"),
               ("model", {**whole["model"], "end_of_word_suffix": "</w>"}, "end_of_word_suffix"),
               ("model", {**whole["model"], "merges": ["a b c"]}, "merge 0"),
               ("model", {**whole["model"], "merges": [["nope!!", "a"]]}, "nope!!"),
               ("model", {**whole["model"], "vocab": {"a": 1, "b": 1}, "merges": []}, "another token"),
               ("model", {**whole["model"], "vocab": {"a": 1 << 30}, "merges": []}, "whole number"),
               ("model", {**whole["model"], "vocab": {"a": 0}, "merges": [], "unk_token": "a"}, "unk_token"),
               ("added_tokens", [{"id": 0, "content": "<new>"}], "another token"),
               ("added_tokens", [{"id": 7}], "no content"), ("added_tokens", {}, "added_tokens")]
    for pattern in [r"\bx", r"[a[b]]", r"(?<n>x)", r"(x", r"(*FAIL)", r"[a&&b]", r"\p{Nonsense}", r"a{1,2}+", r"[\S]", "x\\"]:
        changes.append(("pre_tokenizer", {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"},
                        "regular expression"))
    for number, (key, value, word) in enumerate(changes):
        bad = probe.dir / f"bad{number}"
        bad.mkdir()
        (bad / "tokenizer.json").write_text(json.dumps({**whole, key: value}))
        answer = probe.ask(op="encode", dir=str(bad), runs=[["x", True]])
        checks.check(word in answer.get("error", "") and "tokenizer.json" in answer["error"], f"{key} {str(value)[:80]}: {answer}")


class TokenizerParity(unittest.TestCase):
    def test_qwen(self):
        qwen = made.qwen()
        folder = compare("qwen", qwen, 1500)
        trust(folder, qwen)
        merges_as_strings(folder, qwen)
        refusals(folder)
        settle(self, checks, at_least=8000)

    def test_llama(self):
        compare("llama", made.llama(), 800)
        settle(self, checks, at_least=4000)

    def test_gpt2(self):
        compare("gpt2", made.gpt2(), 1500)
        settle(self, checks, at_least=8000)

    def test_ways_of_cutting(self):
        for name, tokenizer in made.all_cutting().items():
            compare(name, tokenizer, 250)
        settle(self, checks, at_least=8000)


if __name__ == "__main__":
    unittest.main()
