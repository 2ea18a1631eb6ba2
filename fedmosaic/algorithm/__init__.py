"""An algorithm's parts: parameters and roles, models, local work, objective, upload, server; wrappers around them."""
