"""Configurations chosen by measurement, kept as data: see ``choose``."""

from cute_fa.choices.lookup import Choice, choose
from cute_fa.choices.rule import PIPELINED, Preference

__all__ = ["PIPELINED", "Choice", "Preference", "choose"]
