"""What is redrawn is followed as a terminal does it, and what is finished becomes lines."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddpsafe._launcher.watch.screen import Screen, clipped, plain, width_of

UP, WIPE, HIDE, SHOW = "\x1b[1A", "\r\x1b[2K", "\x1b[?25l", "\x1b[?25h"
FRAME = f"{HIDE}one 0%\ntwo 0%"


def follow(chunks: list[str]) -> tuple[list[list[str]], list[str]]:
    """Return the lines that each chunk has finished, with the rest, and the rows after the last chunk."""
    screen = Screen()
    lines = []
    for chunk in chunks:
        screen.feed(chunk)
        lines.append(screen.take_lines())
    rows = screen.rows
    return [*lines, screen.take_lines(final=True)], rows


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        (["a\nb", "c\n\nd"], [["a"], ["bc", ""], ["d"]]),
        (["\x1b[32mgreen\x1b[0m\n"], [["\x1b[32mgreen\x1b[0m"], []]),
        (["dos\r\n", "split\r", "\n"], [["dos"], [], ["split"], []]),
        (["", "\n"], [[], [""], []]),
        # A bar in one row, however it is split into reads.
        (["\r 0%", "\r 50%", "\r100%\n", "done\n"], [[], [], ["100%"], ["done"], []]),
        (["step 9\r", "step 10\r", "end\n"], [[], [], ["end"], []]),
        (["\r50%", "\r   \r"], [[], [], []]),  # a bar that was cleared
        (["\r50%\r   \rsaid\n\r60%", "\r100%\n"], [["said"], ["100%"], []]),  # tqdm.write
        (["50%\x1b[1G\x1b[K100%\n"], [["100%"], []]),
        (["abc\b\bX\n"], [["aXc"], []]),
        (["[=>  ] msg\b\b\b\b\b\b\b3/4", "\r"], [[], [], ["[=>3/4 msg"]]),
        (["ab\x1b[3D\x1b[2Cc\n"], [["abc"], []]),
        (["text\x1b[K more\n"], [["text more"], []]),
        # A sequence that is cut in two by the end of a read.
        (["\r50%\x1b", "[2", "K\r100%\n"], [[], [], ["100%"], []]),
        (["\x1b]8;;http://x\x1b", "\\link\x1b]8;;\x1b\\\n"], [[], ["\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\"], []]),
        # Nested bars of tqdm.
        (["\rout 0%\n\rin 0%\x1b[A", "\n\rin 50%\x1b[A", "\n\r      \r\x1b[A\rout 50%", "\rout 100%\n",
            "end\n"], [[], [], [], [], ["out 100%", "end"], []]),
        (["\rout 0%\n\rin 0%\x1b[A", "\r      \r\n\r     \r\x1b[Asaid\n\rout 0%\n\rin 9%\x1b[A", ""],
            [[], [], ["said"], ["out 0%", "in 9%"]]),
        # A frame of rich, with a line above it, more rows, and its end.
        ([FRAME, f"{WIPE}{UP}{WIPE}said\none 5%\ntwo 5%", f"{WIPE}{UP}{WIPE}one 7%\ntwo 7%"],
            [[], [], ["said"], ["one 7%", "two 7%"]]),
        ([FRAME, f"{WIPE}{UP}{WIPE}one\ntwo\nthree", f"{WIPE}{UP}{WIPE}{UP}{WIPE}1\n2\n3\n{SHOW}", ""],
            [[], [], [], ["1", "2", "3"], []]),
        ([FRAME, f"\n{SHOW}\r{UP}\x1b[2K{UP}\x1b[2K", "end\n", ""], [[], [], [], ["end"], []]),  # transient
        ([FRAME, f"{WIPE}{UP}", "\x1b[2Ksaid\none\ntwo", f"{WIPE}{UP}{WIPE}x\ny"], [[], [], [], ["said"], ["x", "y"]]),
        # A bar of one row that hides the cursor, with prints in between.
        ([f"{HIDE}\r1/2", "\r\x1b[2Ksaid\n", "\r2/2", f"\n{SHOW}"], [[], [], ["said"], ["2/2"], []]),
        # A program for the whole screen.
        ([f"{HIDE}\x1b[Ha\nb", "\x1b[H\x1b[2Jc\nd", f"\x1b[2;2HX{SHOW}"], [[], [], ["c"], ["dX"]]),
        (["a\nb\x1b7\x1b[H\x1b[JX\x1b8"], [["a"], ["X"]]),
    ],
)  # fmt: skip
def test_a_line_is_finished_once_the_program_will_not_change_it(
    chunks: list[str], lines: list[list[str]]
) -> None:
    """What was erased is not a line, and no line is lost or comes twice."""
    assert follow(chunks)[0] == lines


@pytest.mark.parametrize(
    ("chunks", "rows"),
    [
        ([FRAME], ["one 0%", "two 0%"]),
        ([FRAME, f"{WIPE}{UP}{WIPE}\x1b[31mone 5%\x1b[0m\ntwo 5%"], ["\x1b[31mone 5%\x1b[0m", "two 5%"]),
        (["\rout 0%\n\rin 0%\x1b[A", "\n\rin 50%\x1b[A"], ["out 0%", "in 50%"]),
        # As the rest of a terminal's screen that has moved up.
        ([HIDE + "\n".join(map(str, range(300)))], [str(number) for number in range(200, 300)]),
    ],
)  # fmt: skip
def test_rows_are_what_the_terminal_would_show(chunks: list[str], rows: list[str]) -> None:
    """They can change, so they are shown below the finished lines."""
    assert follow(chunks)[1] == rows


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_the_last_state_does_not_depend_on_the_reads(size: int) -> None:
    """A read may end anywhere, in the middle of a sequence or a frame too."""
    text = "".join(
        f"{WIPE}{UP}{WIPE}" * (step > 0) + f"one {step}%\n\x1b[32mtwo\x1b[0m {step}%"
        for step in range(9)
    )
    text = f"before\n{HIDE}{text}\n{SHOW}after\n"
    chunks = [text[at : at + size] for at in range(0, len(text), size)]
    lines = [line for some in follow(chunks)[0] for line in some]
    assert lines == ["before", "one 8%", "\x1b[32mtwo\x1b[0m 8%", "after"]


_PIECES = st.one_of(
    st.sampled_from(
        ["a", "漢", "e\u0301", "\t", "\n", "\r", "\b", "\x1b", "\x1b[", "\x1bM", "\x1b7", "\x1b8", HIDE, SHOW]
    ),
    st.builds(
        lambda first, second, code: f"\x1b[{first};{second}{code}",
        st.sampled_from(["", "0", "1", "2", "5", "9" * 5000]),
        st.sampled_from(["", "1", "3", "9" * 5000]),
        st.sampled_from("ABCDEFGHJKPXdfhlmsu"),
    ),
)  # fmt: skip


@example(chunks=["\x1b[999Ba\x1b[999Bb\x1b[999;1Hc"])
@given(chunks=st.lists(st.lists(_PIECES, max_size=12).map("".join), max_size=8))
def test_no_output_is_too_odd(chunks: list[str]) -> None:
    """Whatever a program writes ends no console, and what comes out of it is lines."""
    lines, rows = follow(chunks)
    for text in [*rows, *(line for some in lines for line in some)]:
        assert not set(text) & set("\r\b\n")
        assert len(text) < 100_000
    assert len(rows) <= 110


def test_a_long_line_is_taken_in_parts() -> None:
    """A program that writes no newline does not use up the memory of its launcher."""
    lines, rows = follow(["x" * 700_000] * 4)
    assert [len(line) for some in lines for line in some] == [1_400_000, 1_400_000]
    assert rows == [""]


@pytest.mark.parametrize(
    ("text", "columns", "shown"),
    [
        ("abcdef", 3, "abc"),
        ("abc", 3, "abc"),
        ("a\tb", 9, "a       b"),
        ("漢字x", 3, "漢"),
        ("e\u0301x", 1, "e\u0301"),
        ("\x1b[31mred\x1b[0m", 2, "\x1b[31mre\x1b[0m"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", 9, "\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\x1b[0m"),
    ],
)  # fmt: skip
def test_a_row_is_cut_at_the_width_of_the_terminal(text: str, columns: int, shown: str) -> None:
    """A row that wraps could not be wiped; colours end with it."""
    assert plain(clipped(text, columns)) == plain(shown)
    assert width_of(clipped(text, columns)) <= columns
