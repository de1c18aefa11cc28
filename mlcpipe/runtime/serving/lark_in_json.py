r"""A Lark grammar of texts as the grammar of the same texts inside a JSON string, where `"`, `\` and control characters
are escaped in the one way that `json_regex.escape` has.

Terminals become rules, see `json_regex`. Syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from mlcpipe.errors import UsageError
from mlcpipe.runtime.serving.json_regex import ESCAPED, Cat, Rules, Star, escape, parsed

MAX_LARK = 64 << 10  # characters of a grammar
_MOST_DEPTH = 16  # of terminals in terminals
_PREFIX = "json-part-"
_TOKENS = re.compile(
    r"""(?P<begin>(?<![^\n])[ \t]*[?!]?[\w-]+[ \t]*(?:\.[ \t]*\d+[ \t]*)?(?:\[(?P<options>[^\]\n]*)\][ \t]*)?:)
    |(?P<space>[ \t\r]+|\n|(?:\#|//)[^\n]*)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|[^/\\\n])+/[imslux]*)
    |%import[ \t]+common(?P<import>[^\n]*)
    |(?P<ignore>%ignore\b)
    |(?P<other>%\w*|<[^<>\s]*>|@[\w-]*|&|~(?![ \t]*[0-9]))
    |(?P<name>_?[A-Z][_A-Z0-9-]*)
    |(?P<plain>->|\.\.|[\w-]+|.)""",
    re.VERBOSE | re.ASCII,
)
# Terminals of `%import common`, as llguidance has them.
_COMMON = {
    "DIGIT": "[0-9]", "HEXDIGIT": "[a-fA-F0-9]", "INT": "[0-9]+", "SIGNED_INT": r"(\+|-)?[0-9]+",
    "DECIMAL": r"([0-9]+\.[0-9]*)|(\.[0-9]+)", "_EXP": r"[eE](\+|-)?[0-9]+",
    "FLOAT": r"([0-9]+\.[0-9]*|\.[0-9]+)([eE](\+|-)?[0-9]+)?|[0-9]+[eE](\+|-)?[0-9]+",
    "NUMBER": r"([0-9]+)|([0-9]+\.[0-9]*|\.[0-9]+)([eE](\+|-)?[0-9]+)?|[0-9]+[eE](\+|-)?[0-9]+",
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"', "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+", "CNAME": "[_A-Za-z][_A-Za-z0-9]*", "WS_INLINE": r"[ \t]+", "WS": r"[ \t\f\r\n]+",
    "CR": r"\r", "LF": r"\n", "NEWLINE": r"(\r?\n)+", "SH_COMMENT": r"#[^\n]*", "CPP_COMMENT": r"\/\/[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}  # fmt: skip
_COMMON |= {f"SIGNED_{name}": rf"(\+|-)?({_COMMON[name]})" for name in ("FLOAT", "NUMBER")}


@lru_cache(64)
def escaped(lark: str) -> str:
    """The grammar inside a JSON string. Raises UsageError for syntax that cannot be rewritten."""
    if len(lark) > MAX_LARK:
        raise UsageError("the grammar is too long", expected=f"at most {MAX_LARK} characters", found=len(lark))
    return _Grammar(lark).text()


class _Grammar:
    """The statements of a grammar: rules, and terminals by name."""

    def __init__(self, lark: str) -> None:
        self._rules: list[list[re.Match[str]]] = []
        self._ignored: list[list[re.Match[str]]] = []
        self._terminals: dict[str, list[re.Match[str]]] = {}
        self._common: dict[str, str] = {}
        self._made = Rules(_PREFIX)
        statement: list[re.Match[str]] = []
        for token in _TOKENS.finditer(lark):
            if token["other"] or (token["options"] or "lazy").strip() != "lazy":
                raise UsageError(
                    "a grammar inside JSON", found=token[0].strip()[:60],
                    expected="rules of literals and expressions, %ignore and %import common",
                )  # fmt: skip
            if token["import"] is not None:
                self._import(token["import"])
                statement = []
            elif token["begin"]:
                statement = [token]
                name = token[0].strip().lstrip("?!").partition(":")[0].partition("[")[0].partition(".")[0].strip()
                if name.lstrip("_")[:1].isupper():
                    self._terminals[name] = statement
                else:
                    self._rules.append(statement)
            elif token["ignore"]:
                statement = []
                self._ignored.append(statement)
            elif not token["space"]:
                statement.append(token)

    def _import(self, names: str) -> None:
        """The names of `.NAME`, `.NAME -> OTHER` or `(NAME, OTHER)`."""
        line = re.split("#|//", names)[0]
        found = re.fullmatch(r"\s*\.\s*(\w+)(?:\s*->\s*(\w+))?\s*|\s*\(([\w\s,]*)\)\s*", line)
        given = [] if found is None else [found[1]] if found[1] else re.findall(r"\w+", found[3])
        if not given or not _COMMON.keys() >= {*given}:
            raise UsageError("%import", expected=f"common with {', '.join(_COMMON)}", found=names.strip()[:60])
        for name in given:
            self._common[(found and found[2]) or name] = _COMMON[name]

    def text(self) -> str:
        """All rules."""
        lines = [" ".join([rule[0][0].strip(), *map(self._symbol, rule[1:])]) for rule in self._rules]
        lines += [line for tokens in self._ignored for line in self._skipped(tokens)]
        return "\n".join([*lines, *self._made.lines, ""])

    def _symbol(self, token: re.Match[str]) -> str:
        """A token of a rule; `|` may begin a line."""
        if token["string"]:
            return _literal(token["string"])
        if token["regex"] or token["name"]:
            return self._made.named(parsed(self._regex([token], 0)))
        return token[0]

    def _regex(self, tokens: Sequence[re.Match[str]], depth: int) -> str:
        """The regular expression of a terminal's body."""
        out: list[str] = []
        for token in tokens:
            if token["string"]:
                text, flag = _unquoted(token["string"])
                out.append(f"(?{flag}:{re.escape(text).replace('/', chr(92) + '/')})")
            elif token["regex"]:
                body, _, flags = token["regex"][1:].rpartition("/")
                if set(flags) - set("ims"):
                    raise UsageError("an expression inside JSON", expected="the flags i, m and s", found=token[0][:60])
                out.append(f"(?{flags}:{body})")
            elif token["name"]:
                name = token["name"]
                if name in self._common:
                    out.append(f"(?:{self._common[name]})")
                elif name not in self._terminals or depth > _MOST_DEPTH:
                    raise UsageError("a grammar inside JSON", expected="terminals of literals", found=name[:60])
                else:
                    out.append(f"(?:{self._regex(self._terminals[name][1:], depth + 1)})")
            elif token[0] in ("|", "(", ")", "*", "+", "?", "{", "}", ",") or token[0].isdigit():
                out.append(token[0].replace("(", "(?:"))
            else:
                raise UsageError("a terminal inside JSON", expected="| ( ) * + ? {m,n} and names", found=token[0][:60])
            if sum(map(len, out)) > MAX_LARK:
                raise UsageError(
                    "a terminal inside JSON", expected=f"at most {MAX_LARK} characters", found=token[0][:60]
                )
        return "".join(out)

    def _skipped(self, tokens: Sequence[re.Match[str]]) -> Iterator[str]:
        """What is ignored: llguidance skips as often as it matches, so a repeated part may be skipped once."""
        node = parsed(self._regex(tokens, 0))
        if isinstance(node, Cat) and len(node.parts) == 2 and node.parts[1] == Star(node.parts[0]):
            node = node.parts[0]
        made = Rules(f"{_PREFIX}ignored-")
        whole = made.named(node)
        parts = made.lines[0].partition(": ")[2][1:-1].split(" | ") if made.lines else [whole]
        if len(made.lines) > 1 or any(not re.fullmatch(r"/(?:\\.|[^/\\])+/ ?", one) for one in parts):
            raise UsageError("%ignore inside JSON", expected="characters, once or repeated", found=tokens[0][0][:60])
        for one in parts:
            yield f"%ignore {one.strip()}"


def _unquoted(quoted: str) -> tuple[str, str]:
    """The text of a literal, and its flag."""
    text = re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", quoted.removesuffix("i"))
    try:
        return str(json.loads(text)), "i" * quoted.endswith("i")
    except ValueError:
        raise UsageError("a literal of the grammar", expected="the escapes of JSON", found=quoted[:60]) from None


def _literal(quoted: str) -> str:
    """A literal, as one lexeme for each escape and for what is between them."""
    text, flag = _unquoted(quoted)
    parts = re.findall(r"""[^\x00-\x1f"\\\x7f]+|[\x00-\x1f"\\\x7f]""", text)
    written = [
        json.dumps(escape(one)) if one in ESCAPED else json.dumps(one, ensure_ascii=False) + flag for one in parts
    ]
    return f"({' '.join(written)})" if written else '""'
