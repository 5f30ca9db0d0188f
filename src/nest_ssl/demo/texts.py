"""Words for the demo's voices to say: random sentences of six languages, without meaning."""

from __future__ import annotations

import numpy as np

WORDS: dict[str, str] = {
    "en-US": "river mountain yellow window thirteen people quickly around the garden because nobody heard seven ships "
    "sailing through thick winter fog before breakfast my brother usually fixes old machines with patience and joy",
    "en-GB": "weather village clever butcher gathers fresh mushrooms near church every Thursday while children measure "
    "strange shadows on the wooden bridge whose beauty changes under bright autumn light and quiet rain",
    "de-DE": "Straße schöne Brücke zwölf Bücher zwischen Häusern fliegt langsam über den grünen Wald heute morgen "
    "kaufen Freunde frisches Brot im kleinen Dorf wo niemand wirklich schnell läuft und jeder freundlich grüßt",
    "es-ES": "montaña pequeña llueve mucho sobre el camino viejo donde los niños juegan siempre después de comer "
    "naranjas dulces mientras la abuela cuenta historias largas del río azul y catorce caballos blancos",
    "fr-FR": "montagne petite rivière chaque matin les oiseaux chantent doucement dans le jardin vert derrière la "
    "maison où quinze enfants mangent du pain chaud avec beaucoup de fromage et une vieille chanson joyeuse",
    "it-IT": "montagna piccola strada ogni mattina gli uccelli cantano piano nel giardino verde dietro la casa dove "
    "quindici ragazzi mangiano pane caldo con molto formaggio e una vecchia canzone piena di luce",
}
LANGUAGES = tuple(WORDS)


def random_text(language: str, num_letters: int, rng: np.random.Generator) -> str:
    """Sentences of 4 to 9 words, `num_letters` long or a little more."""
    words = WORDS[language].split()
    sentences: list[str] = []
    while sum(map(len, sentences)) < num_letters:
        sentence = " ".join(rng.choice(words, size=rng.integers(4, 10)))
        sentences.append(f"{sentence[0].upper()}{sentence[1:]}.")
    return " ".join(sentences)
