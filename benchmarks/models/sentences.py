"""Sentences for the benchmark and the demonstration of MiniLM: four on each of six topics."""

TOPICS: dict[str, tuple[str, ...]] = {
    "weather": (
        "Heavy rain is expected along the coast tonight, with gusts of up to ninety kilometres an hour.",
        "The storm will bring strong wind and a lot of rain to the seaside this evening.",
        "After a frosty morning the sun comes through and temperatures climb to eight degrees.",
        "It will be cold at first, then sunny and a little warmer around noon.",
    ),
    "cooking": (
        "Knead the dough for ten minutes and let it rise in a warm place until it has doubled.",
        "Bread needs time: work the flour and water well, then leave it to rise.",
        "Fry the onions gently until they are golden, then add the tomatoes and a pinch of salt.",
        "For the sauce, soften chopped onion in oil and simmer it with tomatoes.",
    ),
    "computers": (
        "The scheduler keeps a queue for each thread and steals work when a queue is empty.",
        "Idle threads take tasks from the queues of busy ones, so that no core waits.",
        "The compiler fuses neighbouring loops so that intermediate arrays never reach memory.",
        "Joining loops saves memory traffic because temporary values stay in registers.",
    ),
    "music": (
        "The string quartet opened the evening with Haydn and closed it with a late Beethoven.",
        "Two violins, a viola and a cello played Beethoven to a full concert hall.",
        "Her new record mixes jazz piano with the rhythms of West Africa.",
        "The pianist's album brings together improvisation and African drumming.",
    ),
    "health": (
        "Regular walking lowers blood pressure and improves sleep in older adults.",
        "People over sixty who walk every day sleep better and have a healthier heart.",
        "The vaccine was well tolerated; a sore arm was the most frequent complaint.",
        "Side effects of the injection were mild, mostly pain in the arm for a day.",
    ),
    "travel": (
        "The night train leaves Vienna at nine and reaches Venice in time for breakfast.",
        "You can sleep on the way: board in Austria in the evening and wake up in Italy.",
        "A narrow path leads over the pass to a hut where hikers can spend the night.",
        "Walkers crossing the mountains find beds and a warm meal in the refuge.",
    ),
}

SENTENCES: tuple[str, ...] = tuple(text for texts in TOPICS.values() for text in texts)
