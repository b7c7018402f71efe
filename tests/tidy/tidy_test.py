"""The house's rules, checked on every tracked file: include directions, sizes, formatting, dead files, purity, words."""
import pathlib
import subprocess
import unittest

import checks

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Files and functions that are longer because they read better so, with their length. The list only shrinks.
SIZE_EXCEPTIONS: dict[str, int] = {}

# Includes against the table, (beginning of the file's path, header), each with its reason. The list only shrinks.
_SPEC = "the plain description of a model that files, parameters and formulas share"
INCLUDE_EXCEPTIONS: dict[tuple[str, str], str] = {
    ("parvl/nn/", "parvl/plan/model_spec.h"): _SPEC,
    ("parvl/models/", "parvl/plan/model_spec.h"): _SPEC,
    ("parvl/exec/", "parvl/plan/model_spec.h"): _SPEC,
    ("parvl/exec/load", "parvl/plan/cost/fit.h"): "what fits is one set of formulas for serving, planning and training",
    ("parvl/exec/kv_cache.h:", "torch's headers"): "pages are tensors; nothing but exec's own sources includes it",
    ("parvl/exec/load.h:", "torch's headers"): "what is loaded has a device; nothing but exec's own sources includes it",
    ("parvl/serve/", "parvl/exec/sampler.h"): "the limits on what a request may ask for stand beside the sampler",
}

TEXT_SUFFIXES = {".cc", ".cu", ".cuh", ".h", ".py", ".sh", ".txt", ".cmake", ".md", ".yaml", ".yml", ".inc"}
# Text that is data: what it holds is not ours to judge.
DATA_FOLDERS = ("tests/data/", "tests/fuzz/corpus/")
# Made by a training run; its size and words are the run's.
GENERATED = ("examples/easy_vqa/model/",)


def tracked_files():
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for path in listing.split("\0") if path and (ROOT / path).is_file()]


def read_tree():
    tree = {}
    for path in tracked_files():
        named = pathlib.PurePosixPath(path)
        text_file = named.suffix in TEXT_SUFFIXES or named.name in ("Makefile", "Dockerfile") or path.startswith(".ci/")
        if text_file and not path.startswith(DATA_FOLDERS + GENERATED):
            tree[path] = (ROOT / path).read_text()
    return tree


