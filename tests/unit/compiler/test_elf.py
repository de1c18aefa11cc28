"""mlcpipe's own linker: libraries of C objects compute what C says, for x86-64 here and for AArch64 under qemu."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mlcpipe
from mlcpipe.compiler import link as links
from mlcpipe.compiler.elf.shared import link
from mlcpipe.compiler.elf.tables import hash_table, name_hash
from mlcpipe.compiler.link import POOL, Linker, OwnLinker, find_linker, find_linux_linker
from mlcpipe.errors import CompileError
from tests.conftest import Bundles

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it links for Linux")
# Two objects with all that a relocation may ask for: places, words, other libraries' functions, threads' own data.
_FIRST = """
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
int shared_number = 40;
static int numbers[3] = {5, 1, 3};
static const char* const names[] = {"zero", "one", "two"};
static _Thread_local int started = 7, counted;
static long constructed;
static short half = 2;
static char letters[64], letter = 'x';
extern int twice(int);
extern int nobody(void) __attribute__((weak));
__attribute__((weak)) int chosen(void) { return 1; }
static int (*const table[])(int) = {twice, abs};
__attribute__((constructor(200))) static void construct(void) { constructed = 10 * constructed + 1; }
__attribute__((constructor(101))) static void construct_first(void) { constructed = 1; }
static int compare(const void* a, const void* b) { return *(const int*)a - *(const int*)b; }
static void* count(void* by) { counted += *(int*)by; started += counted; *(int*)by = started; return NULL; }
int sorted_number(int at) { qsort(numbers, 3, sizeof *numbers, compare); return numbers[at]; }
int name_length(int at) { return (int)strlen(names[at]); }
int constructed_number(void) { return (int)constructed + half + (memset(letters, letter, 64) == letters ? letters[63] : 0); }
int called(int which, int number) { return table[which](number); }
int is_there(void) { return nobody != NULL; }
int chosen_number(void) { return chosen(); }
int rounded_sine(int thousandths) { return (int)lroundf(1000 * sinf((float)thousandths / 1000)); }
int counted_by(int by) { /* on a thread of its own, and on this one */
  pthread_t thread;
  int other = by;
  if (pthread_create(&thread, NULL, count, &other)) return -1;
  pthread_join(thread, NULL);
  count(&by);
  return 100 * other + by;
}
"""
_SECOND = """
extern int shared_number;
int chosen(void) { return 2; }
int twice(int number) { return 2 * number + shared_number - 40; }
"""
_CALLS = [
    ("sorted_number", (0,), 1), ("sorted_number", (2,), 5), ("name_length", (2,), 3), ("called", (0, 21), 42),
    ("constructed_number", (), 11 + 2 + ord("x")), ("called", (1, -9), 9), ("is_there", (), 0),
    ("chosen_number", (), 2), ("rounded_sine", (1571,), 1000), ("counted_by", (5,), 1212), ("counted_by", (1,), 818),
]  # fmt: skip
_MAIN = """
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char** words) {
  void* library = dlopen(words[1], RTLD_NOW);
  if (library == NULL) return puts(dlerror());
"""


def _objects(folder: Path, compiler: Linker, *flags: str) -> list[Path]:
    made = []
    for name, text in (("first", _FIRST), ("second", _SECOND)):
        source, output = folder / f"{name}.c", folder / f"{name}.o"
        source.write_text(text)
        compiler.run(["-O1", "-fPIC", *flags, "-c", str(source), "-o", str(output)])
        made.append(output)
    return made


@pytest.mark.full
def test_a_library_computes_what_its_sources_say(tmp_path: Path) -> None:
    link(_objects(tmp_path, find_linker()), tmp_path / "made.so")
    library = ctypes.CDLL(str(tmp_path / "made.so"))
    for name, arguments, result in _CALLS:
        assert getattr(library, name)(*arguments) == result, name
    assert ctypes.c_int.in_dll(library, "shared_number").value == 40
    assert not hasattr(library, "compare")


@pytest.mark.full
def test_a_library_for_another_machine(tmp_path: Path) -> None:
    compiler = find_linux_linker("aarch64")
    loader = Path("/usr/aarch64-linux-gnu")
    if compiler is None or "ziglang" in compiler.name or shutil.which("qemu-aarch64") is None or not loader.exists():
        pytest.skip("no compiler for AArch64 and its libraries, or no qemu")
    link(_objects(tmp_path, compiler, "-mno-outline-atomics"), tmp_path / "made.so")
    calls = "".join(
        f'printf("%d\\n", ((int (*)(int, int))dlsym(library, "{name}"))({", ".join(map(str, [*arguments, 0, 0][:2]))}));\n'
        for name, arguments, _ in _CALLS
    )
    (tmp_path / "main.c").write_text(f"{_MAIN}{calls}return 0; }}")
    compiler.run([str(tmp_path / "main.c"), "-ldl", "-o", str(tmp_path / "main")])
    command = ["qemu-aarch64", "-L", str(loader), str(tmp_path / "main"), str(tmp_path / "made.so")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(result) for _, _, result in _CALLS], done.stderr


@pytest.mark.full
def test_a_broken_object_file_is_refused(tmp_path: Path) -> None:
    """Cut anywhere, or with bytes changed: an error of ours, or a library; nothing else."""
    first, second = _objects(tmp_path, find_linker())
    content, random = first.read_bytes(), np.random.default_rng(3)
    for case in range(300):
        changed = bytearray(content[: random.integers(len(content))] if case % 2 else content)
        if not case % 2:
            for at in random.integers(len(content), size=8):
                changed[at] = random.integers(256)
        (tmp_path / "changed.o").write_bytes(changed)
        try:
            link([tmp_path / "changed.o", second], tmp_path / "changed.so")
        except CompileError:
            continue
    (tmp_path / "changed.o").write_bytes(content[:1000])
    with pytest.raises(CompileError, match="a broken object file in changed.o"):
        link([tmp_path / "changed.o"], tmp_path / "changed.so")
    for line, message in (("t: .quad twice", "an address among constants"), (".balign 8192", "size or alignment")):
        (tmp_path / "odd.s").write_text(f'.section .rodata,"a"\n{line}\n')
        find_linker().compile(tmp_path / "odd.s", tmp_path / "odd.o")
        with pytest.raises(CompileError, match=message):
            link([tmp_path / "odd.o", second], tmp_path / "odd.so")
    with pytest.raises(CompileError, match="two definitions; found"):
        link([first, first, second], tmp_path / "twice.so")


@pytest.mark.full
def test_a_model_linked_without_a_linker(
    tiny_bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With cc and with our own, threads included: the same numbers."""
    pool, stubs = tmp_path / "pool.o", Path(__file__).parents[3] / "wheels" / "glibc.c"
    parts = [tmp_path / "threads.o", tmp_path / "glibc.o"]
    for source, part in zip((POOL, stubs), parts, strict=True):
        find_linker().compile(source, part)
    find_linker().run(["-r", "-nostdlib", *map(str, parts), "-o", str(pool)])
    own = OwnLinker("mlcpipe", "1", (), pool=pool)
    with monkeypatch.context() as patch:
        patch.setattr("mlcpipe.compiler.backends.cpu.find_linker", lambda triple: own)
        bundle = tmp_path / "bundle"
        mlcpipe.compile(tiny_bundles.checkpoint, target=tiny_bundles.target, quantization="q4f16_1", output=bundle)
    engines = [mlcpipe.Engine(one, threads=2) for one in (tiny_bundles["q4f16_1"], bundle)]
    found = [engine.logits([5, 6, 7, 8]) for engine in engines]
    np.testing.assert_array_equal(*found)


def test_the_hash_table_finds_every_name() -> None:
    names = [f"name_{index}" for index in range(50)] + ["printf", "Ähm"]
    count, total, *numbers = np.frombuffer(hash_table(names), "<u4").tolist()
    buckets, chain = numbers[:count], numbers[count:]
    assert len(chain) == total == len(names) + 1 and name_hash("printf") == 0x077905A6

    def at(name: str) -> int:
        number = buckets[name_hash(name) % count]
        while number and names[number - 1] != name:
            number = chain[number]
        return number

    assert [at(name) for name in names] == list(range(1, 1 + len(names))) and at("absent") == 0


def test_it_is_taken_where_there_is_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(links, "find_zig", lambda: None)
    monkeypatch.setattr(links, "compiled_pool", lambda: tmp_path / "pool.o")
    found = links.find_linker()
    assert isinstance(found, OwnLinker) and (found.name, found.pool) == ("mlcpipe", tmp_path / "pool.o")
    with pytest.raises(CompileError, match="no C compiler; expected cc, or ziglang; pip install 'mlcpipe"):
        found.compile(POOL, tmp_path / "x.o")
