"""Formulas of the reference backend that are longer than a row of `eager`."""
