"""The scripts as texts: section order, shared blocks, flags that are read, documented metrics."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = [
    path for path in sorted(ROOT.glob("*.py")) if "\ndef main(args: Args)" in path.read_text()
]
SECTIONS = ["[1] setup", "[2] data", "[3] models and optimizer", "[4] inference engine"]
SECTIONS += ["[5] train loop", "[6] teardown"]
LETTERS = [f"({letter})" for letter in "abcdefgh"]

by_script = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)


def test_there_are_scripts() -> None:
    assert {path.name for path in SCRIPTS} >= {"dpo.py", "grpo.py", "reward_model.py", "sft.py"}


@by_script
def test_sections_keep_their_order(path: Path) -> None:
    text = path.read_text()
    found = re.findall(r"^    # ---- (.+) ----$", text, flags=re.M)
    assert found == [name for name in SECTIONS if name in found]
    assert {"[1] setup", "[2] data", "[5] train loop", "[6] teardown"} <= set(found)
    letters = re.findall(r"^ {8}# (\([a-h]\)) ", text, flags=re.M)
    assert letters == [letter for letter in LETTERS if letter in letters]
    assert {"(a)", "(e)", "(g)"} <= set(letters)


def test_shared_blocks_are_identical() -> None:
    """One fix once had to touch four drifted copies (summarize_from_feedback_details)."""
    copies: dict[str, dict[str, str]] = {}
    for path in SCRIPTS:
        text = path.read_text()
        blocks = re.findall(
            r"^ *# -- shared: (.+?) --\n(.*?)^ *# -- end shared --\n", text, flags=re.M | re.S
        )
        assert len(blocks) == text.count("# -- end shared --"), path.name
        for name, body in blocks:
            copies.setdefault(name, {})[path.name] = body
    assert copies
    for name, bodies in copies.items():
        assert len(bodies) > 1, f"block {name!r} has one user; it is not shared"
        assert len(set(bodies.values())) == 1, f"block {name!r} differs among {list(bodies)}"


def _args_class(path: Path) -> ast.ClassDef:
    tree = ast.parse(path.read_text())
    return next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Args")


@by_script
def test_every_flag_is_documented_and_read(path: Path) -> None:
    """8 of 57 flags of a well-known PPO script were never read."""
    body = _args_class(path).body
    fields = [n for n in body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    documented = {
        first.target.id
        for first, second in zip(body, body[1:], strict=False)
        if isinstance(first, ast.AnnAssign)
        and isinstance(first.target, ast.Name)
        and isinstance(second, ast.Expr)
        and isinstance(second.value, ast.Constant)
    }
    read = set(re.findall(r"\bargs\.(\w+)", path.read_text()))
    # flags may be read through a property of Args
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name != "__post_init__" and node.name in read:
            read |= set(re.findall(r"\bself\.(\w+)", ast.unparse(node)))
    names = {field.target.id for field in fields if isinstance(field.target, ast.Name)}
    assert names - documented == set()
    assert names - read == set()


@by_script
def test_deviation_tags_are_listed_and_marked(path: Path) -> None:
    header, _, code = path.read_text().partition('"""\n\nimport')
    listed = set(re.findall(r"^\[(D\d+)\]", header, flags=re.M))
    assert listed
    assert set(re.findall(r"\[(D\d+)\]", code)) == listed


@by_script
def test_pure_functions_have_docstrings(path: Path) -> None:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name != "main":
            assert ast.get_docstring(node), f"{path.name}: {node.name}"


@by_script
def test_every_metric_has_a_row_in_the_readme(path: Path) -> None:
    namespaces = "rollout|policy|reward|value|optim|time|eval|data|memory"
    readme = set(re.findall(rf"`((?:{namespaces})/\w+)", (ROOT / "README.md").read_text()))
    logged = set(re.findall(rf'"((?:{namespaces})/\w+)[/"]', path.read_text()))
    assert logged - readme == set()


@by_script
def test_help_names_every_flag(path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, str(path), "--help"], capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 0, answer.stderr
    for node in _args_class(path).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            assert f"--{node.target.id}" in answer.stdout


def test_huggingface_kernels_package_and_ours_live_together(tmp_path: Path) -> None:
    """HF's optional package `kernels` has the name of our folder: each could hide the other."""
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("IS_HUGGINGFACE = True\n")
    code = "import common, kernels.logprob; print(getattr(kernels, 'IS_HUGGINGFACE', False))"
    for path, expected in (("", "False"), (str(tmp_path), "True")):
        answer = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert answer.stdout.strip() == expected, answer.stderr
