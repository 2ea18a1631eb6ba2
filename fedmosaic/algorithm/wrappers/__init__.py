"""Wrappers, Algorithm -> Algorithm: the personalisations of the papers."""
