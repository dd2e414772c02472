"""What drafters share: the shapes of drafts, growing them depth by depth, and the rounds of each kind of drafter."""
