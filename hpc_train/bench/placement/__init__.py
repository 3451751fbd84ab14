"""`bench placement`: one training on the same nodes in several orders, and what the model predicts for each."""
