"""Each filter, test, method and statement of a chat template writes in C++ what it writes in Python, or fails alike."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from mlcpipe.compiler.text.template_expressions import FILTER_NAMES, TEST_NAMES
from mlcpipe.compiler.text.template_nodes import OPS
from mlcpipe.compiler.text.template_program import template_program
from mlcpipe.errors import TemplateError
from mlcpipe.runtime.text.chat_template import ChatTemplate
from tests.native.cxx import Build
from tests.native.templates import NOW, NativeTemplate, build

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]
VARIABLES: dict[str, Any] = {
    "texts": ["b", "A", "ü", "", "a", "B", "日本", "ΑΣ ΑΣΑ", "ǅ straße İi"],
    "numbers": [3, 1.5, -2, True, 0, 1e16, 1e-5, 0.1, 1234567890123456, -0.0, 5.0, 2.5],
    "mixed": [None, 1, "x", [1], {"k": "v"}, 2.5, False],
    "table": [{"n": "b", "v": 2, "d": {"x": 1}}, {"n": "A", "v": 1}, {"n": "a", "v": 3, "d": {"x": 0}}],
    "object": {"b": 1, "A": [1, {"z": None}], "a": "é\u200b\x01'\"\n\\", "items": 5, "n": {"m": [10, 20]}},
    "text": " \tHello, wörld!\u00a0\n",
    "lines": "one\n\n two\r\nthree\x0bfour\u2028five\n",
    "empty": [],
    "nothing": None,
}
# Written for each of the values below.
OF_ANY = (
    *("x", "x | string | length", "[x]", "(x,)", "{'k': x}", "x is defined", "x | tojson", "x | default('d', true)"),
    *(
        f"x is {test}"
        for test in ("boolean", "callable", "escaped", "false", "float", "integer", "iterable", "mapping")
    ),
    *(f"x is {test}" for test in ("none", "number", "sequence", "string", "true", "undefined", "sameas none")),
    *(
        "not x",
        "x == 1",
        "x != 'b'",
        "x in [1, 'x', none]",
        "x ~ 'y'",
        "x | list",
        "x | length",
        "x | first",
        "x | last",
    ),
    *(
        "x + 1",
        "x * 2",
        "x - 0.5",
        "x / 2",
        "x // 2",
        "x % 3",
        "2 ** x",
        "-x",
        "+x",
        "x < 2",
        "x <= 2",
        "x > 'a'",
        "x >= 1",
    ),
    *(
        "x[0]",
        "x['k']",
        "x[-1:]",
        "x[::-1]",
        "x[1:3]",
        "x.k",
        "x.items is defined",
        "x.foo",
        "x is odd",
        "x is even",
        "x | reverse",
    ),
    *(
        "x | upper",
        "x | lower",
        "x | capitalize",
        "x | title",
        "x | trim",
        "x | int",
        "x | float",
        "x | abs",
        "x | round(1)",
    ),
    *("x | e", "x | safe", "x | forceescape", "x | join('-')", "x | replace('b', 'c')", "x | indent", "x | center(9)"),
    *("x | items | list", "x | dictsort", "x | sort", "x | unique", "x | max", "x | min", "x | sum", "x | batch(2)"),
    *("x | map('string')", "x | map(attribute='k')", "x | select", "x | reject('none')", "x | selectattr('k')"),
    *(
        "x | truncate(3)",
        "x | slice(2)",
        "'%s' % x",
        "'%r' % x",
        "'{}'.format(x)",
        "x | format(1)",
        "x.keys()",
        "x.get('k')",
    ),
    *(
        "x | tojson(indent=2)",
        "x | tojson(ensure_ascii=true, sort_keys=true)",
        "x | groupby('k')",
        "x()",
        "x is divisibleby 2",
    ),
    *("dict(x)", "range(x)", "namespace(a=x).a", "raise_exception(x)", "loop", "x.strip()", "x.split()", "'a'.join(x)"),
)
VALUES = (
    *(
        "undefined_name",
        "none",
        "true",
        "0",
        "3",
        "-7",
        "2.5",
        "1e15",
        "''",
        "'b'",
        "'Ab c'",
        "' é日 '",
        "[]",
        "[3, 1, 2]",
    ),
    *(
        "['b', 'A', 'a']",
        "[{'k': 1}, {'k': 0}]",
        "(1, 'x')",
        "{}",
        "{'k': 'v', 'a': [1]}",
        "{'k': 1}.items()",
        "range(4)",
    ),
    *("namespace(k=1)", "'<b>' | safe", "mixed", "object", "texts", "numbers", "text"),
)
SOURCES = (
    "{{ texts | map('lower') | list }}{{ texts | map('upper') | list }}{{ texts | map('title') | list }}{{ texts | map('capitalize') | list }}",
    "{% for t in texts %}{{ t.title() }}|{{ t.isalpha() }}{{ t.isdigit() }}{{ t.isalnum() }}{{ t.isspace() }}{{ t.isascii() }}{{ t.isnumeric() }}{{ t.isdecimal() }};{% endfor %}",
    "{% for n in numbers %}{{ n }} {{ n | int }} {{ n | float }} {{ n | round }} {{ n | round(2) }} {{ n | tojson }} {{ n // 2 }} {{ n % 3 }} {{ n % -3 }} {{ n / 4 }};{% endfor %}",
    "{% for n in numbers %}{{ '%d|%5d|%-5d|%05d|%+d|%x|%o' % (n, n, n, n, n, n | int, n | int) }};{% endfor %}",
    "{% for n in numbers %}{{ '%f|%.2f|%8.3f|%e|%g|%.3G|%+.1f|%08.2f' % (n, n, n, n, n, n, n, n) }};{% endfor %}",
    "{% for n in numbers %}{{ '{}|{:>20}|{:<9}|{:^9}|{:+}|{:,}|{:.2f}|{:e}|{:%}|{:g}'.format(n, n, n, n, n, n, n, n, n, n) }};{% endfor %}",
    "{% for n in [5, -5, 255] %}{{ '{:d}|{:x}|{:#x}|{:08b}|{:#o}|{:*^9}|{:=+5}|{:X}'.format(n, n, n, n, n, n, n, n) }};{% endfor %}",
    "{% for t in texts %}{{ '{:>5}|{:<5}|{:^5}|{:é^5}|{:.2}|{!r:>9}|{!s}'.format(t, t, t, t, t, t, t) }}{{ '%5s|%-5s|%.2s|%r' % (t, t, t, t) }};{% endfor %}",
    "{{ '%(b)s %(a)r %%' % object }}{{ '{b}{{}}{0}{n}'.format(1, b=2, n=3) }}{{ '%s %s' | format('a', 1) }}{{ '%(x)s' | format(x=2) }}",
    *(
        "{{ '%s' % (1, 2) }}",
        "{{ '%s %s' % 1 }}",
        "{{ '%d' % 'x' }}",
        "{{ '%q' % 1 }}",
        "{{ '%' % 1 }}",
        "{{ '{' .format(1) }}",
    ),
    *(
        "{{ '{}{1}'.format(1, 2) }}",
        "{{ '{2}'.format(1) }}",
        "{{ '{a}'.format(1) }}",
        "{{ '{:d}'.format('x') }}",
        "{{ '{:5}'.format(none) }}",
    ),
    "{% for s in [text, lines, '', 'a', 'aXbXXc'] %}{{ [s.strip(), s.lstrip(), s.rstrip(), s.strip('aHc \\n'), s.split(), s.split('X'), s.split('X', 1), s.split(none, 1), s.rsplit('X', 1), s.rsplit(none, 1), s.splitlines(), s.splitlines(true)] }};{% endfor %}",
    "{% for s in ['aXbXXc', 'ééXé', '', '  a b  c '] %}{{ [s.find('X'), s.rfind('X'), s.count('X'), s.count(''), s.partition('X'), s.rpartition('X'), s.replace('X', '-'), s.replace('', '-'), s.replace('X', '', 1), s.startswith('a'), s.endswith(('c', 'é')), s.find('X', 2), s.find('X', -2), s.count('X', 1, 4), s.startswith('X', 1), s.split(maxsplit=1), s.rsplit(maxsplit=1), s.split(sep='X')] }};{% endfor %}",
    "{{ ['7'.zfill(3), '-7'.zfill(4), 'é'.center(6, '*'), 'ab'.center(5), 'abc'.center(6), 'x'.ljust(3) ~ '|', 'x'.rjust(3, '.'), 'abc'.removeprefix('a'), 'abc'.removesuffix('c'), 'abc'.removesuffix('x'), '-'.join(['a', 'b']), 'abca'.index('c'), 'abca'.rindex('a')] }}",
    *(
        "{{ 'a'.index('x') }}",
        "{{ 'a'.split('') }}",
        "{{ 'a'.join([1]) }}",
        "{{ 'a'.find(1) }}",
        "{{ 'a'.center(1, 'xy') }}",
        "{{ 'a'.strip(1) }}",
    ),
    "{% for w in [4, 0, '>>', -1] %}{{ lines | indent(w) }}{{ lines | indent(w, true) }}{{ lines | indent(w, first=true, blank=true) }}{% endfor %}",
    "{{ table | sort(attribute='n') | map(attribute='n') | list }}{{ table | sort(attribute='n', case_sensitive=true) | map(attribute='v') | list }}{{ table | sort(attribute='n,v', reverse=true) | map(attribute='v') | list }}{{ table | map(attribute='d.x', default=9) | list }}",
    "{% for g in table | groupby('n') %}{{ g.grouper }}{{ g.list | length }}{{ g }}{% endfor %}{% for k, l in table | groupby('n', case_sensitive=true) %}{{ k }}{{ l | map(attribute='v') | list }}{% endfor %}{{ table | groupby('w', default='q') | length }}",
    "{{ object | dictsort }}{{ object | dictsort(true) }}{{ {'a': 2, 'b': 1} | dictsort(by='value') }}{{ {'a': 2, 'b': 1} | dictsort(false, 'key', true) }}{{ {} | dictsort(by='x') }}",
    "{{ numbers | sort }}{{ numbers | sort(reverse=true) }}{{ numbers | max }}{{ numbers | min }}{{ numbers | sum }}{{ numbers | unique | list }}{{ texts | unique | list }}{{ texts | unique(true) | list }}{{ texts | max }}{{ table | max(attribute='v') }}{{ table | sum('v') }}{{ table | sum(attribute='v', start=0.5) }}{{ texts | min(true) }}{{ [] | max }}|{{ [] | first is defined }}",
    "{% for n in [1, 2, 3, 7] %}{{ [1, 2, 3, 4, 5, 6, 7] | batch(n) | list }}{{ [1, 2, 3, 4, 5, 6, 7] | slice(n) | list }}{{ [1, 2, 3] | batch(n, 'x') | list }}{{ [1, 2, 3] | slice(n, 'x') | list }}{% endfor %}{{ [] | slice(0) | list }}",
    "{{ table | selectattr('d') | list | length }}{{ table | selectattr('v', 'gt', 1) | map(attribute='n') | join }}{{ table | rejectattr('n', 'in', ['a', 'b']) | map(attribute='v') | list }}{{ [1, 2, 3, 4] | select('divisibleby', 2) | list }}{{ [1, none] | reject('none') | list }}{{ [1, 2] | select('>', 1) | list }}{{ table | selectattr('d.x', 'defined') | list | length }}",
    "{{ texts | join(', ') }}{{ table | join('-', attribute='n') }}{{ table | join(attribute='v', d='+') }}{{ 'abc' | join('-') }}{{ [1, none, [2]] | join }}{{ object | join(',') }}",
    "{% for v in ['12', ' -7 ', '1.9', 'x', '', '1e3', none, [], 3.99, true, '+5', 'inf'] %}{{ v | int }},{{ v | int(-1) }},{{ v | float }},{{ v | float(0.25) }};{% endfor %}",
    "{{ 2.567 | round(1, 'ceil') }}{{ 2.567 | round(1, 'floor') }}{{ 7 | round(1) }}{{ 2.5 | round }}{{ 3.5 | round }}{{ -2.675 | round(2) }}{{ 5 | round(0, 'ceil') }}{{ 1e300 | round(2) }}",
    *(
        "{{ 1 | round(1, 'x') }}",
        "{{ 'x' | round }}",
        "{{ 1 // 0 }}",
        "{{ 1.0 % 0 }}",
        "{{ 1 / 0 }}",
        "{{ 0 ** -1 }}",
        "{{ 2 ** -1 }}{{ 2.0 ** 0.5 }}{{ (-2) ** 3 }}",
    ),
    "{% for a in [7, -7, 7.5, -7.5] %}{% for b in [2, -2, 2.5, -0.5] %}{{ a // b }} {{ a % b }} {{ a / b }} {{ a * b }} {{ a - b }} {{ a + b }};{% endfor %}{% endfor %}",
    "{{ 'hello world and more' | truncate(9) }}{{ 'hello world and more' | truncate(9, true) }}{{ 'hello world and more' | truncate(12, false, '', 0) }}{{ 'héllo' | truncate(3, leeway=0) }}{{ 'short' | truncate }}",
    "{{ 'it\\'s a (tRUE) word-of [x] \\u00e9t\\u00e9' | title }}{{ 'ÉCOLE' | capitalize }}{{ '<a href=\"x\">&\\'' | e }}{{ ('<b>' | safe) + '<i>' }}{{ '<i>' + ('<b>' | safe) }}{{ ['<' | safe] }}{{ ('<' | safe).upper() + '<' }}{{ ('<' | e) | e }}{{ ('<' | safe) | forceescape }}{{ ('a<' | safe)[1:] + '<' }}{{ ('x' | safe).replace('x', '<') }}",
    "{{ object | tojson }}{{ object | tojson(indent=2) }}{{ object | tojson(indent='--', sort_keys=true) }}{{ object | tojson(separators=(',', ':')) }}{{ object | tojson(ensure_ascii=true) }}{{ '🎉' | tojson(true) }}{{ [[], {}, [[]], 1.0, 1e22, none] | tojson(indent=1) }}{{ (1, 2) | tojson }}{{ {1: 2, none: 3, true: 4, 2.5: 5} | tojson }}{{ [] | tojson(indent=0) }}{{ [1] | tojson(indent=0) }}",
    *(
        "{{ {(1, 2): 3} | tojson }}",
        "{{ undefined_name | tojson }}",
        "{{ range(3) | tojson }}",
        "{{ {'a': 1}.items() | tojson }}",
        "{{ {[1]: 2} }}",
    ),
    "{{ object.n.m[1] }}{{ object['n']['m'][-1] }}{{ object.n.m[5] is defined }}{{ object.get('zz') }}{{ object.get('zz', 4) }}{{ object.items is callable }}{{ object['items'] }}{{ object.keys() | list }}{{ object.values() | list }}{{ object.pop is defined }}{{ 'b' in object }}{{ 'b' in object.keys() }}{{ [1, 2].index(2) }}{{ [1, 1].count(1) }}{{ object.copy() == object }}{{ object.items() | length }}",
    *(
        "{{ object.zz.y }}",
        "{{ nothing.x }}",
        "{{ nothing.x.y }}",
        "{{ undefined_name.x }}",
        "{{ undefined_name() }}",
        "{{ object() }}",
        "{{ object.pop('b') }}",
    ),
    "{% for i in range(-5, 6) %}{% for j in [none, -4, -1, 0, 2, 9] %}{{ 'abécd'[i:j] }},{{ [1, 2, 3][i:j:2] }},{{ 'abécd'[j:i:-1] }},{{ (1, 2, 3)[j:i] }},{{ range(5)[i:j] | list }};{% endfor %}{% endfor %}",
    *(
        "{{ 'abc'[::0] }}",
        "{{ none[1:] }}",
        "{{ {}[1:] }}",
        "{{ 'abc'['x':] }}",
        "{{ 'abc'[1.5] is defined }}",
        "{{ [1][true] is defined }}",
    ),
    "{{ 1 == 1.0 == true }}{{ 'a' < 'b' <= 'b' }}{{ [1, 2] < [1, 3] }}{{ (1,) < (1, 2) }}{{ {'a': 1} == {'a': 1.0} }}{{ 'a' not in 'abc' }}{{ '' in 'a' }}{{ none == undefined_name }}{{ undefined_name == other }}{{ 9007199254740993 == 9007199254740992.0 }}{{ 9007199254740993 > 9007199254740992.0 }}",
    *(
        "{{ 1 < 'a' }}",
        "{{ none < 1 }}",
        "{{ 1 in 'a' }}",
        "{{ 1 in 5 }}",
        "{{ [] < {} }}",
        "{{ 'a' + 1 }}",
        "{{ [1] + (2,) }}",
        "{{ undefined_name + 1 }}",
        "{{ 'a' - 'b' }}",
    ),
    "{% set x = 1 %}{% for i in [1, 2] %}{{ x }}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}{% if true %}{% set x = 9 %}{% endif %}{{ x }}{% if false %}{% set y = 1 %}{% endif %}{{ y is defined }}{% for i in [] %}{% else %}{% set x = 5 %}{{ x }}{% endfor %}{{ x }}",
    "{% for i in [1, 2, 3] %}{% set z = i if i == 2 %}{{ z }}{% if i == 1 %}{% set w = i %}{% endif %}{{ w is defined }}{% endfor %}{{ i is defined }}{% for x in [[1, 2], [3, 4]] %}{% for x in x %}{{ x }}{% endfor %}{{ x }}{% endfor %}",
    "{% macro m(a, b=a, *, c='C') %}{% endmacro %}",
    "{% macro m(a, b='B', c=b ~ '!') %}[{{ a }}{{ b }}{{ c }}{{ varargs }}{{ kwargs }}]{% endmacro %}{{ m(1) }}{{ m(1, 2) }}{{ m(1, c=3) }}{{ m(1, 2, 3, 4, 5) }}{{ m(b=1, z=2) }}{{ m(*[1, 2], **{'c': 3}) }}{{ m }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m() }}{{ m(a=2) }}{{ m(1, 2) }}",
    "{% macro m(a) %}{{ a is defined }}{{ a }}{% endmacro %}{{ m() }}{{ m(1, a=2) }}",
    "{% macro m(a) %}{% if a %}{{ a }}{{ m(a - 1) }}{% endif %}{{ later }}{% endmacro %}{% set later = '!' %}{{ m(3) }}{% set later = '?' %}{{ m(1) }}",
    "{% macro outer(x) %}{% macro inner(y) %}{{ x }}{{ y }}{% endmacro %}{{ inner(1) }}{{ inner(2) }}{% endmacro %}{{ outer('o') }}{{ outer('p') }}",
    "{% macro m(x) %}<{{ caller(x) }}|{{ caller('z') }}>{% endmacro %}{% call(y) m('a') %}{{ y }}{{ messages | length }}{% endcall %}{% macro n() %}{{ caller is defined }}{% endmacro %}{{ n() }}",
    "{% set ns = namespace(a=1) %}{% for i in [1, 2, 3] %}{% set ns.a = ns.a + i %}{% set ns.b = i %}{% endfor %}{{ ns.a }}{{ ns.b }}{{ ns['a'] }}{{ ns.c is defined }}{{ ns }}{% set ns.a, q = [7, 8] %}{{ ns.a }}{{ q }}",
    *(
        "{% set x = {} %}{% set x.y = 1 %}",
        "{% set a, b = [1] %}",
        "{% for a, b in [[1, 2, 3]] %}{% endfor %}",
        "{% for a in 5 %}{% endfor %}",
        "{% for a in none %}{% endfor %}",
    ),
    "{% for a, b in object.items() %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ a }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.depth }}{{ loop.depth0 }}{{ loop.cycle(1, 2, 3) }}{{ loop.changed(b is string) }}{{ loop }}{{ loop['index'] }}{{ loop.foo is defined }};{% endfor %}",
    "{% for i in [1, 2, 3, 4] if i is even %}{{ i }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{% else %}none{% endfor %}{% for i in [1] if i > 1 %}{% else %}none{% endfor %}{% for a, b in [[1, 2]] if a %}{{ loop.nextitem is defined }}{{ a }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for i in [1, 2, 3, 4] if i > ns.n %}{{ i }}{% set ns.n = i + 1 %}{% endfor %}{% for i in [1, 2, 3, 4] if i > ns.n %}{{ i }}{{ loop.last }}{% set ns.n = 0 %}{% endfor %}",
    "{% for i in [1, 2, 3, 4, 5] %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% else %}x{% endfor %}{% for i in [1] %}{% continue %}{% else %}quirk{% endfor %}{% for i in [1] %}{% break %}{% else %}quirk{% endfor %}",
    "{% for i in [[1, [2, 3]], [4, []]] recursive %}{{ i if i is number else '' }}{% if i is iterable %}({{ loop(i) }}{{ loop.depth }}){% endif %}{% for j in [1] %}{{ loop.depth }}{% endfor %}{% else %}e{% endfor %}",
    "{% for i in [1] %}{{ loop([2]) }}{% endfor %}",
    "{% with a = 1, b = 2 %}{{ a }}{{ b }}{% set a = 3 %}{{ a }}{% endwith %}{{ a is defined }}{% set a = 5 %}{% with a = a + 1 %}{{ a }}{% endwith %}{{ a }}",
    "{% set x %}a{{ 1 }}{% set y = 2 %}{{ y }}{% endset %}{{ x }}{{ y is defined }}{% set z | upper | replace('B', '-') %}ab{% endset %}{{ z }}{% filter upper | trim %} q{{ x }} {% endfilter %}{% filter replace('a', 'b') %}aa{% endfilter %}",
    "{% generation %}{% set g = 1 %}{{ g }}{% endgeneration %}{{ g is defined }}{{ add_generation_prompt }}{{ tools }}{{ documents is none }}{{ bos_token }}{{ eos_token is defined }}",
    "{{ strftime_now('%d %b %Y') }}{{ strftime_now('%A %B %-d, %H:%M:%S %p %I %j %y %a %m %e %F %T %% %Z') }}",
    "{{ range(3) }}{{ range(1, 9, 3) }}{{ range(3) | list }}{{ range(5, 0, -2) | list }}{{ range(2)[1] }}{{ 1 in range(3) }}{{ range(0) | length }}{{ range(3) == range(0, 3) }}",
    *(
        "{{ range(100001) }}",
        "{{ range() }}",
        "{{ range('a') }}",
        "{{ range(1, 2, 0) }}",
        "{{ dict([(1, 2)], a=3) }}{{ dict(object)['b'] }}",
        "{{ dict([1]) }}",
    ),
    *(
        "{{ raise_exception('no ' ~ messages[0].role) }}",
        "{{ raise_exception() }}",
        "{% if nothing %}{{ x | from_json }}{% endif %}ok",
        "{% if true %}{{ x | from_json }}{% endif %}",
    ),
    *(
        "{% if true %}{{ x is strange }}{% endif %}",
        "{{ (1 if false) }}|{{ (1 if false) is defined }}",
        "{{ 1 if nothing else 2 }}{{ nothing or 'o' }}{{ 0 and x.y.z }}{{ [] or {} }}",
    ),
    "{{ 'a' 'b' }}{{ 1.50 }}{{ 1_000 }}{{ 'tab\\t' }}{{ [1, 'a\\'b', \"c\\\"d\", 'both\\'\\\"'] }}{{ (1,) }}{{ () }}{{ {'a': (1, [2])} }}{{ [true, none, 1.0] }}{{ [undefined_name] }}",
    "{%- set a = 1 -%}\n  {%- if a %}\n  x\n {% endif %}\n{# comment #}\n  {{- a -}}  \n{% raw %}{{ x }}{% endraw %}",
    "{% for m in messages %}{{ m.role }}{{ m['content'] }}{{ m.thinking is defined }}{{ m.get('role') }}{{ m.count is defined }}{{ m | length }}{% endfor %}{{ messages[::-1][0].role }}{{ messages | map(attribute='role') | join }}",
)


@pytest.fixture(scope="module")
def library(native_library: Build) -> ctypes.CDLL:
    return build(native_library)


def expected(source: str) -> tuple[str | None, str]:
    try:
        template = ChatTemplate(source, bos_token="<s>", now=lambda: NOW)
        return None, template.render(MESSAGES, **VARIABLES)
    except TemplateError as error:
        return "TemplateError", str(error)


def same(ours: tuple[str | None, str], theirs: tuple[str | None, str]) -> bool:
    """The same text, or the same kind of error; what a template says when it refuses is the same too."""
    if theirs[0] is None or theirs[1].startswith("the chat template refuses"):
        return (ours[0], " ".join(ours[1].split()) if ours[0] else ours[1]) == theirs
    return ours[0] == theirs[0] and ours[1].startswith("the chat template ")


def difference(library: ctypes.CDLL, source: str) -> str:
    theirs = expected(source)
    try:
        ours = NativeTemplate(library, source, bos_token="<s>").render(MESSAGES, **VARIABLES)
    except TemplateError as error:
        ours = "TemplateError", str(error)
        if theirs[0] == "TemplateError":
            return ""
    return "" if same(ours, theirs) else f"{source}\n  C++    {ours}\n  Python {theirs}"


def test_the_nodes_are_those_of_python(library: ctypes.CDLL) -> None:
    library.template_ops.restype = ctypes.c_char_p
    assert tuple(library.template_ops().decode().split()) == OPS


@pytest.mark.parametrize("value", [*VALUES[:6], *(pytest.param(value, marks=pytest.mark.full) for value in VALUES[6:])])
def test_every_operation_on(library: ctypes.CDLL, value: str) -> None:
    wrong = [difference(library, f"{{% set x = {value} %}}{{{{ {one} }}}}") for one in OF_ANY]
    assert not any(wrong), "\n".join(filter(None, wrong))


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source[:50])
def test_statements_and_arguments(library: ctypes.CDLL, source: str) -> None:
    assert not difference(library, source), difference(library, source)


def test_numbers_have_the_digits_of_python(library: ctypes.CDLL) -> None:
    """Powers of two among them, whose neighbors are nearer below than above."""
    random = np.random.default_rng(6).integers(0, 1 << 63, 3000, dtype=np.uint64).view(np.float64)
    numbers = [*(2.0**power for power in range(-1074, 1024)), *random[np.isfinite(random)].tolist()]
    numbers += [round(x, places) for places in (1, 3) for x in numbers[:3] + [n * 1e-3 for n in range(300)]]
    kind, text = NativeTemplate(library, "{{ numbers | join(' ') }}").render(MESSAGES, numbers=numbers)
    assert kind is None and text.split() == list(map(repr, numbers))
    kind, text = NativeTemplate(
        library, "{% for x in numbers %}{{ '%.3e %.17g %.2f;' % (x, x, x) }}{% endfor %}"
    ).render(MESSAGES, numbers=numbers[1000:1200])
    assert kind is None and text == "".join(f"{x:.3e} {x:.17g} {x:.2f};" for x in numbers[1000:1200])


def test_each_filter_and_test_is_used_here() -> None:
    text = "".join((*OF_ANY, *SOURCES))
    assert not [name for name in FILTER_NAMES if name not in text and name not in ("escape",)]
    assert not [
        name
        for name in TEST_NAMES
        if f"is {name}" not in text and f"'{name}'" not in text and name not in ("eq", "ge", "le", "lt", "ne")
    ]


@pytest.mark.parametrize(
    "source",
    [
        *(
            "{{ x | wordwrap }}",
            "{{ x | urlencode }}",
            "{{ x | wordcount }}",
            "{{ x | attr('y') }}",
            "{{ x is lower }}",
            "{{ x.swapcase() }}",
        ),
        *(
            "{{ x | map(y) }}",
            "{{ x | select(*y) }}",
            "{{ strftime_now(x) }}",
            "{{ strftime_now('%c') }}",
            "{{ 9999999999999999999 }}",
            "{{ self.x }}",
        ),
    ],
)
def test_what_is_not_covered_is_refused_when_compiled(source: str) -> None:
    with pytest.raises(TemplateError, match=r"line 1|does not compile|not cover"):
        template_program(source)
