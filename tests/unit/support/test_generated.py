"""Text from outside in files of other languages: every place of every template refuses what is no word there."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from mlcpipe.compiler.native_runtime import _LICENSES
from mlcpipe.compiler.sdk import _DECLARATION
from mlcpipe.compiler.static_library import table_source
from mlcpipe.errors import UsageError
from mlcpipe.support.generated import Value, filled, toml_value, word
from mlcpipe.support.resources import native_path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]
PLACE = re.compile("@([A-Z]+)@")
# What ends, joins or expands something in CMake, C, assembler, Kotlin, Swift, Markdown, HTML, XML, JSON or a shell.
NOWHERE = [
    *(" ", '"', "'", "`", "$", "\\", "#", "(", ")", "<", ">", "&", "%", ";", "*", "@", "=", "!", "~", ",", "//", ":"),
    *("\n", "\r", "\t", "\0", "\x1b", "\x7f", "\x85", "\u2028", "\u2029", "\u202e", "\ufeff", "\ud800", "é", "٣"),
    *("]]", "[[", "*/", "/*", "/../", "-->", "<!--", "${", "$(", "]]>", "\\(", '"""', "@NAME@", "</script>", "%s%n"),
    *("\nexecute_process(COMMAND id)\n", '"; id; "', "${jndi:x}", "$ENV{HOME}", "\\\n"),
]
NOT_FIRST = ["", "..", "../x", "/", "/x", "-", "-D", "."]
HOSTILE = [*NOT_FIRST, *NOWHERE, *(f"a{text}b" for text in NOWHERE), *(f"a{text}" for text in NOWHERE)]
PYTHON = {_DECLARATION: ".h", _LICENSES: ".S"}  # templates that are no files
TEMPLATES = {
    **{
        path.relative_to(native_path()).as_posix(): (path.read_text(encoding="utf-8"), path.suffix)
        for path in sorted(native_path().rglob("*"))
        if path.is_file() and path.suffix != ".pyc" and PLACE.search(path.read_text(encoding="utf-8"))
    },
    **{text[:20]: (text, suffix) for text, suffix in PYTHON.items()},
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_place_of_a_template_takes_words_alone(name: str) -> None:
    text, suffix = TEMPLATES[name]
    good: dict[str, Value] = dict.fromkeys(PLACE.findall(text), "word")
    assert not PLACE.search(filled(text, good, suffix))
    for place in good:
        for bad in HOSTILE:
            for value in (bad, ["word", bad], {bad: "word"}, {"WORD": bad or "-"}):
                with pytest.raises(UsageError, match="cannot stand in a file"):
                    filled(text, {**good, place: value}, suffix)


@pytest.mark.parametrize(
    ("suffix", "written"),
    [
        (".txt", 'a|a b|[[A=]] [[B=1]] [[C="x-1"]]'),
        (".mm", 'a|a\nb|#define A\n#define B 1\n#define C "x-1"'),
        (".kts", 'a|"a", "b"|'),
        (".swift", 'a|"a", "b"|'),
        (".md", "a|a, b|"),
    ],
)
def test_lists_and_macros_are_the_language_s(suffix: str, written: str) -> None:
    values: dict[str, Value] = {"ONE": "a", "LIST": ["a", "b"], "MACROS": {"A": "", "B": "1", "C": "x-1"}}
    assert filled("@ONE@|@LIST@|@MACROS@@NOT_A_PLACE@", values, suffix).startswith(written)


def test_no_other_text_of_python_is_a_template() -> None:
    """A literal with @NAME@ is one of `PYTHON`, docstrings aside."""
    found = set()
    for path in sorted((ROOT / "mlcpipe").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source if PLACE.search(source) else "")
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, documented)}
        literals = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        found |= {text for text in literals - docstrings if isinstance(text, str) and PLACE.search(text)}
    assert found == set(PYTHON)


@pytest.mark.parametrize("bad", ["a.b", 'a"};', "a\n", "1a", ""])
def test_symbols_are_names_of_c(bad: str) -> None:
    assert word("__tvm_ffi_main", ".c") in table_source(["__tvm_ffi_main"], "one_")
    with pytest.raises(UsageError):
        table_source([bad], "one_")


@pytest.mark.parametrize("text", [*(text for text in NOWHERE if text != "\ud800"), "🦙", "\U0010ffff\x01\x1f"])
def test_a_toml_string_holds_every_text(text: str) -> None:
    for whole in (text, f"a{text}b", f"{text}\nkey = 1\n"):
        assert tomllib.loads(f"[table]\n{toml_value(whole)} = {toml_value(whole)}") == {"table": {whole: whole}}
    with pytest.raises(UsageError, match="cannot stand in a file"):
        toml_value(f"{text}\udcff")