class House(unittest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        cls.tree = read_tree()
        assert len(cls.tree) > 50, "the tree was not read"

    def none(self, problems):
        problems = list(problems)
        self.assertEqual(problems, [], "\n" + "\n".join(problems))

    def test_include_directions(self):
        needed = set()
        problems = []
        for problem in checks.include_directions(self.tree):
            key = next((k for k in INCLUDE_EXCEPTIONS if problem.startswith(k[0]) and k[1] in problem), None)
            if key is None:
                problems.append(problem)
            else:
                needed.add(key)
        problems += [f"{file}: no longer includes {header}; take it off the exceptions" for file, header in set(INCLUDE_EXCEPTIONS) - needed]
        self.none(problems)

    def test_sizes(self):
        self.none(checks.size_problems(self.tree, SIZE_EXCEPTIONS))

    def test_no_time_chance_or_environment(self):
        self.none(checks.impurity(self.tree))

    def test_dead_files(self):
        self.none(checks.dead_files(self.tree))

    def test_headers(self):
        self.none(checks.headers(self.tree))

    def test_whitespace(self):
        self.none(checks.whitespace(self.tree))

    def test_names(self):
        self.none(checks.duplicated_names(self.tree))

    def test_types(self):
        self.none(checks.duplicated_types(self.tree))

    def test_machine_paths_and_hosts(self):
        self.none(checks.machine_words(self.tree))

    def test_placeholders(self):
        self.assertIn("README.md", self.tree)
        self.none(checks.placeholders(self.tree))

    def test_formatting(self):
        files = [path for path in self.tree if path.endswith(checks.CPP)]
        run = subprocess.run(["clang-format", "--dry-run", "-Werror", *files], cwd=ROOT, capture_output=True, text=True)
        wrong = sorted({line.split(":")[0] for line in run.stderr.splitlines() if ": error:" in line})
        self.assertEqual(run.returncode, 0, "\nnot formatted (run `make format`): " + " ".join(wrong))


class Checks(unittest.TestCase):
    """Each check finds what it is there for."""

    def found(self, problems, *expected):
        problems = list(problems)
        self.assertEqual(len(problems), len(expected), problems)
        for part in expected:
            self.assertTrue(any(part in problem for problem in problems), (part, problems))

    def test_types(self):
        tree = {"parvl/exec/a.h": "namespace parvl {\nstruct Options {\n};\nclass B final : public C {\n};\nstruct Options;\n}\n",
                "parvl/serve/b.h": "namespace parvl {\nstruct Options {\n  struct B {\n  };\n};\n}\n",
                "parvl/nn/c.h": "namespace parvl {\nnamespace kernels {\nstruct Options {\n};\n}\n}\n",
                "parvl/nn/d.cc": "struct Options {\n};\n"}
        self.found(checks.duplicated_types(tree), "parvl/exec/a.h, parvl/serve/b.h: a type named Options in each")

    def test_include_directions(self):
        tree = {
            "parvl/base/a.cc": '#include "parvl/plan/x.h"\n',
            "parvl/nn/a.cc": '#include "parvl/plan/cost_model.h"\n#include "parvl/plan/cost/x.h"\n#include "parvl/plan/model_spec.h"\n',
            "parvl/serve/a.cc": '#include "parvl/exec/engine.h"\n#include "parvl/exec/worker.h"\n  #  include <ATen/ATen.h>\n',
            "parvl/train/a.h": "#include <torch/torch.h>\n",
            "parvl/train/a.cc": '#include <torch/torch.h>\n#include "parvl/models/x.h"\n#include "parvl/base/x.h"\n',
            "parvl/comm/a.cc": "#include <c10/x.h>\n",
            "parvl/comm/gloo/a.cc": "#include <c10/x.h>\n",
            "parvl/cellar/a.cc": "\n",
            "apps/a.cc": '#include "parvl/train/x.h"\n',
        }
        self.found(checks.include_directions(tree), "base may not include", "nn may not include parvl/plan/model_spec.h",
                   "parvl/serve/a.cc:2", "parvl/serve/a.cc:3", "parvl/train/a.h:1", "parvl/comm/a.cc:1", "cellar")

    def test_function_lengths(self):
        body = "  f();\n" * 70
        text = ('namespace a {\nclass B {\n  int g() const {\n    return 1;\n  }\n  int x_{3};\n};\n\n'
                'const int kTable[] = {\n' + "  1,\n" * 100 + '};\n\n'
                'template <typename T>\nvoid long_one(\n    int x) {\n  if (x) {\n' + body + '  }\n}\n'
                'B::B() : x_{2}, y_(3) {\n  auto s = "}";  // }\n  char c = \'{\';\n}\n}  // namespace a\n')
        lengths = sorted(length for _, length in checks.cpp_functions(text))
        self.assertEqual(lengths[-1], 76)
        self.assertEqual([n for n in lengths if n > 4], [76])

    def test_sizes_and_exceptions(self):
        tree = {"a.h": "\n" * 151, "b.cc": "\n" * 401, "c.cc": "\n" * 400, "d.py": "def f():\n" + "  x = 1\n" * 71}
        self.found(checks.size_problems(tree, {}), "a.h: 151", "b.cc: 401", "d.py (function at line 1): 72")
        exact = {"a.h": 151, "b.cc": 401, "d.py (function)": 72}
        self.found(checks.size_problems(tree, exact))
        self.found(checks.size_problems(tree, {**exact, "c.cc": 500}), "c.cc: within the limits")
        self.found(checks.size_problems(tree, {**exact, "a.h": 160}), "a.h: 151 lines now; lower")

    def test_impurity(self):
        tree = {
            "parvl/base/a.cc": "auto t = std::chrono::steady_clock::now();\n",
            "parvl/train/a.cc": "auto t = std::chrono::steady_clock::now();\nint r = rand();\n// getenv( in a comment\n"
                                'auto e = std::getenv("X"); auto q = get_env("Y");\nat::randn({2});\nauto b = brand();\n',
            "apps/a.cc": "getenv(x)\n",
        }
        self.found(checks.impurity(tree), "a.cc:1", "a.cc:2", "a.cc:4: getenv", "a.cc:4: get_env", "a.cc:5")

    def test_dead_files(self):
        tree = {
            "parvl/base/CMakeLists.txt": "parvl_room(base SOURCES a.cc)\nparvl_unit_test(t_test)\n",
            "parvl/base/a.cc": '#include "parvl/base/a.h"\n', "parvl/base/a.h": "", "parvl/base/b.cc": "", "parvl/base/b.h": "",
            "tests/unit/t_test.cc": "", "tests/parity/x.py": "import unittest\nimport y\n", "tests/parity/y.py": "",
            "tests/parity/z.py": "", "tools/run.sh": "", "tools/other.sh": "", "Makefile": "\ttools/run.sh\n",
        }
        self.found(checks.dead_files(tree), "base/b.cc", "base/b.h", "parity/z.py", "tools/other.sh")

    def test_machine_words(self):
        slash = "/"
        tree = {"a.md": f"see {slash}home{slash}someone/x and build/work/x, $HOME/x\nhttps:{slash}/index.somewhere.net/simple\n"
                        f"http:{slash}/127.0.0.1:8000 https:{slash}/github.com/a/b http:{slash}/files.example.com/x\n"}
        self.found(checks.machine_words(tree), "a.md:1: the path", "a.md:2: names the host index.somewhere.net")

    def test_placeholders(self):
        tree = {"README.md": "set NOT_A_CELL\n| all | EVAL_ALL |\n|---|---|\n| `DEMO_TRAIN` | 98.4 % |\n| A | EVAL_1 | EVAL_2 |\n",
                "docs/other.md": "| EVAL_ALL |\n"}
        self.found(checks.placeholders(tree), "README.md:2: the placeholder EVAL_ALL", "README.md:5: the placeholder EVAL_1", "EVAL_2")

    def test_headers_names_and_whitespace(self):
        self.found(checks.headers({"parvl/base/a.h": "int x;\n"}), "pragma once", "comment")
        self.found(checks.whitespace({"a.cc": "x \ny"}), "a.cc:1", "line break")
        self.found(checks.duplicated_names({"parvl/comm/a/x.cc": "", "parvl/comm/b/x.cc": "", "parvl/nn/x.cc": ""}), "one name twice")


if __name__ == "__main__":
    unittest.main()
