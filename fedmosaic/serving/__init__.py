"""Serving: the recommender people hold, and the catalogue that turns positions back into ids."""
