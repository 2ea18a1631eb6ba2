"""Personalisation: wrappers, Algorithm -> Algorithm."""
