"""Tiny models of every family with a drop-in."""

from peers.families_conformers import CONFORMERS
from peers.families_speech import SPEECH
from peers.families_text import TEXT
from peers.families_vision import VISION
from peers.family import Family

FAMILIES: dict[str, Family] = TEXT | SPEECH | CONFORMERS | VISION
