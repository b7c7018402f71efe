"""Every field that the contract names or the code reads has its rows in conformance_table.py, and no row is of another one."""
import re
import unittest

import conformance_table as table
from serve_common import ROOT

SOURCE = ROOT / "parvl" / "serve" / "openai_request.cc"
# The fields of the HTTP contract, one by one.
CONTRACT = """max_completion_tokens max_tokens temperature top_p top_k min_p seed stop stop_token_ids n logprobs top_logprobs presence_penalty
frequency_penalty repetition_penalty logit_bias ignore_eos min_tokens stream_options response_format tools tool_choice priority cache_salt
mm_processor_kwargs model stream messages prompt""".split()
# Of these, what only one of the two endpoints takes.
CHAT_ALONE = {"max_completion_tokens", "top_logprobs", "tools", "tool_choice", "mm_processor_kwargs", "messages"}
COMPLETION_ALONE = {"prompt"}
UNKNOWN = {"some_new_field"}


def fields_read(name):
    """The names in one of the code's lists of fields."""
    lists = re.findall(rf"constexpr std::string_view {name}\[\] = {{([^}}]*)}};", SOURCE.read_text())
    assert len(lists) == 1, f"{SOURCE} has no list {name} any more: tell this test where the fields are"
    names = re.findall(r'"(\w+)"', lists[0])
    assert names and len(set(names)) == len(names), names
    return set(names)


class Contract(unittest.TestCase):
    def test_each_field_has_rows(self):
        common = fields_read("kCommonFields")
        for rows, own, foreign in ((table.CHAT, "kChatFields", COMPLETION_ALONE), (table.COMPLETION, "kCompletionFields", CHAT_ALONE)):
            with self.subTest(own):
                read = common | fields_read(own)
                self.assertEqual(read - set(rows), set(), "the code reads these, and no row of conformance_table.py asks for them")
                self.assertEqual(set(rows) - read - UNKNOWN, set(), "rows of fields that the code does not read")
                contract = set(CONTRACT) - foreign
                self.assertEqual(contract - set(rows), set(), "the contract names these, and no row asks for them")
                self.assertEqual(contract - read, set(), "the contract names these, and the code does not read them")

    def test_rows_are_whole(self):
        for name, rows in (("CHAT", table.CHAT), ("COMPLETION", table.COMPLETION)):
            for field, (taken, refused) in rows.items():
                with self.subTest(f"{name} {field}"):
                    self.assertTrue(taken, "no value is tried that must be taken")
                    self.assertTrue(refused or field in UNKNOWN, "no value is tried that must be refused")


if __name__ == "__main__":
    unittest.main()
