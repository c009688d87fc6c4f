"""Operators rewritten before capture: recurrent layers as operators, spectra without vectors."""
