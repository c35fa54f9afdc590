"""A page that makes and plays tokens in the browser: ``make web``. `docs/chorales.md` says more."""
