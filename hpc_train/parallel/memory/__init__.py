"""What a block keeps for backward, and how it is compiled."""
