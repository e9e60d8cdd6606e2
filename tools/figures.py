"""Draws the figures of the concept pages: `python tools/figures.py` -> docs/figures/*.svg, one a page.

They are sketches of an idea; what was measured is drawn by `dflop report --figure`. Each has its own colours
for light and dark pages. `tests/docs/test_figures.py` compares the files with what stands here.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "docs" / "figures"
STYLE = """<style>
  text { font: 14px system-ui, sans-serif; fill: #24292f }
  .small { font-size: 12px } .soft { fill: #57606a } .mid { text-anchor: middle } .end { text-anchor: end }
  .e { fill: #9cc5ee } .l { fill: #2a5f9e } .w { fill: #fdebdd; stroke: #d9692a; stroke-dasharray: 4 3 }
  .page { fill: #ffffff } .card { fill: #f6f8fa; stroke: #afb8c1 } .good { fill: #dafbe1; stroke: #1a7f37 }
  .line { stroke: #57606a; fill: none } .dash { stroke-dasharray: 4 3 } .bold { stroke: #d9692a; stroke-width: 2; fill: none }
  .on { fill: #ffffff } .one { fill: #0b2540 }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .soft { fill: #9da7b1 } .w { fill: #3b2a1e }
    .page { fill: #0d1117 } .card { fill: #1b2129; stroke: #57606a } .good { fill: #12301c; stroke: #3fb950 } .line { stroke: #9da7b1 }
    .on { fill: #fff } .one { fill: #0b2540 } }
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">
<path d="M0 0L8 4L0 8z" style="fill: #848d97"/></marker></defs>"""


class Drawing:
    """An SVG text that grows."""

    def __init__(self, width: int, height: int, label: str) -> None:
        """An empty one.

        Args:
            width: in pixels, as is the height.
            height: likewise.
            label: what the figure shows, for who does not see it.
        """
        size = f'width="{width + 32}" height="{height + 28}"'
        box = f'viewBox="-16 -14 {width + 32} {height + 28}" role="img" aria-label="{escape(label, quote=True)}"'
        self._parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {box}>', STYLE]
        # A card of its own: the page's colours may be others than the system's.
        self._parts.append(f'<rect x="-16" y="-14" {size} rx="6" class="page"/>')

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Words whose line stands at `y`."""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str, *lines: str) -> None:
        """A rectangle with lines of words in its middle."""
        at = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._parts.append(f'<rect {at} rx="3" class="{kind}"/>')
        colour = {"e": "one", "l": "on"}.get(kind, "")
        first = y + height / 2 + 5 - 8.5 * (len(lines) - 1)
        for number, words in enumerate(lines):
            self.text(x + width / 2, first + 17 * number, words, f"mid small {colour}".strip())

    def line(self, *points: float, kind: str = "line", tip: bool = False) -> None:
        """A line through points, x and y in turns; with a tip it is an arrow."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in zip(points[::2], points[1::2], strict=True))
        end = ' marker-end="url(#tip)"' if tip else ""
        self._parts.append(f'<path d="{path}" class="{kind}"{end}/>')

    def done(self) -> str:
        """The text of the file."""
        return "\n".join([*self._parts, "</svg>\n"])


def chain(drawing: Drawing, y: float, cards: list[tuple[str, ...]], width: int = 130, gap: int = 20) -> None:
    """Cards from left to right with arrows between them."""
    for number, lines in enumerate(cards):
        x = number * (width + gap)
        drawing.box(x, y, width, 64, "card", *lines)
        if number:
            drawing.line(x - gap + 2, y + 32, x - 2, y + 32, tip=True)


def tour() -> str:
    """One sample's way."""
    drawing = Drawing(
        730,
        190,
        "A picture and its text: sizes and a plan before training, then schedule, encoder, LLM, loss and gradient.",
    )
    drawing.text(0, 16, "Before training, once")
    chain(
        drawing,
        28,
        [
            ("a picture of", "640 x 480, a text"),
            ("its sizes,", "from the header"),
            ("what such sizes", "cost this device"),
            ("the plan:", "who holds what"),
        ],
    )
    drawing.text(0, 124, "In each step")
    cards = [
        ("its microbatch", "and rank"),
        ("pixels", "decoded"),
        ("encoder:", "features"),
        ("LLM: loss of", "its label tokens"),
        ("gradient,", "new weights"),
    ]
    for number, lines in enumerate(cards):
        kind = {2: "e", 3: "l"}.get(number, "card")
        drawing.box(number * 150, 134, 130, 50, kind, *lines)
        if number:
            drawing.line(number * 150 - 18, 159, number * 150 - 2, 159, tip=True)
    return drawing.done()


def data() -> str:
    """What a sample's row is made of."""
    drawing = Drawing(
        730,
        168,
        "Header and text of a sample, without its pixels, give a row: encoder tokens, LLM tokens, label tokens.",
    )
    drawing.box(0, 10, 150, 62, "card", "the header of clip.mp4,", "none of its frames")
    drawing.box(0, 92, 150, 62, "card", "the conversation", "(JSON, Parquet, tar)")
    drawing.box(200, 10, 170, 62, "card", "shape rule of the family", "= Hugging Face's")
    drawing.box(200, 92, 170, 62, "card", "chat template,", "tokenizer, labels")
    drawing.line(152, 41, 198, 41, tip=True)
    drawing.line(152, 123, 198, 123, tip=True)
    drawing.line(285, 74, 285, 90, tip=True)
    drawing.box(430, 22, 136, 34, "e", "2,592 encoder tokens")
    drawing.box(430, 68, 136, 34, "l", "913 LLM tokens")
    drawing.box(430, 114, 136, 34, "card", "40 label tokens")
    drawing.line(372, 41, 428, 41, tip=True)
    drawing.line(372, 123, 400, 123, 400, 85, 428, 85, tip=True)
    drawing.line(400, 123, 428, 131, tip=True)
    drawing.text(576, 76, "one row of")
    drawing.text(576, 96, "data_profile.parquet")
    return drawing.done()


def cost_model() -> str:
    """A measured curve and the sum of a microbatch."""
    drawing = Drawing(
        730,
        250,
        "Measured points joined by lines; a size between two points is interpolated, a size beyond the last is marked as extrapolated.",
    )
    drawing.line(50, 10, 50, 190, 400, 190)
    drawing.text(56, 22, "time of one layer", "soft small")
    drawing.text(398, 208, "tokens", "soft small end")
    points = [(70, 172), (120, 166), (190, 142), (270, 98), (330, 58)]
    drawing.line(*[value for point in points for value in point])
    for x, y in points:
        drawing.box(x - 4, y - 4, 8, 8, "l")
    drawing.line(330, 58, 385, 20, kind="line dash")
    drawing.line(230, 190, 230, 121, 50, 121, kind="bold")
    drawing.text(238, 182, "asked", "small")
    drawing.text(300, 24, "marked", "small end")
    drawing.text(300, 40, "as extrapolated", "small end")
    drawing.text(84, 185, "launch floor", "soft small")
    drawing.text(430, 22, "A microbatch of three samples")
    drawing.text(430, 52, "linear part: by the sum of tokens", "small")
    drawing.box(430, 60, 270, 28, "l", "linear(900 + 300 + 100)")
    drawing.text(430, 114, "attention: sample by sample", "small")
    drawing.box(430, 122, 160, 28, "e", "attention(900)")
    drawing.box(592, 122, 70, 28, "e", "(300)")
    drawing.box(664, 122, 36, 28, "e", "(100)")
    drawing.text(430, 180, "times the layers of the stage,", "soft small")
    drawing.text(430, 198, "plus embedding and head where they stand", "soft small")
    drawing.text(0, 238, "Forward, backward, and the backward's two halves have a curve each.", "soft small")
    return drawing.done()


def memory() -> str:
    """What a rank holds from action to action."""
    drawing = Drawing(
        730,
        236,
        "Bytes of a rank over its actions: weights, gradients and optimizer stay, activations rise with each forward and fall with each backward; the peak must be under the budget.",
    )
    names = ["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"]
    heights = [22, 44, 66, 44, 66, 44, 22, 0]
    drawing.box(60, 150, 480, 50, "l", "weights, gradients, optimizer: always")
    for number, (name, height) in enumerate(zip(names, heights, strict=True)):
        x = 60 + 60 * number
        peak = height + 22 if name[0] == "B" else height
        if peak:
            drawing.box(x, 150 - peak, 58, peak, "e", *([f"{peak // 22} kept"] if peak >= 22 else []))
        drawing.text(x + 29, 218, name, "mid small")
    drawing.line(50, 60, 560, 60, kind="bold")
    drawing.text(566, 64, "memory budget", "small")
    drawing.line(50, 84, 560, 84, kind="line dash")
    drawing.text(566, 88, "the peak, at F2 and F3", "small")
    drawing.text(566, 130, "activations of the", "soft small")
    drawing.text(566, 146, "microbatches in flight", "soft small")
    drawing.text(60, 24, "Each rank's own list of actions is counted through, before anything runs")
    return drawing.done()


def scheduler() -> str:
    """Two loads a bucket, and an exchange."""
    drawing = Drawing(
        730,
        244,
        "Buckets with an encoder and an LLM load each. In arrival order one is far above the others; balanced, all are near the bound.",
    )

    def bars(x: float, loads: list[tuple[int, int]], title: str) -> None:
        drawing.text(x, 18, title)
        drawing.line(x, 210, x + 300, 210)
        for number, (encoder, llm) in enumerate(loads):
            at = x + 16 + number * 72
            drawing.box(at, 210 - encoder, 24, encoder, "e")
            drawing.box(at + 26, 210 - llm, 24, llm, "l")
            drawing.text(at + 25, 228, f"bucket {number}", "mid small soft")

    bars(0, [(150, 172), (10, 84), (62, 50), (30, 46)], "Arrival order")
    bars(370, [(62, 92), (66, 86), (60, 88), (64, 86)], "Balanced: the same samples")
    for x in (0, 370):
        drawing.line(x, 122, x + 300, 122, kind="bold")
    drawing.text(304, 126, "bound", "small")
    drawing.box(196, 34, 12, 12, "e")
    drawing.text(212, 45, "encoder", "small")
    drawing.box(196, 52, 12, 12, "l")
    drawing.text(212, 63, "LLM", "small")
    drawing.text(196, 88, "no assignment can", "small soft")
    drawing.text(196, 104, "be below the bound", "small soft")
    return drawing.done()


def step() -> str:
    """From a global batch to lists."""
    drawing = Drawing(
        730,
        196,
        "A global batch becomes balanced buckets, then microbatches in an order with small ones at both ends, then a list of actions for each rank.",
    )
    sizes = [64, 12, 30, 8, 48, 20, 10, 36]
    drawing.text(0, 18, "global batch")
    for number, size in enumerate(sizes):
        drawing.box(0, 30 + number * 19, size, 15, "l" if number % 3 else "e")
    drawing.line(80, 100, 116, 100, tip=True)
    drawing.text(128, 18, "even buckets")
    for number, pieces in enumerate([(64,), (12, 48), (30, 36), (8, 20, 10, 20)]):
        x = 128.0
        for piece in pieces:
            drawing.box(x, 40 + number * 34, piece, 22, "e" if piece in (64, 8, 36) else "l")
            x += piece + 2
    drawing.line(212, 100, 248, 100, tip=True)
    drawing.text(262, 18, "order and sizes")
    for number, width in enumerate([34, 66, 68, 36]):
        drawing.box(262, 40 + number * 34, width, 22, "card", f"m{number}")
    drawing.text(262, 188, "small ones fill and drain the pipeline", "small soft")
    drawing.line(350, 100, 386, 100, tip=True)
    drawing.text(400, 18, "a list of actions for each rank")
    for row, (rank, names) in enumerate(
        [
            ("rank 0", ["0F0", "0F1", "0F2", "0B0", "0F3", "0B1"]),
            ("rank 1", ["", "1F0", "1B0", "1F1", "1B1", "1F2"]),
        ]
    ):
        drawing.text(400, 66 + row * 44, rank, "small soft")
        for number, name in enumerate(names):
            x = 446 + number * 46
            drawing.box(
                x,
                48 + row * 44,
                44,
                28,
                ("e" if row == 0 else "l") if name else "w",
                *([name] if name else []),
            )
    drawing.text(446, 150, "the simulator times it; if a change makes", "small soft")
    drawing.text(446, 166, "the step shorter, it is kept", "small soft")
    return drawing.done()


def simulator() -> str:
    """Two rules make a timeline."""
    drawing = Drawing(
        730,
        190,
        "An action starts when its rank is free and its input has arrived. Idle time has a cause: ramp, imbalance, transfer.",
    )
    drawing.text(
        0, 18, "An action starts when its rank is free and its input is there: then every gap has a cause"
    )
    drawing.text(0, 62, "encoder", "small soft")
    drawing.text(0, 120, "LLM", "small soft")
    for x, width, name in [(60, 90, "0F0"), (152, 250, "0F1: a video"), (404, 90, "0B0"), (608, 84, "0B1")]:
        drawing.box(x, 44, width, 28, "e", name)
    for x, width, name in [(170, 80, "1F0"), (252, 88, "1B0"), (420, 80, "1F1"), (502, 88, "1B1")]:
        drawing.box(x, 102, width, 28, "l", name)
    drawing.box(60, 102, 108, 28, "w", "ramp")
    drawing.box(342, 102, 76, 28, "w", "imbalance")
    drawing.box(496, 44, 110, 28, "w", "ramp")
    drawing.text(112, 92, "transfer", "small")
    drawing.line(150, 72, 168, 102, tip=True)
    drawing.line(402, 72, 419, 102, tip=True)
    drawing.line(340, 102, 400, 73, tip=True)
    drawing.line(590, 102, 607, 72, tip=True)
    drawing.line(60, 164, 692, 164, tip=True)
    drawing.text(692, 182, "makespan: first start to last end", "small soft end")
    return drawing.done()


def planner() -> str:
    """From all candidates to a plan."""
    drawing = Drawing(
        730,
        196,
        "Of 41,984 candidate layouts most are dropped by memory or by lower bounds; the rest are scheduled and simulated on batches of your data; the plan is the best.",
    )
    for x, width, half, lines in [
        (0, 146, 80, ("every way to place", "encoder and LLM", "on 64 ranks: 41,984")),
        (162, 144, 60, ("does it fit?", "memory of each", "rank's own list")),
        (322, 140, 42, ("can it be fast?", "lower bound", "on its step")),
    ]:
        drawing.line(
            x, 96 - half, x + width, 96 - half + 14, x + width, 96 + half - 14, x, 96 + half, x, 96 - half
        )
        for number, words in enumerate(lines):
            drawing.text(x + width / 2, 84 + 17 * number, words, "mid small")
    drawing.box(486, 66, 114, 60, "card", "schedule and", "simulate batches", "of your data")
    drawing.line(464, 96, 484, 96, tip=True)
    drawing.line(602, 96, 620, 96, tip=True)
    drawing.box(622, 70, 108, 52, "good", "the plan,", "and runners-up")
    drawing.text(
        170,
        184,
        "dropped ones are counted by reason; other tools' ways get a search of their own",
        "small soft",
    )
    return drawing.done()


def runtime() -> str:
    """Who does what in a step."""
    drawing = Drawing(
        730,
        214,
        "While step n trains, the leader computes the schedule of step n+1 and workers decode its media; before the step all ranks agree by digest.",
    )
    rows = ["leader's thread", "decoders", "encoder rank", "LLM rank"]
    for row, name in enumerate(rows):
        drawing.text(0, 42 + 44 * row, name, "small soft")
    drawing.box(120, 24, 150, 28, "card", "schedule of step n+1")
    drawing.box(120, 68, 230, 28, "card", "media of step n+1, ahead of need")
    for x, number in ((120, "n"), (430, "n+1")):
        drawing.box(x, 112, 130, 28, "e", f"step {number}: forwards")
        drawing.box(x + 132, 112, 120, 28, "e", "backwards")
        drawing.box(x + 40, 156, 212, 28, "l", f"step {number}: F, B, F, B, ...")
        drawing.line(x + 60, 142, x + 70, 155, tip=True)
        drawing.line(x + 170, 155, x + 180, 141, tip=True)
    drawing.line(402, 16, 402, 192, kind="bold")
    drawing.text(402, 208, "all ranks compare schedule and samples; gradients are summed", "mid small")
    drawing.text(200, 152, "features", "small soft")
    drawing.line(272, 38, 400, 38, kind="line dash")
    return drawing.done()


def rehearsal() -> str:
    """Real processes, slept actions."""
    drawing = Drawing(
        730,
        166,
        "A rehearsal: on your laptop a process for each rank, real messages and schedules; an action sleeps for its predicted time.",
    )
    drawing.box(0, 10, 340, 148, "card")
    drawing.text(170, 32, "your laptop: a process for each rank", "mid")
    for row in range(2):
        for column in range(4):
            drawing.box(
                18 + 78 * column,
                48 + 50 * row,
                66,
                40,
                "e" if column == 0 else "l",
                f"rank {row * 4 + column}",
            )
            if column:
                drawing.line(
                    18 + 78 * column - 11, 68 + 50 * row, 18 + 78 * column - 1, 68 + 50 * row, tip=True
                )
    drawing.text(370, 32, "real")
    for number, words in enumerate(
        [
            "processes, groups, messages and their order",
            "schedules, made in time or not",
            "the files of a run, and its report",
        ]
    ):
        drawing.text(370, 54 + 18 * number, words, "small")
    drawing.text(370, 122, "predicted")
    drawing.text(370, 144, "how long an action takes: the process sleeps that long", "small")
    return drawing.done()


def adaptation() -> str:
    """What measured steps change."""
    drawing = Drawing(
        730,
        176,
        "Measured over predicted times of all actions are split into slow ranks and slow shapes; both correct the next schedules as far as they repeat.",
    )
    drawing.text(0, 18, "measured / predicted time, by rank and by size of sample")
    for row in range(4):
        drawing.text(0, 52 + 30 * row, f"rank {row}", "small soft")
        for column, size in enumerate(("small", "medium", "large")):
            slow = row == 2 or column == 2
            drawing.box(
                56 + 92 * column,
                34 + 30 * row,
                88,
                26,
                "w" if slow else "card",
                f"{1.3 if row == 2 else 1.0:.1f} x {1.2 if column == 2 else 1.0:.1f}",
            )
            if row == 0:
                drawing.text(100 + 92 * column, 168, size, "mid small soft")
    drawing.line(342, 92, 378, 92, tip=True)
    drawing.box(382, 36, 160, 48, "card", "rank 2 takes 1.3 times", "as long: named")
    drawing.box(382, 100, 160, 48, "card", "large samples take", "1.2 times as long")
    drawing.line(544, 60, 576, 80, tip=True)
    drawing.line(544, 124, 576, 104, tip=True)
    drawing.box(580, 66, 150, 52, "good", "the next schedules", "count with both")
    return drawing.done()


def analytic() -> str:
    """From sizes to times."""
    drawing = Drawing(
        730,
        184,
        "A model's configuration gives matrix products and attention sizes; measured kernels of the device, or its peak and bandwidth, give their times.",
    )
    drawing.box(0, 14, 160, 54, "card", "config.json:", "widths, layers, heads")
    drawing.box(0, 106, 160, 54, "card", "the device:", "h100, a100, yours")
    drawing.box(220, 14, 190, 54, "e", "products m x n x k,", "attention, norms, bytes")
    drawing.box(220, 106, 190, 54, "e", "published measurements;", "else peak and bandwidth")
    drawing.line(162, 41, 218, 41, tip=True)
    drawing.line(162, 133, 218, 133, tip=True)
    drawing.box(470, 58, 110, 56, "l", "time of each", "kernel")
    drawing.line(412, 41, 468, 72, tip=True)
    drawing.line(412, 133, 468, 100, tip=True)
    drawing.line(582, 86, 608, 86, tip=True)
    drawing.box(610, 58, 120, 56, "good", "a model profile,", "marked estimated")
    drawing.text(470, 140, "or the host's time to start the", "small soft")
    drawing.text(470, 156, "kernels, where that is longer", "small soft")
    return drawing.done()


FIGURES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        tour,
        data,
        cost_model,
        memory,
        scheduler,
        step,
        simulator,
        planner,
        runtime,
        rehearsal,
        adaptation,
        analytic,
    )
}
"""By the name of the page in `docs`."""


def main() -> None:
    """Writes all files."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
