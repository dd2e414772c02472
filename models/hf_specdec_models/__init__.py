"""Trained heads for hf-specdec's bundled model, a folder each: `hf_specdec.bundled("tiny-eagle3")` finds them here."""
