"""A small Music Transformer, from tunes to sound: ``make example``. `docs/chorales.md` describes it."""
