"""A page that generates and plays music in the browser: ``make web``. `docs/chorales.md` says more."""
