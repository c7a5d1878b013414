"""Measure what each precision costs in exactness: vectors and rankings against float32 on ONNX Runtime's CPU provider.

    python loadtests/precision.py [--artifact FOLDER]

Encodes sentences on every provider and precision that runs here. Printed for each: the smallest and the mean cosine of
a pooled vector to its float32 form, the smallest of a token's, and Spearman's rank correlation of the similarities of
all pairs of sentences, which is what a search would notice.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from arguments import errors_as_messages
from harness import exported
from numpy.typing import NDArray

from service.artifact import Artifact, open_artifact
from service.batching import BatchLimits, pad
from service.errors import ProviderError
from service.placement import PRECISIONS, PROVIDERS, Placement, choose_placement, usable_cores
from service.plain import read_inputs
from service.request import TokenizeRequest
from service.session import Session
from service.tokenization import TextTokenizer

SENTENCES = (
    "A cat sleeps on the warm windowsill.",
    "The kitten naps in the sun.",
    "Two dogs chase a ball across the park.",
    "A puppy runs after a stick.",
    "The train to the coast leaves at noon.",
    "When does the next bus to the harbour depart?",
    "Her flight was cancelled because of fog.",
    "Snow closed the mountain pass for three days.",
    "It will rain in the valley tomorrow.",
    "The harvest failed after a long drought.",
    "Bread needs flour, water, salt and time.",
    "She baked a loaf of rye for breakfast.",
    "How long do I boil an egg?",
    "The soup tastes of garlic and thyme.",
    "Interest rates rose by a quarter of a point.",
    "The central bank fears inflation.",
    "Shares of the carmaker fell after the report.",
    "He opened a savings account for his daughter.",
    "The court dismissed the appeal.",
    "A jury found the banker guilty of fraud.",
    "The parliament passed the budget at midnight.",
    "Voters will choose a new mayor on Sunday.",
    "The striker scored twice in the second half.",
    "Our team lost the final on penalties.",
    "She ran the marathon in under three hours.",
    "The violinist played the concerto from memory.",
    "An old song was on the radio all summer.",
    "The museum bought a painting of the sea.",
    "His third novel is about a lighthouse keeper.",
    "A transformer attends to every token of its input.",
    "Attention weights of each row sum to one.",
    "The compiler reports an error in line forty.",
    "Restart the server after changing its settings.",
    "My laptop does not charge any more.",
    "The vaccine protects against severe illness.",
    "Take one tablet with water in the evening.",
    "The surgeon repaired the valve of the heart.",
    "Light from the galaxy took a billion years to reach us.",
    "The probe landed on the far side of the moon.",
    "Bees find their way home by the sun.",
    "Whales sing to one another over great distances.",
    "The old bridge was rebuilt in stone.",
    "They painted the kitchen yellow.",
    "The landlord raised the rent again.",
    "Children built a castle of sand on the beach.",
    "Grandfather told us how the war ended.",
    "I forgot my umbrella on the tram.",
    "Could you send me the invoice by Friday?",
    "The contract may be ended with a month's notice.",
    "Nobody answered the telephone.",
)


def placements() -> Iterator[Placement]:
    """Give every provider and precision that can run here."""
    for provider in PROVIDERS[1:]:
        for precision in PRECISIONS[1:]:
            try:
                yield choose_placement(provider, precision)
            except ProviderError:
                continue


def encode(artifact: Artifact, placement: Placement) -> tuple[NDArray[np.float32], list[NDArray[np.float32]]]:
    """Encode the sentences; gives (sentences, dim) unit vectors, and each one's (tokens, hidden)."""
    sequences = TextTokenizer(artifact).tokenize(TokenizeRequest(read_inputs(list(SENTENCES))), describe=False)
    outputs = (f"pooled_{artifact.pooling}", "last_hidden_state")
    batch = pad(sequences, outputs, artifact.pad_token_id, BatchLimits(2**31))
    session = Session(artifact, placement, threads=usable_cores())
    arrays = session.run(batch, alone=True)
    pooled = arrays[outputs[0]]
    tokens = [arrays[outputs[1]][row, :length] for row, length in enumerate(batch.lengths)]
    return pooled / np.linalg.norm(pooled, axis=1, keepdims=True), tokens


def spearman(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    """Give the correlation of two lists' ranks."""
    ranks = [np.argsort(np.argsort(values)).astype(np.float64) for values in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])


def main() -> None:
    """Print a line for each provider and precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, help="exported from the default model if unset")
    artifact = open_artifact(exported(parser.parse_args().artifact))
    exact, exact_tokens = encode(artifact, choose_placement("cpu", "float32"))
    pairs = np.triu_indices(len(SENTENCES), 1)
    print("| provider | precision | pooled cosine, smallest | mean | token cosine, smallest | Spearman, all pairs |")
    print("|---|---|---|---|---|---|")
    for placement in placements():
        pooled, tokens = encode(artifact, placement)
        cosines = (pooled * exact).sum(axis=1)
        token_cosines = [
            (a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
            for a, b in zip(tokens, exact_tokens, strict=True)
        ]
        order = spearman((pooled @ pooled.T)[pairs], (exact @ exact.T)[pairs])
        print(
            f"| {placement.provider} | {placement.precision} | {cosines.min():.5f} | {cosines.mean():.5f} "
            f"| {min(float(values.min()) for values in token_cosines):.5f} | {order:.5f} |"
        )


if __name__ == "__main__":
    with errors_as_messages():
        main()
