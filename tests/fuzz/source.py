"""Source: bytes that a fuzzer gives, read as the choices of which a message is made.

The same bytes make the same message, whoever drew them: atheris, hypothesis or a seeded generator. Once they are used
up every choice is the first one. May import: nothing of the project.
"""

from collections.abc import Sequence as SequenceOf
from typing import TypeVar

Choice = TypeVar("Choice")

# Texts on which tokenizers and their spans have come to grief: what a caller's text is made of.
PIECES = (
    *("a", "abc", "hello world", "The quick brown fox", "x" * 300, "a b c d e " * 20, "un##able"),
    *(" ", "\t\r\n", "\x00", "\x01\x7f\x80", "\u00a0\u2003\u3000", "\u200b\u200d\ufeff", "\u202e\u2066"),
    *("[CLS]", "[SEP]", "[PAD]", "[MASK]", "[UNK]", "<s></s>", "##", "[", "'s"),
    *("e\u0301", "\u0301", "Z\u0351\u036b\u0343\u036a" * 8, "\u0958", "\ufb01", "\u0130", "\u00df", "\u1e9e", "\u01c5"),
    *("注意", "日本語テキスト", "한국어", "\u1112\u1161\u11ab", "ภาษาไทย", "العربية", "हिन्दी", "𠜎", "\ua9c5"),
    *("😀", "👩‍👩‍👧‍👦", "🇩🇪", "\ud7ff", "\ue000", "\ufffd", "\uffff", "\U0010ffff", "\U0001f3fb", "\ufdfa" * 6),
    *("%s%n{0}", "../../etc/passwd", "'; drop table", "<script>", "\\ud800", "0" * 50, "1e309", "-0", "NaN"),
)
NUMBERS = (0, 1, 2, 3, 4, 7, 24, 40, 41, 255, 256, 511, 512, 513, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1)
LARGE = (2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


class Source:
    """Choices drawn from bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._place = 0

    @property
    def left(self) -> int:
        """How many bytes are not used yet."""
        return len(self._data) - self._place

    def data(self, count: int) -> bytes:
        """Take so many bytes, fewer where there are fewer."""
        taken = self._data[self._place : self._place + count]
        self._place += len(taken)
        return taken

    def byte(self) -> int:
        """Take a number from 0 to 255."""
        return int.from_bytes(self.data(1), "little")

    def below(self, count: int) -> int:
        """Take a number from 0 to count - 1."""
        return int.from_bytes(self.data(1 if count <= 256 else 4), "little") % count

    def chance(self, of_256: int) -> bool:
        """Say yes so many times of 256; once the bytes are used up always no."""
        return self.left > 0 and self.byte() >= 256 - of_256

    def pick(self, choices: SequenceOf[Choice]) -> Choice:
        """Take one of several."""
        return choices[self.below(len(choices))]

    def few(self) -> int:
        """Take a count that is mostly small."""
        kind = self.byte()
        return kind % 4 if kind < 240 else self.below(40) if kind < 252 else self.below(1200)

    def unsigned(self, bits: int) -> int:
        """Take a number that the wire's unsigned type of so many bits carries: a small one, one of note, or any."""
        kind = self.byte()
        if kind < 160:
            return kind % 45
        if kind < 240:
            return self.pick(NUMBERS if bits == 32 else NUMBERS + LARGE)
        return int.from_bytes(self.data(bits // 8), "little")

    def signed(self, bits: int) -> int:
        """Take the same of a signed type."""
        kind = self.byte()
        if kind < 200:
            return kind % 12 - 4
        number = int.from_bytes(self.data(bits // 8), "little")
        return number - 2**bits if number >= 2 ** (bits - 1) else number

    def text(self) -> str:
        """Take a text without surrogates, which UTF-8 has not."""
        made = []
        for _ in range(1 + self.below(6)):
            kind = self.byte()
            if kind < 190:
                made.append(self.pick(PIECES))
            elif kind < 240:
                made.append(self.data(self.below(24)).decode("utf-8", "replace"))
            elif kind < 254:
                made.append(
                    chr(min(int.from_bytes(self.data(3), "little"), 0x10FFFF)).encode("utf-8", "replace").decode()
                )
            else:
                made.append(self.pick(PIECES) * self.below(3000))
        return "".join(made)
