"""How a transformers model or a draft head runs over packed rows and a paged cache."""
