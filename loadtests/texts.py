"""Texts: what every load test sends, the same at each run.

Each text is drawn from ordinary English words with a seed, so that a word is about one wordpiece in the
vocabularies of BERT's family. Imports nothing of the project.
"""

import random

TEXT = "the old man sat by the river and watched the boats"  # 11 words
TOKENS = 13  # of TEXT in BERT's uncased vocabulary, special tokens included
SHORTEST, LONGEST = 8, 120  # words of a bulk text: from a title to a paragraph

WORDS = """
the of and a to in is was for on with as by at from his her that it not but they this which were are be have had
one two three first last new old young small large long high low early late good great own other many most some
man woman child people family friend house home room door window table book letter paper story song music game
city town village street road river sea lake mountain field garden forest tree flower bird horse dog fish
day night morning evening week month year winter summer spring hour time life death war peace law right power
king queen church school college student teacher doctor lawyer officer soldier captain member party leader
work money market price company business industry bank trade power water fire air light sound color red green
blue black white gold silver iron stone glass wood earth star sun moon sky wind rain snow ice cold hot warm
said made found went came took gave left held kept told asked called used wanted began played moved lived
believed brought happened wrote provided sat stood lost paid met included continued set learned changed led
understood watched followed stopped created spoke read allowed added spent grew opened walked won offered
between under over after before during against among through without within along across behind beyond near
always often never sometimes again still even only just also very well almost already perhaps together
system science history language number word question answer reason result level form part place point side
""".split()


def text(draw: random.Random, words: int) -> str:
    """Draw one text of so many words."""
    return " ".join(draw.choices(WORDS, k=words))


def bulk_texts(count: int, seed: int = 0) -> list[str]:
    """Give texts of 8 to 120 words, every length as likely as another: passages to be indexed."""
    draw = random.Random(seed)
    return [text(draw, draw.randint(SHORTEST, LONGEST)) for _ in range(count)]


def short_texts(count: int, seed: int = 0) -> list[str]:
    """Give texts of 3 to 12 words: what people type into a search box."""
    draw = random.Random(seed)
    return [text(draw, draw.randint(3, 12)) for _ in range(count)]


def mixed_texts(count: int, seed: int = 0) -> list[str]:
    """Give a mixed trace: seven of ten as short as a query, two a few sentences, one a page of up to 300 words."""
    draw = random.Random(seed)
    ranges = draw.choices(((3, 12), (15, 60), (80, 300)), weights=(7, 2, 1), k=count)
    return [text(draw, draw.randint(*words)) for words in ranges]


def in_groups(texts: list[str], size: int) -> list[list[str]]:
    """Cut texts into the inputs of one request each."""
    return [texts[start : start + size] for start in range(0, len(texts), size)]
