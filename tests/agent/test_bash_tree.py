"""Bash commands as simple commands, read by tree-sitter's grammar."""

from __future__ import annotations

import time

import pytest

from etpi_assets.agent.bash_tree import Command, commands
from etpi_assets.scoring.rewards.shell import sure_pipelines


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sed -i 's/a b/c/' \"x y\".py", [Command(["sed", "-i", "s/a b/c/", "x y.py"])]),
        ("A=1 ls a\\ b $x \"$y $(z)\"", [Command(["ls", "a b", "$x", "$y $(z)"]), Command(["z"])]),
        ("ls >a 2>&1 <b; wc &> c", [Command(["ls"], ["a"]), Command(["wc"], ["c"])]),
        (
            "cat <<'E' | tee b > a\n$x\nE\n: <<< 'q'",
            [Command(["cat"], [], ["$x\n"]), Command(["tee", "b"], ["a"]), Command([":"], [], ["q"])],
        ),
        ("cat <<E\nx", [Command(["cat"], [], ["x\n"])]),
        ("cat <<A <<-B\n1\nA\n\t2\n\tB\nls", [Command(["cat"], [], ["1\n", "2\n"]), Command(["ls"])]),
        ("for f in a b; do cp $f \"$f\".c; done > log", [
            Command([], ["log"]), Command(["cp", "a", "b", "a.c", "b.c"])
        ]),
        ("{ (cd x && ls) || pwd; } & f() { rm y; }", [
            Command(["cd", "x"]), Command(["ls"]), Command(["pwd"]), Command(["rm", "y"])
        ]),
    ],
)  # fmt: skip
def test_simple_commands_have_words_targets_and_heredocs(text: str, expected: list[Command]) -> None:
    assert list(commands(text)) == expected


@pytest.mark.parametrize(
    ("command", "programs"),
    [
        ("cd a && python -m pytest 2>&1 | tail -3; ls", [["cd"], ["python", "tail"], ["ls"]]),
        ("(cd a; ls) && wc <<E\nx", [["cd"], ["ls"], ["wc"]]),
        ("cat <<E | wc -l && ls\nx\nE", [["cat", "wc"], ["ls"]]),
        ("if true; then fi", []),
        ("ls; done", []),
        ("it's > src/a.py", []),
        ("if grep x y; then wc a; else ls; fi; pwd", [["grep"], ["wc"], ["pwd"]]),
    ],
)
def test_pipelines_that_surely_run(command: str, programs: list[list[str]]) -> None:
    assert [pipeline.programs for pipeline in sure_pipelines(command)] == programs


def test_characters_beyond_ascii_are_parts_of_words_anywhere() -> None:
    """The parser's own tables end before them: it crashed at `$` before an emoji, and at some names of heredocs."""
    for code in (*range(0x80, 0xD800, 0x3FF), *range(0xE000, 0x110000, 0x3FFF), 0xA0, 0x1F600):
        letter = chr(code)
        list(commands(f"<< {letter}{{{letter}("))
        read = commands(f"ls ${letter} {letter}\ncat <<{letter} >{letter}\nx{letter}\n{letter}\nls")
        assert [*read][1:] == [Command(["cat"], [letter], [f"x{letter}\n"]), Command(["ls"])]


@pytest.mark.parametrize("piece", ["a=(", "<<A\n", "${", "$(", "[[ ", "case x in ", "'", "(", "cd a\n"])
def test_hostile_text_is_left_after_a_second(piece: str) -> None:
    started = time.process_time()
    list(commands(piece * (20_000 // len(piece))))
    assert time.process_time() - started < 20  # a deadlock or a square of the length takes minutes
