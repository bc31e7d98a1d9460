"""Sentences of the language corpus: three to five seconds in five languages.

Any choice of one entry per column is a sentence.
"""

from zlib import crc32

import numpy as np

# Language -> columns of entries: time, subject, verb, object, place, in the order of the language.
COLUMNS = {
    "de": (
        (
            "gestern|heute morgen|vor drei Tagen|am Abend|letzten Sommer|nach dem"
            " Essen|im Dezember|an jenem Tag"
        ),
        (
            "hat meine Schwester|hat der alte Lehrer|hat ein Nachbar|hat das kleine"
            " Kind|hat die Ärztin|hat unser Freund|hat der Bäcker|hat eine junge Frau"
        ),
        (
            "zwei Bücher|den schweren Koffer|das grüne Fahrrad|einen langen Brief|die"
            " alte Uhr|ein schönes Bild|den großen Schlüssel|fünf rote Äpfel"
        ),
        (
            "vor der Kirche|hinter dem Haus|in der Küche|am Bahnhof|unter der Brücke|"
            "auf dem Tisch|neben der Schule|im dunklen Wald"
        ),
        "gefunden|vergessen|gesehen|verkauft|gesucht|gekauft|gelassen|fotografiert",
    ),
    "en": (
        (
            "yesterday|this morning|three days ago|in the evening|last summer|after the"
            " meal|in December|on that day"
        ),
        (
            "my sister|the old teacher|a neighbour|the little child|the doctor|our"
            " friend|the baker|a young woman"
        ),
        "found|forgot|noticed|sold|was looking for|bought|left|photographed",
        (
            "two books|the heavy suitcase|the green bicycle|a long letter|the old"
            " clock|a beautiful picture|the big key|five red apples"
        ),
        (
            "in front of the church|behind the house|in the kitchen|at the"
            " station|under the bridge|on the table|next to the school|in the dark"
            " forest"
        ),
    ),
    "es": (
        (
            "ayer|esta mañana|hace tres días|por la tarde|el verano pasado|después de"
            " comer|en diciembre|aquel día"
        ),
        (
            "mi hermana|el viejo maestro|una vecina|el niño pequeño|la doctora|nuestro"
            " amigo|el panadero|una mujer joven"
        ),
        "encontró|olvidó|vio|vendió|buscaba|compró|dejó|fotografió",
        (
            "dos libros|la maleta pesada|la bicicleta verde|una carta larga|el reloj"
            " antiguo|un cuadro bonito|la llave grande|cinco manzanas rojas"
        ),
        (
            "delante de la iglesia|detrás de la casa|en la cocina|en la estación|debajo"
            " del puente|sobre la mesa|al lado de la escuela|en el bosque oscuro"
        ),
    ),
    "fr": (
        (
            "hier|ce matin|il y a trois jours|dans la soirée|l'été dernier|après le"
            " repas|en décembre|ce jour-là"
        ),
        (
            "ma sœur|le vieux professeur|une voisine|le petit enfant|le médecin|notre"
            " ami|le boulanger|une jeune femme"
        ),
        "a trouvé|a oublié|a vu|a vendu|cherchait|a acheté|a laissé|a photographié",
        (
            "deux livres|la lourde valise|le vélo vert|une longue lettre|la vieille"
            " horloge|un beau tableau|la grande clé|cinq pommes rouges"
        ),
        (
            "devant l'église|derrière la maison|dans la cuisine|à la gare|sous le pont|"
            "sur la table|à côté de l'école|dans la forêt sombre"
        ),
    ),
    "it": (
        (
            "ieri|questa mattina|tre giorni fa|di sera|l'estate scorsa|dopo il pranzo|a"
            " dicembre|quel giorno"
        ),
        (
            "mia sorella|il vecchio maestro|una vicina|il bambino piccolo|la"
            " dottoressa|il nostro amico|il panettiere|una giovane donna"
        ),
        (
            "ha trovato|ha dimenticato|ha visto|ha venduto|cercava|ha comprato|ha"
            " lasciato|ha fotografato"
        ),
        (
            "due libri|la valigia pesante|la bicicletta verde|una lunga lettera|il"
            " vecchio orologio|un bel quadro|la chiave grande|cinque mele rosse"
        ),
        (
            "davanti alla chiesa|dietro la casa|nella cucina|alla stazione|sotto il"
            " ponte|sul tavolo|accanto alla scuola|nel bosco scuro"
        ),
    ),
}
LANGUAGES = tuple(COLUMNS)


def draw_sentence(language: str, utterance: str, *, seed: int) -> str:
    """Draw a sentence of about a dozen words."""
    rng = np.random.default_rng([seed, crc32(utterance.encode()), 1])
    text = " ".join(str(rng.choice(column.split("|"))) for column in COLUMNS[language])
    return text[0].upper() + text[1:] + "."
