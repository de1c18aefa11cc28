"""Hostile chat templates: each must end in a one-line TemplateError, soon and in little memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlcpipe.errors import TemplateError
from mlcpipe.runtime.text import template_sandbox
from mlcpipe.runtime.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]
BIG = "{% set s = 'abcdefgh' * 131000 %}"  # the largest text a template may make
DOUBLED = "{% set x = [0] %}" + "{% set x = [x, x] %}" * 60
DUNDERS = [
    "{{ ''.__class__ }}x{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__']['__base__'] }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__['os'].system('true') }}",
    "{{ raise_exception['__globals__']['os'] }}",
    "{{ (''|attr('__class__')).mro() }}",
    "{{ [''] | map(attribute='__class__') | map(attribute='__name__') | list | first }}",
    "{{ '{0.__class__.__name__}'.format('') }}",
    "{{ '{0[__class__].__name__}'.format('') }}",
    "{% set m = '{0.__class__.__name__}'.format_map %}{{ m({'0': 1}) }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.name() }}",
    "{{ namespace.__init__.__globals__.sys }}",
    "{{ loop.__class__.__name__() }}",
    "{% for i in [1] %}{{ loop._iterator.__reduce__() }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__.x }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__.os }}",
    "{{ joiner.x.y }}",
    "{{ messages.append({}) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ (1).to_bytes(1000000000, 'big') }}",
    "{{ 'a'.encode() }}",
    "{{ messages[0].role.translate({97: 'b' * 1000}) }}",
    "{{ 'a'.expandtabs(1000000000) }}",
]
STATEMENTS = [
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% from 'x' import y %}",
    "{% extends 'x' %}",
    "{% block a %}{% endblock %}",
    "{% autoescape true %}{% endautoescape %}",
]
LOOPS = [
    "{% for i in range(10**12) %}{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% for i in range(100000) if false %}{% endfor %}" * 200,
    "{% for i in range(100000) %}{{ range(100000) | list | length }}{% endfor %}",
    "{% for i in range(100000) %}{% set x = range(100000) | map('string') | list %}{% endfor %}",
    "{% for i in range(100000) %}{% set x = range(100000) | sort | list %}{% endfor %}",
    "{% for i in range(100000) %}{% set x = range(100000) | max %}{% endfor %}",
    "{% for i in range(100000) %}{% set x = 'x' in range(100000) %}{% endfor %}",
    "{% for i in range(100000) %}{% set x = 'x' not in (range(100000) | list) %}{% endfor %}",
    "{{ range(100000) | select('in', range(99999, -1, -1) | list) | list | length }}",
    "{% set l = range(30000) | list %}{% for i in l %}{% for j in l if j == i == l == [l] %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "{% macro a() %}{% call b() %}{% endcall %}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
    "{% macro m() %}{{ caller() }}{% call m() %}{% endcall %}{% endmacro %}{% call m() %}{% endcall %}",
    "{% for i in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(100000) %}{% set ns.x = ns.x + [i] %}{% endfor %}",
    "{% set ns = namespace(x='') %}{% for i in range(100000) %}{% set ns.x = ns.x + 'abcdefghij' * 99 %}{% endfor %}",
]
SIZES = [
    "{{ 'a' * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{{ [1] * 10**10 }}",
    "{{ (1,) * 10**10 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ 9 ** (9 ** (9 ** 9)) }}",
    "{% set ns = namespace(x=9 ** 99) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ''.join([ns.x, ns.x]) %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x | replace('a', 'aa') %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%.10000000000f' % 1 }}",
    "{{ '%*d' % (10 ** 10, 1) }}",
    "{{ '%0*d' | format(10 ** 10, 1) }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10 ** 10) }}",
    "{{ '%(a)s' * 100000 % {'a': 'x' * 100000} }}",
    "{{ ('{0}' * 100000).format('x' * 100000) }}",
    "{{ ('{0:9999}' * 100000).format(1) }}",
    "{{ '%(a)9999s' * 100000 % {'a': 1} }}",
    "{{ ('%(a)9999s' * 100000) | format(a=1) }}",
    "{{ ('%(a)9999d' * 100000) % {'a': 1} }}",
    "{{ ('%(a)9999d' * 100000) | format(a=1) }}",
    "{{ ('ab' * 1000) | join('x' * 1000000) }}",
    "{% for i in range(100000) %}{{ loop | join('x' * 100000) }}{% endfor %}",
    "{% for i in [range(99999) | list] recursive %}{{ 'x' * 9999 }}{{ loop(i) }}{% endfor %}",
    "{{ ('a' * 9) | map('replace', 'a', 'b' * 900000) | map('replace', 'b', 'c' * 900000) | list }}",
    "{% set ns = namespace(x=9 ** 1000) %}{{ [[ns.x] * 999] * 999 }}",
    "{{ 'a' | center(10 ** 9) }}",
    "{{ 'a'.center(10 ** 9) }}",
    "{{ 'a'.ljust(10 ** 9) }}",
    "{{ 'a'.rjust(10 ** 9) }}",
    "{{ 'a'.zfill(10 ** 9) }}",
    "{{ 'a\nb' | indent(10 ** 9) }}",
    "{{ ('\n' * 100000) | indent('x' * 9999, true, true) }}",
    "{{ ('a' * 1000000).replace('', 'b' * 1000000) }}",
    "{{ range(100000) | join('x' * 100000) }}",
    "{{ ('x' * 100000).join(['a'] * 100000) }}",
    "{{ [1] | tojson(indent=10 ** 9) }}",
    "{{ range(9999) | list | tojson(separators=('x' * 9999, 'y')) }}",
    "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "{{ [1] | slice(10 ** 9, 'x') | list }}",
    "{{ [[1]] | sum(start=[]) }}",
    "{{ 5 | round(-10 ** 9) }}",
    "{{ 5 | round(10 ** 9, 'ceil') }}",
    "{{ strftime_now('%Y' * 1000000) }}",
    "{{ raise_exception(*('ab' * 400000)) }}",
    "{{ dict(**{'a': 1}).items() | list | tojson(indent='x' * 9999) }}",
    BIG + "{{ s | list | length }}",
    BIG + "{% for i in range(9999) %}{{ s | title }}{% endfor %}",
    BIG + "{% for i in range(9999) %}{{ s.split('a') | length }}{% endfor %}",
    BIG + "{% for i in range(9999) %}{{ (s | replace('a', ' ')).split() | length }}{% endfor %}",
    BIG + "{% for i in range(9999) %}{{ (s | replace('a', '\n')).splitlines() | length }}{% endfor %}",
    BIG + "".join(f"{{% set v{i} = s[{i}:] %}}" for i in range(1000)),
    BIG + "".join(f"{{% set v{i} = s | upper %}}" for i in range(1000)),
    BIG + "{% for i in range(100000) %}{{ s }}{% endfor %}",
    BIG + "{% set t %}{% for i in range(100000) %}{{ s }}{% endfor %}{% endset %}",
    BIG + "{% macro m() %}{% for i in range(100000) %}{{ s }}{% endfor %}{% endmacro %}{{ m() }}",
    BIG + "{% filter upper %}{% for i in range(100000) %}{{ s }}{% endfor %}{% endfilter %}",
    "{% set t %}{% for i in range(100000) %}" + "text" * 9999 + "{% endfor %}{% endset %}",
    "{% for i in range(100000) %}" + "text" * 9999 + "{% endfor %}",
]
SEARCHES = [
    "{% set s = 'a' * 1000000 %}{{ s.rfind('b' + 'a' * 500000) }}",
    "{% set s = 'a' * 1000000 %}{{ s.rsplit('b' + 'a' * 500000) | length }}",
    "{% set s = 'a' * 1000000 %}{{ s.strip('b' * 1000000 + 'a') }}",
    "{% set s = 'a' * 1000000 %}{{ s | trim('b' * 1000000 + 'a') }}",
    "{% set s = 'a' * 1000000 %}{% set n = 'a' * 49 + 'b' + 'a' * 49 %}{% for i in range(99999) %}{% set x = n in s %}{% endfor %}",
    "{% set s = 'a' * 1000000 %}{% set n = 'a' * 49 + 'b' + 'a' * 49 %}{% for i in range(99999) %}{% set x = s.find(n) %}{% endfor %}",
    "{% set s = 'a' * 1000000 %}{% set n = 'a' * 4000 + 'b' + 'a' * 4000 %}{% for i in range(99999) %}{% set x = s.count(n) %}{% endfor %}",
]
SHARED = [
    DOUBLED + "{{ x }}",
    DOUBLED + "{{ x | tojson }}",
    DOUBLED + "{{ x == x }}",
    DOUBLED.replace("[x, x]", "(x, x)") + "{{ {x: 1} }}",
]
HASHES = [
    "{{ range(0, (2**61-1)*20000, 2**61-1) | unique | list | length }}",
    "{% set d = dict(range(0, (2**61-1)*100000, 2**61-1) | batch(2)) %}",
    "{% set s %}{% for i in range(20000) %}{{ i * (2**61-1) }} {% endfor %}{% endset %}"
    "{{ s.split() | map('int') | unique | list | length }}",
]
# What holds itself is written out in short.
HARMLESS = {
    "{% set a = namespace() %}{% set b = namespace() %}{% set a.x = [b, b] %}{{ a.x }}": "[<Namespace>, <Namespace>]",
    "{% set a = namespace() %}{% set a.x = a %}{{ a }}": "<Namespace>",
    "{% set a = namespace() %}{% set a.x = [a] %}{{ a.x | string }}": "[<Namespace>]",
    "{% set a = namespace() %}{% set a.x = a %}{{ '%s{}'.format(a) % a }}": "<Namespace><Namespace>",
    "{% set a = namespace() %}{% set a.x = a %}{{ a ~ '' }}": "<Namespace>",
    "{{ namespace(__class__=1) }}": "<Namespace>",
    "{{ ('9' * 1000000) | int }}": "0",
}
COMPILER = [
    "{{ " + "(" * 50000 + "1" + ")" * 50000 + " }}",
    "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "{{ " + "-" * 50000 + "1 }}",
    "{{ 1" + " + 1" * 40000 + " }}",
    "{{ 1" + " ~ 1" * 40000 + " }}",
    "{{ 1" + " == 1" * 40000 + " }}",
    "{{ x" + ".x" * 60000 + " }}",
    "{% if x %}" * 3000 + "{% endif %}" * 3000,
    "{% for i in [1] %}" * 40 + "{% endfor %}" * 40,
    "{{ a }}" * 36000,
    "{% macro m() %}" * 2000 + "{% endmacro %}" * 2000,
    "{{ " + "9" * 200000 + " ** 9 }}",
    "{#" * 100000,
    "{% raw %}" * 20000,
    "{{ '" + "\\" * 200000,
    "{%-" * 80000,
    " " * 200000 + "{% x",
]


def attacks() -> list[str]:
    return [*DUNDERS, *STATEMENTS, *LOOPS, *SIZES, *SEARCHES, *HASHES, *SHARED, *COMPILER]


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.5)


def million_steps_s() -> float:
    """CPU time of a million steps of a loop: some 20 ms, more where everything takes more."""
    started = time.thread_time()
    for _ in range(1_000_000):
        pass
    return time.thread_time() - started


@pytest.mark.parametrize("source", attacks(), ids=lambda source: source[:60] + f"#{len(source)}")
def test_an_attack_ends_soon_in_a_one_line_error(source: str) -> None:
    started = time.thread_time()
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(source).render(MESSAGES)
    spent = time.thread_time() - started
    assert spent < 4 * template_sandbox.MAX_SECONDS or spent < 100 * million_steps_s()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700
    if source not in COMPILER:
        # The limits stop it, not Python's own last resort.
        assert "MemoryError" not in str(caught.value)


@pytest.mark.parametrize("source", HARMLESS)
def test_what_looks_like_an_attack_and_is_none(source: str) -> None:
    assert ChatTemplate(source).render(MESSAGES) == HARMLESS[source]


MEMORY = """
import resource, sys
sys.path.insert(0, {tests!r})
import test_template_attacks as attacks
from mlcpipe.errors import TemplateError
from mlcpipe.runtime.text.chat_template import ChatTemplate
ChatTemplate("{{{{ messages }}}}").render(attacks.MESSAGES)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for source in attacks.SIZES + attacks.SHARED:
    try:
        ChatTemplate(source).render(attacks.MESSAGES)
    except TemplateError:
        pass
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // (2**20 if sys.platform == "darwin" else 1024))
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform == "win32", reason="resource is not available on Windows")
def test_attacks_take_little_memory() -> None:
    """Peak over all attacks on size, in a fresh process, in MiB above a harmless rendering."""
    script = MEMORY.format(tests=str(Path(__file__).parent))
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=paths)
    assert int(done.stdout) < 400
