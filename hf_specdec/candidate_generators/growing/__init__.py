"""Growing drafts depth by depth: tree shapes, the growth itself, and base classes for the kinds of drafters."""
